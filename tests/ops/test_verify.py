"""What is drafted changes how fast tokens come, and never which, or how often each does."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from walks import BEGIN, BEGIN_BADLY, CRITICAL, TARGET, Walk, chi_square, counted

from limelight.ops import verify as module
from limelight.ops.noise import ACCEPT, DRAFT, PLAIN, RESIDUAL, uniform
from limelight.ops.pieces import Cuts
from limelight.ops.sample import invert
from limelight.ops.trim import log_odds, split, survival
from limelight.ops.verify import (
    NOTHING,
    Proposals,
    draft_probs,
    packed_rows,
    verify,
    verify_by,
    verify_greedy,
)

DRAWS = 200_000


def check_walk(
    walk: Walk, draws: int, *, first_seed: int = 0, begin: int = BEGIN
) -> dict[str, float]:
    """Chi-squares over the critical value: the first token, the first two, a third behind them."""
    seed_B = torch.arange(draws) + first_seed
    position_B = torch.full((draws,), 17)
    first = walk.step(torch.full((draws,), begin), seed_B, position_B)
    begun = TARGET[begin].double()
    one = chi_square(counted(first.tokens_BQ[:, 0], 3), begun)
    tokens_B2 = walk.pairs(first, seed_B, position_B)
    pair = counted(tokens_B2[:, 0] * 3 + tokens_B2[:, 1], 9)
    two = chi_square(pair, (begun[:, None] * TARGET[:3].double()).flatten())
    behind = first.tokens_BQ[first.accepted_B >= 2]
    third = counted(behind[:, 1] * 3 + behind[:, 2], 9).view(3, 3)
    seen = third.sum(dim=-1) > 0
    three = chi_square(third[seen], TARGET[:3][seen])
    assert len(behind) > draws / 100
    freedom = 2 * int(seen.sum())
    critical = CRITICAL.get(freedom, CRITICAL[6])
    return {"one": one / CRITICAL[2], "two": two / CRITICAL[8], "three": three / critical}


@pytest.mark.parametrize("kept", [None, 0.4], ids=["whole", "trimmed"])
@pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "best"])
@pytest.mark.parametrize("temperature", [0.7, 1.5], ids="T{}".format)
def test_tokens_have_the_targets_distribution(temperature, sampled, kept):
    ratios = check_walk(Walk(temperature, sampled, kept), DRAWS)
    assert max(ratios.values()) < 1, ratios


@pytest.mark.slow
@pytest.mark.parametrize("kept", [None, 0.4], ids=["whole", "trimmed"])
@pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "best"])
@pytest.mark.parametrize("temperature", [0.7, 1.5], ids="T{}".format)
def test_a_million_tokens_have_the_targets_distribution(temperature, sampled, kept):
    ratios = check_walk(Walk(temperature, sampled, kept), 10**6, first_seed=-(10**9))
    assert max(ratios.values()) < 1, ratios


@pytest.mark.parametrize("name", ["ACCEPT", "RESIDUAL"])
def test_a_number_used_twice_would_be_seen(name, monkeypatch):
    assert check_walk(Walk(1.0, True), 50_000, begin=BEGIN_BADLY)["one"] < 1
    monkeypatch.setattr(module, name, DRAFT)
    assert check_walk(Walk(1.0, True), 50_000, begin=BEGIN_BADLY)["one"] > 5


def test_a_budget_that_knows_the_draft_would_be_seen():
    assert check_walk(Walk(1.0, True, peeks=True), 50_000)["one"] > 5


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_tokens_are_the_plain_argmax_for_any_drafts(seed, num_drafts):
    """Random drafts, good ones, placeholders, ids outside; scores of any kind do not matter."""
    generator = torch.Generator().manual_seed(seed)
    batch, vocabulary, candidates = 13, 7, 3
    table_VV = torch.randn(vocabulary, vocabulary, generator=generator).round(decimals=1)
    counts_B = torch.randint(0, num_drafts + 1, (batch,), generator=generator)
    last_B = torch.randint(0, vocabulary, (batch,), generator=generator)
    drafts_BN = torch.randint(-2, vocabulary + 2, (batch, num_drafts), generator=generator)
    plain, want = last_B.tolist(), []
    for b in range(batch):
        tokens, token = [], plain[b]
        for j in range(num_drafts + 1):
            token = int(table_VV[token].argmax())
            tokens.append(token)
            good = torch.rand(1, generator=generator) < 0.7
            if j < num_drafts and good:
                drafts_BN[b, j] = token
        agree = [int(drafts_BN[b, j]) == tokens[j] for j in range(counts_B[b])] + [False]
        want.append(tokens[: agree.index(False) + 1])
    starts_B = torch.nn.functional.pad((counts_B + 1).cumsum(0), (1, 0))
    sequence_R, at_R = packed_rows(starts_B, int(starts_B[-1]))
    before_BQ = torch.cat([last_B[:, None], drafts_BN.clamp(0, vocabulary - 1)], dim=1)
    logits_RV = table_VV[before_BQ[sequence_R, at_R]]
    scores_BNK = torch.randn(batch, num_drafts, candidates, generator=generator)
    scores_BNK[::2] = float("nan")
    ids_BNK = torch.randint(0, vocabulary, scores_BNK.shape, generator=generator)
    zeros = torch.zeros(batch, dtype=torch.int64)
    for result in (
        verify_greedy(logits_RV, starts_B, drafts_BN),
        verify(
            logits_RV, starts_B, drafts_BN, torch.zeros(batch), zeros, zeros,
            proposals=Proposals(ids_BNK, scores_BNK),
        ),
    ):  # fmt: skip
        got = [[t for t in row if t != NOTHING] for row in result.tokens_BQ.tolist()]
        assert got == want
        assert result.accepted_B.tolist() == [len(tokens) - 1 for tokens in want]


def shares(logits_V, proposals, draft_B, *, temperature=1.0, cuts=None) -> torch.Tensor:
    """Counts of the first token behind one draft each."""
    batch = len(draft_B)
    logits_RV = logits_V.expand(2 * batch, -1)
    result = verify_by(
        proposals, logits_RV, torch.arange(batch + 1) * 2, draft_B[:, None],
        torch.full((batch,), temperature), torch.arange(batch), torch.full((batch,), 5), cuts=cuts,
    )  # fmt: skip
    return counted(result.tokens_BQ[:, 0], len(logits_V))


CUTS = {
    "nothing": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.25},
    "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "best"])
@pytest.mark.parametrize("cut", CUTS)
def test_cut_offs_hold_for_accepted_drafts_and_what_comes_instead(cut, sampled):
    batch, temperature = 60_000, 0.8
    logits_V = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.6, 0.4])
    p = torch.softmax(logits_V.double() / temperature, dim=-1)
    given = CUTS[cut]
    p = torch.where(p >= p.max() * given.get("min_p", 0), p, 0)
    p = torch.where(p >= p.sort(descending=True).values[given.get("top_k", 6) - 1], p, 0)
    p = p / p.sum()
    ranked = p.sort(descending=True)
    outside = ranked.values.cumsum(0) - ranked.values >= given.get("top_p", 1.0)
    p[ranked.indices[outside]] = 0
    p = p / p.sum()
    one = torch.ones(batch)
    cuts = Cuts(
        one * given.get("top_k", 6), one * given.get("top_p", 1), one * given.get("min_p", 0)
    )
    ids_K, scores_K = torch.tensor([3, 2, 1, 0]), torch.tensor([0.2, 0.5, 0.9, 0.0])
    proposals = Proposals(ids_K.expand(batch, 1, 4), scores_K.expand(batch, 1, 4))
    number_B = uniform(torch.arange(batch), torch.tensor(5), stream=DRAFT).float()
    q_BK = draft_probs(scores_K.expand(batch, 4), torch.full((batch,), temperature))
    draft_B = ids_K[invert(q_BK, number_B)] if sampled else torch.full((batch,), 2)
    counts = shares(
        logits_V, proposals if sampled else None, draft_B, temperature=temperature, cuts=cuts
    )
    assert counts[p == 0].sum() == 0
    assert chi_square(counts[p > 0], p[p > 0]) < CRITICAL[10]


@pytest.mark.parametrize("fault", ["nan", "zeros", "one bad", "outside", "placeholder", "foreign"])
def test_a_broken_drafter_leaves_the_distribution(fault):
    """Its drafts are the first candidate's, or what it could not have drawn."""
    batch, logits_V = 60_000, torch.tensor([0.1, 0.6, 0.3]).log()
    ids_K, scores_K = torch.tensor([1, 2]), torch.tensor([1.0, 0.5])
    draft_B = torch.full((batch,), 1)
    if fault == "nan":
        scores_K = torch.full((2,), float("nan"))
    elif fault == "one bad":
        scores_K = torch.tensor([0.3, float("nan")])
    elif fault == "outside":
        draft_B = torch.full((batch,), 3)
    elif fault == "placeholder":
        draft_B = torch.full((batch,), NOTHING)
    elif fault == "foreign":
        draft_B = torch.full((batch,), 0)
    elif fault == "zeros":
        scores_K = torch.zeros(2)
        number_B = uniform(torch.arange(batch), torch.tensor(5), stream=DRAFT).float()
        draft_B = ids_K[invert(torch.full((batch, 2), 0.5), number_B)]
    proposals = Proposals(ids_K.expand(batch, 1, 2), scores_K.expand(batch, 1, 2))
    counts = shares(logits_V, proposals, draft_B)
    assert chi_square(counts, torch.tensor([0.1, 0.6, 0.3])) < CRITICAL[2]


