"""MXFP8: its numbers against the format's own table and rule, and its products against FP64."""

import math

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops import batch_invariance
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.expert_pairs import expert_pairs
from limelight.ops.experts import moe
from limelight.ops.linear import norm_project, norm_swiglu, project, swiglu_project
from limelight.ops.lora import Adapted, StepAdapters
from limelight.ops.mxfp8 import (
    BLOCK,
    CODES,
    MXFP8,
    dequantize,
    fake_quantize,
    pair_products,
    product,
    quantize,
    quantize_into,
)
from limelight.ops.norm import rmsnorm
from limelight.ops.weight import Stack

pytestmark = pytest.mark.usefixtures("poisoned")
CPU, GPU = ("cpu", torch.float32), ("cuda", torch.bfloat16)


def compile_cases() -> list[Case]:
    cases = [Case("fake quantize", lambda: fake_quantize.kernel(meta(64, 2048)))]
    for rows in (1, 64, 2048):
        args = meta(rows, 2048), meta_mxfp8(5120, 2048)
        cases.append(Case(f"product T{rows}", lambda args=args: product(*args)))
    for block_m, each in ((16, 6), (128, 1)):
        blocks = meta(300, block_m, dtype=torch.int32), meta(300, dtype=torch.int32)
        args = meta(600, 512), meta_mxfp8(256, 2048, 512), blocks, each
        cases.append(Case(f"pairs M{block_m}", lambda args=args: pair_products(*args)))
    return cases


