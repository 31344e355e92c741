"""A process's place among all that run a model. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place: its rank among the `size` that share a model, which are one of
    `data_size` such groups. Where experts are shared by all, they are one world.

    Of the `size`, `here` are on this machine (None: all), of which `first` is the lowest rank.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    first: int = 0
    here: int | None = None

    @property
    def world_rank(self) -> int:
        return self.data_rank * self.size + self.rank

    @property
    def world_size(self) -> int:
        return self.data_size * self.size

    @property
    def local_rank(self) -> int:
        """Which of this machine's devices is this rank's."""
        return self.rank - self.first

    @property
    def local_size(self) -> int:
        return self.size if self.here is None else self.here

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all that share the model are."""
        return self.local_size == self.size
