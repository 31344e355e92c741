"""A tensor as a checkpoint stores it: what it is, and how its values get into place."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from limelight.ops.fp4 import Weight

# How checkpoints may hold the values of a model; NVFP4 with its scales beside it.
DTYPES = ("F32", "F16", "BF16", "NVFP4")
FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)(\.weight)?")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a model by its name in safetensors checkpoints, routed experts stacked.

    `shape` is that of the values, `dtype` one of DTYPES or what the file says. `copy(into, take)`
    puts the part `take` (a slice with both ends for each dimension) of the values into `into`,
    which has the part's shape and may be on any device: an FP4 for NVFP4, else a tensor of any
    floating-point type. It raises `ValueError` that names file and tensor.
    """

    file: Path
    name: str  # by which messages name it: its own in the file
    target: str  # by which the model knows it
    dtype: str
    shape: tuple[int, ...]
    copy: Callable[[Weight, tuple[slice, ...]], None]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


class Readable(Protocol):
    """A tensor as it lies in a file, or comes from elsewhere: `read` gives a part of its values."""

    @property
    def file(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, part: tuple[slice, ...]) -> torch.Tensor: ...


def as_stored(raw: Readable) -> Iterator[Stored]:
    """The tensor by the model's name; of gate and up in one, both."""
    match = FUSED.fullmatch(raw.name)
    names = ["gate_proj", "up_proj"] if match and match["kind"] == "gate_up_proj" else ["down_proj"]
    if match is None or len(raw.shape) != 3 or raw.shape[1] % len(names):
        yield _part(raw, raw.name, tuple(slice(0, size) for size in raw.shape))
        return
    count, rows, columns = raw.shape
    size = rows // len(names)
    for i, name in enumerate(names):
        part = (slice(0, count), slice(i * size, (i + 1) * size), slice(0, columns))
        yield _part(raw, f"{match['experts']}.{name}.weight", part)


def _part(raw: Readable, target: str, part: tuple[slice, ...]) -> Stored:
    def copy(into: Weight, take: tuple[slice, ...]) -> None:
        assert isinstance(into, torch.Tensor)
        inner = tuple(
            slice(outer.start + t.start, outer.start + t.stop)
            for outer, t in zip(part, take, strict=True)
        )
        into.copy_(raw.read(inner))

    shape = tuple(one.stop - one.start for one in part)
    return Stored(raw.file, raw.name, target, raw.dtype, shape, copy)
