"""Bounds in JSON schemas: of numbers, and of the lengths of texts, lists and objects."""

import math
from typing import Protocol, cast

from limelight.text.regex import Ranges
from limelight.text.schema import Schema


class Nothing(Exception):
    """No value is valid; the text says why."""


class Lacking(Protocol):
    """What makes the schemas, and hears of what cannot be enforced."""

    without: Ranges

    @property
    def is_plain(self) -> bool: ...
    def lacks(self, keyword: str, place: str, why: str = ""): ...
    def refuse(self, fault: str, place: str): ...
    def read(self, schema: object, place: str) -> Schema: ...


def bounds_of(reader: Lacking, schema: Schema, place: str) -> list[float | None]:
    """minimum, exclusiveMinimum, maximum, exclusiveMaximum."""
    found: list[float | None] = []
    for keyword, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        bound, beyond = schema.get(keyword), schema.get(exclusive)
        if isinstance(beyond, bool):
            # Draft 4: it says how the other is meant.
            bound, beyond = (None, bound) if beyond else (bound, None)
        for name, value in ((keyword, bound), (exclusive, beyond)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            # An integer may be too large for `math.isfinite`.
            if value is not None and not (is_number and abs(cast(float, value)) < math.inf):
                reader.refuse(f"{name} must be a number, got {str(value)[:50]!r}", place)
            found.append(cast(float | None, value))
    return found


def in_bounds(value: float, reader: Lacking, schema: Schema, place: str) -> bool:
    low, above, high, below = bounds_of(reader, schema, place)
    return (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    )


def lengths_of(reader: Lacking, schema: Schema, of: str, place: str) -> tuple[int, int | None]:
    """The bounds min`of` and max`of`."""
    found: list[int | None] = []
    for keyword in (f"min{of}", f"max{of}"):
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            reader.refuse(f"{keyword} must be an integer from 0 on, got {str(value)[:50]!r}", place)
        found.append(cast(int | None, value))
    low, high = found[0] or 0, found[1]
    if high is not None and low > high:
        raise Nothing(f"{place[1:] or 'it'} has a min{of} above its max{of}")
    return low, high


def held_lengths(
    reader: Lacking, schema: Schema, of: str, most: int, place: str
) -> tuple[int, int | None]:
    """The same, without what is too large to be enforced."""
    low, high = lengths_of(reader, schema, of, place)
    if low > most:
        reader.lacks(f"min{of} {low}", place, f"at most {most} is")
        low = most
    if high is not None and high > most:
        reader.lacks(f"max{of} {high}", place, f"at most {most} is")
        high = None
    return low, high
