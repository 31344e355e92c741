"""Products and experts of many rows with NVFP4 weights, in the interpreter and on a GPU."""

import pytest
import torch
from ahead import Case, meta
from fp4s import decoded, meta_fp4, random_fp4
from near import PLACES, assert_near
from sizes import EXPERTS

from limelight.ops import fp4, linear
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.experts import moe
from limelight.ops.fp4 import FP4, FUSED_ROWS
from limelight.ops.grouped import FP4_TILES, grouped_moe

# Rows, rows of the weight, columns: of one block, off every tile, of no whole word of scales, of
# more than one part, of more rows than one block has.
PRODUCTS = [
    (2, 6, 16), (5, 64, 256), (17, 36, 80), (40, 130, 320), (66, 24, 640), (130, 76, 1600)
]  # fmt: skip
# Weights as the models have them: Flint's, and those of one of eight ranks of Beam.
REAL = {
    "flint qkv": (5120, 2048),
    "flint o": (2048, 4096),
    "flint gate_up": (12288, 2048),
    "flint head": (150144, 2048),
    "beam qkvg": (1792, 5120),
    "beam o": (5120, 768),
    "beam down": (5120, 2560),
}
# Rows, channels, experts, chosen, inner channels, those of the shared expert, FP32 SwiGLU, scale.
SIZES = [
    (3, 48, 12, 3, 32, 0, True, 2.5),
    (9, 64, 8, 2, 32, 48, False, 1.0),
    (40, 320, 5, 2, 48, 80, False, 1.0),
    (37, 256, 3, 2, 272, 16, True, 2.5),
    (150, 80, 3, 1, 48, 16, True, 1.0),
    (300, 32, 3, 2, 16, 0, True, 1.0),
]
MODELS = [(rows, *size) for size in EXPERTS for rows in [2, 8, 17, 33, 130, 1000, 2500, 5000]]
CPU, GPU = ("cpu", torch.float32), ("cuda", torch.bfloat16)
IDS = "T{0[0]}-D{0[1]}-E{0[2]}-N{0[3]}-F{0[4]}-shared{0[5]}".format

pytestmark = pytest.mark.usefixtures("poisoned", "always_decoded")
places = pytest.mark.parametrize("place", PLACES)
products = pytest.mark.parametrize("case", PRODUCTS, ids="T{0[0]}-{0[1]}x{0[2]}".format)


def compile_cases() -> list[Case]:
    cases = [
        Case(f"T{rows} {name}", lambda a=(rows, *shape), n=name: multiply(*a, n), decode=rows < 64)
        for name, shape in REAL.items()
        for rows in [12, 32, 64, FUSED_ROWS]
    ]
    for rows in [9, 32, 128, 1000, 2048, 4000, 16384]:
        for size, experts, count, width, shared, fp32, scale in (m[1:] for m in MODELS[::8]):
            tensors = (
                meta(rows, size), meta_fp4(experts, 2 * width, size),
                meta_fp4(experts, size, width), meta(rows, count, dtype=torch.float32),
                meta(rows, count, dtype=torch.int64),
                meta_fp4(2 * shared, size) if shared else None,
                meta_fp4(size, shared) if shared else None,
            )  # fmt: skip
            cases.append(
                Case(
                    f"moe T{rows} D{size}",
                    lambda a=tensors, o=(fp32, scale): grouped_moe(*a, fp32=o[0], scale=o[1]),
                    decode=rows <= 128,
                )
            )
    return cases


def multiply(rows: int, outputs: int, columns: int, name: str) -> None:
    """As the models do with the weight of this name."""
    fp32 = False if name.endswith("gate_up") else None
    dtype = torch.float32 if name.endswith("head") else None
    fp4.product(meta(rows, columns), meta_fp4(outputs, columns), fp32=fp32, dtype=dtype)


def operands(case, place, *, spread: float = 8.0) -> tuple[torch.Tensor, FP4]:
    (rows, outputs, columns), (device, dtype) = case, place
    generator = torch.Generator(device).manual_seed(sum(case))
    x_TF = torch.randn(rows, columns + 16, generator=generator, device=device).to(dtype)
    weight = random_fp4(outputs, columns, generator=generator, device=device, spread=spread)
    return x_TF[:, :columns], weight


def assert_rows_near(y_TN: torch.Tensor, x_TF: torch.Tensor, weight: FP4) -> None:
    """Each row of the weight by its own scale."""
    exact_TN = x_TF.double() @ decoded(weight).T
    unit_N = exact_TN.abs().amax(dim=0).clamp(min=1e-6)
    assert_near(y_TN / unit_N, exact_TN / unit_N, dtype=y_TN.dtype)


@places
@products
def test_a_product_has_the_scale_of_each_row_of_the_weight(case, place):
    # In FP16, products of the largest scales are too large.
    x_TF, weight = operands(case, place, spread=4.0)
    y_TN = fp4.product(x_TF, weight)
    assert y_TN.dtype == place[1]
    assert_rows_near(y_TN, x_TF, weight)


@places
@products
def test_logits_are_not_rounded(case, place):
    x_TF, weight = operands(case, place)
    y_TN = fp4.product(x_TF, weight, dtype=torch.float32)
    assert y_TN.dtype == torch.float32
    assert_rows_near(y_TN, x_TF, weight)


@places
@products
@pytest.mark.parametrize("fp32", [False, True], ids=["rounded", "fp32"])
def test_swiglu_follows_the_rounded_product(fp32, case, place):
    x_TF, weight = operands(case, place, spread=2.0)
    rounded_TN = (x_TF.double() @ decoded(weight).T).to(place[1])
    expected_TN = (swiglu_fp32 if fp32 else swiglu)(rounded_TN)
    assert_near(fp4.product(x_TF, weight, fp32=fp32), expected_TN, dtype=place[1])


