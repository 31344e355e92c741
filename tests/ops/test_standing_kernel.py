"""Where tokens stand in their rows, against sums in FP64, in the interpreter and on a GPU."""

import math

import pytest
import torch
from ahead import Case, meta

from limelight.ops.pieces import PIECE, Cuts
from limelight.ops.standing import standing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# One piece, its edge, several, and more than are read at once.
SIZES = [5, PIECE + 1, 3 * PIECE - 7, 5 * PIECE + 9]
INF = float("inf")

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    logits, number = meta(4, 150_144, dtype=torch.float32), meta(9, dtype=torch.float32)
    rows = meta(9, dtype=torch.int64)

    def call(cuts):
        return lambda: standing.kernel(logits, rows, number, number, cuts=cuts)

    return [
        Case("standing", call(None), decode=True),
        Case("standing cut", call(Cuts(number, number, number))),
    ]


def made(vocabulary: int, device: str) -> tuple[torch.Tensor, ...]:
    """Rows in a wider tensor, some twice and one of no one; a token of each, likely or not."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = (4 * torch.randn(6, vocabulary + 3, generator=generator))[:, :vocabulary]
    logits_RV[4] = logits_RV[4].round()
    logits_RV[5, : vocabulary // 2] = -INF
    rows_X = torch.tensor([3, 0, -1, 4, 4, 5, 1, 3])
    at_X = torch.randint(vocabulary, (8,), generator=generator)
    at_X[0], at_X[5], at_X[6] = logits_RV[3].argmax(), vocabulary - 1, logits_RV[1].argmin()
    temperature_X = torch.tensor([1.0, 0.3, 1.0, 2.5, 1.0, 1.0, 0.7, 1.0])
    found = (logits_RV, rows_X, logits_RV[rows_X, at_X], temperature_X)
    return tuple(x.to(device) for x in found)


def exact(logits_RV, rows_X, logit_X, temperature_X, left_XV=None):
    """Log-probabilities and ranks by FP64."""
    row_XV = logits_RV[rows_X].double() / temperature_X.double()[:, None]
    if left_XV is not None:
        row_XV = row_XV.masked_fill(~left_XV, -INF)
    told_X = logit_X.double() / temperature_X.double() - row_XV.logsumexp(dim=1)
    return told_X, 1 + (logits_RV[rows_X] > logit_X[:, None]).sum(dim=1)


def told(figures_5X, temperature_X):
    logit_X, best_X, weight_X, larger_X, left_X = figures_5X
    return (logit_X - best_X) / temperature_X - weight_X.log(), 1 + larger_X, left_X


@pytest.mark.parametrize("vocabulary", SIZES, ids="V{}".format)
def test_a_token_is_as_likely_as_fp64_says_and_has_its_rank(vocabulary, device):
    given = made(vocabulary, device)
    expected_X, ranks_X = exact(*given)
    there_X = given[1] >= 0
    for form, near in ((standing.reference, 1e-12), (standing.kernel, 3e-7)):
        told_X, rank_X, left_X = told(form(*given), given[3])
        assert ((told_X - expected_X)[there_X].abs() < near * (1 + expected_X[there_X].abs())).all()
        assert torch.equal(rank_X[there_X].long(), ranks_X[there_X])
        assert (left_X[there_X] == vocabulary).all()


# Top-k, top-p, min-p of each; off in the third and the seventh.
CUTS = ([7, 10**9, 10**9, 1, 3000, 10**9, 10**9, 20],
        [1.0, 0.9, 1.0, 1.0, 0.99, 1e-4, 1.0, 0.8],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03])  # fmt: skip


@pytest.mark.parametrize("vocabulary", [5, PIECE + 1], ids="V{}".format)
def test_what_cut_offs_leave_is_all_there_is(vocabulary, device):
    logits_RV, rows_X, _, temperature_X = made(vocabulary, device)
    most_X, share_X, least_X = (torch.tensor(x, device=device) for x in CUTS)
    least_X[4] = 0.05
    cuts = Cuts(most_X.clamp(max=vocabulary), share_X, least_X)
    # The best stays whatever is cut.
    logit_X = logits_RV[rows_X].amax(dim=1)
    expected = standing.reference(logits_RV, rows_X, logit_X, temperature_X, cuts=cuts)
    found = standing.kernel(logits_RV, rows_X, logit_X, temperature_X, cuts=cuts)
    there_X = rows_X >= 0
    assert torch.equal(found[4, there_X], expected[4, there_X])
    torch.testing.assert_close(found[:, there_X], expected[:, there_X], rtol=1e-6, atol=0)
    order_XV = logits_RV[rows_X].sort(dim=1, descending=True, stable=True).indices
    left_XV = torch.zeros_like(order_XV, dtype=torch.bool)
    for x, count in enumerate(found[4].tolist()):
        if there_X[x]:
            left_XV[x, order_XV[x, : int(count)]] = True
    exact_X, _ = exact(logits_RV, rows_X, logit_X, temperature_X, left_XV)
    told_X, _, _ = told(found, temperature_X)
    assert ((told_X - exact_X)[there_X].abs() < 1e-6).all()


def test_a_row_is_told_the_same_bits_alone_and_among_others(device):
    given = made(SIZES[2], device)
    together = standing.kernel(*given)
    for i in (0, 3, 6):
        alone = standing.kernel(given[0], *(x[i : i + 1] for x in given[1:]))
        assert torch.equal(alone[:, 0], together[:, i])


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_what_is_no_number_shows_in_its_own_row_alone(bad, device):
    logits_RV, rows_X, logit_X, temperature_X = made(PIECE + 1, device)
    logits_RV[3, 2] = bad
    for form in (standing.reference, standing.kernel):
        told_X, _, _ = told(form(logits_RV, rows_X, logit_X, temperature_X), temperature_X)
        assert told_X.isfinite().tolist() == [False, True, bool(told_X[2].isfinite()), True, True,
                                              True, True, False]  # fmt: skip


def test_no_tokens_stand_nowhere(device):
    none_X = torch.empty(0, device=device)
    assert standing.kernel(
        torch.empty(3, 9, device=device), none_X.long(), none_X, none_X
    ).shape == (5, 0)
