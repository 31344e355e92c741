"""The kernels that count logits by level against the references, interpreted and on a GPU."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.levels import BINS, COUNTED, SHIFTS, Levels, Window, narrow, tally
from limelight.ops.pieces import PIECE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 6

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def numbers(*shape, dtype=torch.float32):
        return meta(*shape, dtype=dtype)

    def count(shift):
        levels = Levels(numbers(4), numbers(4))
        level_R = numbers(4, dtype=torch.int64)
        return lambda: tally.kernel(numbers(4, 75_072), levels, numbers(4), level_R, shift=shift)

    def find(shift, ranks):
        window = Window(
            numbers(4, dtype=torch.int64), numbers(ranks, 4, dtype=torch.int64),
            numbers(ranks, 4, dtype=torch.float64),
        )  # fmt: skip
        tally_NRB = numbers(ranks, 4, BINS, dtype=torch.int64)
        levels = Levels(numbers(4), numbers(4))
        top_k_R, most_R = numbers(4), numbers(4, dtype=torch.float64)
        return lambda: narrow.kernel(
            tally_NRB, window, levels, top_k_R, most_R, shift=shift, last=shift == 0
        )

    return [
        *(Case(f"tally {shift}", count(shift), decode=True) for shift in (SHIFTS[0], 0)),
        *(Case(f"narrow {n} at {s}", find(s, n), decode=True) for n in (2, 8) for s in (24, 0)),
    ]


def shares(size: int, device: str) -> list[torch.Tensor]:
    """Two ranks' logits: ties, what is ruled out, a row of equal ones, and one without any."""
    generator = torch.Generator().manual_seed(size)
    logits_RV = 3 * torch.randn(ROWS, 2 * size, generator=generator)
    logits_RV[1] = logits_RV[1].round()
    logits_RV[2] = 0.5
    logits_RV[3, : size + 1] = float("-inf")
    logits_RV[4] = float("-inf")
    return list(logits_RV.to(device).split(size, dim=1))


@pytest.mark.parametrize("size", [5, PIECE + 1], ids="S{}".format)
def test_cut_offs_are_found_bin_by_bin_as_by_the_references(size, device):
    both = shares(size, device)
    levels = Levels(
        torch.cat(both, dim=1).amax(dim=1), torch.tensor([0.3, 1, 1, 1, 1, 2.5], device=device)
    )
    top_k_R = torch.tensor([3, 4, size + 2, 2 * size, 5, 2 * size], device=device)
    min_p_R = torch.tensor([0.0, 0.01, 0, 0.2, 0.1, 0.0], device=device)
    most_R = torch.tensor([2.0, 1e9, 1e9, 0.5, 1e-30, 1.5], dtype=torch.float64, device=device)
    window = Window.whole(2, ROWS, both[0].device)
    for shift in SHIFTS:
        given = (levels, min_p_R, window.level_R)
        found = [tally.kernel(own_RS, *given, shift=shift) for own_RS in both]
        expected = [tally.reference(own_RS, *given, shift=shift) for own_RS in both]
        for (mine_RB, kept_R), (theirs_RB, left_R) in zip(found, expected, strict=True):
            assert torch.equal(mine_RB >> COUNTED, theirs_RB >> COUNTED)
            assert (kept_R is None) == (left_R is None) == (shift != SHIFTS[0])
            assert kept_R is None or left_R is None or torch.equal(kept_R, left_R)
            # Of each weight the last bits may differ.
            assert ((mine_RB - theirs_RB).abs() <= 8 * (mine_RB >> COUNTED)).all()
        tally_NRB = torch.stack([theirs_RB for theirs_RB, _ in expected])
        given = (tally_NRB, window, levels, top_k_R, most_R)
        mine, window = (
            f(*given, shift=shift, last=shift == 0) for f in (narrow.kernel, narrow.reference)
        )
        assert torch.equal(mine.level_R, window.level_R)
        assert torch.equal(mine.above_NR, window.above_NR)
        torch.testing.assert_close(mine.weight_NR, window.weight_NR, rtol=1e-12, atol=1e-300)
    assert window.above_NR.sum(dim=0).tolist()[:2] == [3, 4] or size > 5
    assert window.above_NR[:, 4].sum() == 0


def test_no_rows_are_no_bins(device):
    none_R = torch.empty(0, device=device)
    levels, window = Levels(none_R, none_R), Window.whole(2, 0, none_R.device)
    tally_RB, kept_R = tally.kernel(
        torch.empty(0, 9, device=device), levels, none_R, window.level_R, shift=SHIFTS[0]
    )
    assert tally_RB.shape == (0, BINS) and kept_R.shape == (0,)
    given = (torch.stack((tally_RB, tally_RB)), window, levels, none_R, none_R.double())
    found = narrow.kernel(*given, shift=0, last=True)
    assert found.above_NR.shape == (2, 0)