def test_what_a_drafter_can_give_is_never_lost_to_scores_that_are_not_numbers():
    nan, inf = float("nan"), float("inf")
    scores_XK = torch.tensor([[nan, 1.0, 1.0], [nan, nan, -inf], [1e30, -1e30, inf], [2.0, 3, 3]])
    assert draft_probs(scores_XK, torch.ones(4))[:3].tolist() == [
        [0, 0.5, 0.5],
        [1, 0, 0],
        [1, 0, 0],
    ]
    greedy = draft_probs(scores_XK, torch.zeros(4))
    assert greedy.argmax(dim=-1).tolist() == [1, 0, 0, 1] and greedy.sum() == 4


def test_streams_and_rows_have_independent_numbers():
    seed_X1, position_P = torch.arange(-300, 300)[:, None], torch.arange(300)
    streams = [PLAIN, ACCEPT, RESIDUAL, DRAFT, DRAFT + 1, DRAFT + 14]
    numbers_SX = torch.stack([uniform(seed_X1, position_P, stream=s).flatten() for s in streams])
    assert numbers_SX.unique().numel() == numbers_SX.numel()
    assert numbers_SX.min() >= 0 and numbers_SX.max() < 1
    assert (numbers_SX.mean(dim=1) - 0.5).abs().max() < 0.004
    off = torch.corrcoef(numbers_SX) - torch.eye(len(streams))
    assert off.abs().max() < 0.011
    # A draft of the same position by the pass before has another place in its block.
    shifted = uniform(seed_X1, position_P + 1, stream=DRAFT + 1).flatten()
    assert torch.corrcoef(torch.stack([numbers_SX[3], shifted]))[0, 1].abs() < 0.011


