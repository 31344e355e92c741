"""The best logits of each row, equal ones in order, against a sort."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.pieces import PIECE
from limelight.ops.topk import top_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAN, INF = float("nan"), float("inf")

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def call(rows, vocabulary, count, rows_T=None):
        logits_TV = meta(rows, vocabulary, dtype=torch.float32)
        return top_tokens.kernel(logits_TV, count=count, rows_T=rows_T)

    return [
        Case("seven rows", lambda: call(7, 150_144, 16), decode=True),
        Case("of ranks", lambda: call(896, 64, 16), decode=True),
        Case("few of few", lambda: call(9, 5001, 5)),
        Case("of rows", lambda: call(9, 150_144, 20, meta(40, dtype=torch.int64)), decode=True),
    ]


def made(rows, vocabulary, *, steps=None):
    """Logits, with `steps` of few values."""
    logits_TV = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    return logits_TV if steps is None else (logits_TV * steps).round() / steps


def assert_best_first(logits_TV, count, device):
    order_TV = logits_TV.sort(dim=1, descending=True, stable=True).indices[:, :count]
    for form in (top_tokens.kernel, top_tokens.reference):
        best_TK, ids_TK = form(logits_TV.to(device), count=count)
        assert torch.equal(ids_TK.cpu(), order_TV)
        expected_TK = logits_TV.gather(1, order_TV)
        torch.testing.assert_close(best_TK.cpu(), expected_TK, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("steps", [None, 4, 0.1], ids=["all differ", "ties", "nearly all equal"])
@pytest.mark.parametrize(
    ("vocabulary", "count"), [(1, 1), (17, 16), (97, 8), (PIECE + 3, 5), (3 * PIECE - 1, 16)]
)
def test_equal_logits_come_in_the_order_of_their_tokens(vocabulary, count, steps, device):
    assert_best_first(made(5, vocabulary, steps=steps), count, device)


def test_what_is_no_number_comes_first_and_what_is_forbidden_last(device):
    logits_TV = made(6, PIECE + 20, steps=2)
    logits_TV[0, [3, PIECE + 1]] = torch.tensor([NAN, -NAN])
    logits_TV[1, [70, 71]] = torch.tensor([INF, NAN])
    logits_TV[2], logits_TV[2, [4, PIECE + 2]] = -INF, torch.tensor([0.0, -3e38])
    logits_TV[3] = NAN
    logits_TV[4] = torch.where(torch.arange(PIECE + 20) % 3 == 0, 0.0, -0.0)
    logits_TV[5, ::2] = INF
    assert_best_first(logits_TV, 16, device)


def test_rows_may_lie_apart(device):
    logits_TV = made(7, 2 * PIECE)[:, : PIECE + 9]
    assert_best_first(logits_TV, 16, device)


@pytest.mark.parametrize("count", [5, 40], ids=["by kernel", "sorted"])
def test_rows_are_those_that_are_asked_for(count, device):
    logits_TV = made(5, PIECE + 9, steps=4).to(device)
    rows_T = torch.tensor([4, -1, 0, 4, 2, 1, 1, 3, 0, 4], device=device)
    there_T = rows_T >= 0
    expected = [x[rows_T[there_T]] for x in top_tokens.reference(logits_TV, count=count)]
    for form in (top_tokens.kernel, top_tokens.reference):
        found = form(logits_TV, count=count, rows_T=rows_T)
        assert all(torch.equal(x[there_T], y) for x, y in zip(found, expected, strict=True))
