"""Both models give the tokens and log-probabilities that transformers gives, however served."""

import pytest
import torch
from tiny import prompts, request, run, start, write_checkpoint

# Two tokens this close together may change places: FP32 sums in another order.
TIE = 1e-5
SHAPES = [
    ("flint", {}),
    ("flint", {"num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 3}),
    (
        "flint",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6, "sliding_window": 40},
    ),
    ("flint", {"num_attention_heads": 7, "num_key_value_heads": 1, "num_experts_per_tok": 5}),
    (
        "flint",
        {"num_experts": 3, "num_experts_per_tok": 1, "mlp_only_layers": [], "num_hidden_layers": 3},
    ),
    (
        "flint",
        {"layer_types": ["sliding_attention"] * 4, "num_hidden_layers": 4, "hidden_size": 40},
    ),
    (
        "flint",
        {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4, "mlp_only_layers": [2]},
    ),
    ("beam", {}),
    ("beam", {"num_attention_heads": 9, "num_key_value_heads": 3, "sliding_window": 3}),
    ("beam", {"num_experts": 12, "n_group": 3, "topk_group": 1, "num_experts_per_tok": 4}),
    (
        "beam",
        {"num_experts": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "head_dim": 10},
    ),
    ("beam", {"num_hidden_layers": 13, "sliding_window": 40, "final_logit_softcapping": None}),
    ("beam", {"mlp_layer_types": ["sparse", "dense"] * 2, "num_hidden_layers": 4}),
    ("beam", {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4}),
]
SERVINGS = {
    "whole prompts": {},
    "chunks of 1": {"max_num_batched_tokens": 4, "max_num_seqs": 4},
    "chunks of 13": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "blocks of 5": {"block_size": 5},
    "one at a time": {"max_num_seqs": 1},
}


def assert_agrees(oracle, one, answer):
    """Every token is the oracle's likeliest after those before it, and as likely as there."""
    prompt, made = one.prompt_token_ids, answer.token_ids
    assert len(made) == one.max_tokens
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + made])).logits[0].float()
    expected = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    for row, token, report in zip(expected, made, answer.logprobs, strict=True):
        assert row[token] >= row.max() - TIE
        assert abs(report.logprob - row[token].item()) < 1e-4


@pytest.mark.parametrize("family, changes", SHAPES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_model_of_any_shape_agrees_with_transformers(tmp_path, family, changes):
    oracle = write_checkpoint(tmp_path, family, seed=3, **changes)
    engine = start(tmp_path, max_num_batched_tokens=37)
    asked = [request(prompt, max_tokens=24) for prompt in prompts(1, 18, 150)]
    for one, answer in zip(asked, run(engine, asked), strict=True):
        assert_agrees(oracle, one, answer)


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("family", ["flint", "beam"])
def test_the_way_of_serving_does_not_change_the_tokens(tmp_path, family, serving):
    oracle = write_checkpoint(tmp_path, family)
    engine = start(tmp_path, **SERVINGS[serving])
    asked = [request(prompt, max_tokens=24) for prompt in prompts(1, 5, 40, 120)]
    for one, answer in zip(asked, run(engine, asked), strict=True):
        assert_agrees(oracle, one, answer)


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_a_prefix_hit_does_not_change_the_tokens(tmp_path, family):
    oracle = write_checkpoint(tmp_path, family)
    engine = start(tmp_path)
    (head,) = prompts(165)
    run(engine, [request(head, max_tokens=1)])
    asked = [
        request(head[:cut] + tail, max_tokens=24) for cut in (33, 160) for tail in prompts(3, 90)
    ]
    answers = run(engine, asked)
    assert all(answer.last.num_cached >= 32 for answer in answers)
    for one, answer in zip(asked, answers, strict=True):
        assert_agrees(oracle, one, answer)


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_preemption_does_not_change_the_tokens(tmp_path, family):
    oracle = write_checkpoint(tmp_path, family)
    engine = start(tmp_path, max_model_len=300, kv_cache_memory_bytes=700_000)
    asked = [request(prompt, max_tokens=90) for prompt in prompts(80, 120, 150, 100, 90)]
    answers = run(engine, asked)
    assert engine.stats().preemptions > 0
    for one, answer in zip(asked, answers, strict=True):
        assert_agrees(oracle, one, answer)


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_prompt_logprobs_are_those_of_transformers(tmp_path, family):
    oracle = write_checkpoint(tmp_path, family)
    engine = start(tmp_path, max_num_batched_tokens=29)
    (prompt,) = prompts(131)
    asked = [request(prompt, prompt_logprobs=2) for _ in range(2)]
    with torch.no_grad():
        expected = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].float(), dim=-1)
    for answer in run(engine, asked):
        reports = answer.prompt_logprobs
        assert reports[0] is None and len(reports) == len(prompt)
        for row, token, report in zip(expected, prompt[1:], reports[1:], strict=False):
            assert report.token_id == token
            assert abs(report.logprob - row[token].item()) < 1e-4
            assert report.rank == (row > row[token]).sum() + 1
            assert [token for token, _ in report.top] == row.topk(2).indices.tolist()


def test_a_context_of_many_windows_agrees_with_transformers(tmp_path):
    oracle = write_checkpoint(tmp_path, "beam", max_position_embeddings=4000)
    engine = start(tmp_path, max_num_batched_tokens=512)
    asked = [request(prompt, max_tokens=24) for prompt in prompts(3000)]
    assert_agrees(oracle, asked[0], run(engine, asked)[0])
