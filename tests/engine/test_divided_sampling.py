"""Tokens that ranks choose of their shares of a vocabulary: one rank would choose the same."""

from dataclasses import replace

import pytest
from drafters import config_json, write_drafter
from test_ranks import FOUR, THREE, assert_near, write
from tiny import prompts, request, run, start

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


@pytest.mark.parametrize(
    ("size", "method"),
    [
        (2, "probabilistic"),
        pytest.param(2, "greedy", marks=pytest.mark.slow),
        pytest.param(3, "probabilistic", marks=pytest.mark.slow),
        pytest.param(3, "greedy", marks=pytest.mark.slow),
    ],
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
