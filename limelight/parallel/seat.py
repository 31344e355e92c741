"""A process's place among all that run a model. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place: its rank among the `size` that share a model, which are one of
    `data_size` such groups. Where experts are shared by all, they are one world."""

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1

    @property
    def world_rank(self) -> int:
        return self.data_rank * self.size + self.rank

    @property
    def world_size(self) -> int:
        return self.data_size * self.size
