"""LoRA adapters: read from PEFT's files into host memory, and put into slots beside the weights.

An adapter is read once for each time that it is loaded; from then on its files do not matter. A
slot is filled between two steps, in the order of the device's work: no forward sees half of one.

Where adapters are merged with routed experts, their weights become W + scale * B A, rounded once,
as PEFT has it; W is kept on the host and put back first each time.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from limelight.models.adapters import AdapterRoom
from limelight.ops.lora import Adapted
from limelight.quant.safetensor_files import Raw, Shard
from limelight.rl.adapter_config import read_adapter_config
from limelight.rl.adapter_layouts import Factors, Layouts, find_pairs

WEIGHTS = "adapter_model.safetensors"
# Experts whose new weights exist beside the old ones.
MERGED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Patch:
    """What goes into a slot of one matrix: A and B, and where they begin in it."""

    matrix: Adapted
    a: torch.Tensor
    b: torch.Tensor
    first_rank: int
    first_column: int
    first_row: int

    def write(self, slot: int) -> None:
        """Into that slot, from 1 on, which holds zeros."""
        rank, rows = self.a.shape[-2], self.b.shape[-2]
        a_ranks = slice(self.first_rank, self.first_rank + rank)
        b_ranks = slice(self.first_column, self.first_column + rank)
        b_rows = slice(self.first_row, self.first_row + rows)
        self.matrix.a[slot - 1, ..., a_ranks, :].copy_(self.a, non_blocking=True)
        self.matrix.b[slot - 1, ..., b_rows, b_ranks].copy_(self.b, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Merge:
    """What is added to rows of all experts' weights: A and B in their type, and the factor."""

    matrix: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    first_row: int

    def write(self) -> None:
        """Into weights that are the base model's."""
        rows = slice(self.first_row, self.first_row + self.b.shape[-2])
        for first in range(0, len(self.matrix), MERGED_AT_ONCE):
            some = slice(first, first + MERGED_AT_ONCE)
            part_ENK = self.matrix[some, rows]
            a, b = (x[some].to(part_ENK.device, non_blocking=True) for x in (self.a, self.b))
            part_ENK.copy_(torch.baddbmm(part_ENK, b, a, alpha=self.scale))


def read_adapter(folder: Path, room: AdapterRoom) -> list[Patch | Merge]:
    """This rank's part of the adapter in a folder; `ValueError` says what cannot be served."""
    file = folder / WEIGHTS
    config = read_adapter_config(folder)
    if not file.is_file():
        raise ValueError(f"{file}: no such file; adapters come as safetensors")
    shard = Shard(file)
    pairs = find_pairs(Raw(shard, name) for name in shard.shapes)
    if not pairs:
        raise ValueError(f"{file} has no tensors")
    return [_patch(factors, room) for factors in Layouts(pairs, config, room.sites).factors()]


def _patch(factors: Factors, room: AdapterRoom) -> Patch | Merge:
    """What this rank holds of A and B; beside weights the scale is within B."""
    first = factors.sites[0]
    a = factors.a[..., first.columns]
    sizes = [site.outputs for site in factors.sites]
    pieces = factors.b.split(sizes, dim=-2)
    held = [piece[..., site.rows, :] for piece, site in zip(pieces, factors.sites, strict=True)]
    b, matrix = torch.cat(held, dim=-2), first.matrix
    if isinstance(matrix, torch.Tensor):
        a, b = (_settled(part, matrix.dtype) for part in (a, b))
        return Merge(matrix, a, b, factors.scale, first.first_row)
    a, b = (_settled(part, room.dtype) for part in (a, b.float() * factors.scale))
    return Patch(matrix, a, b, first.first_rank, first.first_column, first.first_row)


def _settled(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the type of where it goes, and where a device can copy it from while it works."""
    part = part.to(dtype).contiguous()
    if not part.isfinite().all():
        raise ValueError("the adapter has values that are not finite")
    return _pinned(part)


def _pinned(part: torch.Tensor) -> torch.Tensor:
    return part.pin_memory() if torch.cuda.is_available() else part


@dataclass(slots=True)
class AdapterBank:
    """The adapters of one rank: those in host memory by id, and which matrices a slot fills.

    `base` has the weights that adapters were merged with, and what they are without any.
    """

    room: AdapterRoom
    held: dict[int, list[Patch | Merge]] = field(default_factory=dict)
    filled: dict[int, list[Adapted]] = field(default_factory=dict)
    base: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter; what a slot has of it stays there."""
        self.held.pop(adapter_id, None)

    def place(self, adapter_id: int, slot: int) -> None:
        """Fill a slot with an adapter that is held; 0 is the base model, where adapters merge."""
        for matrix in self.filled.pop(slot, []):
            matrix.a[slot - 1].zero_()
            matrix.b[slot - 1].zero_()
        for weight, untouched in self.base.values():
            weight.copy_(untouched, non_blocking=True)
        parts = self.held[adapter_id] if adapter_id else []
        self.filled[slot] = [part.matrix for part in parts if isinstance(part, Patch)]
        for part in parts:
            if isinstance(part, Patch):
                part.write(slot)
            else:
                self._keep(part.matrix)
                part.write()

    def _keep(self, weight: torch.Tensor) -> None:
        """Have a copy of a weight that no adapter is merged with yet."""
        if id(weight) not in self.base:
            untouched = weight.detach().to("cpu", copy=True)
            self.base[id(weight)] = weight, _pinned(untouched)
