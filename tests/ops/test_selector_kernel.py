"""The selector's walk and the odds of drafts against the references."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.selector import choose
from limelight.ops.trim import MOST_ODDS, log_odds

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Sequences, drafts, candidates, rank, vocabulary; the last on a GPU alone.
SHAPES = [
    (5, 3, 8, 10, 97),
    (3, 7, 16, 32, 500),
    (4, 1, 5, 256, 64),
    pytest.param((70, 7, 16, 256, 151_936), marks=pytest.mark.gpu),
]
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("poisoned")
devices = pytest.mark.parametrize("device", DEVICES)


def compile_cases() -> list[Case]:
    def number(*shape):
        return meta(*shape, dtype=torch.float32)

    def integer(*shape):
        return meta(*shape, dtype=torch.int64)

    def call(batch, drafts, candidates, rank):
        shape = (batch, drafts, candidates)
        return choose.kernel(
            number(*shape), integer(*shape), meta(batch, drafts, rank), integer(batch),
            meta(151_936, rank), meta(151_936, rank), number(batch), number(batch, drafts),
        )  # fmt: skip

    return [
        Case("choose", lambda: call(1, 7, 16, 256), decode=True),
        Case("choose of few", lambda: call(8, 7, 8, 16), decode=True),
        Case("odds", lambda: log_odds.kernel(number(8, 7, 16), number(8)), decode=True),
    ]


def parts(shape, device, *, dtype=torch.float32):
    batch, drafts, candidates, rank, vocabulary = shape
    generator = torch.Generator().manual_seed(rank)

    def normal(*size):
        return torch.randn(size, generator=generator)

    order = torch.stack(
        [torch.randperm(vocabulary, generator=generator) for _ in range(batch * drafts)]
    )
    temperature_B = 0.3 + torch.rand(batch, generator=generator)
    temperature_B[1::3] = 0.0
    scale = rank**-0.25
    given = (
        normal(batch, drafts, candidates),
        order[:, :candidates].reshape(batch, drafts, candidates).contiguous(),
        normal(batch, drafts, rank).to(dtype) * scale,
        torch.randint(0, vocabulary, (batch,), generator=generator),
        normal(vocabulary, rank).to(dtype) * scale,
        normal(vocabulary, rank).to(dtype) * scale,
        temperature_B,
        torch.rand(batch, drafts, generator=generator),
    )
    return [x.to(device) for x in given]


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_walk_is_that_of_the_whole_table(shape, dtype, device):
    given = parts(shape, device, dtype=dtype)
    tokens_BN, scores_BNK = choose.kernel(*given)
    expected_BN, expected_BNK = choose.reference(*given)
    assert torch.equal(tokens_BN, expected_BN)
    torch.testing.assert_close(scores_BNK, expected_BNK, rtol=1e-4, atol=1e-4)


@devices
def test_scores_that_are_not_numbers_lead_where_they_do_in_the_reference(device):
    unary_BNK, *rest = parts(SHAPES[0], device)
    unary_BNK[0, 0] = NAN
    unary_BNK[1, 1, 3], unary_BNK[2, 0, 2], unary_BNK[3, 2] = NAN, INF, -INF
    tokens_BN, scores_BNK = choose.kernel(unary_BNK, *rest)
    expected_BN, expected_BNK = choose.reference(unary_BNK, *rest)
    assert torch.equal(tokens_BN, expected_BN)
    torch.testing.assert_close(scores_BNK, expected_BNK, rtol=1e-4, atol=1e-4, equal_nan=True)


@devices
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 16), (3, 5, 11)], ids=str)
def test_odds_are_those_of_the_reference(shape, device):
    generator = torch.Generator().manual_seed(0)
    scores_BNK = 20 * torch.randn(shape, generator=generator)
    scores_BNK[0, 0] = NAN
    scores_BNK[-1, -1, :2] = torch.tensor([INF, -INF])[: shape[2]]
    scores_BNK[-1, 0] = 3.0
    temperature_B = torch.rand(shape[0], generator=generator)
    temperature_B[0] = 0.0
    scores_BNK, temperature_B = scores_BNK.to(device), temperature_B.to(device)
    odds_BN = log_odds.kernel(scores_BNK, temperature_B)
    expected_BN = log_odds.reference(scores_BNK, temperature_B)
    assert odds_BN.abs().max() <= MOST_ODDS
    torch.testing.assert_close(odds_BN, expected_BN, rtol=1e-4, atol=1e-4)