def test_a_result_does_not_depend_on_neighbours_or_padding():
    generator = torch.Generator().manual_seed(2)
    batch, vocabulary = 9, 11
    counts_B = torch.tensor([3, 0, 2, 3, 1, 0, 3, 2, 3])
    rows_B = counts_B + 1
    rows_B[5] = 0
    starts_B = torch.nn.functional.pad(rows_B.cumsum(0), (1, 0)).int()
    logits_RV = torch.randn(int(starts_B[-1]) + 4, vocabulary, generator=generator)
    drafts_BN = torch.randint(0, vocabulary, (batch, 3), generator=generator)
    temperature_B = torch.tensor([0.0, 1.0, 0.7] * 3)
    seed_B, position_B = torch.arange(batch) * 7 - 20, torch.arange(batch) * 31
    ids_BNK = torch.randn(batch, 3, vocabulary, generator=generator).argsort(dim=-1)[..., :4]
    ids_BNK[..., 2] = drafts_BN
    scores_BNK = torch.randn(batch, 3, 4, generator=generator)
    for b in range(batch):
        for j in range(int(rows_B[b]) - 1):
            logits_RV[starts_B[b] + j, drafts_BN[b, j]] += 2
    cuts = Cuts(torch.tensor([11, 4, 11] * 3), torch.tensor([1, 1, 0.7] * 3), torch.zeros(batch))
    per_B = (drafts_BN, temperature_B, seed_B, position_B)
    together = verify(
        logits_RV, starts_B, *per_B, proposals=Proposals(ids_BNK, scores_BNK), cuts=cuts
    )
    for b in range(batch):
        one = slice(b, b + 1)
        if rows_B[b] == 0:
            assert together.tokens_BQ[b].tolist() == [NOTHING] * 4
            continue
        alone = verify(
            logits_RV[int(starts_B[b]) : int(starts_B[b + 1])], torch.tensor([0, int(rows_B[b])]),
            *(x_B[one] for x_B in per_B), proposals=Proposals(ids_BNK[one], scores_BNK[one]),
            cuts=Cuts(cuts.top_k_B[one], cuts.top_p_B[one], cuts.min_p_B[one]),
        )  # fmt: skip
        assert together.tokens_BQ[b].tolist() == alone.tokens_BQ[0].tolist()
        assert together.accepted_B[b] == alone.accepted_B[0]
        assert together.best_B[b] == alone.best_B[0]
    assert int(together.accepted_B.sum()) > 0


