"""The references of routing and of the experts against a loop over tokens in float64."""

import pytest
import torch
import torch.nn.functional as F
from fp4s import decoded, random_fp4

from limelight.ops.experts import moe
from limelight.ops.router import route, sigmoid_scores, top_experts


def token_by_token(x, gate_up, down, weights, ids):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            out[t] += weight * (down[e].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 3, 40, 700], ids="T{}".format)
@pytest.mark.parametrize("experts, count", [(3, 1), (9, 4), (9, 2), (64, 6)], ids=str)
def test_experts_give_the_weighted_sum_of_those_chosen(tokens, experts, count):
    x = torch.randn(tokens, 12)
    gate_up, down = torch.randn(experts, 14, 12), torch.randn(experts, 12, 7)
    weights, ids = top_experts(torch.rand(tokens, experts), count=count)
    out = moe(x, gate_up, down, weights, ids, None, None, fp32=False)
    assert out.shape == x.shape and not out.isnan().any()
    if tokens:
        expected = token_by_token(x, gate_up, down, weights, ids)
        assert (out - expected).abs().max() / expected.abs().max() < 1e-5


def test_the_shared_expert_is_added_to_the_scaled_sum():
    x, ids, weights = torch.randn(9, 12), torch.arange(9)[:, None] % 4, torch.ones(9, 1)
    gate_up, down = torch.randn(4, 14, 12), torch.randn(4, 12, 7)
    shared = torch.randn(1, 22, 12), torch.randn(1, 12, 11)
    out = moe(x, gate_up, down, weights, ids, shared[0][0], shared[1][0], fp32=True, scale=2.5)
    expected = 2.5 * token_by_token(x, gate_up, down, weights, ids)
    expected += token_by_token(x, *shared, weights, torch.zeros_like(ids))
    assert (out - expected).abs().max() / expected.abs().max() < 1e-5


def test_all_tokens_may_go_to_one_expert():
    x, ids = torch.randn(300, 12), torch.full((300, 1), 5)
    gate_up, down = torch.randn(8, 14, 12), torch.randn(8, 12, 7)
    weights = torch.ones(300, 1)
    out = moe(x, gate_up, down, weights, ids, None, None, fp32=False)
    expected = token_by_token(x, gate_up, down, weights, ids)
    assert (out - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("tokens", [0, 3, 100], ids="T{}".format)
def test_experts_of_four_bits_are_those_of_their_decoded_weights(tokens):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 48, generator=generator)
    held = [
        random_fp4(*shape, generator=generator, spread=2.0)
        for shape in [(5, 64, 48), (5, 48, 32), (32, 48), (48, 16)]
    ]
    weights, ids = top_experts(torch.rand(tokens, 5), count=2)
    out = moe(x, held[0], held[1], weights, ids, held[2], held[3], fp32=True, scale=2.5)
    wide = [decoded(weight, torch.float32) for weight in held]
    expected = moe(x, wide[0], wide[1], weights, ids, wide[2], wide[3], fp32=True, scale=2.5)
    assert out.shape == x.shape
    assert (out - expected).norm() <= 1e-5 * expected.norm()


def test_experts_are_differentiable():
    x = torch.randn(9, 12, requires_grad=True)
    gate_up = torch.randn(4, 14, 12, requires_grad=True)
    weights, ids = top_experts(torch.rand(9, 4), count=2)
    out = moe(x, gate_up, torch.randn(4, 12, 7), weights, ids, None, None, fp32=False)
    out.sum().backward()
    assert x.grad.abs().sum() > 0 and gate_up.grad.abs().sum() > 0


def test_scores_are_fp32_whatever_the_activations_are():
    x, router = torch.randn(5, 16), torch.randn(9, 16)
    expected = torch.sigmoid(x.bfloat16().double() @ router.double().T)
    scores = sigmoid_scores(x.bfloat16(), router)
    assert scores.dtype == torch.float32
    assert (scores - expected).abs().max() < 1e-6


def test_weights_are_the_scores_shared_out():
    scores = torch.tensor([[0.2, 0.9, 0.4, 0.1]])
    weights, ids = top_experts(scores, count=2)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.tensor([[0.9, 0.4]]) / 1.3)


def routed(scores, bias, **options):
    """Of one token with these scores."""
    return route(torch.ones(1, 1), torch.logit(scores)[:, None], bias, **options)


def test_experts_outside_the_best_groups_are_never_chosen():
    # Expert 4 is the best of all, but its group of two has the lowest sum.
    scores = torch.tensor([0.5, 0.6, 0.5, 0.5, 0.95, 0.01])
    weights, ids = routed(scores, torch.zeros(6), count=2, groups=3, kept_groups=2)
    assert ids.tolist()[0][0] == 1 and 4 not in ids[0]
    assert weights.sum().item() == pytest.approx(1.0)


def test_the_selection_bias_decides_who_comes_but_not_with_what_weight():
    scores = torch.tensor([0.5, 0.6, 0.3, 0.4])
    bias = torch.tensor([0.0, 0.0, 0.9, 0.0])
    weights, ids = routed(scores, bias, count=2, groups=1, kept_groups=1)
    assert ids.tolist() == [[2, 1]]
    assert torch.allclose(weights, torch.tensor([[0.3, 0.6]]) / 0.9)
