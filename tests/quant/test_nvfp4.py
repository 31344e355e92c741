import math

import gguf
import numpy as np
import pytest
import torch

from limelight.ops.fp4 import VALUES, unpack_reference
from limelight.ops.fp4_codes import mixed
from limelight.quant import nvfp4
from limelight.quant.nvfp4 import gguf_blocks, global_scale, quantize_matrix


def gaussian(*shape):
    return torch.randn(*shape) * 0.02


def heavy_tails(*shape):
    return torch.distributions.StudentT(3.0).sample(shape) * 0.02


def few_values(*shape):
    return torch.randint(-3, 4, shape) * 0.01


def outliers(*shape):
    return gaussian(*shape) * torch.where(torch.rand(shape) < 0.01, 50.0, 1.0)


KINDS = [gaussian, heavy_tails, few_values, outliers]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def decode(result):
    """The weights that the codes and scales stand for, in float64, value by value."""
    codes = torch.stack((result.codes % 16, result.codes // 16), dim=-1).flatten(-2)
    sizes = torch.tensor(VALUES, dtype=torch.float64)[codes.int() % 8]
    values = torch.where(codes < 8, sizes, -sizes)
    scales = result.scales.double().repeat_interleave(16, dim=-1)
    return values * scales * result.scale.double()


def plain(weight):
    """Every block's largest weight as a 6, its scale rounded: the squared error."""
    scale = global_scale(weight).double()
    blocks = weight.double().reshape(-1, 16)
    wanted = blocks.abs().amax(dim=1, keepdim=True) / 6 / scale
    steps = wanted.clamp(max=448).to(torch.float8_e4m3fn).double() * scale
    return float(nearest_error(blocks, steps).square().sum())


def nearest_error(blocks, steps):
    grid = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
    return (blocks[..., None] - steps[..., None] * grid).abs().amin(dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_never_above_that_of_plain_scaling(kind):
    weight = kind(37, 48)
    result = quantize_matrix(weight, global_scale(weight))
    assert result.deviation.error_squares <= plain(weight) * (1 + 1e-6)


def test_normal_weights_lose_a_quarter_less_energy_than_under_plain_scaling():
    weight = gaussian(64, 512)
    result = quantize_matrix(weight, global_scale(weight))
    assert result.deviation.error_squares < 0.75 * plain(weight)


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_scales_would_do_much_better(kind):
    weight = kind(16, 64)
    scale = global_scale(weight)
    result = quantize_matrix(weight, scale)
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    blocks = weight.double().reshape(-1, 1, 16)
    errors = nearest_error(blocks, (every * scale)[:, None]).square().sum(dim=-1)
    best = float(errors.amin(dim=1).sum())
    assert result.deviation.error_squares <= 1.02 * best + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_says_of_the_error_is_true(kind):
    weight = kind(3, 5, 48)
    result = quantize_matrix(weight, global_scale(weight))
    error = decode(result) - weight.double()
    relative = math.sqrt(error.square().sum() / weight.double().square().sum())
    assert result.deviation.relative == pytest.approx(relative, rel=1e-4, abs=1e-7)
    assert result.deviation.largest == pytest.approx(float(error.abs().max()), rel=1e-4, abs=1e-9)


def test_each_code_is_the_nearest_and_of_two_the_even_one():
    weight = torch.randint(-96, 97, (64, 48)) / 16
    result = quantize_matrix(weight, torch.tensor(2.0**-4))
    evens_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    grid = torch.tensor(VALUES, dtype=torch.float64)[evens_first]
    steps = (result.scales.double() * 2.0**-4).repeat_interleave(16, dim=-1)
    distance = (weight.double().abs()[..., None] - steps[..., None] * grid).abs()
    expected = evens_first[distance.argmin(dim=-1)]
    codes = torch.stack((result.codes & 15, result.codes >> 4), dim=-1).flatten(-2)
    assert torch.equal(codes % 8, expected.to(torch.uint8))
    assert torch.equal(codes >= 8, (weight < 0) & (expected > 0))
    # Halfway between two codes is common here.
    assert ((distance == distance.amin(dim=-1, keepdim=True)).sum(dim=-1) == 2).any()


def test_weights_that_the_format_can_hold_stay_as_they_are():
    codes = torch.tensor(VALUES)[torch.randint(8, (8, 4, 16))] * (
        torch.randint(2, (8, 4, 16)) * 2 - 1
    )
    codes[..., 0] = 6.0
    scales = torch.randint(1, 0x7F, (8, 4), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales[0, 0] = 448.0
    weight = (codes * scales[..., None]).flatten(1) * 2.0**-9
    result = quantize_matrix(weight, global_scale(weight))
    assert torch.equal(decode(result), weight.double())
    assert result.deviation.largest == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_shape_and_type_is_taken_and_pieces_do_not_show(dtype, monkeypatch):
    weight = gaussian(3, 7, 80).to(dtype)
    scale = global_scale(weight)
    whole = quantize_matrix(weight, scale)
    assert whole.codes.shape == (3, 7, 40) and whole.codes.dtype == torch.uint8
    assert whole.scales.shape == (3, 7, 5) and whole.scales.dtype == torch.float8_e4m3fn
    assert whole.scale.shape == () and whole.scale.dtype == torch.float32
    monkeypatch.setitem(nvfp4.PIECES, "cpu", 48)
    pieces = quantize_matrix(weight, scale)
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales.view(torch.uint8), whole.scales.view(torch.uint8))


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_scales_are_finite_and_unsigned_whatever_the_size_of_the_weights(size):
    weight = torch.rand(4, 64) * 2 - 1
    weight[1, 16:32] = 0.0
    weight[2] *= 1e-12
    result = quantize_matrix(weight * size, global_scale(weight * size))
    assert result.scales.view(torch.uint8).max() < 0x7F
    assert torch.isfinite(result.scale) and result.scale > 0
    assert decode(result).isfinite().all()
    assert not result.codes[1, 8:16].any()
    assert math.isfinite(result.deviation.relative)
    if size >= 1e-30 / 10:
        assert result.deviation.relative < 0.12


def test_a_global_scale_that_is_too_large_costs_nothing():
    small, large = gaussian(5, 32), gaussian(7, 32) * 9
    alone = quantize_matrix(small, global_scale(small)).deviation
    shared = quantize_matrix(small, global_scale(large)).deviation
    assert shared.relative == pytest.approx(alone.relative, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    weight = gaussian(4, 16)
    weight[2, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        global_scale(weight)


@pytest.mark.parametrize("shape", [(5, 64), (3, 7, 192)], ids=str)
def test_blocks_of_gguf_decode_to_the_same_weights(shape):
    *rows, columns = shape
    codes = torch.randint(256, (*rows, columns // 2), dtype=torch.uint8)
    bits = torch.arange(math.prod(rows) * columns // 16, dtype=torch.uint8) % 0x7F
    scales = bits.view(torch.float8_e4m3fn).view(*rows, columns // 16)
    blocks = gguf_blocks(codes, scales).numpy()
    assert blocks.shape == (*rows, columns // 64 * 36)
    held = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(held, unpack_reference(mixed(codes), scales, dtype=torch.float32))
