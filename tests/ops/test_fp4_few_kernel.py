"""The kernels for a few rows and NVFP4 weights, in the interpreter and on a GPU."""

from collections.abc import Callable
from functools import partial

import pytest
import sizes
import torch
from ahead import Case, meta
from fp4s import decoded, meta_fp4, random_fp4
from near import PLACES, assert_near
from sizes import WEIGHTS

from limelight.ops import linear, thin
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.chosen import few_moe
from limelight.ops.experts import moe
from limelight.ops.fp4 import FP4

EPS = 1e-3
# Rows and columns: of one block, off every tile, of several tiles, of a row of Beam's.
SHAPES = [(6, 16), (100, 192), (22, 1280), (10, 2048), (6, 5120)]

pytestmark = pytest.mark.usefixtures("poisoned")
places = pytest.mark.parametrize("place", PLACES)
shapes = pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)


def compile_cases() -> list[Case]:
    cases = [Case(f"T1 {name}", call_of(name, WEIGHTS[name]), decode=True) for name in WEIGHTS]
    for rows in [4, 8]:
        for name, shape in WEIGHTS.items():
            fp32 = False if "gate_up" in name else None
            args = meta(rows, shape[1]), meta_fp4(*shape)
            call = partial(thin.few_rows, *args, fp32=fp32)
            cases.append(Case(f"T{rows} {name}", call, decode=True))
    cases += [
        Case(f"T{rows} moe D{size[0]}", experts_of(rows, *size), decode=True)
        for rows in [1, 4, 8]
        for size in sizes.EXPERTS
    ]
    return cases


def call_of(name: str, shape: tuple[int, int]) -> Callable[[], object]:
    """The call for one row with this weight."""
    h, x, norm, weight = meta(1, shape[1]), meta(1, shape[1]), meta(shape[1]), meta_fp4(*shape)
    if name == "flint qkv":
        return lambda: thin.one_row(h, x, norm, weight, eps=EPS)
    if name.startswith("flint") and name.endswith("gate_up"):
        return lambda: thin.one_row(h, x, norm, weight, eps=EPS, fp32=False)
    if name == "beam gate_up":
        return lambda: thin.one_row(None, x, None, weight, fp32=True)
    if name.endswith("head"):
        return lambda: linear.lm_head.kernel(x, weight)
    return lambda: thin.one_row(None, x, None, weight)


def experts_of(rows, size, experts, count, width, shared, fp32, scale) -> Callable[[], object]:
    """The call for the experts of a model."""
    wide = (meta_fp4(2 * shared, size), meta_fp4(size, shared)) if shared else (None, None)
    args = (
        meta(rows, size), meta_fp4(experts, 2 * width, size), meta_fp4(experts, size, width),
        meta(rows, count, dtype=torch.float32), meta(rows, count, dtype=torch.int64), *wide,
    )  # fmt: skip
    return lambda: few_moe(*args, fp32=fp32, scale=scale)


def rows_of(count: int, size: int, place) -> torch.Tensor:
    device, dtype = place
    return torch.randn(count, size).to(device, dtype)


def weight_of(shape: tuple[int, int], place, *, spread: float = 8.0) -> FP4:
    generator = torch.Generator(place[0]).manual_seed(sum(shape))
    return random_fp4(*shape, generator=generator, device=place[0], spread=spread)


def norm_of(size: int, place) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(size)).to(*place)


