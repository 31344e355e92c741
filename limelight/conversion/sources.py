"""The tensors of a checkpoint in BF16, FP16 or FP32, read when they are asked for.

Experts are read one by one, also where they lie in one tensor.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from limelight.models.loader import Model, match_tensors
from limelight.quant.gguf import FLOATS
from limelight.quant.safetensor_files import find_tensors
from limelight.quant.stored import Stored


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a model, or one expert of it, and the part of a stored tensor that it is."""

    name: str
    stored: Stored
    take: tuple[slice, ...]

    @property
    def dtype(self) -> torch.dtype:
        return FLOATS[self.stored.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.take[-2:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        value = torch.empty(self.shape, dtype=dtype, device=device)
        self.stored.copy(value[None] if len(self.take) == 3 else value, self.take)
        return value

    def __str__(self) -> str:
        return f"{self.stored.file}: {self.name}"


# By the names of a model's targets: one, or one for each expert of a stack.
Sources = dict[str, list[Source]]


def find_sources(folder: Path, model: Model) -> Sources:
    """Where all of the model's tensors are; `ValueError` names what is not as it should be."""
    stored = find_tensors(folder)
    for one in stored:
        if one.dtype not in FLOATS:
            raise ValueError(f"{one}: type {one.dtype}; expected one of {', '.join(FLOATS)}")
    found = {}
    for filling in match_tensors(stored, model.targets, model.renames, folder=folder):
        name, take = filling.stored.target, filling.target.take
        for old, new in model.renames.items():
            name = name.replace(old, new)
        for e, each in enumerate(_each(name, filling.stored.shape)):
            part = (slice(e, e + 1), *take[1:]) if len(take) == 3 else take
            found[each] = Source(each, filling.stored, part)
    return {
        name: [found[each] for each in _each(name, target.shape)]
        for name, target in model.targets.items()
    }


def _each(name: str, shape: tuple[int, ...]) -> list[str]:
    """The name; of stacked experts that of each."""
    if len(shape) < 3:
        return [name]
    return [name.replace(".experts.", f".experts.{e}.") for e in range(shape[0])]
