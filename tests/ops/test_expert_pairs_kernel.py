"""Outputs of single experts and their sum, as ranks that share experts make them."""

import pytest
import torch
from ahead import Case, meta
from fp4s import decoded, meta_fp4, random_fp4
from near import PLACES, assert_near

from limelight.ops.expert_pairs import expert_pairs, unpack_once
from limelight.ops.experts import moe_reference
from limelight.ops.fp4 import Unpacked
from limelight.ops.placed_sum import placed_sum

pytestmark = pytest.mark.usefixtures("poisoned")
# Rows, channels, experts, chosen, inner channels, FP32 SwiGLU, scale.
SIZES = [(3, 48, 4, 2, 32, True, 2.5), (37, 64, 5, 2, 32, False, 1.0), (130, 32, 3, 2, 16, True, 2)]
cases = pytest.mark.parametrize("case", SIZES, ids="T{0[0]}-D{0[1]}-E{0[2]}".format)


def compile_cases() -> list[Case]:
    int64, fp32 = {"dtype": torch.int64}, {"dtype": torch.float32}
    plain = (meta(128, 5120, 5120), meta(128, 5120, 2560))
    packed = (meta_fp4(128, 5120, 5120), meta_fp4(128, 5120, 2560))
    found = [
        Case(
            f"{name} P{pairs}",
            lambda w=weights, p=pairs: expert_pairs.kernel(
                meta(p, 5120), *w, meta(p, **int64), fp32=True
            ),
        )
        for pairs in [16, 1024, 16384]
        for name, weights in [("bf16", plain), ("fp4", packed)]
    ]
    for dtype in (torch.bfloat16, torch.float32):
        sums = lambda d=dtype: placed_sum.kernel(  # noqa: E731
            meta(4096, 5120), meta(512, 8, **int64), meta(512, 8, **fp32), None, dtype=d
        )
        found.append(Case(f"sums {dtype}", sums, decode=True))
    return found


def tensors(case, place, packed):
    rows, size, experts, count, width, *_ = case
    device, dtype = place
    draw = {"generator": torch.Generator(device).manual_seed(rows), "device": device}
    y_TD = torch.randn(rows, size, **draw).to(dtype)
    shapes = (experts, 2 * width, size), (experts, size, width)
    if packed:
        held = [random_fp4(*shape, spread=1.0, **draw) for shape in shapes]
        exact = [decoded(weight, torch.float32) for weight in held]
    else:
        held = [(torch.randn(shape, **draw) * shape[-1] ** -0.5).to(dtype) for shape in shapes]
        exact = [weight.float() for weight in held]
    weights, ids = torch.rand(rows, experts, **draw).topk(count, dim=-1)
    return y_TD, held, exact, weights / weights.sum(dim=-1, keepdim=True), ids


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "fp4"])
@pytest.mark.parametrize("place", PLACES)
@cases
def test_experts_in_two_halves_give_what_all_give_at_once(case, place, packed):
    *_, fp32, scale = case
    y_TD, held, exact, weights_TN, ids_TN = tensors(case, place, packed)
    experts, count = len(exact[0]), ids_TN.shape[1]
    half = experts // 2
    outputs, places_TN = [], torch.full_like(ids_TN, -1)
    for first, last in ((0, half), (half, experts)):
        mine_TN = (ids_TN >= first) & (ids_TN < last)
        ids_P = torch.where(mine_TN, ids_TN - first, last - first).flatten()
        rows_PD = y_TD.repeat_interleave(count, dim=0)
        part = [weight[first:last] for weight in held]
        outputs.append(expert_pairs.kernel(rows_PD, *part, ids_P, fp32=fp32))
        at_TN = torch.arange(ids_TN.numel(), device=ids_TN.device).view(ids_TN.shape)
        places_TN = torch.where(mine_TN, at_TN + (len(outputs) - 1) * ids_TN.numel(), places_TN)
    found = placed_sum.kernel(
        torch.cat(outputs), places_TN, weights_TN, None, scale=scale, dtype=place[1]
    )
    expected = moe_reference(
        y_TD.float(), *exact, weights_TN, ids_TN, None, None, fp32=fp32, scale=scale
    )
    assert_near(found, expected, dtype=place[1])


@pytest.mark.parametrize("place", PLACES)
def test_weights_unpacked_once_for_several_chunks_give_the_same(place):
    y_TD, held, *_, ids_TN = tensors((90, 64, 1, 1, 32, True, 1), place, packed=True)
    few, many = [[90, 5], [90, 0]], [90, 80]
    for weight in held:
        assert all(unpack_once.kernel(y_TD, weight, chunks) is weight for chunks in few)
    unpacked = [unpack_once.kernel(y_TD, weight, many) for weight in held]
    assert all(isinstance(weight, Unpacked) for weight in unpacked)
    args = {"ids_P": ids_TN.flatten(), "fp32": True}
    found = expert_pairs.kernel(y_TD, *unpacked, **args)
    torch.testing.assert_close(found, expert_pairs.kernel(y_TD, *held, **args), rtol=0, atol=0)


@pytest.mark.parametrize("place", PLACES)
def test_what_another_rank_has_is_left_out_of_a_sum(place):
    device, dtype = place
    out_PD = torch.full((6, 40), 2.0, dtype=dtype, device=device)
    out_PD[5] = float("nan")
    places_TN = torch.tensor([[4, -1], [-1, -1], [0, 3]], device=device)
    weights_TN = torch.tensor([[0.5, 9.0], [1.0, 1.0], [0.25, 0.5]], device=device)
    for run in (placed_sum.kernel, placed_sum.reference):
        sums = run(out_PD, places_TN, weights_TN, None, dtype=torch.float32)
        assert sums.dtype == torch.float32
        assert sums.tolist() == [[1.0] * 40, [0.0] * 40, [1.5] * 40]


def test_the_reference_of_pairs_is_that_of_all_experts_at_once():
    y_TD, held, _, weights_TN, ids_TN = tensors(SIZES[1], ("cpu", torch.float32), False)
    count = ids_TN.shape[1]
    rows_PD = y_TD.repeat_interleave(count, dim=0)
    out_PD = expert_pairs(rows_PD, *held, ids_TN.flatten(), fp32=False)
    found = placed_sum(out_PD, None, weights_TN, None, dtype=torch.float32)
    expected = moe_reference(y_TD, *held, weights_TN, ids_TN, None, None, fp32=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    nothing = expert_pairs(rows_PD[:0], *held, ids_TN.flatten()[:0], fp32=False)
    assert nothing.shape == (0, y_TD.shape[1])
