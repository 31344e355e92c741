"""The process group of all ranks, over a store on rank 0's loopback address, or torchrun's."""

import logging
import os
import socket
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.parallel.symmetric import with_peers

logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
# NCCL lets go of a communicator only when no graph has its kernels any more.
SECONDS_TO_LEAVE = 5.0


def take_device(device: torch.device, rank: int, size: int) -> None:
    """Have `cuda` mean this rank's GPU; `ValueError` if there are fewer than ranks.

    `rank` and `size` are those of this machine.
    """
    if device.type != "cuda":
        return
    if (count := torch.cuda.device_count()) < size:
        raise ValueError(f"{size} ranks need as many GPUs; this machine shows {count}")
    torch.cuda.set_device(rank)


def open_store() -> TCPStore:
    """Rank 0's store, on a free port."""
    if dist.is_initialized():
        raise ValueError("this process belongs to a group of torch.distributed already")
    # By itself it would listen on every address.
    listening = socket.socket()
    listening.bind((HOST, 0))
    listening.listen()
    port = listening.getsockname()[1]
    return TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def store_at(port: int) -> TCPStore:
    """Rank 0's store, from another rank."""
    return TCPStore(HOST, port, is_master=False)


def have_come(store: Store, seat: Seat) -> bool:
    """Whether all ranks above 0 are about to join: rank 0 then need not wait for them long."""
    first = seat.data_rank * seat.size
    return bool(store.check([_arrival(first + rank) for rank in range(1, seat.size)]))


def _arrival(rank: int) -> str:
    return f"rank {rank} has come"


def join(store: Store, device: torch.device, seat: Seat, *, width: int, dtype: torch.dtype) -> Mesh:
    """Wait for all ranks of the world; from then on tensors on `device` can be exchanged.

    `width` and `dtype` are those of the rows [T, D] that the layers of a group sum.
    """
    on_gpu = device.type == "cuda"
    store.set(_arrival(seat.world_rank), "")
    # What is summed here needs no multicast, whose set-up can fail where all else works.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if sys.platform == "linux" and seat.is_on_one_machine:
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=seat.world_rank,
        world_size=seat.world_size,
        device_id=torch.device("cuda", seat.local_rank) if on_gpu else None,
    )  # fmt: skip
    if seat.size == 1 and seat.data_size > 1:
        return Mesh.single()
    group = dist.group.WORLD
    if seat.data_size > 1:
        starts = range(0, seat.world_size, seat.size)
        groups = [dist.new_group(list(range(first, first + seat.size))) for first in starts]
        group = groups[seat.data_rank]
    mesh = Mesh(seat.rank, seat.size, group)
    if not seat.is_on_one_machine:
        logger.info(
            "sums over ranks go through %s: they are on several machines", dist.get_backend()
        )
        return mesh
    return with_peers(mesh, width, dtype, device)


def abandon(mesh: Mesh) -> None:
    """Let steps end that wait for a lost rank, from any thread; what they make means nothing."""
    if mesh.peers is not None:
        mesh.peers.abandon()
    # Gloo notices by itself.
    if mesh.group is not None and dist.get_backend(mesh.group) == "nccl":
        _abort(mesh.group)


def leave() -> None:
    """Let go of the group, if there is one; the other ranks may have gone already."""
    if not dist.is_initialized():
        return
    thread = threading.Thread(target=_leave, name="leaving", daemon=True)
    thread.start()
    thread.join(SECONDS_TO_LEAVE)
    if thread.is_alive():
        logger.warning("the group of ranks has not ended within %g s", SECONDS_TO_LEAVE)


def _leave() -> None:
    if dist.get_backend() == "nccl":
        _abort(dist.group.WORLD)
    dist.destroy_process_group()


def _abort(group: dist.ProcessGroup | None) -> None:
    """End what is under way. This waits for graphs that hold NCCL's kernels to be let go."""
    assert group is not None
    try:
        group.abort()
    except RuntimeError as error:
        logger.warning("the group of ranks could not be ended: %s", error)
