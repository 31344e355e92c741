"""Which experts each rank holds: all of them once at least, and hot ones more often. No torch.

Every rank has as many slots for experts as every other. Without a recorded load, experts come in
their order and spare slots hold the first ones again. With one, spare slots go to the experts with
the most tokens a copy, and the copies, from the busiest down, to the ranks with the least to do.
"""

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Loads = Mapping[int, Sequence[float]]  # of a layer, how many tokens each expert got


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Of each layer, the expert in each slot: those of rank 0, of rank 1 and so on."""

    experts: int
    ranks: int
    slots: int  # of a rank
    layers: Mapping[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, experts: int, ranks: int, *, spare: int = 0, loads: Loads | None = None
    ) -> "ExpertPlacement":
        """With `spare` slots at least beside one for each expert; `ValueError` if that is more than
        one of each expert on each rank."""
        slots = math.ceil((experts + spare) / ranks)
        if slots > experts:
            raise ValueError(
                f"{spare} redundant experts are too many: {ranks} ranks hold {experts} experts, "
                f"and each at most one of each"
            )
        layers = {layer: balance(load, ranks, slots) for layer, load in (loads or {}).items()}
        return cls(experts, ranks, slots, layers)

    def of_layer(self, layer: int) -> list[int]:
        """The expert in each slot of all ranks."""
        in_order = [slot % self.experts for slot in range(self.ranks * self.slots)]
        return self.layers.get(layer, in_order)

    def held(self, layer: int, rank: int) -> list[int]:
        """The experts in the slots of a rank."""
        return self.of_layer(layer)[rank * self.slots : (rank + 1) * self.slots]

    def choices(self, layer: int, rank: int) -> list[list[int]]:
        """For each expert the slots that a rank's tokens go to in turn, as many for each.

        That is its own slot where it has one; ranks begin with different ones of others' slots.
        """
        slots: list[list[int]] = [[] for _ in range(self.experts)]
        for slot, expert in enumerate(self.of_layer(layer)):
            slots[expert].append(slot)
        most = max(map(len, slots))
        found = []
        for places in slots:
            own = [slot for slot in places if slot // self.slots == rank]
            turn = own[:1] or [places[(rank + i) % len(places)] for i in range(len(places))]
            found.append([turn[i % len(turn)] for i in range(most)])
        return found


def balance(load: Sequence[float], ranks: int, slots: int) -> list[int]:
    """The expert in each of `slots` slots of `ranks` ranks, for experts with these loads."""
    copies = [1] * len(load)
    # An expert that nobody asked for counts a little, so that none of many lie on one rank.
    least = 1e-6 * (sum(load) or 1.0) / len(load)
    loads = [max(value, least) for value in load]
    hottest = [(-value, expert) for expert, value in enumerate(loads)]
    heapq.heapify(hottest)
    for _ in range(ranks * slots - len(load)):
        _, expert = heapq.heappop(hottest)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(hottest, (-loads[expert] / copies[expert], expert))
    shares = [loads[expert] / copies[expert] for expert in range(len(load))]
    held: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for expert in sorted(range(len(load)), key=lambda one: (-shares[one], one)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < slots]
            # A second copy on a rank is of no use, but the last slots may leave no other choice.
            apart = [rank for rank in free if expert not in held[rank]] or free
            rank = min(apart, key=lambda one: (work[one], one))
            held[rank].append(expert)
            work[rank] += shares[expert]
    return [expert for experts in held for expert in sorted(experts)]


def read_loads(files: Sequence[str], *, experts: int) -> Loads:
    """The sum of loads that `--expert-load-file` wrote; `ValueError` names a file that is none."""
    sums: dict[int, list[float]] = {}
    for name in files:
        try:
            layers = json.loads(Path(name).read_text())["layers"]
            loads = {int(layer): [float(value) for value in load] for layer, load in layers.items()}
        except OSError as error:
            raise ValueError(f"--expert-placement: cannot read {name}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"--expert-placement: {name} is no record of loads: {error}") from None
        for layer, load in loads.items():
            if len(load) != experts or not all(0 <= value < math.inf for value in load):
                raise ValueError(
                    f"--expert-placement: {name}: layer {layer} must have {experts} counts of "
                    f"tokens; it has {len(load)} numbers"
                )
            old = sums.get(layer, [0.0] * experts)
            sums[layer] = [a + b for a, b in zip(old, load, strict=True)]
    return sums
