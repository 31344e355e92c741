"""The products' kernels against FP64 products, in the interpreter and on a GPU."""

from collections.abc import Callable

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near
from sizes import WEIGHTS

from limelight.ops import linear
from limelight.ops.activation import swiglu, swiglu_fp32

EPS = 1e-3
ROWS = [1, 5, 11, 40]
# Rows and columns: off every tile, of no 16 bytes, of several tiles.
SHAPES = [(100, 192), (36, 130), (24, 1280)]

pytestmark = pytest.mark.usefixtures("poisoned")
places = pytest.mark.parametrize("place", PLACES)
rows = pytest.mark.parametrize("rows", ROWS, ids="T{}".format)
shapes = pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)


def compile_cases() -> list[Case]:
    cases = [(name, 1) for name in WEIGHTS]
    cases += [(name, 4) for name in WEIGHTS if not name.endswith("head")]
    cases += [("flint o", 16), ("flint gate_up", 24)]
    return [
        Case(f"T{rows} {name}", call_of(name, rows, WEIGHTS[name]), decode=True)
        for name, rows in cases
    ]


def call_of(name: str, rows: int, shape: tuple[int, int]) -> Callable[[], object]:
    """The call of the op that multiplies with this weight."""
    h, x, norm, weight = meta(rows, shape[1]), meta(rows, shape[1]), meta(shape[1]), meta(*shape)
    if name == "flint qkv":
        return lambda: linear.norm_project.kernel(h, x, norm, weight, eps=EPS)
    if name == "flint gate_up":
        return lambda: linear.norm_swiglu.kernel(h, x, norm, weight, eps=EPS, fp32=False)
    if name == "beam gate_up":
        return lambda: linear.swiglu_project.kernel(x, weight, fp32=True)
    if name.endswith("head"):
        return lambda: linear.lm_head.kernel(x, weight)
    return lambda: linear.project.kernel(x, weight)


def rows_of(count: int, size: int, place, *, apart: int = 0) -> torch.Tensor:
    device, dtype = place
    return torch.randn(count, size + apart).to(device, dtype)[:, :size]


def weight_of(shape: tuple[int, int], place) -> torch.Tensor:
    return (torch.randn(shape) / shape[1] ** 0.5).to(*place)


def norm_of(size: int, place) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(size)).to(*place)


