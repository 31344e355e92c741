"""With --batch-invariant a request's numbers are the same to the last bit, whatever else runs."""

from dataclasses import replace

import pytest
from adapter_files import ATTENTION, PARAMETERS, write_by_peft
from drafted import inject, knowing, start_drafted
from tiny import VOCAB, prompts, request, run, start, write_checkpoint

from limelight.types import LoRARequest

TYPES = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}}


def ask(text, i, *, tokens=9):
    """Every logit of every token of the answer, greedy or drawn."""
    warmth = {"temperature": 0.9 * (i % 2), "seed": i}
    return request(text, max_tokens=tokens, logprobs=VOCAB, **warmth)


def begin(folder, dtype, **config):
    return start(
        folder, batch_invariant=True, logprobs_mode="raw_logits",
        enable_return_routed_experts=True, **TYPES[dtype], **config,
    )  # fmt: skip


def alone(folder, dtype, asked) -> list:
    """Each by itself in an engine that has nothing cached."""
    engine = begin(folder, dtype, enable_prefix_caching=False, max_num_seqs=1)
    return [run(engine, [one])[0] for one in asked]


def assert_equal(answers, expected):
    for got, want in zip(answers, expected, strict=True):
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs
        assert got.last.routed_experts == want.last.routed_experts


@pytest.fixture(scope="module", params=["flint", "beam"])
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, request.param)
    return request.param, path


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_batches_chunks_hits_and_preemptions_leave_every_bit(family, dtype):
    name, folder = family
    head, *tails = prompts(60, 1, 9, 16, 2, seed=1)
    texts = [head[: 20 + 11 * i] + tail for i, tail in enumerate(tails)]
    asked = [ask(text, i, tokens=24) for i, text in enumerate(texts)]
    expected = alone(folder, dtype, asked)
    small = begin(
        folder, dtype, max_num_batched_tokens=19, max_num_seqs=4, max_model_len=112,
        kv_cache_memory_bytes=280_000 if dtype == "float32" else 147_000,
    )  # fmt: skip
    small.overlap = name == "beam"
    assert_equal(run(small, asked), expected)
    assert small.stats().preemptions > 0
    large = begin(folder, dtype, max_num_batched_tokens=64)
    again = [ask(text, i, tokens=24) for i, text in enumerate(texts)]
    assert_equal(run(large, again[:1]), expected[:1])
    assert_equal(run(large, again[1:]), expected[1:])
    assert large.stats().prefix_hits > 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_adapters_with_merged_experts_leave_every_bit(tmp_path, dtype):
    config = {"target_modules": ATTENTION, "target_parameters": PARAMETERS}
    oracle = write_by_peft(tmp_path, "flint", {"one": config, "other": config})

    def adapted(**settings):
        engine = begin(oracle.folder, dtype, enable_lora=True, merge_lora_experts=True, **settings)
        for number, folder in enumerate(oracle.adapters.values(), 1):
            engine.load_adapter(LoRARequest(str(number), number, str(folder)))
        return engine

    cases = [
        replace(ask(text, i), adapter_id=number)
        for i, text in enumerate(prompts(40, 5))
        for number in (1, 2, 0)
    ]
    engine = adapted(enable_prefix_caching=False, max_num_seqs=1)
    expected = [run(engine, [one])[0] for one in cases]
    assert len({tuple(answer.token_ids) for answer in expected}) > 4
    assert_equal(run(adapted(max_num_batched_tokens=19, max_num_seqs=4), cases), expected)


def test_drafts_leave_every_bit(flint, drafter):
    asked = [ask(text, i, tokens=12) for i, text in enumerate(prompts(4, 77))]
    expected = alone(flint, "float32", asked)
    known = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    engine = start_drafted(
        flint, drafter, batch_invariant=True, logprobs_mode="raw_logits",
        enable_return_routed_experts=True,
    )  # fmt: skip
    inject(engine, knowing(known, right=0.7))
    assert_equal(run(engine, asked), expected)
    assert engine.stats().speculation.accepted > 0