@places
def test_no_rows_are_no_rows(place):
    x_TF, weight = operands((0, 36, 80), place)
    assert fp4.product(x_TF, weight).shape == (0, 36)
    assert fp4.product(x_TF, weight, fp32=True).shape == (0, 18)


@places
@pytest.mark.parametrize("rows", [1, 3, 20], ids="T{}".format)
def test_the_ops_take_weights_of_four_bits(rows, place):
    x_TD, weight = operands((rows, 36, 80), place, spread=2.0)
    norm_D = torch.ones(80).to(*place)
    calls = [
        (linear.project, (x_TD, weight), {}),
        (linear.norm_project, (x_TD, x_TD, norm_D, weight), {"eps": 1e-3}),
        (linear.norm_swiglu, (x_TD, None, norm_D, weight), {"eps": 1e-3, "fp32": True}),
        (linear.swiglu_project, (x_TD, weight), {"fp32": False}),
        (linear.lm_head, (x_TD, weight), {}),
    ]
    for op, args, options in calls:
        found, expected = op.kernel(*args, **options), op.reference(*args, **options)
        if isinstance(found, tuple):
            (_, found), (_, expected) = found, expected
        assert found.dtype == expected.dtype
        assert_near(found, expected, dtype=place[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 17, 33, 130, 1000, 2500], ids="T{}".format)
@pytest.mark.parametrize("name", REAL)
def test_products_of_the_models_sizes_are_right(name, rows):
    x_TF, weight = operands((rows, *REAL[name]), GPU, spread=2.0)
    exact_TN = x_TF.float() @ decoded(weight, torch.float32).T
    assert_near(fp4.product(x_TF, weight), exact_TN, dtype=torch.bfloat16)
    inner_TN = fp4.product(x_TF, weight, fp32=True)
    assert_near(inner_TN, swiglu_fp32(exact_TN.bfloat16()), dtype=torch.bfloat16)
    logits_TN = fp4.product(x_TF, weight, dtype=torch.float32)
    assert logits_TN.dtype == torch.float32
    assert (logits_TN - exact_TN).abs().max() <= 1e-3 * exact_TN.abs().max()


def tensors(case, place, *, shared_fp4: bool = True):
    device, dtype = place
    rows, size, experts, count, width, shared, *_ = case
    draw = {"generator": torch.Generator(device).manual_seed(sum(case[:6])), "device": device}

    def matrix(*shape, four_bits=True):
        weight = random_fp4(*shape, **draw, spread=1.0)
        return weight if four_bits else decoded(weight).to(dtype)

    weights, ids = torch.rand(rows, experts, **draw).topk(count, dim=-1)
    return (
        torch.randn(rows, size, **draw).to(dtype),
        matrix(experts, 2 * width, size),
        matrix(experts, size, width),
        weights / weights.sum(dim=-1, keepdim=True),
        ids,
        matrix(2 * shared, size, four_bits=shared_fp4) if shared else None,
        matrix(size, shared, four_bits=shared_fp4) if shared else None,
    )


def check(args, case, place):
    *_, fp32, scale = case
    # What is of another kind is the op's to put apart.
    form = moe.kernel if isinstance(args[5], torch.Tensor) else grouped_moe
    found = form(*args, fp32=fp32, scale=scale)
    # Of BF16 the reference rounds at the same points, and its products are FP32 too.
    exact = [
        a.float() if isinstance(a, torch.Tensor) and a.dtype == torch.float16 else a for a in args
    ]
    assert found.dtype == place[1]
    assert_near(found, moe.reference(*exact, fp32=fp32, scale=scale), dtype=place[1])


@places
@pytest.mark.parametrize("shared_fp4", [True, False], ids=["alike", "shared-apart"])
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_experts_are_summed_by_weight(case, shared_fp4, place):
    if shared_fp4 or case[5]:
        check(tensors(case, place, shared_fp4=shared_fp4), case, place)


@places
@pytest.mark.parametrize("case", SIZES[:3], ids=IDS)
def test_unpacked_experts_give_the_same(case, place, monkeypatch):
    monkeypatch.setattr("limelight.ops.grouped.FP4_TILES", {0: None})
    for shared_fp4 in (True, False):
        check(tensors(case, place, shared_fp4=shared_fp4), case, place)


@places
@pytest.mark.parametrize("tile", FP4_TILES.values(), ids=lambda tile: f"M{tile['BLOCK_M']}")
def test_every_tile_gives_the_same(tile, place, monkeypatch):
    monkeypatch.setattr("limelight.ops.grouped.FP4_TILES", {2**31: tile})
    monkeypatch.setattr("limelight.ops.grouped_fp4.MOST_EACH", 0)
    case = (140, 80, 3, 2, 48, 16, True, 1.0)
    check(tensors(case, place), case, place)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS, ids=IDS)
def test_experts_of_the_models_are_summed_by_weight(case):
    check(tensors(case, GPU), case, GPU)


def test_all_rows_may_choose_one_expert():
    y, gate_up, down, weights, ids, *_ = tensors((70, 32, 6, 2, 48, 0), CPU)
    ids = torch.tensor([[4, 1]]).expand(70, 2).contiguous()
    found = grouped_moe(y, gate_up, down, weights, ids, None, None, fp32=True, scale=1.0)
    expected = moe.reference(y, gate_up, down, weights, ids, None, None, fp32=True)
    assert_near(found, expected, dtype=torch.float32)
