"""NVFP4 weights: their decoding against the format's tables, in the interpreter and on a GPU."""

from dataclasses import replace

import pytest
import torch
from ahead import Case, meta
from fp4s import decoded, random_fp4
from near import PLACES, assert_near

from limelight.ops import for_graph
from limelight.ops.fp4 import FP4, VALUES, multiply_reference, product, unpack
from limelight.ops.fp4_codes import mixed


def compile_cases() -> list[Case]:
    codes = meta(5120, 1024, dtype=torch.uint8), meta(5120, 128, dtype=torch.float8_e4m3fn)
    return [Case("unpack", lambda: unpack.kernel(*codes, dtype=torch.bfloat16), decode=True)]


def all_scales():
    """Every block scale that a checkpoint may have."""
    return torch.arange(0x7F, dtype=torch.uint8)


def every_pair(device):
    """[127, 16] weights: every code under every scale, and the exact values."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = mixed(codes[0::2] | codes[1::2] << 4).expand(127, 8).contiguous().to(device)
    scales = all_scales().view(torch.float8_e4m3fn)[:, None].to(device)
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
    return packed, scales, values * scales.cpu().double()


@pytest.mark.parametrize("place", PLACES)
def test_every_code_under_every_scale_is_exact(place):
    device, dtype = place
    codes, scales, expected = every_pair(device)
    for form in (unpack.kernel, unpack.reference):
        found = form(codes, scales, dtype=dtype)
        assert found.dtype == dtype
        assert torch.equal(found.cpu().double(), expected)


@pytest.mark.usefixtures("always_decoded")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("blocks", [1, 3, 4, 21], ids="B{}".format)
def test_products_decode_every_code_under_every_scale_exactly(blocks, place):
    device, dtype = place
    codes, scales, _ = every_pair(device)
    # Every block of a row has another scale.
    order = (torch.arange(127)[:, None] + 31 * torch.arange(blocks)) % 127
    weight = FP4(
        codes.repeat(1, blocks), scales[order.to(device), 0], torch.ones(127, device=device)
    )
    eye = torch.eye(16 * blocks, dtype=dtype, device=device)
    expected = unpack.reference(weight.codes, weight.scales, dtype=torch.float32).T
    assert torch.equal(product(eye, weight, dtype=torch.float32), expected)


def test_scales_and_codes_lie_where_the_format_says():
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scales = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    weight = FP4(mixed(codes), scales, torch.tensor([0.25]))
    assert weight.shape == (1, 16)
    expected = torch.tensor([[*VALUES, *(-value for value in VALUES)]]) * 0.5
    assert torch.equal(multiply_reference(torch.eye(16), weight), expected.T)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 40, 129, 500], ids="T{}".format)
def test_unpacked_weights_give_the_same_products_whether_they_are_kept_or_not(rows):
    place = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator(place[0]).manual_seed(rows)
    weight = random_fp4(5120, 2048, generator=generator, device="cuda", spread=1.0)
    x_TK = torch.randn(rows, 2048, generator=generator, device="cuda").bfloat16()
    kept = replace(weight, values=unpack(weight.codes, weight.scales, dtype=torch.bfloat16))
    expected_TN = x_TK.double() @ decoded(weight).T
    for one in (weight, kept):
        assert_near(product(x_TK, one), expected_TN, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 500, 3000], ids="T{}".format)
def test_products_by_runs_of_rows_are_scaled_before_they_are_rounded(rows):
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = random_fp4(1280, 2048, generator=generator, device="cuda", spread=0.0)
    runs = ((1024, 0.0123), (1152, 3.21), (1280, 0.77))
    for first, (end, scale) in zip((0, 1024, 1152), runs, strict=True):
        weight.rows[first:end] = scale
    x_TK = torch.randn(rows, 4096, generator=generator, device="cuda").bfloat16()[:, :2048]
    values = unpack(weight.codes, weight.scales, dtype=torch.bfloat16)
    expected_TN = x_TK.double() @ decoded(weight).T
    # What its rows say is not looked at.
    kept = replace(weight, rows=torch.full_like(weight.rows, torch.nan), values=values, runs=runs)
    assert_near(product(x_TK, kept), expected_TN, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 500], ids="T{}".format)
def test_a_graph_follows_the_scales_of_rows_that_change(rows):
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = random_fp4(1024, 2048, generator=generator, device="cuda", spread=0.0)
    x_TK = torch.randn(rows, 2048, generator=generator, device="cuda").bfloat16()
    values = unpack(weight.codes, weight.scales, dtype=torch.bfloat16)
    kept = replace(weight, values=values, runs=((1024, 0.5),))
    graph = torch.cuda.CUDAGraph()
    with for_graph():
        product(x_TK, kept)
        with torch.cuda.graph(graph):
            y_TN = product(x_TK, kept)
    weight.rows.fill_(3.0)
    graph.replay()
    assert_near(y_TN, x_TK.double() @ decoded(weight).T, dtype=torch.bfloat16)
