"""The sampling kernels against the reference, in the interpreter and on a GPU."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops import pieces
from limelight.ops.pieces import PIECE, Cuts
from limelight.ops.sample import GREEDY_BELOW, probabilities, sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# One piece, its edge, several, and a vocabulary of a real model.
SIZES = [5, PIECE, PIECE + 1, 3 * PIECE - 7]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def call(cap, into, cut):
        number = meta(4, dtype=torch.float32)
        logits = meta(4, 150_144, dtype=torch.float32)
        cuts = Cuts(number, number, number) if cut else None
        return lambda: sample.kernel(logits, number, number, cap=cap, cuts=cuts, into=into)

    def share():
        logits, number = meta(4, 75_072, dtype=torch.float32), meta(4, dtype=torch.float32)
        sample.kernel(logits, number, meta(4, dtype=torch.float64))

    into = (meta(9, dtype=torch.int64), meta(4, dtype=torch.int64))
    return [
        Case("sample", call(None, into, False), decode=True),
        Case("sample cut", call(None, into, True)),
        Case("sample capped", call(30.0, None, False), decode=True),
        Case("sample capped and cut", call(30.0, None, True)),
        Case("sample a share", share, decode=True),
    ]


def rows_of(vocabulary: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows in a wider tensor, some of them greedy, with numbers up to the very ends."""
    generator = torch.Generator().manual_seed(vocabulary)
    wide_RV = 4 * torch.randn(8, vocabulary + 3, generator=generator)
    temperature_R = torch.tensor([0.0, 1e-6, 0.3, 1.0, 1.0, 2.5, 1.0, 1.0])
    uniform_R = torch.rand(8, generator=generator)
    uniform_R[3], uniform_R[4] = 0.0, 1.0
    return wide_RV.to(device)[:, :vocabulary], temperature_R.to(device), uniform_R.to(device)


@pytest.mark.parametrize("cap", [None, 3.0], ids="cap-{}".format)
@pytest.mark.parametrize("vocabulary", SIZES, ids="V{}".format)
def test_a_token_is_the_one_whose_interval_holds_the_number(vocabulary, cap, device):
    logits_RV, temperature_R, uniform_R = rows_of(vocabulary, device)
    token_R, best_R = sample.kernel(logits_RV, temperature_R, uniform_R, cap=cap)
    expected_R, expected_best_R = sample.reference(logits_RV, temperature_R, uniform_R, cap=cap)
    assert token_R.dtype == torch.int64 and best_R.dtype == torch.float32
    assert torch.allclose(best_R, expected_best_R, atol=1e-5)
    if cap is not None:
        logits_RV = cap * torch.tanh(logits_RV / cap)
    for row, (token, expected) in enumerate(zip(token_R, expected_R, strict=True)):
        if token != expected:
            # Sums in another order may move a number across an edge that it all but touches.
            warmth = max(float(temperature_R[row]), 1e-3)
            cumulated_V = torch.softmax(logits_RV[row].double() / warmth, dim=-1).cumsum(dim=-1)
            below, above = sorted([int(token), int(expected)])
            assert abs(cumulated_V[below] - uniform_R[row]) < 1e-6
            assert cumulated_V[above - 1] - cumulated_V[below] < 1e-6


