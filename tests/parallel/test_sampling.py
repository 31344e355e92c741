"""Tokens drawn from shares of the vocabulary are those that one rank draws of all logits."""

import pytest
import torch
from ranks import OFF, among_ranks, share_of

from limelight.ops.pieces import Cuts
from limelight.ops.sample import probabilities, sample
from limelight.ops.standing import standing
from limelight.ops.topk import top_tokens
from limelight.parallel import sampling
from limelight.parallel.sampling import (
    look,
    sample_share,
    standing_in_shares,
    top_tokens_of_shares,
)

SIZES = (17, 60, 997)


def rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy and drawn, with numbers up to the ends, ties, and shares that are ruled out."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = 3 * torch.randn(40, vocabulary, generator=generator)
    logits_RV[5] = logits_RV[5].round()
    logits_RV[6, : vocabulary // 2] = OFF
    logits_RV[7, vocabulary // 2 :] = OFF
    logits_RV[8] = OFF
    logits_RV[8, vocabulary - 1] = 0.0
    logits_RV[9] = -1.25
    logits_RV[10:16] = logits_RV[10:16].round()
    logits_RV[16:20] *= 1e-3
    # What is left lies in one share, and the other shares have others of the same weight.
    logits_RV[20:23, : vocabulary // 5] += 40.0
    temperature_R = torch.tensor([0.0, 1e-6, 0.3, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 2.5] * 4)
    uniform_R = torch.rand(40, generator=generator)
    uniform_R[3], uniform_R[4] = 0.0, 1.0
    return logits_RV, temperature_R, uniform_R


def cut_offs(vocabulary: int, turn: int) -> Cuts:
    """By row, each with a share of those that are off; the turns let rows have others."""
    most = [1, 2, 5, 50, vocabulary // 2 + 1, vocabulary, vocabulary]
    weights = [1.0, 0.9, 0.5, 1e-4, 0.999]
    least = [0.0, 0.0, 0.1, 0.01, 1.0, 0.0]
    at = [row + 3 * turn for row in range(40)]
    return Cuts(
        torch.tensor([most[i % 7] for i in at]),
        torch.tensor([weights[(i + turn) % 5] for i in at]),
        torch.tensor([least[(i // 2) % 6] for i in at]),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_draw_the_token_that_one_draws_of_all_logits(ranks, monkeypatch):
    for vocabulary in SIZES:
        given = rows(vocabulary)
        expected = sample(*given)

        def work(mesh, given=given):
            own_RS, share = share_of(given[0], mesh)
            kept = torch.zeros(41, dtype=torch.int64)
            found = sample_share(own_RS, *given[1:], share, into=(kept, torch.arange(40)))
            assert torch.equal(kept[:40], found[0])
            return found

        for token_R, best_R in among_ranks(monkeypatch, ranks, work)[0]:
            assert torch.equal(token_R, expected[0]) and torch.equal(best_R, expected[1])


@pytest.mark.parametrize(
    ("ranks", "looks"), [(1, True), (2, True), (2, False), (3, True), (4, False)]
)
def test_cut_offs_leave_of_shares_what_they_leave_of_all(ranks, looks, monkeypatch):
    monkeypatch.setattr(sampling, "may_look", lambda logits_RS: looks)
    for vocabulary in SIZES:
        logits_RV, temperature_R, uniform_R = rows(vocabulary)
        for turn in range(3):
            cuts = cut_offs(vocabulary, turn)
            expected = sample(logits_RV, temperature_R, uniform_R, cuts=cuts)
            warm_R = temperature_R >= 1e-5
            left_RV = probabilities(logits_RV, temperature_R, cuts) > 0

            def work(mesh, logits_RV=logits_RV, cuts=cuts, given=(temperature_R, uniform_R)):
                own_RS, share = share_of(logits_RV, mesh)
                known = look(own_RS, given[0], share, cuts=cuts)
                left_RS = probabilities(own_RS, given[0], known.own) > 0
                left_RS &= (known.own.top_k_B > 0)[:, None]
                return *sample_share(own_RS, *given, share, cuts=cuts), left_RS

            found = among_ranks(monkeypatch, ranks, work)[0]
            for token_R, best_R, _ in found:
                assert torch.equal(token_R, expected[0]) and torch.equal(best_R, expected[1])
            mine_RV = torch.cat([left_RS for *_, left_RS in found], dim=1)[:, :vocabulary]
            assert torch.equal(mine_RV[warm_R], left_RV[warm_R])


def test_many_random_rows_with_cut_offs_are_drawn_alike(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    count, vocabulary = 400, 3001
    logits_RV = torch.randn(count, vocabulary, generator=generator)
    logits_RV *= torch.rand(count, 1, generator=generator) * 8
    temperature_R, uniform_R, share_R, least_R = torch.rand(4, count, generator=generator)
    temperature_R, least_R = temperature_R * 2 + 0.05, (least_R - 0.5).clamp(min=0) / 5
    most_R = torch.randint(1, vocabulary + 200, (count,), generator=generator)
    cuts = Cuts(most_R, share_R.clamp(min=0.001), least_R)
    expected_R, _ = sample(logits_RV, temperature_R, uniform_R, cuts=cuts)

    def work(mesh):
        own_RS, share = share_of(logits_RV, mesh)
        return sample_share(own_RS, temperature_R, uniform_R, share, cuts=cuts)[0]

    for token_R in among_ranks(monkeypatch, 3, work)[0]:
        assert torch.equal(token_R, expected_R)


def test_a_row_does_not_depend_on_the_cut_offs_beside_it(monkeypatch):
    logits_RV, temperature_R, uniform_R = rows(997)
    off = Cuts(torch.full((40,), 997), torch.ones(40), torch.zeros(40))
    beside = Cuts(off.top_k_B.clone(), off.top_p_B.clone(), off.min_p_B.clone())
    beside.top_p_B[::2] = 0.5

    def work(mesh):
        own_RS, share = share_of(logits_RV, mesh)
        given = (own_RS, temperature_R, share)
        return [look(*given, cuts=cuts).weight_NR[:, 1::2] for cuts in (None, off, beside)]

    for alone_MR, *others in among_ranks(monkeypatch, 2, work)[0]:
        assert all(torch.equal(alone_MR, other_MR) for other_MR in others)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_number_that_is_none_shows_on_every_rank(monkeypatch, cut):
    logits_RV = torch.zeros(2, 10)
    logits_RV[0, 7] = float("nan")
    half_R = torch.full((2,), 0.5)

    def work(mesh):
        own_RS, share = share_of(logits_RV, mesh)
        cuts = Cuts(half_R * 6, half_R, half_R) if cut else None
        return sample_share(own_RS, half_R, half_R, share, cuts=cuts)

    for token_R, best_R in among_ranks(monkeypatch, 2, work)[0]:
        assert best_R.isnan().tolist() == [True, False]
        assert ((token_R >= 0) & (token_R < 10)).all()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_tell_where_tokens_stand_as_one_does_of_all_logits(ranks, cut, monkeypatch):
    for vocabulary, count in ((17, 17), (60, 5), (997, 30)):
        logits_RV, temperature_R, _ = rows(vocabulary)
        temperature_R = temperature_R.clamp(min=0.3)
        rows_X = torch.tensor([3, 5, 5, -1, 6, 7, 8, 39, 0])
        tokens_X = torch.tensor([0, 1, vocabulary - 1, 2, vocabulary - 1, 0, vocabulary - 1, 9, 8])
        there_X = rows_X >= 0
        given = (rows_X, tokens_X, temperature_R[rows_X])
        cuts = Cuts(*(x_R[:9] for x_R in cut_offs(vocabulary, 2).arguments)) if cut else None
        logit_X = logits_RV[rows_X, tokens_X]
        figures_5X = standing(logits_RV, rows_X, logit_X, given[2], cuts=cuts)
        best = top_tokens(logits_RV, count=count, rows_T=rows_X)

        def work(mesh, logits_RV=logits_RV, given=given, count=count, cuts=cuts):
            own_RS, share = share_of(logits_RV, mesh)
            found = standing_in_shares(own_RS, *given, share, cuts=cuts)
            return found, *top_tokens_of_shares(own_RS, given[0], share, count=count)

        for found in among_ranks(monkeypatch, ranks, work)[0]:
            own = [x[there_X] for x in (found[0].T, *found[1:])]
            expected = [x[there_X] for x in (figures_5X.T, *best)]
            assert torch.allclose(own[0][:, :4], expected[0][:, :4], rtol=1e-12)
            assert all(map(torch.equal, own[1:], expected[1:]))
            left_X = expected[0][:, 4].clamp(max=vocabulary)
            off_X = left_X == vocabulary
            assert torch.equal(own[0][~off_X, 4], left_X[~off_X])
            assert (own[0][off_X, 4] >= vocabulary).all()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_what_ranks_exchange_does_not_grow_with_the_vocabulary(cut, monkeypatch):
    sizes = []
    monkeypatch.setattr(sampling, "may_look", lambda logits_RS: False)
    for vocabulary in (100, 100_000):
        count = 3
        logits_RV = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1))
        one_R = torch.ones(count)
        cuts = Cuts(one_R * 50, one_R * 0.9, one_R * 0.0) if cut else None

        def work(mesh, logits_RV=logits_RV, one_R=one_R, cuts=cuts):
            own_RS, share = share_of(logits_RV, mesh)
            return sample_share(own_RS, one_R, one_R / 2, share, cuts=cuts)

        sizes.append(among_ranks(monkeypatch, 2, work)[1].sizes)
    assert sizes[0] == sizes[1] == [3 * x for x in [24, *(7 * [2048] if cut else []), 8]]


def test_a_host_that_may_look_exchanges_no_more_than_it_has_to(monkeypatch):
    count, vocabulary = 3, 1000
    logits_RV = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1))
    one_R, off = torch.ones(count), torch.tensor([vocabulary] * count)
    steps = {}
    for name, cuts in {
        "off": Cuts(off, one_R, one_R * 0),
        "top-k": Cuts(one_R * 9, one_R, one_R * 0),
        "top-p": Cuts(off, one_R * 0.9, one_R * 0),
        "both": Cuts(one_R * 9, one_R * 0.9, one_R * 0),
    }.items():

        def work(mesh, cuts=cuts):
            own_RS, share = share_of(logits_RV, mesh)
            return sample_share(own_RS, one_R, one_R / 2, share, cuts=cuts)

        steps[name] = len(among_ranks(monkeypatch, 2, work)[1].sizes)
    assert steps["off"] == 3 and max(steps["top-k"], steps["top-p"]) <= 5 and steps["both"] <= 7
