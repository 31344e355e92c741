"""Room for LoRA adapters beside the projections of a model; `rl/lora.py` fills it.

A placement that has an `AdapterRoom` lets it put an `Adapted` around each matrix that adapters may
change, and the room keeps a `Site` for each projection by the path of its module. A room that
merges has nothing beside routed experts: an adapter's part of these is added to the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from limelight.ops.lora import Adapted, Matrix, StepAdapters
from limelight.ops.weight import Stack, Weight

# Matrix units multiply so many ranks at a time.
RANKS_AT_ONCE = 16


class Projection(Protocol):
    """One of the projections of a packed matrix, as `Part` in `layers.py`."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def take(self) -> slice: ...


@dataclass(frozen=True, slots=True)
class Site:
    """A projection that adapters may change: where its A and B go, and what this rank holds.

    It has `inputs` and `outputs` channels in all, of which `columns` and `rows` are held. In the
    matrix its ranks begin at `first_rank` of A and at `first_column` of B, and its outputs at
    `first_row`; it takes `most` ranks. Of the projections of routed experts there are `experts`.
    A matrix that is a tensor is to be merged with.
    """

    matrix: Adapted | torch.Tensor
    inputs: int
    outputs: int
    columns: slice
    rows: slice
    first_rank: int
    first_column: int
    first_row: int
    most: int
    experts: int | None


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Memory for `slots` adapters of up to `max_rank` in `dtype`, made as a model is."""

    slots: int
    max_rank: int
    dtype: torch.dtype
    merges_experts: bool = False
    step: StepAdapters = field(default_factory=StepAdapters)
    sites: dict[str, Site] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Ranks that a projection has room for, in whole tiles."""
        return -(-self.max_rank // RANKS_AT_ONCE) * RANKS_AT_ONCE

    @property
    def nbytes(self) -> int:
        matrices = {id(site.matrix): site.matrix for site in self.sites.values()}
        return sum(matrix.nbytes for matrix in matrices.values() if isinstance(matrix, Adapted))

    def beside(
        self,
        weight: Weight | Stack,
        prefix: str,
        parts: Sequence[Projection],
        columns: int,
        take: slice,
        device: torch.device,
    ) -> Matrix:
        """`weight` with room beside it; its `parts` are below `prefix`.

        Gate and up of routed experts share their ranks, since an adapter may have one A for both:
        each has half of them where it does not.
        """
        experts = weight.shape[0] if len(weight.shape) == 3 else None
        front = () if experts is None else (experts,)
        sizes = [part.take.stop - part.take.start for part in parts]
        shared = experts is not None
        ranks = len(parts) * self.rank
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        ends = [0, starts[-1]] if shared else starts
        matrix: Adapted | torch.Tensor
        if shared and self.merges_experts:
            if not isinstance(weight, torch.Tensor):
                raise ValueError(
                    f"{prefix}{parts[0].name} is quantized, and no adapter can be merged: leave "
                    f"--merge-lora-experts out"
                )
            matrix = weight
        else:
            matrix = Adapted(
                base=weight,
                a=self._zeros(device, *front, ranks, take.stop - take.start),
                b=self._zeros(device, *front, sum(sizes), ranks if shared else self.rank),
                sizes=(sum(sizes),) if shared else tuple(sizes),
                starts=torch.tensor(ends, dtype=torch.int32, device=device),
                step=self.step,
            )
        for i, part in enumerate(parts):
            first = i * self.rank
            self.sites[prefix + part.name] = Site(
                matrix, columns, part.size, take, part.take,
                first, first if shared else 0, starts[i], self.max_rank, experts,
            )  # fmt: skip
        return matrix

    def _zeros(self, device: torch.device, *shape: int) -> torch.Tensor:
        return torch.zeros(self.slots, *shape, dtype=self.dtype, device=device)
