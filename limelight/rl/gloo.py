"""The same group as NCCL's over gloo: what trainer and engines are on a CPU."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

PREFIX = "weight_transfer"
TRAINER = 0
SECONDS_BETWEEN_LOOKS = 0.001


def host_store(host: str, port: int, *, world_size: int, seconds: float) -> TCPStore:
    """The trainer's store, by which all find each other; port 0: any free one."""
    return TCPStore(
        host, port, world_size, is_master=True, timeout=timedelta(seconds=seconds),
        wait_for_workers=False, use_libuv=False,
    )  # fmt: skip


def join_store(host: str, port: int, *, world_size: int, seconds: float) -> TCPStore:
    """The trainer's store, from an engine; `TimeoutError` if there is none."""
    try:
        return TCPStore(
            host, port, world_size, is_master=False, timeout=timedelta(seconds=seconds),
            wait_for_workers=False, use_libuv=False,
        )  # fmt: skip
    except RuntimeError as error:
        text = f"the trainer's store at {host}:{port} does not answer: {error}"
        raise TimeoutError(text[:500]) from error


class GlooGroup:
    """A member of the group; `rank` 0 broadcasts. After an error it can only be closed.

    `watch` is called while others are waited for, and may raise.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        rank: int,
        world_size: int,
        seconds: float,
        watch: Callable[[], None] | None = None,
    ):
        """Wait for all others; `RuntimeError` if they do not come."""
        self.watch = watch
        _gather(store, rank, world_size, seconds, watch or (lambda: None))
        # torch says little of these to type checkers.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_own_address(store))]
        options._timeout = timedelta(seconds=seconds)
        self.group = gloo(PrefixStore(PREFIX, store), rank, world_size, options)
        self.store = store
        self.group.allreduce(torch.zeros(1)).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with rank 0's."""
        work = self.group.broadcast(tensor, TRAINER)
        while self.watch is not None and not work.is_completed():
            self.watch()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        work.wait()

    def wait(self) -> None:
        """All is done at once."""

    def close(self) -> None:
        """Leave."""
        self.group.shutdown()


def _gather(
    store: TCPStore, rank: int, world_size: int, seconds: float, watch: Callable[[], None]
) -> None:
    """Let the trainer watch while engines are on their way: gloo would wait and do no more."""
    if rank != TRAINER:
        store.set(f"{PREFIX}/{rank}", "here")
        return
    names = [f"{PREFIX}/{other}" for other in range(1, world_size)]
    deadline = time.monotonic() + seconds
    while not store.check(names):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {world_size - 1} engines' ranks came in {seconds:g} s")
        watch()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _own_address(store: TCPStore) -> str:
    """The address of this machine by which it reaches the store, or others reach it there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])
