"""Tokens that ranks choose of their shares of a vocabulary: one rank would choose the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from drafters import config_json, write_drafter
from test_constraints import Small
from test_ranks import FOUR, NEAR, THREE, assert_near, write
from tiny import prompts, request, run, start

from limelight.parallel import collectives

# What each request asks for, beside seeds: alone and together.
RULES = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.2, "top_p": 1e-4},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.2, "allowed_token_ids": [3, 8, 21, 34, 70, 90]},
    {"temperature": 1.2, "logit_bias": {5: 4.0, 60: -3.0, 95: 5.0}, "top_p": 0.9},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [5, 50, 90], "ignore_eos": False},
]


def asked(tokens: int) -> list:
    texts = prompts(*(3 + 2 * i for i in range(len(RULES))), seed=7)
    pairs = zip(texts, RULES, strict=True)
    return [
        request(text, **({"max_tokens": tokens, "seed": i, "logprobs": i % 3} | rule))
        for i, (text, rule) in enumerate(pairs)
    ]


def answers_of(folder, size: int, *, tokens: int = 12, **config: object) -> list:
    engine = start(folder, tensor_parallel_size=size, max_model_len=64, **config)
    try:
        each = asked(tokens)
        bad = request([9, 4], temperature=1.0, seed=3, max_tokens=tokens)
        each.append(replace(bad, bad_words=[[7], [11, 12], [80]]))
        answers = run(engine, each)
        if engine.stats().speculation is not None:
            assert engine.stats().speculation.verified > 0
        return answers
    finally:
        engine.close()


SHAPES = {2: FOUR, 3: THREE, 4: FOUR}


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (2, "processed_logprobs"),
        pytest.param(3, "raw_logprobs", marks=pytest.mark.slow),
        pytest.param(4, "processed_logits", marks=pytest.mark.slow),
    ],
)
def test_every_parameter_gives_the_token_of_one_rank(tmp_path, size, mode):
    write(tmp_path, "flint", **SHAPES[size])
    expected, answers = (answers_of(tmp_path, n, logprobs_mode=mode) for n in (1, size))
    assert_near(answers, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "method"),
    [(2, "probabilistic"), (2, "greedy"), (3, "probabilistic"), (3, "greedy")],
)
def test_drafts_stand_and_fall_as_on_one_rank(tmp_path, size, method):
    write(tmp_path / "target", "beam", **SHAPES[size])
    kv_heads = SHAPES[size]["num_key_value_heads"]
    write_drafter(tmp_path / "drafter", config_json(num_key_value_heads=kv_heads))
    spec = {
        "model": str(tmp_path / "drafter"), "num_speculative_tokens": 3,
        "draft_sample_method": method, "enable_adaptive_verification": False,
    }  # fmt: skip
    expected, answers = (
        answers_of(tmp_path / "target", n, speculative_config=spec) for n in (1, size)
    )
    assert_near(answers, expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("model", ["flint-nano", "beam-nano"])
def test_bundled_models_with_their_drafters_say_what_one_rank_says(model, method):
    spec = {"draft_sample_method": method, "enable_adaptive_verification": False}
    spec |= {"model": f"{model}-dflash2", "num_speculative_tokens": 7}
    expected, answers = (
        answers_of(Path(model), size, tokens=30, speculative_config=spec) for size in (1, 2)
    )
    assert_near(answers, expected)


def led(**changes: object) -> list:
    """Answers under grammars and budgets beside other rules, with what their tokens are told."""
    small = Small(**changes)
    try:
        rules = [
            {"temperature": 0.0, "logprobs": 1},
            {"temperature": 1.2, "top_p": 0.9, "logprobs": 2},
            {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}},
        ]
        asked = [one for rule in rules for one in small.ask(**(rule | {"max_tokens": 40}))]
        for rule in rules:
            asked += small.ask(waits=True, budget=6, **(rule | {"max_tokens": 30}))
            asked += small.ask(form=None, budget=4, **(rule | {"max_tokens": 20}))
        return run(small.engine, asked)
    finally:
        small.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "greedy", "probabilistic"])
def test_what_leads_an_answer_holds_beside_all_other_rules(method):
    spec = {"num_speculative_tokens": 0}
    if method is not None:
        spec = {
            "model": "flint-nano-dflash2", "num_speculative_tokens": 5,
            "draft_sample_method": method, "enable_adaptive_verification": False,
        }  # fmt: skip
    mode = {"speculative_config": spec, "logprobs_mode": "processed_logprobs"}
    expected, answers = (led(tensor_parallel_size=size, **mode) for size in (1, 2))
    for answer, want in zip(answers, expected, strict=True):
        assert answer.token_ids == want.token_ids
        assert answer.last.finish_reason == want.last.finish_reason
        for got, told in zip(answer.logprobs, want.logprobs, strict=True):
            assert abs(got.logprob - told.logprob) < NEAR and got.rank == told.rank


WIDE = 20_000


@pytest.mark.slow
def test_nothing_that_ranks_exchange_is_as_wide_as_the_vocabulary(tmp_path, monkeypatch):
    """Less than a row of one rank's logits, whatever is asked for and however many rows there are;
    a layer's sums of these few tokens are less too."""
    write(tmp_path / "target", "flint", **FOUR, vocab_size=WIDE)
    write_drafter(tmp_path / "drafter", config_json(vocab_size=WIDE))
    sizes: dict[str, int] = {}

    def measured(name, exchange):
        def measure(x, *args, **kwargs):
            all_ = sum(part.nbytes for part in x) if isinstance(x, list) else x.nbytes
            sizes[name] = max(sizes.get(name, 0), all_)
            return exchange(x, *args, **kwargs)

        return measure

    spec = {
        "model": str(tmp_path / "drafter"), "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic", "enable_adaptive_verification": False,
    }  # fmt: skip
    engine = start(
        tmp_path / "target", tensor_parallel_size=2, max_model_len=64, speculative_config=spec
    )
    # From here on, for the start takes as many rows as there can be.
    for name in ("all_reduce", "all_gather", "broadcast", "scatter"):
        monkeypatch.setattr(dist, name, measured(name, getattr(dist, name)))
    stacked = measured("stacked", collectives.all_gather_single)
    monkeypatch.setattr(collectives, "all_gather_single", stacked)
    try:
        for rule in (RULES[0], RULES[8], RULES[9], {"prompt_logprobs": 1, "logprobs": 5}):
            (answer,) = run(engine, [request([5, 6, 7], **({"max_tokens": 4, "seed": 1} | rule))])
            assert len(answer.token_ids) == 4
    finally:
        engine.close()
    assert sizes["stacked"] >= 2 * 2048 and max(sizes.values()) < 4 * WIDE // 2