def normed(x_TD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """In FP64, rounded to the type of `x_TD`."""
    wide_TD = x_TD.double()
    mean = wide_TD.square().mean(dim=-1, keepdim=True)
    return (wide_TD / torch.sqrt(mean + EPS) * norm_D.double()).to(x_TD.dtype)


def product(x_TF: torch.Tensor, weight_DF: FP4) -> torch.Tensor:
    return x_TF.double() @ decoded(weight_DF).T


def gated(x_TF: torch.Tensor, weight_GF: FP4, *, fp32: bool) -> torch.Tensor:
    return (swiglu_fp32 if fp32 else swiglu)(product(x_TF, weight_GF).to(x_TF.dtype))


def assert_rows_near(out_TN: torch.Tensor, expected_TN: torch.Tensor, factors_N, *, dtype):
    """Each column of the result by the scale of its row of the weight, so that all count alike."""
    assert_near(out_TN.double() / factors_N, expected_TN.double() / factors_N, dtype=dtype)


@places
@shapes
def test_a_projection_of_one_row_is_the_product_with_the_decoded_weight(shape, place):
    x_1F, weight_DF = rows_of(1, shape[1], place), weight_of(shape, place)
    _, y_1D = thin.one_row(None, x_1F, None, weight_DF)
    assert y_1D.dtype == x_1F.dtype
    assert_rows_near(y_1D, product(x_1F, weight_DF), weight_DF.rows, dtype=place[1])


@places
@shapes
@pytest.mark.parametrize("added", [False, True], ids=["h", "h+x"])
def test_the_product_is_that_of_the_rounded_norm_of_the_rounded_sum(added, shape, place):
    h_1D, x_1D = rows_of(1, shape[1], place), rows_of(1, shape[1], place)
    norm_D, weight_ND = norm_of(shape[1], place), weight_of(shape, place)
    expected_1D = h_1D + x_1D if added else h_1D
    sum_1D, y_1N = thin.one_row(h_1D, x_1D if added else None, norm_D, weight_ND, eps=EPS)
    assert torch.equal(sum_1D, expected_1D) if added else sum_1D is None
    expected_1N = product(normed(expected_1D, norm_D), weight_ND)
    assert_rows_near(y_1N, expected_1N, weight_ND.rows, dtype=place[1])


@places
@shapes
@pytest.mark.parametrize("fp32", [False, True], ids=["rounded", "fp32"])
def test_swiglu_follows_the_rounded_product(fp32, shape, place):
    h_1D, x_1D = rows_of(1, shape[1], place), rows_of(1, shape[1], place)
    norm_D, weight_GD = norm_of(shape[1], place), weight_of(shape, place, spread=1.0)
    _, inner_1F = thin.one_row(None, x_1D, None, weight_GD, fp32=fp32)
    assert inner_1F.shape == (1, shape[0] // 2)
    assert_near(inner_1F, gated(x_1D, weight_GD, fp32=fp32), dtype=place[1])
    sum_1D, inner_1F = thin.one_row(h_1D, x_1D, norm_D, weight_GD, eps=EPS, fp32=fp32)
    assert_near(inner_1F, gated(normed(sum_1D, norm_D), weight_GD, fp32=fp32), dtype=place[1])


@places
@shapes
def test_logits_of_one_row_are_not_rounded(shape, place):
    x_1D, weight_VD = rows_of(1, shape[1], place), weight_of(shape, place)
    _, logits_1V = thin.one_row(None, x_1D, None, weight_VD, dtype=torch.float32)
    assert logits_1V.dtype == torch.float32
    assert_rows_near(logits_1V, product(x_1D, weight_VD), weight_VD.rows, dtype=torch.float32)


# Rows and columns that a thread's two blocks divide, off the tile and of several.
FEW_SHAPES = [(6, 32), (20, 192), (18, 2048)]


@places
@pytest.mark.parametrize("shape", FEW_SHAPES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("rows", [2, 5, 8], ids="T{}".format)
def test_a_few_rows_are_multiplied_with_the_decoded_weight(rows, shape, place):
    x_TF = rows_of(rows, shape[1] + 16, place)[:, : shape[1]]
    weight_DF = weight_of(shape, place)
    y_TD = thin.few_rows(x_TF, weight_DF)
    assert_rows_near(y_TD, product(x_TF, weight_DF), weight_DF.rows, dtype=place[1])
    logits_TV = thin.few_rows(x_TF, weight_DF, dtype=torch.float32)
    assert_rows_near(logits_TV, product(x_TF, weight_DF), weight_DF.rows, dtype=torch.float32)
    weight_GF = weight_of(shape, place, spread=1.0)
    inner_TF = thin.few_rows(x_TF, weight_GF, fp32=True)
    assert_near(inner_TF, gated(x_TF, weight_GF, fp32=True), dtype=place[1])


@pytest.mark.parametrize("rows, shape", [(4, (4, 48)), (9, (4, 64))], ids=["odd", "more"])
def test_other_products_are_left_to_another_kernel(rows, shape):
    assert thin.few_tile(rows, weight_of(shape, ("cpu", torch.float32))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [2, 8], ids="T{}".format)
def test_a_few_rows_and_the_sizes_of_the_models_are_right_too(rows, name):
    shape, place = WEIGHTS[name], ("cuda", torch.bfloat16)
    x_TF, weight_DF = rows_of(rows, shape[1], place), weight_of(shape, place)
    y_TD = thin.few_rows(x_TF, weight_DF)
    assert_rows_near(y_TD, product(x_TF, weight_DF), weight_DF.rows, dtype=place[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_sizes_of_the_models_are_right_too(name):
    shape, place = WEIGHTS[name], ("cuda", torch.bfloat16)
    h_1D, norm_D = rows_of(1, shape[1], place), norm_of(shape[1], place)
    weight_ND = weight_of(shape, place)
    sum_1D, y_1N = thin.one_row(h_1D, h_1D, norm_D, weight_ND, eps=EPS)
    assert torch.equal(sum_1D, h_1D + h_1D)
    expected_1N = product(normed(sum_1D, norm_D), weight_ND)
    assert_rows_near(y_1N, expected_1N, weight_ND.rows, dtype=place[1])


# Rows, channels, experts, chosen, inner channels, those of the shared expert, FP32 SwiGLU, scale.
EXPERTS = [
    (1, 64, 8, 2, 32, 48, False, 1.0),
    (3, 48, 12, 3, 16, 0, True, 2.5),
    (2, 304, 8, 2, 16, 48, False, 1.0),
    (3, 48, 12, 3, 48, 0, True, 2.5),
    (8, 80, 6, 2, 16, 16, False, 2.5),
    (1, 1040, 3, 2, 16, 16, True, 1.0),
]
KINDS = ["fp4", "plain"]
IDS = "T{0[0]}-D{0[1]}-E{0[2]}-N{0[3]}-F{0[4]}-shared{0[5]}".format


def experts(case, place, *, shared: str = "fp4"):
    """The arguments of the experts' op, with a shared expert of NVFP4 or of the rows' type."""
    device, dtype = place
    rows, size, experts, count, width, wide, *_ = case
    draw = {"generator": torch.Generator(device).manual_seed(sum(case[:6])), "device": device}

    def weight(*shape):
        return random_fp4(*shape, spread=1.0, **draw)

    weights, ids = torch.rand(rows, experts, **draw).topk(count, dim=-1)
    more = (weight(2 * wide, size), weight(size, wide)) if wide else (None, None)
    if wide and shared == "plain":
        more = tuple(decoded(weight, torch.float32).to(dtype) for weight in more)
    y_TD = torch.randn(rows, size, **draw).to(dtype)
    routed = weight(experts, 2 * width, size), weight(experts, size, width)
    return (y_TD, *routed, weights / weights.sum(dim=-1, keepdim=True), ids, *more)


def check_experts(args, case, place):
    *_, fp32, scale = case
    # What is of another kind is the op's to put apart.
    form = moe.kernel if isinstance(args[5], torch.Tensor) else few_moe
    found_TD = form(*args, fp32=fp32, scale=scale)
    assert found_TD.dtype == place[1]
    plain = (torch.float16, torch.bfloat16)
    exact = [a.float() if isinstance(a, torch.Tensor) and a.dtype in plain else a for a in args]
    assert_near(found_TD, moe.reference(*exact, fp32=fp32, scale=scale), dtype=place[1])


@places
@pytest.mark.parametrize("case", EXPERTS, ids=IDS)
def test_experts_are_summed_by_weight(case, place):
    check_experts(experts(case, place), case, place)


@places
@pytest.mark.parametrize("case", EXPERTS[:3:2], ids=IDS)
def test_the_shared_expert_may_be_of_another_kind(case, place):
    check_experts(experts(case, place, shared="plain"), case, place)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 8], ids="T{}".format)
@pytest.mark.parametrize("shared", KINDS)
@pytest.mark.parametrize("size", sizes.EXPERTS, ids="D{0[0]}".format)
def test_experts_of_the_models_are_summed_by_weight(size, shared, rows):
    place = ("cuda", torch.bfloat16)
    check_experts(experts((rows, *size), place, shared=shared), (rows, *size), place)


def test_all_rows_may_choose_one_expert():
    case, place = (7, 32, 6, 2, 16, 0, True, 1.0), ("cpu", torch.float32)
    args = list(experts(case, place))
    args[4] = torch.tensor([[4, 1]]).expand(7, 2).contiguous()
    check_experts(args, case, place)


def test_rows_of_experts_may_lie_apart():
    case, place = (3, 64, 6, 2, 16, 16, False, 1.0), ("cpu", torch.float32)
    y_TD, *rest = experts(case, place)
    apart_TD = torch.randn(3, 100)[:, :64]
    apart_TD.copy_(y_TD)
    found_TD = few_moe(apart_TD, *rest, fp32=False, scale=1.0)
    assert torch.equal(found_TD, few_moe(y_TD, *rest, fp32=False, scale=1.0))
