"""A tensor as a checkpoint stores it: what it is, and how its values get into place."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from limelight.ops.fp4 import Weight

# How checkpoints may hold the values of a model; NVFP4 with its scales beside it.
DTYPES = ("F32", "F16", "BF16", "NVFP4")


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
