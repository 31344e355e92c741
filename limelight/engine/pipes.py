"""What rank 0 and another rank tell each other: msgpack of these, each behind its length.

It goes over pipes, or over a socket between machines.
"""

import os
import socket
import sys
import threading
from dataclasses import dataclass
from io import FileIO
from typing import Any, TypeVar

import msgspec

from limelight.config import EngineConfig
from limelight.orders import DeviceOrder
from limelight.parallel.seat import Seat
from limelight.steps import StepPlan

LENGTH = 8
# What was sent to a machine that is gone would be kept for a quarter of an hour.
SECONDS_WITHOUT_RECEIPT = 8.0
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank."""

    config: EngineConfig
    seat: Seat
    port: int  # of the store, or 0 where torchrun has one


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank that torchrun has started."""

    token: bytes
    rank: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be the same on every rank, and the size of the cache, which the least decides."""

    versions: dict[str, str]
    model: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The second message to a rank; those after it are of the kind `Told`."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Told:
    """To a rank: a step to make, or what to do with its device."""

    plan: StepPlan | None = None
    order: DeviceOrder | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """From a rank: a sign of life, and what there is to tell beside it."""

    facts: Facts | None = None
    is_compiled: bool = False  # its machine has the kernels
    is_ready: bool = False
    fault: str | None = None  # why the rank ends


class Sender:
    """One end of a pipe, for any thread."""

    def __init__(self, pipe: FileIO):
        self.pipe, self.lock = pipe, threading.Lock()

    def send(self, message: object) -> None:
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, data: bytes) -> None:
        """`OSError` when no one reads any more."""
        rest = memoryview(len(data).to_bytes(LENGTH, "little") + data)
        with self.lock:
            while rest:
                rest = rest[self.pipe.write(rest) :]


def ends_of(connection: socket.socket) -> tuple[FileIO, Sender]:
    """The two directions of a TCP connection; both have ended once it is shut down."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        wait = int(1000 * SECONDS_WITHOUT_RECEIPT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait)
    reads, writes = (os.dup(connection.fileno()) for _ in range(2))
    return FileIO(reads, "r"), Sender(FileIO(writes, "w"))


def receive(pipe: FileIO, kind: type[Kind]) -> Kind | None:
    """The next message; None when no one writes any more."""
    data = receive_bytes(pipe)
    return None if data is None else msgspec.msgpack.decode(data, type=kind)


def receive_bytes(pipe: FileIO, most: int | None = None) -> bytes | None:
    """The next message's bytes; `ValueError` if it has more than `most`."""
    if (head := _exactly(pipe, LENGTH)) is None:
        return None
    count = int.from_bytes(head, "little")
    if most is not None and count > most:
        raise ValueError(f"a message of {count} bytes is longer than {most}")
    return _exactly(pipe, count)


def _exactly(pipe: FileIO, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        more: Any = pipe.read(count - len(data))
        if not more:
            return None
        data += more
    return bytes(data)
