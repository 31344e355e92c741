"""What adapters add to rows: kernels against references, in the interpreter and on a GPU."""

from dataclasses import replace

import pytest
import torch
from ahead import Case, meta
from fp4s import random_fp4
from near import PLACES, assert_near

from limelight.ops import batch_invariance
from limelight.ops.experts import moe
from limelight.ops.linear import norm_swiglu, project
from limelight.ops.lora import Adapted, StepAdapters, add_lora

# Rows, channels in, channels of each matrix, ranks of each, adapters.
SIZES = [
    (1, 40, (24,), 16, 1),
    (5, 300, (40, 8, 8), 16, 3),
    (70, 64, (72, 20), 32, 2),
]
# Of Flint's and Beam's attention, dense and shared feed-forward.
MODELS = [
    (1, 2048, (4096, 512, 512), 16, 1),
    (64, 5120, (768, 128, 128, 768), 16, 4),
    (1000, 2048, (1024, 1024), 64, 8),
    (33, 6144, (2048,), 16, 2),
]
# Rows, channels, experts, chosen, inner channels, FP32 SwiGLU.
EXPERTS = [(1, 64, 8, 2, 32, False), (7, 48, 5, 3, 24, True), (40, 32, 6, 2, 16, False)]
GPU = ("cuda", torch.bfloat16)

pytestmark = pytest.mark.usefixtures("poisoned")


def compile_cases() -> list[Case]:
    kinds = ((1, torch.bfloat16), (2048, torch.bfloat16), (2048, torch.float32))
    cases = [
        Case(f"moe T{rows}", lambda rows=rows, dtype=dtype: of_experts(rows, dtype))
        for rows, dtype in kinds
    ]
    for rows, dtype in ((1, torch.bfloat16), (64, torch.float32), (2048, torch.bfloat16)):
        for _, size, sizes, rank, adapters in MODELS[:2]:
            weight = adapted(
                meta(sum(sizes), size),
                meta(adapters, len(sizes) * rank, size, dtype=dtype),
                meta(adapters, sum(sizes), rank, dtype=dtype), sizes, meta_step(rows),
            )  # fmt: skip
            args = meta(rows, size), weight
            cases.append(Case(f"project T{rows} {sizes}", lambda args=args: project.kernel(*args)))
    return cases


def meta_step(rows):
    return StepAdapters(meta(rows, dtype=torch.int32))


def of_experts(rows, dtype, experts=256, size=2048, inner=512, count=6, rank=16):
    step = meta_step(rows)
    gate_up = adapted(
        meta(experts, 2 * inner, size), meta(2, experts, 2 * rank, size, dtype=dtype),
        meta(2, experts, 2 * inner, 2 * rank, dtype=dtype), (2 * inner,), step,
    )  # fmt: skip
    down = adapted(
        meta(experts, size, inner), meta(2, experts, rank, inner, dtype=dtype),
        meta(2, experts, size, rank, dtype=dtype), (size,), step,
    )  # fmt: skip
    weights = meta(rows, count, dtype=torch.float32)
    ids = meta(rows, count, dtype=torch.int64)
    moe.kernel(meta(rows, size), gate_up, down, weights, ids, None, None, fp32=False)


def adapted(base, a, b, sizes, step):
    starts = torch.empty(len(sizes) + 1, dtype=torch.int32, device=a.device)
    if a.device.type != "meta":
        ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        starts = torch.tensor(ends, dtype=torch.int32, device=a.device)
    return Adapted(base, a, b, sizes, starts, step)


def drawn(place, seed):
    device, dtype = place
    draw = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, **draw) * scale).to(dtype)

    return normal, draw