def meta_mxfp8(*shape):
    *rows, columns = shape
    scales = meta(*rows, columns // BLOCK, dtype=torch.uint8)
    return MXFP8(meta(*shape, dtype=CODES), scales)


def numbers(*shape, generator, device="cpu", dtype=torch.float32, spread=2.0):
    """Normal ones in blocks whose sizes differ by up to 2^(2 spread)."""
    x = torch.randn(shape, generator=generator).unflatten(-1, (-1, BLOCK))
    x = x * 2 ** (spread * (2 * torch.rand(*x.shape[:-1], 1, generator=generator) - 1))
    return x.flatten(-2).to(device=device, dtype=dtype)


def random_mxfp8(*shape, generator, device="cpu"):
    weight = quantize(numbers(*shape, generator=generator) * shape[-1] ** -0.5)
    return MXFP8(*(tensor.to(device) for tensor in weight.tensors))


# The format as its standard writes it, one number at a time.


def table():
    """The numbers of E4M3 without a sign, in rising order."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    return small + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]


def by_hand(block):
    """The exponent of a block, and what it holds."""
    largest = max(map(abs, block))
    exponent = -127 if largest == 0 else max(-127, math.ceil(math.log2(largest / 448)))
    held, values = [], table()
    for x in block:
        size = abs(x) / 2.0**exponent
        at = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
        held.append(math.copysign(values[at] * 2.0**exponent, x))
    return exponent, held


def edges():
    """[N, 32]: halves between codes, sizes around 448 times a power of two, and ends of FP32."""
    values = table()
    halves = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)] + values
    halves += [-x for x in halves]
    rows = [[448.0, *halves[at : at + 31]] for at in range(0, len(halves), 31)]
    near = [448.0, math.nextafter(448.0, 0), 448.00006, 224.0, 255.0, 447.0, 1.75, 1.7500001]
    rows += [[x * 2.0**e, 1.0] for x in near for e in (-130, -20, 0, 1, 90)]
    rows += [[0.0], [2.0**-149], [2.0**-126, 2.0**-130], [3.0e38, -1.0e38]]
    rows = [(row + [0.0] * 32)[:32] for row in rows]
    return torch.tensor(rows, dtype=torch.float64).float()


def test_scales_are_the_least_power_of_two_that_does_not_saturate():
    x = edges()
    found = quantize(x)
    for row, scale, held in zip(x.tolist(), found.scales, dequantize_rows(found), strict=True):
        exponent, expected = by_hand(row)
        assert int(scale) - 127 == exponent
        assert held == expected
    assert found.codes.dtype == CODES and found.scales.shape == (len(x), 1)


def dequantize_rows(x):
    return dequantize(x, dtype=torch.float64).tolist()


@pytest.mark.parametrize("place", PLACES)
def test_the_kernel_rounds_as_the_reference(place):
    device, dtype = place
    generator = torch.Generator().manual_seed(0)
    x = numbers(7, 96, generator=generator, spread=6.0)
    if dtype == torch.float32:
        x = torch.cat([x.view(-1, 32), edges()])
    x = x.to(device=device, dtype=dtype)
    assert torch.equal(fake_quantize.kernel(x), fake_quantize.reference(x))
    assert torch.equal(fake_quantize.kernel(x[..., None, :]), fake_quantize.reference(x)[:, None])


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_spoils_its_block_alone(wrong):
    x = torch.ones(2, 64)
    x[1, 40] = wrong
    for form in (fake_quantize.kernel, fake_quantize.reference):
        found = form(x)
        assert found[1, 32:].isnan().all()
        assert torch.equal(found[1, :32], x[1, :32]) and torch.equal(found[0], x[0])
    with pytest.raises(ValueError, match="not finite"):
        quantize_into(quantize(torch.ones(2, 64)), x)


def test_what_is_held_is_rounded_no_more():
    generator = torch.Generator().manual_seed(1)
    once = fake_quantize(numbers(9, 64, generator=generator, spread=8.0))
    assert torch.equal(fake_quantize(once), once)
    again = quantize(once)
    assert torch.equal(dequantize(again, dtype=torch.float32), once)


def test_gradients_pass_as_if_nothing_were_rounded():
    x = torch.randn(3, 64, requires_grad=True)
    fake_quantize(x).backward(torch.arange(192.0).view(3, 64))
    assert torch.equal(x.grad, torch.arange(192.0).view(3, 64))


def exact(x, weight):
    """The product of what MXFP8 holds of both, FP64."""
    held = dequantize(weight, dtype=torch.float64)
    return fake_quantize.reference(x.float()).double() @ held.to(x.device).mT


# Rows, columns, channels: off the tile, and of one block.
SIZES = [(1, 32, 8), (3, 160, 72), (17, 128, 130), (70, 96, 64)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sizes", SIZES, ids="T{0[0]}-K{0[1]}-N{0[2]}".format)
def test_products_are_those_of_what_is_held(sizes, place):
    device, dtype = place
    rows, columns, channels = sizes
    generator = torch.Generator().manual_seed(rows)
    weight = random_mxfp8(channels, columns, generator=generator, device=device)
    x = numbers(rows, columns, generator=generator, device=device, dtype=dtype)
    for form in (project.kernel, project.reference):
        assert_near(form(x, weight), exact(x, weight), dtype=dtype)


def test_every_code_is_decoded_exactly_under_scales_of_any_size():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    scales = torch.tensor([0, 1, 2, 60, 119, 126, 127, 128, 135, 190, 246], dtype=torch.uint8)
    blocks = len(scales)
    weight = MXFP8(
        codes[:, None].expand(-1, 32 * blocks).contiguous().view(CODES),
        scales.expand(len(codes), -1).contiguous(),
    )
    # A row of x for each block, with one number in it.
    x = torch.zeros(blocks, blocks, 32)
    x[torch.arange(blocks), torch.arange(blocks), 0] = 1.0
    expected = dequantize(weight, dtype=torch.float32)[:, ::32].T
    assert torch.equal(project.kernel(x.flatten(1), weight), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fp32", [False, True])
def test_norms_and_swiglu_are_rounded_before_they_are_quantized(fp32, place):
    device, dtype = place
    generator = torch.Generator().manual_seed(3)
    weight = random_mxfp8(2 * 40, 64, generator=generator, device=device)
    x = numbers(5, 64, generator=generator, device=device, dtype=dtype)
    norm = torch.randn(64, generator=generator).to(device=device, dtype=dtype)
    h, y = norm_swiglu.kernel(x, x, norm, weight, eps=1e-6, fp32=fp32)
    assert torch.equal(h, x + x)
    act = swiglu_fp32 if fp32 else swiglu
    normed = rmsnorm.reference(x + x, norm, eps=1e-6)
    assert_near(y, act(exact(normed, weight).to(dtype)), dtype=dtype)
    assert_near(
        norm_project.kernel(x, None, norm, weight, eps=1e-6)[1],
        exact(rmsnorm.reference(x, norm, eps=1e-6), weight), dtype=dtype,
    )  # fmt: skip
    assert_near(
        swiglu_project.kernel(x, weight, fp32=fp32), act(exact(x, weight).to(dtype)), dtype=dtype
    )


@pytest.mark.parametrize("rows", [1, 6])
def test_rows_of_a_matrix_may_be_held_in_two_ways(rows):
    generator = torch.Generator().manual_seed(4)
    coded = random_mxfp8(24, 64, generator=generator)
    plain = torch.randn(16, 64, generator=generator)
    x = numbers(rows, 64, generator=generator)
    expected = torch.cat([exact(x, coded), x.double() @ plain.double().T], dim=1)
    for form in (project.kernel, project.reference):
        assert_near(form(x, Stack((coded, plain))), expected, dtype=torch.float32)


def test_adapters_are_added_to_rounded_products():
    generator = torch.Generator().manual_seed(7)
    x = numbers(5, 64, generator=generator)
    a, b = torch.randn(1, 16, 64, generator=generator), torch.randn(1, 24, 16, generator=generator)
    step = StepAdapters(torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32))
    weight = Adapted(
        random_mxfp8(24, 64, generator=generator), a, b, (24,),
        torch.tensor([0, 24], dtype=torch.int32), step,
    )  # fmt: skip
    # What goes through A is not rounded.
    added = x.double() @ a[0].double().T @ b[0].double().T * step.of_rows_T[:, None]
    expected = exact(x, weight.base) + added
    for form in (project.kernel, project.reference):
        assert_near(form(x, weight), expected, dtype=torch.float32)


def routed(rows, experts, count, generator):
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :count].contiguous()
    weights = torch.rand(rows, count, generator=generator) / count
    return ids, weights


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_experts_are_quantized_before_each_of_their_products(rows, shared, place):
    device, dtype = place
    size, inner, experts, count = 64, 32, 3, 2
    generator = torch.Generator().manual_seed(rows)

    def weight(*shape):
        return random_mxfp8(*shape, generator=generator, device=device)

    gate_up, down = weight(experts, 2 * inner, size), weight(experts, size, inner)
    beside = (weight(2 * 96, size), weight(size, 96)) if shared else (None, None)
    y = numbers(rows, size, generator=generator, device=device, dtype=dtype, spread=1.0)
    ids, weights = (x.to(device) for x in routed(rows, experts, count, generator))
    args = (y, gate_up, down, weights, ids, *beside)

    def through(row, up, out):
        inner = swiglu(exact(row[None], up).to(dtype))
        return exact(inner, out).to(dtype)[0]

    expected = torch.stack([
        sum(
            weights[t, n].double() * through(y[t], gate_up[e], down[e]).double()
            for n, e in enumerate(ids[t].tolist())
        ).to(dtype)
        for t in range(rows)
    ])  # fmt: skip
    if shared:
        expected = expected + torch.stack([through(row, *beside) for row in y])
    for form in (moe.kernel, moe.reference):
        assert_near(form(*args, fp32=False), expected.double(), dtype=dtype)


@pytest.mark.parametrize("place", PLACES)
def test_pairs_of_other_ranks_are_left_out(place):
    device, dtype = place
    generator = torch.Generator().manual_seed(5)
    gate_up = random_mxfp8(4, 64, 64, generator=generator, device=device)
    down = random_mxfp8(4, 64, 32, generator=generator, device=device)
    y = numbers(23, 64, generator=generator, device=device, dtype=dtype, spread=1.0)
    ids = torch.randint(5, (23,), generator=generator).to(device)
    here = ids < 4
    found = expert_pairs.kernel(y, gate_up, down, ids, fp32=True)
    expected = expert_pairs.reference(y, gate_up, down, ids, fp32=True)
    assert_near(found[here], expected[here].double(), dtype=dtype)


@pytest.mark.parametrize("form", ["kernel", "reference"])
def test_where_batches_must_not_matter_a_row_has_the_same_bits_alone(form):
    generator = torch.Generator().manual_seed(6)
    weight = random_mxfp8(72, 160, generator=generator)
    x = numbers(40, 160, generator=generator)
    gate_up = random_mxfp8(3, 64, 64, generator=generator)
    down = random_mxfp8(3, 64, 32, generator=generator)
    y, (ids, weights) = numbers(40, 64, generator=generator), routed(40, 3, 2, generator)
    with batch_invariance(True):
        many = getattr(project, form)(x, weight)
        mixed = getattr(moe, form)(y, gate_up, down, weights, ids, None, None, fp32=True)
        for t in (0, 39):
            one = slice(t, t + 1)
            assert torch.equal(getattr(project, form)(x[one], weight)[0], many[t])
            alone = y[one], gate_up, down, weights[one].contiguous(), ids[one].contiguous()
            alone = getattr(moe, form)(*alone, None, None, fp32=True)
            assert torch.equal(alone[0], mixed[t])


# Flint's and Beam's matrices.
MODELS = [(5120, 2048), (2048, 6144), (12288 + 2048, 5120), (5120, 2560)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 700])
@pytest.mark.parametrize("shape", MODELS, ids="N{0[0]}-K{0[1]}".format)
def test_products_of_the_models_sizes(shape, rows):
    generator = torch.Generator().manual_seed(rows)
    weight = random_mxfp8(*shape, generator=generator, device="cuda")
    x = numbers(rows, shape[1], generator=generator, device="cuda", dtype=torch.bfloat16)
    assert_near(project.kernel(x, weight), exact(x, weight), dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 1000])
@pytest.mark.parametrize(
    "model", [(2048, 512, 6, 1024, False), (5120, 2560, 8, 0, True)], ids=["flint", "beam"]
)
def test_experts_of_the_models_sizes(model, rows):
    size, inner, count, shared, fp32 = model
    generator = torch.Generator().manual_seed(rows)

    def weight(*shape):
        return random_mxfp8(*shape, generator=generator, device="cuda")

    gate_up, down = weight(32, 2 * inner, size), weight(32, size, inner)
    beside = (weight(2 * shared, size), weight(size, shared)) if shared else (None, None)
    y = numbers(rows, size, generator=generator, device="cuda", dtype=torch.bfloat16, spread=1.0)
    ids, weights = (x.cuda() for x in routed(rows, 32, count, generator))
    args = (y, gate_up, down, weights, ids, *beside)
    expected = moe.reference(*args, fp32=fp32)
    assert_near(moe.kernel(*args, fp32=fp32), expected.double(), dtype=torch.bfloat16)
