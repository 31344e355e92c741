"""A tensor as a checkpoint stores it: what it is, and how its values get into place."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from limelight.ops.mxfp8 import MXFP8, quantize_into
from limelight.ops.weight import Weight

# How checkpoints may hold the values of a model; NVFP4 with its scales beside it.
DTYPES = ("F32", "F16", "BF16", "NVFP4")
# Codes of MXFP8, and what their scales may be called; these are tensors of their own, by the name
# of the codes and SCALE.
CODES, SCALES, SCALE = "F8_E4M3", ("U8", "F8_E8M0"), "_scale"
# What a matrix can be packed as.
Packing = Literal["NVFP4", "MXFP8"]
FUSED = re.compile(
    r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)(\.weight)?(?P<scale>_scale)?"
)
NO_NUMBER = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0xFF}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a model by its name in safetensors checkpoints, routed experts stacked.

    `shape` is that of the values, `dtype` one of DTYPES or what the file says. `copy(into, take)`
    puts the part `take` (a slice with both ends for each dimension) of the values into `into`,
    which has the part's shape and may be on any device: an FP4 for NVFP4, codes or scales for
    those of MXFP8, else a tensor of any floating-point type, or an MXFP8, for which they are
    quantized. It raises `ValueError` that names file and tensor.
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
        yield _part(raw, f"{match['experts']}.{name}.weight{match['scale'] or ''}", part)


def _part(raw: Readable, target: str, part: tuple[slice, ...]) -> Stored:
    def copy(into: Weight, take: tuple[slice, ...]) -> None:
        inner = tuple(
            slice(outer.start + t.start, outer.start + t.stop)
            for outer, t in zip(part, take, strict=True)
        )
        values = raw.read(inner)
        try:
            _put(values, into)
        except ValueError as error:
            raise ValueError(f"{raw.file}: {raw.name} {error}") from error

    shape = tuple(one.stop - one.start for one in part)
    return Stored(raw.file, raw.name, target, raw.dtype, shape, copy)


def _put(values: torch.Tensor, into: Weight) -> None:
    """`ValueError` for codes or scales that are no numbers, and for values that have no codes."""
    if isinstance(into, MXFP8):
        quantize_into(into, values)
        return
    assert isinstance(into, torch.Tensor)
    # Scales are bytes, by whatever name.
    into.copy_(values.view(torch.uint8) if into.dtype == torch.uint8 else values)
    bits = NO_NUMBER.get(into.dtype)
    if bits is not None and bool(((into.view(torch.uint8) & bits) == bits).any()):
        raise ValueError("holds what is no number")
