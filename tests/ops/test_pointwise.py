"""Norms, activations and rotations against their equations in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from limelight.ops.activation import output_gate, softcap, swiglu, swiglu_fp32
from limelight.ops.norm import depth_scaled_add, rmsnorm
from limelight.ops.rope import Heads, rotation, split_heads, ssmax

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
DTYPES = list(TOLERANCE)


def assert_near(out, expected, dtype):
    assert out.dtype == dtype
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (5, 48), (3, 4, 6)], ids=str)
def test_rmsnorm_divides_by_the_root_mean_square(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    mean = x.double().square().mean(dim=-1, keepdim=True)
    expected = x.double() / torch.sqrt(mean + 1e-3) * weight.double()
    assert_near(rmsnorm(x, weight, eps=1e-3), expected, dtype)


@pytest.mark.parametrize("act", [swiglu, swiglu_fp32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_gates_the_second_half_with_the_first(dtype, act):
    x = torch.randn(3, 10).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(act(x), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_output_gate_has_a_bias_for_each_head(dtype):
    out, gate = torch.randn(5, 3, 4).to(dtype), torch.randn(5, 3, 4).to(dtype)
    bias = torch.randn(3).to(dtype)
    expected = out.double() * torch.sigmoid(gate.double() + bias.double()[:, None])
    assert_near(output_gate(out, gate, bias), expected, dtype)


def test_the_soft_cap_bends_and_never_passes_its_limit():
    x = torch.tensor([-1e4, -10.0, 0.0, 0.1, 500.0])
    capped = softcap(x, cap=30.0)
    assert capped.abs().max() <= 30.0
    assert (capped.double() - 30 * torch.tanh(x.double() / 30)).abs().max() < 1e-5


@pytest.mark.parametrize("n", [2, 3, 105])
def test_the_depth_scaled_residual_keeps_the_variance(n):
    h, x = torch.randn(100_000), torch.randn(100_000)
    out = depth_scaled_add(h, x, n=n)
    assert (out - (math.sqrt((n - 1) / n) * h + x / math.sqrt(n))).abs().max() < 1e-5
    assert abs(out.var() - 1.0) < 0.05


def test_rotation_turns_each_pair_by_its_angle():
    positions = torch.tensor([0, 1, 513, 262_143])
    x = torch.randn(4, 2, 8)
    x *= torch.rsqrt(x.square().mean(dim=-1, keepdim=True))  # as the norm leaves it
    turn = rotation(positions, head_dim=8, theta=10_000.0, dtype=torch.float32)
    q, k, _ = split_heads(
        F.pad(x, (0, 0, 0, 1)).flatten(1), torch.ones(2, 8), heads=Heads(1, 1, 1e-12), turn=turn
    )
    out = torch.cat((q, k), dim=1).double()
    for t, position in enumerate(positions.tolist()):
        for i in range(4):
            # The angle is FP32, as everywhere: that is its error at far positions.
            angle = float(torch.tensor(position * 1.0) * (1.0 / 10_000.0 ** (2 * i / 8)))
            a, b = x[t, :, i].double(), x[t, :, i + 4].double()
            assert (out[t, :, i] - (a * math.cos(angle) - b * math.sin(angle))).abs().max() < 0.02
            assert (
                out[t, :, i + 4] - (b * math.cos(angle) + a * math.sin(angle))
            ).abs().max() < 0.02


@pytest.mark.parametrize("position", [0, 2046, 2047, 2048, 99_999])
def test_the_query_scale_of_beam_counts_positions_from_one(position):
    expected = (1 + (position + 1) / 2048) ** 0.1
    scale = ssmax(torch.tensor([position]))
    assert abs(scale.item() - expected) < 1e-6
    rows, weight, heads = torch.randn(1, 5 * 4), torch.randn(2, 4), Heads(3, 1, 1e-6)
    plain = split_heads(rows, weight, heads=heads)
    scaled = split_heads(rows, weight, heads=heads, ssmax_T=scale)
    for x, y, factor in zip(plain, scaled, (expected, 1.0, 1.0), strict=True):
        assert torch.allclose(x * factor, y, atol=1e-5)
