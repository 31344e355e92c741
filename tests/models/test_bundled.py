"""The bundled checkpoints, as they are shipped: whole, small, and read alike by transformers."""

import inspect
import json
import textwrap

import pytest
import torch
from tiny import request, run, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from limelight.checkpoint import BUNDLED_NAMES, locate
from limelight.text.tokenizer import Tokenizer

SOURCES = [textwrap.wrap, textwrap.TextWrapper, inspect.getsource, json.dumps]


def texts(folder):
    """Token ids of some code, a few hundred each: many windows long."""
    tokenizer = Tokenizer.load(folder)
    sources = map(inspect.getsource, SOURCES)
    return [tokenizer.encode(text, add_special_tokens=False)[:700] for text in sources]


@pytest.mark.parametrize("name", BUNDLED_NAMES)
@pytest.mark.parametrize(
    "dtype, most", [("bfloat16", 0.01), ("float32", 1e-4)], ids=["bf16", "fp32"]
)
def test_log_probabilities_are_those_of_transformers(name, dtype, most):
    folder = locate(name)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    asked = [request(ids, max_tokens=1, prompt_logprobs=0) for ids in texts(folder)]
    differences = []
    for one, answer in zip(asked, run(start(folder, dtype=dtype), asked), strict=True):
        ids = torch.tensor([one.prompt_token_ids])
        with torch.no_grad():
            hidden = oracle.model(ids).last_hidden_state[0]
            logits = oracle.lm_head.float()(hidden.float())
            oracle.lm_head.to(oracle.dtype)
        if cap := getattr(oracle.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        expected = torch.log_softmax(logits, dim=-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        ours = torch.tensor([report.logprob for report in answer.prompt_logprobs[1:]])
        differences.append((ours - expected).abs())
    assert torch.cat(differences).mean() < most


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_a_bundled_model_is_small_and_knows_code(name):
    folder = locate(name)
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
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
