"""What ranks tell of their shares, kernels against references, interpreted and on a GPU."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.pieces import PIECE
from limelight.ops.sample import GREEDY_BELOW
from limelight.ops.shares import holding, mass, meet

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INF, NAN = float("inf"), float("nan")

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    number_R, wide = meta(4, dtype=torch.float32), torch.float64
    logits_RS, told_N3R = meta(4, 75_072, dtype=torch.float32), meta(2, 3, 4, dtype=wide)
    return [
        Case("mass", lambda: mass.kernel(logits_RS, number_R, first=75_072), decode=True),
        Case("meet", lambda: meet.kernel(told_N3R, number_R), decode=True),
        Case("holding", lambda: holding.kernel(meta(2, 4, dtype=wide), number_R, rank=1),
             decode=True),
    ]  # fmt: skip


@pytest.mark.parametrize("size", [5, PIECE, 3 * PIECE - 7], ids="S{}".format)
def test_a_share_tells_its_best_logit_and_its_weight(size, device):
    generator = torch.Generator().manual_seed(size)
    logits_RS = (4 * torch.randn(6, size, generator=generator)).to(device)
    logits_RS[2, : size // 2], logits_RS[3], logits_RS[4, size - 2] = -INF, -INF, NAN
    logits_RS[5, [1, size - 1]] = 50.0
    temperature_R = torch.tensor([0.0, 0.3, 1.0, 1.0, 1.0, 2.5], device=device)
    found, expected = (f(logits_RS, temperature_R, first=30) for f in (mass.kernel, mass.reference))
    assert torch.equal(found[0].nan_to_num(), expected[0].nan_to_num())
    assert found[0, 4].isnan()
    counts_R = (logits_RS > -INF).any(dim=1) & ~logits_RS.isnan().any(dim=1)
    assert torch.equal(found[1, counts_R], expected[1, counts_R]) and found[1, 5] == 31
    drawn_R = counts_R & (temperature_R >= GREEDY_BELOW)
    torch.testing.assert_close(found[2, drawn_R], expected[2, drawn_R], rtol=1e-6, atol=0)
    assert found[2, 3] == expected[2, 3] == 0


def test_ranks_know_the_best_of_all_shares_and_what_each_weighs(device):
    best_NR = [[1.0, 2.0, -INF, 3.0, -INF, 5.0], [1.0, 3.5, 2.0, NAN, -INF, 4.0]]
    token_NR = [[3.0, 4, 0, 7, 0, 1], [11.0, 12, 13, 14, 10, 19]]
    weight_NR = [[1.5, 2.0, 0.0, 1.0, 0.0, 1.0], [4.0, 1.0, 1.0, 1.0, 0.0, 3.0]]
    told_N3R = torch.tensor([best_NR, token_NR, weight_NR], dtype=torch.float64, device=device)
    told_N3R = told_N3R.transpose(0, 1).contiguous()
    temperature_R = torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0, 0.0], device=device)
    found, expected = (f(told_N3R, temperature_R) for f in (meet.kernel, meet.reference))
    for known in (found, expected):
        assert known.greedy_R.tolist() == [3, 12, 13, 14, 0, 1]
        assert known.best_R.nan_to_num(nan=-1.0, neginf=-INF).tolist() == [
            1.0,
            3.5,
            2.0,
            -1.0,
            -INF,
            5.0,
        ]
    some = [0, 1, 2, 5]
    torch.testing.assert_close(
        found.weight_NR[:, some], expected.weight_NR[:, some], rtol=1e-12, atol=0
    )
    assert (found.weight_NR[:, 4] == 0).all() and (expected.weight_NR[:, 4] == 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_number_is_held_by_one_share_and_stands_for_a_number_within_it(ranks, device):
    count = 70
    generator = torch.Generator().manual_seed(ranks)
    weight_NR = torch.rand(ranks, count, generator=generator, dtype=torch.float64)
    weight_NR[-1, 3:6] = 0.0
    weight_NR[:, 7] = 0.0
    number_R = torch.rand(count, generator=generator)
    number_R[3], number_R[4], number_R[8], number_R[9] = 1.0, 0.0, 1.0, 0.0
    weight_NR, number_R = weight_NR.to(device), number_R.to(device)
    for rank in range(ranks):
        found, expected = (
            f(weight_NR, number_R, rank=rank) for f in (holding.kernel, holding.reference)
        )
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)
    holder_R = found[0]
    assert ranks == 1 or holder_R[3] == ranks - 2
    assert holder_R[8] == ranks - 1 and holder_R[9] == 0
    assert ((holder_R >= 0) & (holder_R < ranks)).all()
