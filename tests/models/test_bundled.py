"""The bundled checkpoints, as they are shipped: whole, small, and read alike by transformers."""

import inspect
import json
import textwrap

import pytest
import torch
import torch.nn.functional as F
from tiny import request, run, start
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from limelight.checkpoint import BUNDLED_NAMES, locate
from limelight.models.batch import Batch
from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.ops.paging import QUERIES_AT_ONCE
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.text.tokenizer import Tokenizer

PLAIN = ("flint-nano", "beam-nano")
SOURCES = [textwrap.wrap, textwrap.TextWrapper, inspect.getsource, json.dumps]


def texts(folder):
    """Token ids of some code, a few hundred each: many windows long."""
    tokenizer = Tokenizer.load(folder)
    sources = map(inspect.getsource, SOURCES)
    return [tokenizer.encode(text, add_special_tokens=False)[:700] for text in sources]


def ours(folder, dtype):
    """The log-probability of each token of the texts after the first, served in `dtype`."""
    asked = [request(ids, max_tokens=1, prompt_logprobs=0) for ids in texts(folder)]
    answers = run(start(folder, dtype=dtype), asked)
    reports = [report for answer in answers for report in answer.prompt_logprobs[1:]]
    return torch.tensor([report.logprob for report in reports])


@torch.no_grad()
def theirs(folder, dtype, *, piece=1024):
    """The same by transformers, `piece` tokens at a time; the product of the LM head is FP32."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    cap, found = getattr(oracle.config, "final_logit_softcapping", None), []
    for ids in texts(folder):
        cache = DynamicCache(config=oracle.config)
        pieces = [torch.tensor([ids[at : at + piece]]) for at in range(0, len(ids), piece)]
        hidden = torch.cat(
            [oracle.model(ids_1T, past_key_values=cache).last_hidden_state[0] for ids_1T in pieces]
        )
        logits = F.linear(hidden.float(), oracle.lm_head.weight.float())
        logits = torch.tanh(logits / cap) * cap if cap else logits
        logprobs = torch.log_softmax(logits, dim=-1)[:-1]
        found.append(logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0])
    return torch.cat(found)


def distance(first, second) -> float:
    return (first - second).abs().mean().item()


@pytest.mark.parametrize("name", PLAIN)
def test_log_probabilities_are_those_of_transformers(name):
    folder = locate(name)
    assert distance(ours(folder, "float32"), theirs(folder, "float32")) < 1e-4


@pytest.mark.parametrize("name", PLAIN)
def test_serving_in_bf16_rounds_where_transformers_does(name):
    """It is given the prompts in the same pieces: the groups in which queries meet keys matter.

    Whole prompts are 0.012 from their pieces for Beam, on some CPUs 0.006.
    """
    folder = locate(name)
    there = theirs(folder, "bfloat16", piece=QUERIES_AT_ONCE)
    assert distance(ours(folder, "bfloat16"), there) < 0.003


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_whole_sequences_in_bf16_have_the_bits_of_transformers(name):
    """Of its default attention: its own two back ends for Beam differ by 0.03 in BF16."""
    folder, dtype = locate(name), torch.bfloat16
    model = load_model(
        folder, Placement(Mesh.single(), dtype, torch.device("cpu")),
        config_folder=folder, dummy_seed=None, progress=Progress(quiet=True),
    )  # fmt: skip
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for ids in texts(folder)[:2]:
        mine_TD = model(torch.tensor(ids), Batch.packed([len(ids)]))
        assert torch.equal(mine_TD, oracle.model(torch.tensor([ids])).last_hidden_state[0])


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_a_bundled_model_is_small_and_knows_code(name):
    folder = locate(name)
    (weights,) = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    assert weights.stat().st_size <= 12_000_000
    (ids, *_) = texts(folder)
    (answer,) = run(start(folder), [request(ids, max_tokens=1, prompt_logprobs=0)])
    scores = [report.logprob for report in answer.prompt_logprobs[1:]]
    # Guessing among 4,096 tokens would cost 8.3 nats each.
    assert -sum(scores) / len(scores) < 3.5


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_transformers_reads_the_tokenizer_and_template_alike(name):
    folder = locate(name)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in ("def f(x):\n    return 12 + x", "naïve 𝄞 ends", "<|user|>not a turn"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
