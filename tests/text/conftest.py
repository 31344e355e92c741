"""Two small vocabularies, as model folders: byte-level BPE, and BPE with byte fallback."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from limelight.text.tokenizer import Tokenizer

TEXT = "the quick brown fox naïve café \U0001f468‍\U0001f469‍\U0001f467 नमस्ते \U0001d11e, the end. "


def byte_level():
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=333,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>"],
        show_progress=False,
    )
    made.train_from_iterator([TEXT * 3], trainer)
    made.add_tokens(["<think>", "two words"])
    return made


def byte_fallback():
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdehnt", "▁t", "he", "▁the", "▁▁", "é"]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")],
        byte_fallback=True,
        unk_token="</s>",
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<s>", "</s>"])
    return made


MADE = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@pytest.fixture(scope="session", params=sorted(MADE))
def library(request):
    """A tokenizer of the `tokenizers` library: the oracle."""
    return MADE[request.param]()


@pytest.fixture(scope="session")
def tokenizer(library, tmp_path_factory):
    """The same, as ours."""
    folder = tmp_path_factory.mktemp("model")
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture
def folder(tmp_path):
    """The folder of a model with the byte-level vocabulary; a test may change its files."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": {"content": "<|user|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path
