"""What ranks exchange; the identity where there is no one to exchange it with."""

import torch
import torch.distributed as dist

from limelight.ops.boundary import Partial, Summand
from limelight.ops.combine import Unsummed
from limelight.parallel.mesh import Mesh

# Its name since torch 2.13, which warns of the one before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sum of every rank's `x`, in place."""
    if mesh.group is not None:
        dist.all_reduce(x, group=mesh.group)
    return x


def summed(x: torch.Tensor | Unsummed, mesh: Mesh) -> Summand:
    """The sum of every rank's `x` [T, D]: made here, or left to the norm that follows."""
    if mesh.peers is not None and mesh.leaves(len(x)):
        return Partial(x, mesh.peers, lambda x_TD: all_reduce(x_TD.clone(), mesh))
    return all_reduce(x.combined() if isinstance(x, Unsummed) else x, mesh)


def all_gather(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Every rank's `x`, joined along the last dimension in the order of the ranks."""
    if mesh.group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(mesh.size)]
    dist.all_gather(parts, x.contiguous(), group=mesh.group)
    return torch.cat(parts, dim=-1)


def stacked(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Every rank's `x` of one or more dimensions, with the ranks as the first."""
    if mesh.group is None:
        return x[None]
    all_NX = x.new_empty(mesh.size, *x.shape)
    all_gather_single(all_NX.flatten(0, 1), x.contiguous(), group=mesh.group)
    return all_NX


def scattered(parts_NX: torch.Tensor | None, like: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The part for this rank of what rank 0 has for each, of the form of `like`."""
    if mesh.group is None:
        assert parts_NX is not None
        return parts_NX[0]
    parts = None if parts_NX is None else list(parts_NX.unbind(0))
    dist.scatter(like, parts, group=mesh.group, group_src=0)
    return like


def from_first(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """What rank 0 has in `x`, in place."""
    if mesh.group is not None:
        dist.broadcast(x, group=mesh.group, group_src=0)
    return x
