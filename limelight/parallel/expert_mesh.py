"""The ranks that share a model's experts, and how their rows reach them (expert parallelism)."""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from limelight.parallel.expert_placement import ExpertPlacement
from limelight.parallel.mesh import Mesh

Backend = Literal["auto", "allgather_reducescatter", "all2all", "all2all_pipelined"]
# Up to so many rows a rank, every rank gets all rows: that needs no counts on the host, so a CUDA
# graph can hold it.
MOST_GATHERED = 512
# From so many rows a rank on, chunks are large enough to hide the exchange of each other's rows.
LEAST_PIPELINED = 2048
CHUNKS = 2


@dataclass(slots=True)
class Pace:
    """What the ranks agree on for one step; None where all have as many rows as this one."""

    most: int | None = None  # rows of the data rank that has the most
    valid_1: torch.Tensor | None = None  # how many of this rank's rows are no padding


@dataclass(frozen=True)
class ExpertMesh:
    """This rank's place among the `size` ranks that hold whole experts.

    `rows` are those of them with the same rows as this one, the ranks of one tensor-parallel group;
    each brings a part of these rows to the experts.
    """

    rank: int
    size: int
    placement: ExpertPlacement
    rows: Mesh = field(default_factory=Mesh.single)
    group: dist.ProcessGroup | None = None
    backend: Backend = "auto"
    fp8: bool = False  # rows travel as FP8 with a scale for each 128 numbers
    records: bool = False  # how many rows each expert gets
    pace: Pace = field(default_factory=Pace)

    def share(self, rows: int) -> int:
        """How many of so many rows a rank brings at most."""
        return -(-rows // self.rows.size)

    def part(self, rows: int) -> slice:
        """Which of its `rows` rows this rank brings."""
        share = self.share(rows)
        return slice(min(rows, self.rows.rank * share), min(rows, (self.rows.rank + 1) * share))

    def capacity(self, rows: int) -> int:
        """The most rows that any rank brings in a step in which this one has `rows`."""
        most = rows if self.pace.most is None else self.pace.most
        assert rows <= most, f"{rows} rows where ranks agreed on at most {most}"
        return self.share(most)

    def gathers(self, capacity: int) -> bool:
        """Whether every rank gets all rows; else only those that its experts were chosen for."""
        if self.backend == "auto":
            return capacity <= MOST_GATHERED
        return self.backend == "allgather_reducescatter"

    def chunks(self, capacity: int) -> int:
        """In how many pieces rows go, so that those of one travel while another is computed."""
        if self.backend == "auto":
            return CHUNKS if capacity >= LEAST_PIPELINED else 1
        return CHUNKS if self.backend == "all2all_pipelined" else 1

    def choices(self, layer: int, device: torch.device) -> torch.Tensor:
        """[E, C]: the slots for each expert, which rows take in turn."""
        table = self.placement.choices(layer, self.rank)
        return torch.tensor(table, device=device, dtype=torch.int64)
