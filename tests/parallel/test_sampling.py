"""Tokens drawn from shares of the vocabulary: ranks are threads that tell each other by a list."""

import threading
from collections.abc import Callable

import pytest
import torch

from limelight.ops.sample import sample
from limelight.ops.standing import standing
from limelight.ops.topk import top_tokens
from limelight.parallel import sampling
from limelight.parallel.mesh import Mesh

OFF = float("-inf")


class Told:
    """What ranks in threads exchange."""

    def __init__(self, ranks: int):
        self.barrier, self.values = threading.Barrier(ranks), [None] * ranks

    def all_of(self, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        self.barrier.wait()
        self.values[mesh.rank] = x
        self.barrier.wait()
        found = torch.stack(self.values)
        self.barrier.wait()
        return found


def on_ranks(count: int, work: Callable[[Mesh], object]) -> list:
    results = [None] * count

    def run(rank: int) -> None:
        results[rank] = work(Mesh(rank, count))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def told(monkeypatch):
    def tell(ranks: int) -> None:
        told = Told(ranks)
        monkeypatch.setattr(sampling, "stacked", told.all_of)
        monkeypatch.setattr(sampling, "all_reduce", lambda x, mesh: told.all_of(x, mesh).sum(0))

    return tell


def rows(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy and drawn, with numbers up to the ends, ties, and shares that are ruled out."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = 3 * torch.randn(40, vocabulary, generator=generator)
    logits_RV[5] = logits_RV[5].round()
    logits_RV[6, : vocabulary // 2] = OFF
    logits_RV[7, vocabulary // 2 :] = OFF
    logits_RV[8] = OFF
    logits_RV[8, vocabulary - 1] = 0.0
    temperature_R = torch.tensor([0.0, 1e-6, 0.3, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 2.5] * 4)
    uniform_R = torch.rand(40, generator=generator)
    uniform_R[3], uniform_R[4] = 0.0, 1.0
    return logits_RV, temperature_R, uniform_R


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_draw_the_token_that_one_draws_of_all_logits(ranks, told):
    told(ranks)
    for vocabulary in (17, 60, 997):
        logits_RV, temperature_R, uniform_R = rows(vocabulary)
        expected = sample(logits_RV, temperature_R, uniform_R)
        share = -(-vocabulary // ranks)
        padded_RV = torch.nn.functional.pad(logits_RV, (0, share * ranks - vocabulary), value=OFF)

        def work(mesh: Mesh, share=share, padded_RV=padded_RV, rows=(temperature_R, uniform_R)):
            first, kept = mesh.rank * share, torch.zeros(41, dtype=torch.int64)
            own_RS = padded_RV[:, first : first + share]
            into = (kept, torch.arange(40))
            token_R, best_R = sampling.sample_shares(own_RS, *rows, mesh, first=first, into=into)
            assert torch.equal(kept[:40], token_R)
            return token_R, best_R

        for token_R, best_R in on_ranks(ranks, work):
            assert torch.equal(token_R, expected[0]) and torch.equal(best_R, expected[1])


def test_a_number_that_is_none_shows_on_every_rank(told):
    told(2)
    logits_RV = torch.zeros(2, 10)
    logits_RV[0, 7] = float("nan")

    def work(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        own_RS, into = (
            logits_RV[:, 5 * mesh.rank :][:, :5],
            (torch.zeros(3).long(), torch.arange(2)),
        )
        half_R = torch.full((2,), 0.5)
        return sampling.sample_shares(own_RS, half_R, half_R, mesh, first=5 * mesh.rank, into=into)

    for token_R, best_R in on_ranks(2, work):
        assert best_R.isnan().tolist() == [True, False]
        assert ((token_R >= 0) & (token_R < 10)).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_tell_where_tokens_stand_as_one_does_of_all_logits(ranks, told):
    told(ranks)
    for vocabulary, count in ((17, 17), (60, 5), (997, 30)):
        logits_RV, temperature_R, _ = rows(vocabulary)
        temperature_R = temperature_R.clamp(min=0.3)
        rows_X = torch.tensor([3, 5, 5, -1, 6, 7, 8, 39, 0])
        tokens_X = torch.tensor([0, 1, vocabulary - 1, 2, vocabulary - 1, 0, vocabulary - 1, 9, 8])
        there_X = rows_X >= 0
        given = (rows_X, tokens_X, temperature_R[rows_X])
        figures_5X = standing(logits_RV, rows_X, logits_RV[rows_X, tokens_X], given[2])
        best = top_tokens(logits_RV, count=count, rows_T=rows_X)
        share = -(-vocabulary // ranks)
        padded_RV = torch.nn.functional.pad(logits_RV, (0, share * ranks - vocabulary), value=OFF)

        def work(mesh: Mesh, share=share, padded_RV=padded_RV, given=given, count=count):
            first = mesh.rank * share
            own_RS, of = padded_RV[:, first : first + share], sampling.Share(mesh, first)
            found = sampling.standing_in_shares(own_RS, *given, of)
            return found, *sampling.top_tokens_of_shares(own_RS, given[0], of, count=count)

        for found in on_ranks(ranks, work):
            own = [x[there_X] for x in (found[0][:4].T, *found[1:])]
            expected = [x[there_X] for x in (figures_5X[:4].T, *best)]
            assert torch.allclose(own[0], expected[0], rtol=1e-12)
            assert all(map(torch.equal, own[1:], expected[1:]))
            assert (found[0][4] >= vocabulary).all()
