"""Random values in place of a checkpoint's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dummy:
    """The distribution of a tensor's random values: normal, with this mean and deviation."""

    mean: float
    std: float


# As benchmarks of these models use them: routing is uniform and activations stay finite.
PROJECTION = Dummy(0.0, 0.02)
OUTPUT_PROJECTION = Dummy(0.0, 0.002)
UNIT = Dummy(0.0, 1.0)
ONES = Dummy(1.0, 0.0)
ZEROS = Dummy(0.0, 0.0)
