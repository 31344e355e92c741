"""Which part of the model this rank holds. A world of one needs no process group."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from limelight.ops.boundary import Peers


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the `size` ranks that share each layer (tensor parallelism).

    With `peers` a sum over the ranks of a few rows is left to the norm that follows it.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    peers: Peers | None = None

    @classmethod
    def single(cls) -> "Mesh":
        """The world of one rank."""
        return cls()

    @classmethod
    def slice_of(cls, size: int) -> "Mesh":
        """One rank of `size` without the others: for measurements, its results are partial."""
        return cls(size=size)

    def leaves(self, rows: int) -> bool:
        """Whether the sum of so many rows is left to the norm behind it."""
        return self.peers is not None and self.peers.fits(rows)

    def without_peers(self) -> "Mesh":
        """For layers behind which there is no such norm."""
        return replace(self, peers=None)

    def shard(self, total: int, *, what: str) -> slice:
        """This rank's equal share of `total` things; `ValueError` if they cannot be divided."""
        if total % self.size:
            raise ValueError(f"{total} {what} cannot be divided among {self.size} ranks")
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_shard(self, kv_heads: int) -> slice:
        """This rank's KV heads; with more ranks than heads, several ranks hold the same one."""
        if kv_heads >= self.size or self.size % kv_heads:
            return self.shard(kv_heads, what="KV heads")
        head = self.rank * kv_heads // self.size
        return slice(head, head + 1)