# Top-k (0: off), top-p, min-p.
CUTS = [
    (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 1e-4, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1),
    (20, 0.8, 0.03), (10**6, 1.0, 1.0), (3000, 0.99, 0.0), (0, 1.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocabulary", [SIZES[0], SIZES[2], SIZES[3]], ids="V{}".format)
def test_cut_offs_leave_what_sorting_leaves(vocabulary, rounded, device):
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = 3 * torch.randn(len(CUTS), vocabulary, generator=generator)
    if rounded:
        logits_RV = logits_RV.round()
    temperature_R = 0.4 + torch.rand(len(CUTS), generator=generator)
    most, share, least = (torch.tensor(x_R, device=device) for x_R in zip(*CUTS, strict=True))
    cuts = Cuts(most.where(most > 0, vocabulary), share, least)
    logits_RV, temperature_R = logits_RV.to(device), temperature_R.to(device)
    made = pieces.launch(logits_RV, temperature_R, greedy_below=GREEDY_BELOW, cuts=cuts)
    left_RV = probabilities(logits_RV, temperature_R, cuts) > 0
    weight_RV = ((logits_RV - logits_RV.max(1, keepdim=True).values) / temperature_R[:, None]).exp()
    cut_R1, last_R1 = made.cut_R[:, None], made.last_R[:, None]
    equal_RV = (logits_RV == cut_R1) & (torch.arange(vocabulary, device=device) <= last_R1)
    mine_RV = ((logits_RV > cut_R1) | equal_RV) & (weight_RV >= least[:, None])
    assert torch.equal(mine_RV, left_RV)
    scale_RP = (
        (made.best_RP - logits_RV.max(1, keepdim=True).values) / temperature_R[:, None]
    ).exp()
    torch.testing.assert_close(
        (made.sum_RP * scale_RP).sum(1), (weight_RV.double() * left_RV).sum(1), rtol=1e-5, atol=0
    )
    uniform_R = torch.rand(len(CUTS), generator=generator).to(device)
    token_R, _ = sample.kernel(logits_RV, temperature_R, uniform_R, cuts=cuts)
    assert torch.equal(token_R, sample.reference(logits_RV, temperature_R, uniform_R, cuts=cuts)[0])


def test_of_equal_logits_the_greedy_token_is_the_first(device):
    logits_RV = torch.zeros(2, 2 * PIECE + 9, device=device)
    logits_RV[1, [PIECE + 3, PIECE + 4, 2 * PIECE]] = 7.0
    zeros_R = torch.zeros(2, device=device)
    token_R, best_R = sample.kernel(logits_RV, zeros_R, zeros_R)
    assert token_R.tolist() == [0, PIECE + 3] and best_R.tolist() == [0.0, 7.0]


def test_a_token_that_is_ruled_out_never_comes(device):
    logits_RV = torch.full((4, PIECE + 100), float("-inf"), device=device)
    logits_RV[:, PIECE + 20], logits_RV[:, PIECE + 40] = -200.0, -200.0
    uniform_R = torch.tensor([0.0, 0.49, 0.51, 1.0], device=device)
    token_R, best_R = sample.kernel(logits_RV, torch.full_like(uniform_R, 0.1), uniform_R)
    assert token_R.tolist() == [PIECE + 20, PIECE + 20, PIECE + 40, PIECE + 40]
    assert best_R.tolist() == [-200.0] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids="temperature-{}".format)
def test_rows_that_are_no_numbers_say_so_and_leave_the_others(temperature, device):
    logits_RV = torch.randn(3, 2 * PIECE, device=device)
    logits_RV[0, PIECE + 1] = float("nan")
    logits_RV[1] = float("-inf")
    temperature_R = torch.full((3,), temperature, device=device)
    token_R, best_R = sample.kernel(logits_RV, temperature_R, torch.zeros(3, device=device))
    assert best_R[0] != best_R[0] and best_R[1] == float("-inf")
    assert best_R[2] == logits_RV[2].max()
    assert ((token_R >= 0) & (token_R < 2 * PIECE)).all()


def test_chosen_tokens_follow_the_probabilities(device):
    logits_V = torch.tensor([0.0, 1.0, float("-inf"), 2.0], device=device).repeat_interleave(700)
    number = 64
    uniform_R = (torch.arange(number, device=device) + 0.5) / number
    logits_RV = logits_V.expand(number, -1).contiguous()
    token_R, _ = sample.kernel(logits_RV, torch.ones_like(uniform_R), uniform_R)
    share = torch.bincount(token_R // 700, minlength=4).double() / number
    expected = torch.softmax(logits_V[::700].double(), dim=-1)
    assert (share - expected).abs().max() < 1.5 / number
    assert (token_R.diff() >= 0).all()


def test_tokens_also_go_where_the_last_of_each_slot_are_kept(device):
    logits_RV, temperature_R, uniform_R = rows_of(PIECE + 1, device)
    slots_R = torch.tensor([9, 2, 3, 4, 0, 6, 7, 8], device=device)
    for form in (sample.reference, sample.kernel):
        last_tokens_S = torch.full((11,), -1, device=device)
        token_R, _ = form(logits_RV, temperature_R, uniform_R, into=(last_tokens_S, slots_R))
        expected_S = torch.full_like(last_tokens_S, -1)
        expected_S[slots_R] = token_R
        assert torch.equal(last_tokens_S, expected_S)


def test_no_rows_are_no_tokens(device):
    none_R = torch.empty(0, device=device)
    token_R, best_R = sample.kernel(torch.empty(0, 10, device=device), none_R, none_R)
    assert token_R.shape == best_R.shape == (0,)