CERTAIN = Proposals(torch.tensor([[[1], [0]]]), torch.zeros(1, 2, 1))


@pytest.mark.parametrize("proposals", [CERTAIN, None], ids=["drawn", "best"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_row_without_numbers_or_allowed_tokens_is_told_and_ends_the_step(
    bad, temperature, proposals
):
    logits_RV = torch.tensor([[0.0, 200.0, 0.0], [bad, bad, bad], [200.0, 0.0, 0.0]])
    result = verify_by(
        proposals, logits_RV, torch.tensor([0, 3]), torch.tensor([[1, 0]]),
        torch.tensor([temperature]), torch.tensor([3]), torch.tensor([8]), cuts=None,
    )  # fmt: skip
    assert result.accepted_B.tolist() == [1] and result.tokens_BQ[0, 0] == 1
    assert str(float(result.best_B[0])) == str(bad) and result.tokens_BQ[0, 2] == NOTHING


class Waits(TorchDispatchMode):
    """Raises where the host would have to wait for a value, or for how many there are."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(self.NAMES), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_nothing_waits_for_the_device(num_drafts):
    batch, rows, vocabulary = 5, 17, 11
    scores_BNK = torch.zeros(batch, num_drafts, 4)
    seed_B = position_B = torch.arange(batch)
    drafts_BN = torch.zeros(batch, num_drafts, dtype=torch.int64)
    starts_B = torch.arange(batch + 1, dtype=torch.int32) * 3
    cuts = Cuts(torch.full((batch,), 3), torch.ones(batch), torch.zeros(batch))
    logits_RV, temperature_B = torch.zeros(rows, vocabulary), torch.ones(batch)
    rest = (temperature_B, seed_B, position_B)
    with Waits():
        for proposals in (None, Proposals(scores_BNK.long(), scores_BNK)):
            result = verify_by(proposals, logits_RV, starts_B, drafts_BN, *rest, cuts=cuts)
            assert result.tokens_BQ.shape == (batch, num_drafts + 1)
        assert verify_greedy(logits_RV, starts_B, drafts_BN).accepted_B.shape == (batch,)
        survival_BN = survival(log_odds(scores_BNK, temperature_B), temperature_B[0], 0.1)
        assert split(survival_BN, position_B, position_B[2]).shape == (batch,)
        with pytest.raises(AssertionError, match="waits"):
            result.accepted_B.sum().item()
