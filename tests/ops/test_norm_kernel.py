"""The norms' kernels against their equations in FP64, in the interpreter and on a GPU."""

import math

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops.norm import add_rmsnorm, rmsnorm, sandwich

EPS = 1e-3
SHAPES = [(1, 192), (3, 2048), (5, 5120), (17, 100), (2, 1)]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("place", PLACES),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids="T{0[0]}-D{0[1]}".format)


def compile_cases() -> list[Case]:
    cases = []
    for rows, size in [(1, 2048), (1, 5120), (4096, 2048)]:
        h, x, weight = meta(rows, size), meta(rows, size), meta(size)
        calls = {
            "add_rmsnorm": lambda a=(h, x, weight): add_rmsnorm.kernel(*a, eps=EPS),
            "rmsnorm": lambda a=(h, weight): rmsnorm.kernel(*a, eps=EPS),
            "sandwich": lambda a=(h, x, weight, weight): sandwich.kernel(*a, n=3, eps=EPS),
        }
        cases += [Case(f"{op} T{rows} D{size}", call, decode=True) for op, call in calls.items()]
    return cases


def rows(shape, place, *, apart=0) -> torch.Tensor:
    """Random rows, with a gap between them."""
    device, dtype = place
    wide = torch.randn(shape[0], shape[1] + apart).to(device, dtype)
    return wide[:, : shape[1]]


def weights(size, place) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(size)).to(*place)


def normed(x_TD, weight_D) -> torch.Tensor:
    x_TD = x_TD.double()
    mean = x_TD.square().mean(dim=-1, keepdim=True)
    return x_TD / torch.sqrt(mean + EPS) * weight_D.double()


@shapes
def test_rmsnorm_divides_by_the_root_mean_square(shape, place):
    x_TD, weight_D = rows(shape, place, apart=8), weights(shape[1], place)
    y_TD = rmsnorm.kernel(x_TD, weight_D, eps=EPS)
    assert y_TD.dtype == x_TD.dtype and y_TD.is_contiguous()
    assert_near(y_TD, normed(x_TD, weight_D), dtype=place[1])


def test_rmsnorm_keeps_the_leading_dimensions(place):
    x, weight = torch.randn(2, 3, 40).to(*place), weights(40, place)
    assert_near(rmsnorm.kernel(x, weight, eps=EPS), normed(x, weight), dtype=place[1])


@shapes
def test_the_sum_is_rounded_before_its_norm(shape, place):
    h_TD, x_TD = rows(shape, place), rows(shape, place, apart=8)
    weight_D = weights(shape[1], place)
    before_TD = h_TD.clone()
    sum_TD, y_TD = add_rmsnorm.kernel(h_TD, x_TD, weight_D, eps=EPS)
    assert torch.equal(sum_TD, h_TD + x_TD) and torch.equal(h_TD, before_TD)
    assert_near(y_TD, normed(h_TD + x_TD, weight_D), dtype=place[1])


@shapes
def test_the_sandwich_rounds_each_step(shape, place):
    h_TD, x_TD = rows(shape, place, apart=8), rows(shape, place)
    post_D, pre_D, n = weights(shape[1], place), weights(shape[1], place), 7
    dtype = place[1]
    sum_TD, y_TD = sandwich.kernel(h_TD, x_TD, post_D, pre_D, n=n, eps=EPS)
    z_TD = normed(x_TD, post_D).to(dtype)
    expected_TD = z_TD * (1 / math.sqrt(n)) + h_TD * math.sqrt((n - 1) / n)
    assert_near(sum_TD, expected_TD, dtype=dtype)
    assert_near(y_TD, normed(sum_TD, pre_D), dtype=dtype)


def test_a_row_is_the_same_alone_and_among_others(place):
    h_TD, x_TD, weight_D = rows((9, 320), place), rows((9, 320), place), weights(320, place)
    together = add_rmsnorm.kernel(h_TD, x_TD, weight_D, eps=EPS)
    alone = add_rmsnorm.kernel(h_TD[4:5], x_TD[4:5], weight_D, eps=EPS)
    assert all(torch.equal(a[4:5], b) for a, b in zip(together, alone, strict=True))


def test_no_rows_are_no_rows(place):
    none_0D, weight_D = torch.empty((0, 12)).to(*place), weights(12, place)
    assert rmsnorm.kernel(none_0D, weight_D, eps=EPS).shape == (0, 12)
    assert add_rmsnorm.kernel(none_0D, none_0D, weight_D, eps=EPS)[1].shape == (0, 12)
    assert sandwich.kernel(none_0D, none_0D, weight_D, weight_D, n=2, eps=EPS)[1].shape == (0, 12)
