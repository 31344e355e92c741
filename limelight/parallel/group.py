"""The process group of the ranks of one machine, over a store on rank 0's loopback address."""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat

HOST = "127.0.0.1"


def take_device(device: torch.device, rank: int, size: int) -> None:
    """Have `cuda` mean this rank's GPU; `ValueError` if there are fewer than ranks."""
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


def join(store: TCPStore, device: torch.device, seat: Seat) -> Mesh:
    """Wait for all ranks of the world; from then on tensors on `device` can be exchanged."""
    on_gpu = device.type == "cuda"
    if sys.platform == "linux":
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=seat.world_rank,
        world_size=seat.world_size,
        device_id=torch.device("cuda", seat.rank) if on_gpu else None,
    )  # fmt: skip
    if seat.data_size == 1:
        return Mesh(seat.rank, seat.size, dist.group.WORLD)
    if seat.size == 1:
        return Mesh.single()
    starts = range(0, seat.world_size, seat.size)
    groups = [dist.new_group(list(range(first, first + seat.size))) for first in starts]
    return Mesh(seat.rank, seat.size, groups[seat.data_rank])


def leave() -> None:
    """Let go of the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
