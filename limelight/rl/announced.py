"""What a trainer says that it will send: names, types and shapes, judged before anything is sent.

A trainer that sends what the engine does not expect leaves both waiting for each other, so that
everything that can be wrong with a tensor has to be found in its announcement.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from limelight.models.loader import Filling, Place, place_tensors
from limelight.models.targets import Targets
from limelight.quant.stored import as_stored

# As safetensors files call the types that are taken; each is kept as the model holds the weight.
# The last are codes and scales of MXFP8.
DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32",
    "float8_e4m3fn": "F8_E4M3", "uint8": "U8", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
# What SkyRL has before the names of codes and scales of all experts of a layer.
SKYRL_EXPERTS = "__skyrl_batched_moe_fp8__:"
# In messages, where a checkpoint has its file.
SOURCE = Path("update_info")
LONGEST_NAME = 512


@dataclass(frozen=True, slots=True)
class Announced:
    """A tensor that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Incoming:
    """A tensor on its way, seen as one of a checkpoint is; `value` is there once it has come."""

    announced: Announced
    value: torch.Tensor | None = None
    file: Path = SOURCE

    @property
    def name(self) -> str:
        return self.announced.name

    @property
    def dtype(self) -> str:
        return DTYPES[str(self.announced.dtype).removeprefix("torch.")]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.announced.shape

    def read(self, part: tuple[slice, ...]) -> torch.Tensor:
        assert self.value is not None, f"{self.name} has not come yet"
        return self.value[part]


def read_announcement(info: dict[str, object]) -> list[Announced]:
    """The tensors of an `update_info`; `ValueError` says what is wrong with it."""
    names, dtypes, shapes = (_list(info, key) for key in ("names", "dtype_names", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"names, dtype_names and shapes must be equally long; they have {len(names)}, "
            f"{len(dtypes)} and {len(shapes)} entries"
        )
    return [_one(*entry) for entry in zip(names, dtypes, shapes, strict=True)]


def _list(info: dict[str, object], key: str) -> list[object]:
    value = info.get(key)
    if not isinstance(value, list):
        raise ValueError(f"update_info.{key} must be a list; got {value!r:.50}")
    return value


def _one(name: object, dtype: object, shape: object) -> Announced:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"update_info.names: {name!r:.50} is no name of a tensor")
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
        raise ValueError(
            f"{name}: dtype {dtype!r:.50} is not supported; send one of {', '.join(DTYPES)}"
        )
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name}: {shape!r:.50} is no shape")
    name = name.removeprefix(SKYRL_EXPERTS)
    return Announced(name, getattr(torch, dtype.removeprefix("torch.")), tuple(shape))


@dataclass(frozen=True, slots=True)
class Landing:
    """The tensors of one update, and what each of them fills."""

    incoming: dict[str, Incoming]
    fillings: dict[str, list[Filling]]
    places: frozenset[Place]

    @classmethod
    def plan(
        cls, announced: Sequence[Announced], targets: Targets, renames: dict[str, str]
    ) -> "Landing":
        """`ValueError` names what is not part of the model, or has another shape there."""
        incoming: dict[str, Incoming] = {}
        for one in announced:
            if one.name in incoming:
                raise ValueError(f"{one.name} is announced twice")
            incoming[one.name] = Incoming(one)
        stored = [part for tensor in incoming.values() for part in as_stored(tensor)]
        placed = place_tensors(stored, targets, renames)
        fillings: dict[str, list[Filling]] = {name: [] for name in incoming}
        for filling in chain.from_iterable(placed.values()):
            fillings[filling.stored.name].append(filling)
        for name, filled in fillings.items():
            if not filled:
                raise ValueError(f"{name} cannot be replaced in a running engine")
        return cls(incoming, fillings, frozenset(placed))

    def put(self, arrived: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor as it comes, or this rank's part of it, into the model."""
        for name, value in arrived:
            one = self.incoming[name]
            one.value = value
            for filling in self.fillings[name]:
                filling.stored.copy(filling.target.into, filling.target.take)
            one.value = None
