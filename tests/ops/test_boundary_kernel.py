"""Sums over ranks with the norm behind them: ranks are processes that share memory."""

import mmap
import multiprocessing
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from ahead import Case, meta

from limelight.ops import boundary
from limelight.ops.boundary import Partial, Peers, sum_add_rmsnorm, sum_sandwich
from limelight.ops.combine import Unsummed
from limelight.ops.norm import add_rmsnorm, sandwich

EPS = 1e-3
SECONDS = 60
# Bytes of all rows sent once, and sent twice: of few rows, so that both ways are taken.
FEW = (2 * 4 * 48, 3 * 4 * 48)


def compile_cases() -> list[Case]:
    cases = []
    for ranks in (2, 4, 8):
        for size, post in [(2048, None), (5120, meta(5120))]:
            peers = Peers.of(0, size, torch.bfloat16, meta(ranks, dtype=torch.int64))
            for rows in (1, 8, peers.once + 1):
                x, weight = meta(rows, size), meta(size)
                routed = Unsummed(
                    meta(rows * 6, size), meta(rows, 6, dtype=torch.float32),
                    meta(rows, size) if post is None else None, 1.0 if post is None else 2.5,
                )  # fmt: skip
                for part in (x, routed):
                    partial = Partial(part, peers, never)
                    name = f"N{ranks} T{rows} D{size} {type(part).__name__}"
                    if post is None:
                        call = lambda a=(x, partial, weight): sum_add_rmsnorm.kernel(*a, eps=EPS)  # noqa: E731
                    else:
                        call = lambda a=(x, partial, post, weight): sum_sandwich.kernel(  # noqa: E731
                            *a, n=3, eps=EPS
                        )
                    cases.append(Case(name, call, decode=True))
    return cases


def never(x_TD: torch.Tensor) -> torch.Tensor:
    raise AssertionError("kernels take the sum")


def on_ranks(count: int, size: int, dtype: torch.dtype, work: Callable[[Peers], None]) -> None:
    """Run `work` on so many ranks at once, each a process that sees all memories."""
    nbytes = boundary.bytes_of(count, size, dtype)
    memory = torch.frombuffer(mmap.mmap(-1, count * nbytes), dtype=torch.uint8)
    addresses_N = memory.data_ptr() + nbytes * torch.arange(count)
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=lambda r=r: work(Peers.of(r, size, dtype, addresses_N)))
        for r in range(count)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + SECONDS
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * count


def summands(seed: int, shape: tuple[int, int], peers: Peers) -> list[torch.Tensor]:
    """What each rank adds in a round: all know it."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(peers.dtype) for _ in range(peers.ranks)]


def added_up(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def round_of(seed: int, rows: int, peers: Peers) -> None:
    """One boundary of each kind, equal to the bit to a sum and then the norm."""
    size, dtype = peers.size, peers.dtype
    h_TD, *parts = summands(seed, (rows, size), peers) + summands(seed + 1, (rows, size), peers)
    parts = parts[-peers.ranks :]
    post_D, pre_D = (w[0] for w in summands(seed + 2, (1, size), peers)[:2])
    partial = Partial(parts[peers.rank], peers, never)
    found = sum_add_rmsnorm.kernel(h_TD, partial, pre_D, eps=EPS)
    expected = add_rmsnorm.kernel(h_TD, added_up(parts), pre_D, eps=EPS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    found = sum_sandwich.kernel(h_TD, partial, post_D, pre_D, n=5, eps=EPS)
    expected = sandwich.kernel(h_TD, added_up(parts), post_D, pre_D, n=5, eps=EPS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].dtype == dtype


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, torch.float32),
        pytest.param(4, torch.float16, marks=pytest.mark.slow),
        pytest.param(2, torch.float16, marks=pytest.mark.slow),
        pytest.param(3, torch.float32, marks=pytest.mark.slow),
        pytest.param(8, torch.float16, marks=pytest.mark.slow),
    ],
    ids=["2 fp32", "4 fp16", "2 fp16", "3 fp32", "8 fp16"],
)
def test_every_rank_has_the_bits_of_the_sum_and_then_the_norm(ranks, dtype, monkeypatch):
    monkeypatch.setattr(boundary, "MOST_BYTES", {8: FEW})

    def work(peers: Peers) -> None:
        assert 0 < peers.once < peers.rows
        late = random.Random(peers.rank)
        for turn, rows in enumerate([1, peers.once, peers.rows, 1]):
            time.sleep(late.random() * 0.02)
            round_of(10 * turn, rows, peers)

    on_ranks(ranks, 44 if dtype == torch.float32 else 92, dtype, work)


@pytest.mark.parametrize("rows", [1, 3], ids=["once", "twice"])
def test_rounds_are_counted_on_for_ever(rows, monkeypatch):
    monkeypatch.setattr(boundary, "MOST_BYTES", {8: FEW})

    def work(peers: Peers) -> None:
        peers.rounds.fill_(2**31 - 2)
        for turn in range(3):
            round_of(turn, rows, peers)
        assert (peers.rounds < 0).any()

    on_ranks(2, 48, torch.float32, work)


@pytest.mark.parametrize("rows", [2, 3], ids=["once", "twice"])
def test_outputs_of_experts_are_summed_on_the_way(rows, monkeypatch):
    monkeypatch.setattr(boundary, "MOST_BYTES", {8: FEW})

    def work(peers: Peers) -> None:
        routed = []
        for rank in range(peers.ranks):
            generator = torch.Generator().manual_seed(rank)
            out_PD, added_TD, weights_TN = (
                torch.randn(shape, generator=generator)
                for shape in [(rows * 2, 48), (rows, 48), (rows, 2)]
            )
            routed.append(Unsummed(out_PD, weights_TN, added_TD, 2.5))
        h_TD, weight_D = torch.randn(rows, 48, generator=generator), torch.ones(48)
        partial = Partial(routed[peers.rank], peers, never)
        found = sum_add_rmsnorm.kernel(h_TD, partial, weight_D, eps=EPS)
        total_TD = added_up([one.combined() for one in routed])
        expected = add_rmsnorm.kernel(h_TD, total_TD, weight_D, eps=EPS)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    on_ranks(2, 48, torch.float32, work)


@pytest.mark.parametrize("rows", [1, 3], ids=["once", "twice"])
def test_who_waits_for_a_lost_rank_can_be_told(rows, monkeypatch):
    monkeypatch.setattr(boundary, "MOST_BYTES", {8: FEW})

    def work(peers: Peers) -> None:
        if peers.rank:
            return
        threading.Timer(0.2, peers.abandon).start()
        start = time.monotonic()
        h_TD, weight_D = torch.randn(rows, 48), torch.ones(48)
        sum_add_rmsnorm.kernel(h_TD, Partial(h_TD, peers, never), weight_D, eps=EPS)
        assert time.monotonic() - start > 0.2

    on_ranks(2, 48, torch.float32, work)
