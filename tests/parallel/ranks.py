"""Ranks that are threads and tell each other by a list; shared by tests of what ranks exchange."""

import threading
from collections.abc import Callable

import pytest
import torch

from limelight.parallel import sampling, verifying
from limelight.parallel.mesh import Mesh
from limelight.parallel.sampling import Share

OFF = float("-inf")
EXCHANGES = ("stacked", "all_reduce", "from_first", "scattered")


class Told:
    """What ranks in threads exchange; `sizes` are the bytes that each one had in each exchange."""

    def __init__(self, ranks: int):
        self.barrier, self.values = threading.Barrier(ranks), [None] * ranks
        self.sizes: list[int] = []

    def stacked(self, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        self._tell(x, mesh)
        found = torch.stack(self.values)
        self.barrier.wait()
        return found

    def all_reduce(self, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        return self.stacked(x, mesh).sum(0)

    def from_first(self, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        return self.stacked(x, mesh)[0]

    def scattered(
        self, parts_NX: torch.Tensor | None, like: torch.Tensor, mesh: Mesh
    ) -> torch.Tensor:
        self._tell(like if parts_NX is None else parts_NX, mesh, size=like.nbytes)
        found = self.values[0][mesh.rank].clone()
        self.barrier.wait()
        return found

    def _tell(self, x: torch.Tensor, mesh: Mesh, size: int | None = None) -> None:
        if mesh.rank == 0:
            self.sizes.append(x.nbytes if size is None else size)
        self.barrier.wait()
        self.values[mesh.rank] = x
        self.barrier.wait()


def among_ranks(
    patch: pytest.MonkeyPatch, count: int, work: Callable[[Mesh], object], *modules: object
) -> tuple[list, Told]:
    """What each rank makes, and what they told each other, also in these modules."""
    told, results, errors = Told(count), [None] * count, []
    for module in (sampling, verifying, *modules):
        for name in EXCHANGES:
            if hasattr(module, name):
                patch.setattr(module, name, getattr(told, name))

    def run(rank: int) -> None:
        try:
            results[rank] = work(Mesh(rank, count))
        except Exception as error:
            errors.append(error)
            told.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, told


def share_of(logits_RV: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, Share]:
    """A rank's logits, padded as the LM head does."""
    vocabulary = logits_RV.shape[1]
    size = -(-vocabulary // mesh.size)
    share = Share(mesh, min(mesh.rank * size, vocabulary), vocabulary)
    assert share.size == size
    own_RS = logits_RV[:, share.first : share.first + size]
    padding = (0, size - own_RS.shape[1])
    return torch.nn.functional.pad(own_RS, padding, value=OFF).contiguous(), share
