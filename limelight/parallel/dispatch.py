"""Rows to the ranks of their experts and outputs back, as all-to-all of what was chosen alone.

A row goes once to each rank that has any of its experts, with a word for each pair of it and an
expert there: which of the rows that came from this rank, and which expert. The output of each pair
comes back. Where a rank's pairs are in a chunk is known there alone, so counts go first, those of
all chunks at once: the one wait of the host.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from limelight.parallel.collectives import all_gather_single
from limelight.parallel.expert_mesh import ExpertMesh
from limelight.parallel.row_codes import decode_rows, encode_rows


@dataclass(slots=True)
class Moving:
    """Tensors on their way; `take` waits for what comes. What goes is kept until then."""

    came: torch.Tensor
    went: torch.Tensor
    work: "dist.Work | None"

    def take(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.came


def exchange(x: torch.Tensor, sent: list[int], received: list[int], mesh: ExpertMesh) -> Moving:
    """Start to send `sent[r]` rows of x, in the order of ranks, and to receive `received[r]`."""
    came = x.new_empty(sum(received), *x.shape[1:])
    work = dist.all_to_all_single(came, x, received, sent, group=mesh.group, async_op=True)
    return Moving(came, x, work)


class Sorted:
    """The pairs of a chunk's rows in the order of the ranks they go to, then as they come."""

    def __init__(self, slots_XN: torch.Tensor, mesh: ExpertMesh):
        self.mesh = mesh
        rows, count = slots_XN.shape
        dest_P = slots_XN.flatten() // mesh.placement.slots
        self.order_P = dest_P.argsort(stable=True)
        self.dest_P = dest_P[self.order_P]
        self.slots_P = slots_XN.flatten()[self.order_P] % mesh.placement.slots
        self.tokens_P = self.order_P // count
        key_P = self.dest_P * max(1, rows) + self.tokens_P
        new_P = torch.ones_like(key_P)
        new_P[1:] = key_P[1:] != key_P[:-1]
        upto_P = F.pad(new_P.cumsum(0), (1, 0))  # rows that go with the pairs before
        self.rows_P = upto_P[1:] - 1  # each pair's among the rows that go, once each
        ranks_R = torch.arange(mesh.size, device=slots_XN.device)
        ends_R = torch.searchsorted(self.dest_P, ranks_R, right=True)
        zero_1 = ends_R.new_zeros(1)
        self.pairs_R = ends_R.diff(prepend=zero_1)
        self.sent_R = upto_P[ends_R].diff(prepend=zero_1)

    def leaving(self, y_XD: torch.Tensor, total: int) -> torch.Tensor:
        """The `total` rows in the order in which they go."""
        tokens = self.tokens_P.new_empty(len(self.tokens_P))
        return y_XD[tokens.scatter_(0, self.rows_P, self.tokens_P)[:total]]

    def words(self) -> torch.Tensor:
        """[P, 2] int32: which of the rows that go to its rank a pair's is, and the slot there."""
        firsts_R = self.sent_R.cumsum(0) - self.sent_R
        offset_P = self.rows_P - firsts_R[self.dest_P]
        return torch.stack((offset_P, self.slots_P), dim=1).int()

    def places(self, count: int) -> torch.Tensor:
        """[X, N]: where each pair's output is among those that come back."""
        at_P = torch.arange(len(self.order_P), device=self.order_P.device)
        return torch.empty_like(at_P).scatter_(0, self.order_P, at_P).view(-1, count)


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one chunk: rows and pairs to each rank and from each."""

    rows_out: list[int]
    pairs_out: list[int]
    rows_in: list[int]
    pairs_in: list[int]


def agree_on_counts(chunks: list[Sorted], mesh: ExpertMesh) -> list[Counts]:
    """Every rank tells every other how much it will send in each chunk."""
    sent_RC2 = torch.stack([torch.stack((c.sent_R, c.pairs_R), 1) for c in chunks], 1).contiguous()
    came_RC2 = torch.empty_like(sent_RC2)
    dist.all_to_all_single(came_RC2, sent_RC2, group=mesh.group)
    both = torch.stack((sent_RC2, came_RC2)).permute(2, 0, 3, 1).tolist()
    return [Counts(*out, *into) for out, into in both]


@dataclass(slots=True)
class Arriving:
    """A chunk on its way to the ranks of its experts."""

    rows: Moving
    words: Moving
    counts: Counts
    size: int
    dtype: torch.dtype

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of every pair that came, and its slot here; in the order of their senders."""
        words_P2 = self.words.take().long()
        firsts = [sum(self.counts.rows_in[:r]) for r in range(len(self.counts.rows_in))]
        device = words_P2.device
        first_P = torch.repeat_interleave(
            torch.tensor(firsts, device=device),
            torch.tensor(self.counts.pairs_in, device=device),
            output_size=len(words_P2),
        )
        rows_XD = decode_rows(self.rows.take(), self.size, self.dtype)
        return rows_XD[words_P2[:, 0] + first_P], words_P2[:, 1].contiguous()


def dispatch(y_XD: torch.Tensor, chunk: Sorted, counts: Counts, mesh: ExpertMesh) -> Arriving:
    """Start to send a chunk's rows."""
    rows = encode_rows(chunk.leaving(y_XD, sum(counts.rows_out)), fp8=mesh.fp8)
    return Arriving(
        exchange(rows, counts.rows_out, counts.rows_in, mesh),
        exchange(chunk.words(), counts.pairs_out, counts.pairs_in, mesh),
        counts,
        y_XD.shape[1],
        y_XD.dtype,
    )


def send_back(out_PD: torch.Tensor, counts: Counts, mesh: ExpertMesh) -> Moving:
    """Start to return the outputs of the pairs that came."""
    return exchange(out_PD, counts.pairs_in, counts.pairs_out, mesh)


def gather_rows(x_XD: torch.Tensor, mesh: ExpertMesh) -> torch.Tensor:
    """Every rank's rows, of which all have as many."""
    all_XD = x_XD.new_empty(mesh.size * len(x_XD), *x_XD.shape[1:])
    all_gather_single(all_XD, x_XD.contiguous(), group=mesh.group)
    return all_XD


def scatter_sums(x_XD: torch.Tensor, mesh: ExpertMesh) -> torch.Tensor:
    """The sum over ranks of the part of x that is for this one, in the order of ranks: a
    reduce-scatter whose result does not depend on how the ranks are connected."""
    came_XD = torch.empty_like(x_XD)
    dist.all_to_all_single(came_XD, x_XD, group=mesh.group)
    return came_XD.unflatten(0, (mesh.size, -1)).sum(0)


def join_parts(x_XD: torch.Tensor, rows: int, mesh: ExpertMesh) -> torch.Tensor:
    """All `rows` rows of which each rank of a tensor-parallel group has its part."""
    if mesh.rows.group is None or not rows:
        return x_XD
    share = mesh.share(rows)
    padded_XD = F.pad(x_XD, (0, 0, 0, share - len(x_XD)))
    all_XD = x_XD.new_empty(mesh.rows.size * share, x_XD.shape[1])
    all_gather_single(all_XD, padded_XD.contiguous(), group=mesh.rows.group)
    return all_XD[:rows]
