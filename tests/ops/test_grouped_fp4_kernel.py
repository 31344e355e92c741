"""NVFP4 experts of some rows each: the Gluon kernel's source in NumPy, and itself on a GPU."""

import numpy as np
import pytest
import torch
from fp4s import random_fp4
from gluon_numpy import in_numpy
from near import assert_near
from sizes import EXPERTS

from limelight.ops import grouped_fp4
from limelight.ops.experts import moe
from limelight.ops.fp4_codes import DECODED_PAIRS, values_of
from limelight.ops.grouped import grouped_moe

# Rows, channels, experts, chosen, inner channels, those of the shared expert, FP32 SwiGLU, scale:
# of one chunk, off every tile, of several blocks an expert, of more columns than are held at once.
SIZES = [
    (3, 128, 12, 3, 64, 0, True, 2.5),
    (9, 320, 5, 2, 192, 64, False, 1.0),
    (21, 64, 3, 2, 448, 320, True, 1.0),
    (5, 2368, 2, 1, 64, 64, True, 1.0),
]
PLACES = [
    pytest.param(("cpu", torch.float32), id="fp32-numpy"),
    pytest.param(("cuda", torch.bfloat16), id="bf16-cuda", marks=pytest.mark.gpu),
]
IDS = "T{0[0]}-D{0[1]}-E{0[2]}-N{0[3]}-F{0[4]}-shared{0[5]}".format

pytestmark = pytest.mark.usefixtures("poisoned", "streamed")
places = pytest.mark.parametrize("place", PLACES)


def two_scales(bits):
    """What TWO_SCALES means."""
    pairs = []
    for shift in (0, 8):
        scales = torch.from_numpy((np.asarray(bits) >> shift & 255).astype(np.uint8))
        wide = scales.view(torch.float8_e4m3fn).float().numpy() * np.float32(2.0**118)
        half = wide.view(np.uint32) >> 16
        pairs.append((half << 16 | half).view(np.int32))
    return pairs


def decoded_pairs(word, pair):
    """What DECODED_PAIRS means."""
    scale = (np.asarray(pair) << 16).view(np.float32).astype(np.float64) * 2.0**-126
    word = torch.from_numpy(np.ascontiguousarray(word)).view(torch.uint8)
    values = values_of(word).unflatten(-1, (-1, 8)).numpy()
    return [(values[..., j] * scale).astype(np.float32) for j in range(8)]


@pytest.fixture
def streamed(monkeypatch):
    """All experts go to the kernel, on a CPU in NumPy."""
    monkeypatch.setattr(grouped_fp4, "MOST_EACH", 2**31)
    monkeypatch.setattr(grouped_fp4, "DTYPES", (torch.float32, torch.bfloat16))
    assembly = {grouped_fp4.TWO_SCALES.value: two_scales, DECODED_PAIRS.value: decoded_pairs}
    if torch.cuda.is_available():
        yield
    else:
        with in_numpy(grouped_fp4, assembly):
            yield


def tensors(case, place):
    device, dtype = place
    rows, size, experts, count, width, shared, *_ = case
    draw = {"generator": torch.Generator(device).manual_seed(sum(case[:6])), "device": device}

    def weight(*shape):
        return random_fp4(*shape, **draw, spread=1.0)

    weights, ids = torch.rand(rows, experts, **draw).topk(count, dim=-1)
    return (
        torch.randn(rows, size, **draw).to(dtype), weight(experts, 2 * width, size),
        weight(experts, size, width), weights / weights.sum(dim=-1, keepdim=True), ids,
        weight(2 * shared, size) if shared else None, weight(size, shared) if shared else None,
    )  # fmt: skip


def check(args, case, place):
    *_, fp32, scale = case
    assert grouped_fp4.fits(args[0], (args[2], args[6])), "another kernel would be asked"
    found_TD = grouped_moe(*args, fp32=fp32, scale=scale)
    assert_near(found_TD, moe.reference(*args, fp32=fp32, scale=scale), dtype=place[1])


@places
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_experts_are_summed_by_weight(case, place):
    check(tensors(case, place), case, place)


@places
@pytest.mark.parametrize("width", grouped_fp4.WIDTHS)
def test_stages_of_every_width_give_the_same(width, place, monkeypatch):
    monkeypatch.setattr(grouped_fp4, "WIDTHS", (width,))
    case = (21, 320, 4, 2, 128, 64, False, 1.0)
    check(tensors(case, place), case, place)


@places
def test_all_rows_may_choose_one_expert(place):
    case = (35, 64, 6, 2, 192, 0, True, 1.0)
    args = list(tensors(case, place))
    args[4] = torch.tensor([[4, 1]], device=place[0]).expand(35, 2).contiguous()
    check(args, case, place)


@places
def test_rows_may_lie_apart(place):
    case = (9, 64, 5, 2, 64, 64, False, 1.0)
    y_TD, *rest = tensors(case, place)
    apart_TD = torch.zeros(9, 128).to(y_TD)[:, :64]
    apart_TD.copy_(y_TD)
    check((apart_TD, *rest), case, place)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 16, 33, 64, 130], ids="T{}".format)
@pytest.mark.parametrize("size", EXPERTS, ids="D{0[0]}".format)
def test_experts_of_the_models_are_summed_by_weight(size, rows):
    place = ("cuda", torch.bfloat16)
    check(tensors((rows, *size), place), (rows, *size), place)
