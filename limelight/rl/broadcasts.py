"""Tensors that a trainer broadcasts: one by one, or packed into few large pieces.

Packed, tensors are bytes one behind the other, in the order of their announcement and without
gaps. A piece ends with the tensor by which it grows larger than the buffer's size; both sides cut
alike, by the announcement alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from limelight.rl.announced import Announced


class Group(Protocol):
    """A trainer, rank 0, and those who hear it."""

    def broadcast(self, tensor: torch.Tensor) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


def pieces(announced: Iterable[Announced], buffer_bytes: int) -> Iterator[list[Announced]]:
    """The tensors of each packed broadcast."""
    piece: list[Announced] = []
    nbytes = 0
    for one in announced:
        piece.append(one)
        nbytes += one.nbytes
        if nbytes > buffer_bytes:
            yield piece
            piece, nbytes = [], 0
    if piece:
        yield piece


def unpack(packed: torch.Tensor, piece: Sequence[Announced]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that lie in bytes, as views where their types allow for it."""
    end = 0
    for one in piece:
        start, end = end, end + one.nbytes
        data = packed[start:end]
        if start % one.dtype.itemsize:
            data = data.clone()
        yield one.name, data.view(one.dtype).view(one.shape)


def sendable(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that groups know: of codes of eight bits they take the bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


class Broadcasts:
    """Receives from a group, on a device."""

    def __init__(self, group: Group, device: torch.device, *, packed: bool, buffer_bytes: int):
        self.group, self.device = group, device
        self.packed, self.buffer_bytes = packed, buffer_bytes

    def check(self, announced: Sequence[Announced], info: dict[str, object]) -> None:
        """`ValueError` if the tensors come in another way than was agreed on."""
        if info.get("ipc_handles") is not None or info.get("ipc_handles_pickled") is not None:
            raise ValueError("this server was not started for CUDA IPC; tensors are broadcast")
        if not isinstance(packed := info.get("packed", self.packed), bool):
            raise ValueError(f"update_info.packed must be true or false; got {packed!r:.50}")

    def receive(
        self, announced: Sequence[Announced], info: dict[str, object]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they come; each is to be used before the next one."""
        packed = info.get("packed", self.packed)
        cut = pieces(announced, self.buffer_bytes) if packed else ([one] for one in announced)
        for piece in cut:
            if packed:
                nbytes = sum(one.nbytes for one in piece)
                data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            else:
                data = torch.empty(piece[0].shape, dtype=piece[0].dtype, device=self.device)
            if data.numel():
                self.group.broadcast(sendable(data))
            yield from unpack(data, piece) if packed else [(piece[0].name, data)]
            # Also bounds the memory that pieces under way take.
            self.group.wait()

    def finish(self) -> None:
        """An update is over."""

    def close(self) -> None:
        self.group.close()
