"""Tensors of a trainer on the same GPU, by handles of CUDA's inter-process memory.

A handle is what `torch.multiprocessing.reductions.reduce_tensor` gives, by the UUID of its GPU.
Over HTTP handles come pickled, which is read as data (`rl/pickled.py`), and only where the server
was started with `--enable-pickled-ipc-handles`: whoever may send one chooses what memory is mapped.

A packed trainer puts all pieces into one buffer, so each is copied out before the reply, and a
buffer is mapped once: its owner counts how often it is let go of.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from limelight.rl.announced import Announced
from limelight.rl.broadcasts import unpack
from limelight.rl.pickled import Call, Name, read_pickled

# Of `rebuild_cuda_tensor`: how many arguments it has, and which of them is the device.
ARGUMENTS = 15
DEVICE = 6
NAMES: dict[Name, object] = {
    Name("torch", "Tensor"): torch.Tensor,
    Name("torch.nn.parameter", "Parameter"): torch.Tensor,
    Name("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    Name("torch.storage", "TypedStorage"): torch.TypedStorage,
} | {
    Name("torch", str(kind).removeprefix("torch.")): kind
    for kind in (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
}
SIZE = Name("torch", "Size")


def read_handles(text: object) -> object:
    """The handles in the base64 of a pickle, as plain data; `ValueError` for anything else."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error as error:
        raise ValueError(f"ipc_handles_pickled is not base64: {error}") from error
    return read_pickled(data)


class IPC:
    """Maps what a trainer on the same GPU exports."""

    def __init__(self, *, index: int, uuid: str, packed: bool):
        """For the GPU that this process knows by its `index`, and all by its `uuid`."""
        self.index, self.uuid, self.packed = index, uuid, packed
        self._mapped: tuple[tuple[object, ...], torch.Tensor] | None = None

    @classmethod
    def on(cls, device: torch.device, *, packed: bool) -> "IPC":
        """`ValueError` unless the device is a GPU."""
        if device.type != "cuda":
            raise ValueError("CUDA IPC needs an engine on a GPU")
        index = torch.cuda.current_device() if device.index is None else device.index
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return cls(index=index, uuid=uuid, packed=packed)

    def check(self, announced: Sequence[Announced], info: dict[str, object]) -> None:
        """`ValueError` if a tensor has no handle for this GPU, or the sizes differ."""
        handles = self._handles(info)
        if not self.packed:
            if not isinstance(handles, list) or len(handles) != len(announced):
                raise ValueError("ipc_handles must be a list with a handle for each tensor")
            for one, handle in zip(announced, handles, strict=True):
                self._arguments(handle, one.name)
            return
        sizes = info.get("tensor_sizes")
        if sizes != [one.nbytes for one in announced]:
            raise ValueError("tensor_sizes must be the bytes of each tensor, as shapes tell them")
        self._arguments(handles, "the packed buffer")

    def receive(
        self, announced: Sequence[Announced], info: dict[str, object]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they lie in the trainer's memory, which may change after the reply."""
        handles = self._handles(info)
        if self.packed:
            buffer = self._map_once(self._arguments(handles, "the packed buffer"))
            yield from unpack(buffer.view(torch.uint8).flatten(), announced)
        else:
            assert isinstance(handles, list), "checked before"
            for one, handle in zip(announced, handles, strict=True):
                tensor = rebuild_cuda_tensor(*self._arguments(handle, one.name))
                if tuple(tensor.shape) != one.shape or tensor.dtype != one.dtype:
                    raise ValueError(f"{one.name}: the handle is of {tuple(tensor.shape)}")
                yield one.name, tensor
        torch.cuda.synchronize(self.index)

    def finish(self) -> None:
        """Let go of the trainer's buffer, once."""
        self._mapped = None

    def close(self) -> None:
        self.finish()

    def _handles(self, info: dict[str, object]) -> object:
        pickled = info.get("ipc_handles_pickled")
        if pickled is None:
            raise ValueError("update_info.ipc_handles_pickled is missing")
        return read_handles(pickled)

    def _arguments(self, handle: object, what: str) -> tuple[object, ...]:
        """Of the function that maps memory, checked, and on this process's device."""
        if not isinstance(handle, dict) or self.uuid not in handle:
            raise ValueError(f"{what}: no handle for GPU {self.uuid}; there is {_shown(handle)}")
        given = handle[self.uuid]
        if not isinstance(given, tuple) or len(given) != ARGUMENTS:
            raise ValueError(f"{what}: a handle has {ARGUMENTS} parts")
        arguments = [_plain(part, what) for part in given]
        arguments[DEVICE] = self.index
        return tuple(arguments)

    def _map_once(self, arguments: tuple[object, ...]) -> torch.Tensor:
        if self._mapped is None or self._mapped[0] != arguments:
            self._mapped = None
            self._mapped = arguments, rebuild_cuda_tensor(*arguments)
        return self._mapped[1]


def _plain(part: object, what: str) -> object:
    """A part of a handle: one of the names that handles have, a shape, or a plain value."""
    match part:
        case Name() if part in NAMES:
            return NAMES[part]
        case Call(callee, (sizes,)) if callee == SIZE and isinstance(sizes, tuple):
            return torch.Size(sizes)
        case int() | bytes() | None:
            return part
        case tuple() if all(type(item) is int for item in part):
            return part
    raise ValueError(f"{what}: {_shown(part)} is no part of a handle")


def _shown(value: object) -> str:
    """For a message: a few bytes of a pickle may stand for a text without end."""
    if isinstance(value, dict):
        return ", ".join(str(key)[:80] for key in islice(value, 4) if isinstance(key, str))
    return f"{value.module}.{value.name}"[:80] if isinstance(value, Name) else type(value).__name__
