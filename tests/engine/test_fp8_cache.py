"""An FP8 KV cache: what it costs in accuracy, and that it holds what later steps will read."""

import inspect
import textwrap

import pytest
import torch
from tiny import Answer, request, run, write_checkpoint
from tiny import start as start_tiny

from limelight.checkpoint import BUNDLED_NAMES, locate
from limelight.config import EngineConfig
from limelight.engine.startup import plan_memory, resolve
from limelight.text.tokenizer import Tokenizer
from limelight.types import Sequence

SOURCES = [textwrap.wrap, textwrap.TextWrapper, inspect.getsource]


@pytest.fixture(scope="module", params=BUNDLED_NAMES)
def folder(request):
    return locate(request.param)


@pytest.fixture(scope="module", params=[name for name in BUNDLED_NAMES if "nvfp4" not in name])
def plain(request):
    """Of what weights are the cache knows nothing."""
    return locate(request.param)


def start(folder, **settings):
    """A small engine, without the drafter of its own that a bundled model has."""
    small = {"max_model_len": 1024, "max_num_batched_tokens": 256}
    small |= {"speculative_config": {"num_speculative_tokens": 0}}
    return start_tiny(folder, **(small | settings))


def texts(folder) -> list[list[int]]:
    """Token ids of some code, up to a few hundred each: many windows long."""
    tokenizer = Tokenizer.load(folder)
    sources = map(inspect.getsource, SOURCES)
    return [tokenizer.encode(text, add_special_tokens=False)[:500] for text in sources]


def asked(folder):
    return [request(ids, max_tokens=24) for ids in texts(folder)]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_answers_do_not_depend_on_chunks_or_hits(plain):
    cold = start(plain, kv_cache_dtype="fp8", enable_prefix_caching=False)
    expected = tokens(run(cold, asked(plain)))
    chunked = start(plain, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=70)
    assert tokens(run(chunked, asked(plain))) == expected
    again = run(chunked, asked(plain))
    assert all(answer.last.num_cached > 0 for answer in again)
    assert tokens(again) == expected


def test_a_preempted_request_goes_on_as_it_began(plain):
    heads = [request(ids[at : at + 90], max_tokens=48) for ids in texts(plain) for at in (0, 70)]
    settings = {"kv_cache_dtype": "fp8", "max_model_len": 200, "enable_prefix_caching": False}
    expected = tokens(run(start(plain, **settings), heads))
    plan = plan_of(plain, kv_cache_dtype="fp8", max_model_len=200)
    room = 2 * plan.blocks_for(200) * plan.block.nbytes
    narrow = start(plain, kv_cache_memory_bytes=room, **settings)
    assert tokens(run(narrow, heads)) == expected
    assert narrow.stats().preemptions > 0


def test_log_probabilities_stay_near_those_of_a_whole_cache(folder):
    """Seen: 0.060 and 0.114, some 14 times what BF16 costs, whose numbers have 4 places more."""
    found = []
    for kind in ("auto", "fp8"):
        engine = start(folder, kv_cache_dtype=kind)
        one = [request(ids, max_tokens=1, prompt_logprobs=0) for ids in texts(folder)]
        reports = [answer.prompt_logprobs[1:] for answer in run(engine, one)]
        found.append(torch.tensor([report.logprob for group in reports for report in group]))
    lost = found[0] - found[1]
    assert 0 < lost.abs().mean() < 0.14
    # Seen: 0.010 and 0.011, of 1.09 and 2.00 nats a token.
    assert abs(lost.mean()) < 0.02


def plan_of(folder, **settings):
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    return plan_memory(config, resolve(config))


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_a_block_takes_half_of_what_one_of_bf16_takes(tmp_path, kind):
    write_checkpoint(tmp_path, "flint")
    settings = {"kv_cache_memory_bytes": 2**20, "max_model_len": 100}
    whole, half = (
        plan_of(tmp_path, kv_cache_dtype=name, **settings) for name in ("bfloat16", kind)
    )
    assert 2 * half.block.nbytes == whole.block.nbytes
    assert half.num_blocks == 2 * whole.num_blocks
    assert 2 * half.bytes_per_token()["full"] == whole.bytes_per_token()["full"]


def test_blocks_of_another_precision_are_not_the_same_prefix(folder):
    first = []
    for kind in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        groups = start(folder, kv_cache_dtype=kind, prefix_hash_seed="x").scheduler.groups
        first.append(groups.block_hash(Sequence(request([1] * 40)), 0))
    assert first[2] == first[3]
    assert len(set(first)) == 3
