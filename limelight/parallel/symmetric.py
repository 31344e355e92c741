"""Memory that all ranks of a machine read and write over their links: symmetric memory of torch.

Only its addresses are used; multicast is not.
"""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from limelight.ops.boundary import Peers, bytes_of
from limelight.parallel.mesh import Mesh

logger = logging.getLogger(__name__)


def with_peers(mesh: Mesh, size: int, dtype: torch.dtype, device: torch.device) -> Mesh:
    """The mesh with memory for rows of `size` numbers, if each GPU can reach every other's.

    All ranks must call this at once, and all get it or none does.
    """
    if mesh.group is None or device.type != "cuda":
        return mesh
    nbytes = bytes_of(mesh.size, size, dtype)
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    able = nbytes > 0 and all(torch.cuda.can_device_access_peer(mesh.rank, r) for r in others)
    if not _all_are(able, mesh, device):
        logger.warning(
            "sums over ranks go through NCCL: %s",
            "some GPUs cannot reach each other's memory" if nbytes else "no kernel for this shape",
        )
        return mesh
    # Only now, for a CPU's build of torch may lack it.
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", mesh.rank))
    memory.zero_()
    handle = symmetric.rendezvous(memory, mesh.group)
    # A tensor may begin behind its allocation, of which the handle has the addresses.
    offset = torch.tensor([memory.data_ptr() - handle.buffer_ptrs[mesh.rank]], device=device)
    offsets = [torch.empty_like(offset) for _ in range(mesh.size)]
    # Behind this, everyone's memory is zero.
    dist.all_gather(offsets, offset, group=mesh.group)
    addresses_N = torch.tensor(handle.buffer_ptrs, device=device) + torch.cat(offsets)
    peers = Peers.of(mesh.rank, size, dtype, addresses_N, owner=(memory, handle))
    return replace(mesh, peers=peers)


def _all_are(able: bool, mesh: Mesh, device: torch.device) -> bool:
    count = torch.tensor([int(able)], device=device)
    dist.all_reduce(count, group=mesh.group)
    return int(count.item()) == mesh.size
