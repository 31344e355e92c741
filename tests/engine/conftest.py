"""Checkpoints and a tokenizer that are written once and only read, and engines that take orders."""

import pytest
import tokenizers
from drafters import write_drafter
from ordered import Ordered
from tiny import write_checkpoint
from tokenizers import decoders, models, pre_tokenizers

from limelight.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=["flint", "beam"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, request.param)
    return path


@pytest.fixture(scope="session")
def flint(tmp_path_factory):
    path = tmp_path_factory.mktemp("flint")
    write_checkpoint(path, "flint")
    return path


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    write_drafter(path)
    return path


@pytest.fixture
def either_loop(folder) -> bool:
    """Whether steps overlap: with one model they do, with the other they do not."""
    return folder.name.startswith("flint")


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlap(request):
    return request.param


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "old", "flint")
    return folder / "old", write_checkpoint(folder / "new", "flint", seed=1)


@pytest.fixture
def ordered(checkpoints):
    made = []

    def make(**config):
        made.append(Ordered(checkpoints[0], **config))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One token a byte, by its number, then an end token and a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("d", "o"), ("Ġ", "do")]
    pieces = [*alphabet, "<|end|>", "ca", "cat", "Ġcat", "do", "Ġdo"]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("model")
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)