def check(case, place, *, of=None):
    rows, size, sizes, rank, adapters = case
    normal, draw = drawn(place, rows + size)
    of = of or place[1]
    x, y = normal(rows, size), normal(rows, sum(sizes))
    a = normal(adapters, len(sizes) * rank, size, scale=size**-0.5, dtype=of)
    b = normal(adapters, sum(sizes), rank, scale=rank**-0.5, dtype=of)
    which = torch.randint(0, adapters + 1, (rows,), **draw).int()
    own = adapted(y, a, b, sizes, StepAdapters())
    found = add_lora.kernel(x, which, a, b, own.starts, sizes, onto=y.clone())
    expected = add_lora.reference(x, which, a, b, own.starts, sizes, onto=y.clone())
    assert_near(found, expected.float(), dtype=place[1])
    assert torch.equal(found[which == 0], y[which == 0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", SIZES, ids="T{0[0]}-K{0[1]}-N{0[2]}".format)
def test_each_row_gets_what_its_own_adapter_adds(case, place):
    check(case, place)


@pytest.mark.parametrize("place", PLACES)
def test_a_row_is_the_same_alone_and_in_a_batch_where_that_is_wanted(place):
    (rows, size, sizes), (normal, draw) = (70, 600, (40, 8)), drawn(place, 0)
    x, y, a = normal(rows, size), normal(rows, sum(sizes)), normal(2, 2 * 16, size)
    b, which = normal(2, sum(sizes), 16), torch.randint(0, 3, (rows,), **draw).int()
    starts = adapted(y, a, b, sizes, StepAdapters()).starts
    with batch_invariance(True):
        found = add_lora.kernel(x, which, a, b, starts, sizes, onto=y.clone())
        for i in (0, 33, 69):
            one = slice(i, i + 1)
            alone = add_lora.kernel(x[one], which[one], a, b, starts, sizes, onto=y[one].clone())
            assert torch.equal(alone, found[one])


@pytest.mark.gpu
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", MODELS, ids="T{0[0]}-K{0[1]}-N{0[2]}".format)
def test_at_the_sizes_of_the_models(case, of):
    check(case, GPU, of=of)


def experts(case, place, base=None):
    rows, size, count_e, count, inner, fp32 = case
    normal, draw = drawn(place, sum(case[:5]))
    step = StepAdapters(torch.randint(0, 3, (rows,), **draw).int())
    step.of_rows_T[0] = 1
    gate_up = adapted(
        normal(count_e, 2 * inner, size, scale=size**-0.5),
        normal(2, count_e, 32, size, scale=size**-0.5),
        normal(2, count_e, 2 * inner, 32, scale=0.2), (2 * inner,), step,
    )  # fmt: skip
    down = adapted(
        normal(count_e, size, inner, scale=inner**-0.5),
        normal(2, count_e, 16, inner, scale=inner**-0.5),
        normal(2, count_e, size, 16, scale=0.3), (size,), step,
    )  # fmt: skip
    weights, ids = torch.rand(rows, count_e, **draw).topk(count, dim=-1)
    return normal(rows, size), gate_up, down, weights, ids


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", EXPERTS, ids="T{0[0]}-D{0[1]}-E{0[2]}".format)
def test_experts_add_what_each_rows_adapter_does(case, place):
    y, gate_up, down, weights, ids = experts(case, place)
    fp32 = case[-1]
    found = moe.kernel(y, gate_up, down, weights, ids, None, None, fp32=fp32, scale=2.5)
    expected = moe.reference(y, gate_up, down, weights, ids, None, None, fp32=fp32, scale=2.5)
    assert_near(found, expected.float(), dtype=place[1])
    plain = moe.reference(
        y, gate_up.base, down.base, weights, ids, None, None, fp32=fp32, scale=2.5
    )
    without = gate_up.step.of_rows_T == 0
    assert torch.allclose(expected[without], plain[without], rtol=1e-2, atol=1e-2)
    assert not torch.allclose(expected[0], plain[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows, count", [
    pytest.param(9, 4, id="decoded"), pytest.param(80, 2, id="unpacked", marks=pytest.mark.slow),
])  # fmt: skip
def test_experts_in_four_bits_can_have_adapters(rows, count):
    y, gate_up, down, weights, ids = experts(
        (rows, 64, count, 2, 32, False), ("cpu", torch.float32)
    )
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        replace(one, base=random_fp4(*one.shape, generator=generator, spread=1.0))
        for one in (gate_up, down)
    )
    found = moe.kernel(y, gate_up, down, weights, ids, None, None, fp32=False)
    expected = moe.reference(y, gate_up, down, weights, ids, None, None, fp32=False)
    assert_near(found, expected, dtype=torch.float32)


def test_norm_and_swiglu_stand_around_the_adapters_part():
    normal, _ = drawn(("cpu", torch.float32), 0)
    step = StepAdapters(torch.tensor([0, 2, 1], dtype=torch.int32))
    weight = adapted(normal(48, 40), normal(2, 32, 40), normal(2, 48, 16), (24, 24), step)
    args = normal(3, 40), normal(3, 40), normal(40), weight
    found = norm_swiglu.kernel(*args, eps=1e-6, fp32=True)
    expected = norm_swiglu.reference(*args, eps=1e-6, fp32=True)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, dtype=torch.float32)


def test_in_a_step_without_adapters_the_weight_is_used_alone():
    normal, _ = drawn(("cpu", torch.float32), 0)
    weight = adapted(normal(24, 40), normal(1, 16, 40), normal(1, 24, 16), (24,), StepAdapters())
    x = normal(3, 40)
    assert torch.equal(project.kernel(x, weight), project.kernel(x, weight.base))
    assert torch.equal(project.reference(x, weight), project.reference(x, weight.base))
