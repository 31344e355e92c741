"""What torchrun tells each process that it starts, on one machine or several. No torch until used.

The processes share a store, which is torchrun's own. Whoever reaches it can take part, as with all
of `torch.distributed`: its port must be open to these machines alone.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from limelight.config import EngineConfig, ServerConfig
from limelight.parallel.seat import Seat

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# Rank 0 may have a model to download first; the store ends with its machine.
SECONDS_TO_MEET = 3600.0


@dataclass(frozen=True, slots=True)
class Torchrun:
    """One of the `size` processes; `host` is the machine of rank 0."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str

    @property
    def seat(self) -> Seat:
        """All share one model."""
        first = self.rank - self.local_rank
        return Seat(self.rank, self.size, first=first, here=self.local_size)

    def check(self, engine: EngineConfig, server: ServerConfig) -> None:
        """`ValueError` for what cannot be had of processes that are started so."""
        if self.size != engine.tensor_parallel_size:
            raise ValueError(
                f"torchrun has started {self.size} processes (WORLD_SIZE), but -tp is "
                f"{engine.tensor_parallel_size}: they must be the same. Without torchrun, unset "
                f"RANK and WORLD_SIZE"
            )
        if self.size == 1:
            return
        for flag, is_given in (
            ("--data-parallel-size", server.data_parallel_size > 1),
            ("--ray", server.ray),
            ("--restart-engine", server.restart_engine > 0),
        ):
            if is_given:
                raise ValueError(f"{flag} is not supported with torchrun: leave it out")

    def store(self) -> "Store":
        """The one of all these processes; `OSError` if they do not meet."""
        from torch.distributed.rendezvous import rendezvous

        try:
            # It reads the environment too, which tells it whose the store is.
            meeting = rendezvous("env://", timeout=timedelta(seconds=SECONDS_TO_MEET))
            return next(meeting)[0]
        except RuntimeError as error:
            raise OSError(f"torchrun's processes do not meet: {error}"[:500]) from error


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
    """What it has told this process, if it has started it; `ValueError` if that is not all."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    for name in (*NUMBERS, "MASTER_ADDR"):
        text = environment.get(name)
        if text is None or (name in NUMBERS and not text.isdecimal()):
            raise ValueError(
                f"RANK and WORLD_SIZE are set, as by torchrun, but {name} is {text!r}; unset "
                f"them to start without it"
            )
    rank, size, local_rank, local_size, _ = (int(environment[name]) for name in NUMBERS)
    return Torchrun(rank, size, local_rank, local_size, environment["MASTER_ADDR"])
