"""Drafts judged from shares of the vocabulary stand and fall as they do before all logits."""

import random

import pytest
import torch
from ranks import OFF, among_ranks, share_of

from limelight.ops.pieces import Cuts
from limelight.ops.verify import (
    NOTHING,
    Proposals,
    Verified,
    verify_by,
    verify_by_odds,
    verify_greedy,
)
from limelight.parallel import sampling
from limelight.parallel.verifying import judge_by, judge_by_odds, judge_greedy

BATCH, CANDIDATES = 12, 4


class Steps:
    """Rows and drafts of a step, some of which are good; greedy sequences, one without rows, rows
    behind the last, ties, and what is ruled out."""

    def __init__(self, vocabulary: int, num_drafts: int, seed: int):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        counts_B = torch.randint(0, num_drafts + 1, (BATCH,), generator=generator) + 1
        counts_B[3] = 0
        self.starts_B = torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)).int()
        rows = int(self.starts_B[-1]) + 2
        self.logits_RV = rng.choice([0.5, 2.0, 4.0]) * torch.randn(
            rows, vocabulary, generator=generator
        )
        if seed % 3 == 0:
            self.logits_RV = self.logits_RV.round()
        if seed % 4 == 0:
            out_RV = torch.rand(rows, vocabulary, generator=generator) < 0.7
            self.logits_RV = self.logits_RV.masked_fill(out_RV, OFF)
        shape = (BATCH, num_drafts)
        self.drafts_BN = torch.randint(NOTHING, vocabulary, shape, generator=generator)
        order_BNV = torch.randn(*shape, vocabulary, generator=generator).argsort(dim=-1)
        ids_BNK = order_BNV[..., :CANDIDATES].contiguous()
        for b in range(BATCH):
            for j in range(int(counts_B[b]) - 1):
                if (draft := int(self.drafts_BN[b, j])) >= 0:
                    row_V = self.logits_RV[int(self.starts_B[b]) + j]
                    row_V[draft] = row_V.max() + rng.choice([-1.0, 0.0, 1.0, 3.0])
                    if draft not in ids_BNK[b, j]:
                        ids_BNK[b, j, rng.randrange(CANDIDATES)] = draft
        self.logits_RV[-4] = OFF
        self.proposals = Proposals(ids_BNK, torch.randn(ids_BNK.shape, generator=generator))
        self.temperature_B = torch.rand(BATCH, generator=generator) * 1.5 + 0.05
        self.temperature_B[1], self.temperature_B[5] = 0.0, 1e-6
        self.seed_B = torch.randint(-(10**9), 10**9, (BATCH,), generator=generator)
        self.position_B = torch.randint(0, 10**4, (BATCH,), generator=generator)
        self.odds_BN = 2 * torch.randn(shape, generator=generator)
        self.slots_B = torch.randperm(BATCH, generator=generator).int() if seed % 2 else None
        chosen = [
            (
                rng.choice([1, 2, 50, vocabulary // 2 + 1, vocabulary, vocabulary]),
                rng.choice([1.0, 1.0, 0.9, 0.5, 1e-4]),
                rng.choice([0.0, 0.0, 0.1, 0.01]),
            )
            for _ in range(BATCH)
        ]
        self.cuts = Cuts(*(torch.tensor(x) for x in zip(*chosen, strict=True)))

    @property
    def asked(self) -> tuple[torch.Tensor, ...]:
        drafts = (self.starts_B, self.drafts_BN)
        return (*drafts, self.temperature_B, self.seed_B, self.position_B)

    @property
    def by_odds(self) -> tuple[torch.Tensor, ...]:
        return self.starts_B, self.drafts_BN, self.odds_BN, self.seed_B, self.position_B


def assert_same(found: Verified, expected: Verified) -> None:
    """Where a token is allowed; elsewhere all that is said of it is that none is."""
    assert torch.equal(found.best_B, expected.best_B)
    assert torch.equal(found.accepted_B, expected.accepted_B)
    some_B = expected.best_B > OFF
    assert torch.equal(found.tokens_BQ[some_B], expected.tokens_BQ[some_B])


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("way", ["best", "drawn"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_judge_as_one_does(ranks, way, cut, monkeypatch):
    accepted = 0
    for seed, (vocabulary, num_drafts) in enumerate(
        [(17, 1), (60, 3), (997, 7), (97, 7), (1000, 3), (31, 2)]
    ):
        steps = Steps(vocabulary, num_drafts, seed)
        proposals = steps.proposals if way == "drawn" else None
        options = {"cuts": steps.cuts if cut else None, "slots_B": steps.slots_B}
        expected = verify_by(proposals, steps.logits_RV, *steps.asked, **options)

        def work(mesh, steps=steps, proposals=proposals, options=options):
            own_RS, share = share_of(steps.logits_RV, mesh)
            return judge_by(proposals, own_RS, *steps.asked, share, **options)

        for found in among_ranks(monkeypatch, ranks, work)[0]:
            assert_same(found, expected)
        accepted += int(expected.accepted_B.sum())
    assert accepted > 10


@pytest.mark.parametrize("ranks", [2, 3])
def test_greedy_drafts_and_those_that_stand_by_odds_are_judged_alike(ranks, monkeypatch):
    for seed in range(4):
        steps = Steps(97, 5, seed)
        slots = {"slots_B": steps.slots_B}
        greedy = verify_greedy(steps.logits_RV, steps.starts_B, steps.drafts_BN, **slots)
        by_odds = verify_by_odds(steps.logits_RV, *steps.by_odds, **slots)

        def work(mesh, steps=steps, slots=slots):
            own_RS, share = share_of(steps.logits_RV, mesh)
            drafts = (steps.starts_B, steps.drafts_BN)
            yield judge_greedy(own_RS, *drafts, share, **slots)
            yield judge_by_odds(own_RS, *steps.by_odds, share, **slots)

        for found in among_ranks(monkeypatch, ranks, lambda mesh, work=work: [*work(mesh)])[0]:
            assert_same(found[0], greedy)
            assert_same(found[1], by_odds)


@pytest.mark.parametrize("way", ["best", "drawn"])
def test_what_is_exchanged_of_drafts_does_not_grow_with_the_vocabulary(way, monkeypatch):
    """Beside 24 and 2,048 bytes of a row, 16 of a draft and 8 of a sequence, or of a row."""
    sizes = []
    monkeypatch.setattr(sampling, "may_look", lambda logits_RS: False)
    for vocabulary in (100, 20_000):
        steps = Steps(vocabulary, 3, 2)

        def work(mesh, steps=steps):
            own_RS, share = share_of(steps.logits_RV, mesh)
            proposals = steps.proposals if way == "drawn" else None
            return judge_by(proposals, own_RS, *steps.asked, share, cuts=steps.cuts)

        sizes.append(among_ranks(monkeypatch, 2, work)[1].sizes)
    rows = len(steps.logits_RV)
    last = [16 * BATCH * 3, 8 * BATCH] if way == "drawn" else [8 * rows]
    assert sizes[0] == sizes[1] == [24 * rows, *(7 * [2048 * rows]), *last]