def normed(x_TD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """In FP64, rounded to the type of `x_TD`."""
    wide_TD = x_TD.double()
    mean = wide_TD.square().mean(dim=-1, keepdim=True)
    return (wide_TD / torch.sqrt(mean + EPS) * norm_D.double()).to(x_TD.dtype)


def product(x_TF: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
    return x_TF.double() @ weight_DF.double().T


def gated(x_TF: torch.Tensor, weight_GF: torch.Tensor, *, fp32: bool) -> torch.Tensor:
    return (swiglu_fp32 if fp32 else swiglu)(product(x_TF, weight_GF).to(x_TF.dtype))


@places
@shapes
@rows
def test_a_projection_is_the_product_with_the_transpose(rows, shape, place):
    x_TF, weight_DF = rows_of(rows, shape[1], place, apart=16), weight_of(shape, place)
    y_TD = linear.project.kernel(x_TF, weight_DF)
    assert y_TD.dtype == x_TF.dtype
    assert_near(y_TD, product(x_TF, weight_DF), dtype=place[1])


@places
@shapes
@rows
@pytest.mark.parametrize("added", [False, True], ids=["h", "h+x"])
def test_the_product_is_that_of_the_rounded_norm_of_the_rounded_sum(added, rows, shape, place):
    h_TD, x_TD = rows_of(rows, shape[1], place), rows_of(rows, shape[1], place)
    norm_D, weight_ND = norm_of(shape[1], place), weight_of(shape, place)
    expected_TD = h_TD + x_TD if added else h_TD.clone()
    new_TD, y_TN = linear.norm_project.kernel(
        h_TD, x_TD if added else None, norm_D, weight_ND, eps=EPS
    )
    assert torch.equal(new_TD, expected_TD) and (added or new_TD is h_TD)
    assert_near(y_TN, product(normed(expected_TD, norm_D), weight_ND), dtype=place[1])


@places
@shapes
@rows
@pytest.mark.parametrize("fp32", [False, True], ids=["rounded", "fp32"])
def test_swiglu_follows_the_rounded_product(fp32, rows, shape, place):
    h_TD, x_TD = rows_of(rows, shape[1], place), rows_of(rows, shape[1], place)
    norm_D, weight_GD = norm_of(shape[1], place), weight_of(shape, place)
    inner_TF = linear.swiglu_project.kernel(x_TD, weight_GD, fp32=fp32)
    assert inner_TF.shape == (rows, shape[0] // 2)
    assert_near(inner_TF, gated(x_TD, weight_GD, fp32=fp32), dtype=place[1])
    new_TD, inner_TF = linear.norm_swiglu.kernel(h_TD, x_TD, norm_D, weight_GD, eps=EPS, fp32=fp32)
    assert torch.equal(new_TD, h_TD + x_TD)
    y_TD = normed(new_TD, norm_D)
    assert_near(inner_TF, gated(y_TD, weight_GD, fp32=fp32), dtype=place[1])


def check_logits(rows, shape, place):
    x_TD, weight_VD = rows_of(rows, shape[1], place), weight_of(shape, place)
    logits_TV = linear.lm_head.kernel(x_TD, weight_VD)
    assert logits_TV.dtype == torch.float32
    assert_near(logits_TV, product(x_TD, weight_VD), dtype=torch.float32)


@places
@shapes
def test_logits_of_one_row_are_not_rounded(shape, place):
    check_logits(1, shape, place)


@pytest.mark.gpu
@shapes
@rows
def test_logits_of_many_rows_are_not_rounded(rows, shape):
    # By torch's product with an FP32 result, which only CUDA has.
    check_logits(rows, shape, ("cuda", torch.bfloat16))


@places
def test_more_rows_than_our_kernels_take_are_multiplied_too(place):
    x_TD, weight_GD = rows_of(129, 130, place), weight_of((36, 130), place)
    assert_near(linear.project.kernel(x_TD, weight_GD), product(x_TD, weight_GD), dtype=place[1])
    inner_TF = linear.swiglu_project.kernel(x_TD, weight_GD, fp32=True)
    assert_near(inner_TF, gated(x_TD, weight_GD, fp32=True), dtype=place[1])


@places
def test_no_rows_are_no_rows(place):
    none_0F, weight_DF, norm_F = (
        rows_of(0, 64, place),
        weight_of((10, 64), place),
        norm_of(64, place),
    )
    assert linear.project.kernel(none_0F, weight_DF).shape == (0, 10)
    assert linear.swiglu_project.kernel(none_0F, weight_DF, fp32=True).shape == (0, 5)
    assert linear.norm_project.kernel(none_0F, None, norm_F, weight_DF, eps=EPS)[1].shape == (0, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 33, 128, 200], ids="T{}".format)
def test_the_sizes_of_the_models_are_right_too(rows, name):
    shape, place = WEIGHTS[name], ("cuda", torch.bfloat16)
    h_TD, norm_D, weight_ND = (
        rows_of(rows, shape[1], place), norm_of(shape[1], place), weight_of(shape, place)
    )  # fmt: skip
    _, y_TN = linear.norm_project.kernel(h_TD, h_TD, norm_D, weight_ND, eps=EPS)
    assert_near(y_TN, product(normed(h_TD + h_TD, norm_D), weight_ND), dtype=place[1])
    inner_TF = linear.swiglu_project.kernel(h_TD, weight_ND, fp32=False)
    assert_near(inner_TF, gated(h_TD, weight_ND, fp32=False), dtype=place[1])
