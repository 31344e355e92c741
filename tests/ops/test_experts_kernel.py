"""The experts' kernels against their reference, in the interpreter and on a GPU."""

from functools import partial

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near
from sizes import EXPERTS

from limelight.ops.chosen import FEW
from limelight.ops.experts import moe

# Rows, channels, experts, chosen, inner channels, those of the shared expert, FP32 SwiGLU, scale.
SIZES = [
    (1, 64, 8, 2, 32, 48, False, 1.0),
    (3, 48, 12, 3, 20, 0, True, 2.5),
    (2, 300, 8, 2, 24, 72, False, 1.0),
    (5, 48, 12, 3, 20, 0, True, 2.5),
    (37, 64, 8, 2, 32, 72, False, 1.0),
    (150, 40, 5, 2, 24, 8, True, 1.0),
    (600, 16, 3, 2, 16, 0, True, 1.0),
]
MODELS = [(rows, *size) for size in EXPERTS for rows in [1, 2, 7, 8, 9, 33, 130, 1000, 2500]]
EPS = 1e-6
CPU, GPU = ("cpu", torch.float32), ("cuda", torch.bfloat16)
IDS = "T{0[0]}-D{0[1]}-E{0[2]}-N{0[3]}-F{0[4]}-shared{0[5]}".format

pytestmark = pytest.mark.usefixtures("poisoned")


def compile_cases() -> list[Case]:
    cases = []
    sizes = [(rows, torch.bfloat16) for rows in [1, 4, 9, 130, 1000, 2048, 16384]]
    # FP32 takes twice as much shared memory.
    sizes += [(rows, torch.float32) for rows in (130, 16384)]
    for rows, dtype in sizes:
        of = partial(meta, dtype=dtype)
        for size, experts, count, width, shared, fp32, scale in (m[1:] for m in MODELS[::9]):
            wide = (of(2 * shared, size), of(size, shared)) if shared else (None, None)
            tensors = (
                of(rows, size), of(experts, 2 * width, size), of(experts, size, width),
                meta(rows, count, dtype=torch.float32), meta(rows, count, dtype=torch.int64),
            )  # fmt: skip
            cases.append(
                Case(
                    f"moe T{rows} D{size} {dtype}",
                    lambda a=(*tensors, *wide), o=(fp32, scale): moe.kernel(
                        *a, fp32=o[0], scale=o[1]
                    ),
                    decode=rows <= 130 and dtype == torch.bfloat16,
                )
            )
    return cases


def tensors(case, place):
    device, dtype = place
    rows, size, experts, count, width, shared, *_ = case
    draw = {"generator": torch.Generator(device).manual_seed(sum(case[:6])), "device": device}

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, **draw) * scale).to(dtype)

    weights, ids = torch.rand(rows, experts, **draw).topk(count, dim=-1)
    return (
        normal(rows, size),
        normal(experts, 2 * width, size, scale=size**-0.5),
        normal(experts, size, width, scale=width**-0.5),
        weights / weights.sum(dim=-1, keepdim=True),
        ids,
        normal(2 * shared, size, scale=size**-0.5) if shared else None,
        normal(size, shared, scale=shared**-0.5) if shared else None,
    )


def check(case, place):
    *_, fp32, scale = case
    args = tensors(case, place)
    found = moe.kernel(*args, fp32=fp32, scale=scale)
    exact = [a.float() if a is not None and a.is_floating_point() else a for a in args]
    assert found.dtype == place[1]
    assert_near(found, moe.reference(*exact, fp32=fp32, scale=scale), dtype=place[1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_experts_are_summed_by_weight(case, place):
    check(case, place)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS, ids=IDS)
def test_experts_of_the_models_are_summed_by_weight(case):
    check(case, GPU)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("rows", [2, 9])
def test_values_are_rounded_where_the_reference_rounds_them(rows, fp32):
    # One channel in and one inside: no sum, so nothing but the rounding differs.
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(shape, generator=generator).half()

    ids = torch.arange(rows)[:, None] % 4
    args = normal(rows, 1), normal(4, 2, 1), normal(4, 1, 1), torch.rand(rows, 1), ids
    args = (*args, normal(2, 1), normal(1, 1))
    found = moe.kernel(*args, fp32=fp32, scale=2.5)
    assert torch.equal(found, moe.reference(*args, fp32=fp32, scale=2.5))


@pytest.mark.parametrize("rows", [FEW[4096], FEW[4096] + 1])
def test_all_rows_may_choose_one_expert(rows):
    y, gate_up, down, weights, ids, *_ = tensors((rows, 32, 6, 2, 24, 0), CPU)
    ids = torch.tensor([[4, 1]]).expand(rows, 2).contiguous()
    found = moe.kernel(y, gate_up, down, weights, ids, None, None, fp32=True)
    expected = moe.reference(y, gate_up, down, weights, ids, None, None, fp32=True)
    assert_near(found, expected, dtype=torch.float32)


def test_rows_may_lie_apart():
    args = tensors((6, 64, 6, 2, 24, 16), CPU)
    for rows in [2, 6]:
        y, gate_up, down, weights, ids, *shared = args
        apart = torch.randn(rows, 100)[:, :64]
        apart.copy_(y[:rows])
        call = gate_up, down, weights[:rows], ids[:rows], *shared
        found = moe.kernel(apart, *call, fp32=True)
        assert torch.equal(found, moe.kernel(y[:rows], *call, fp32=True))


def test_no_rows_give_no_rows():
    args = tensors((0, 64, 6, 2, 24, 16), CPU)
    assert moe.kernel(*args, fp32=True).shape == (0, 64)
