"""How long a step takes, by its rows and by the context that they read. NumPy, no torch.

Measured on a grid at the start, and corrected by every step that is timed while serving. A step
of few rows is padded to the next size on the grid, since it replays a graph of that size; beyond
the largest graph times lie on lines between the points.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from limelight.steps import StepKind, StepTimes

SPREAD = 0.05  # log of how far times of the same step lie apart, until it is known
LEAST_SPREAD = 0.005
OUTLIER = 3.0  # spreads beyond which a time counts as just that far
WIDENING = 0.2  # how fast the spread follows: what is late again and again is no outlier
RATE, LEAST_RATE = 0.5, 0.04  # of a point's first correction, and of all in the long run
REACH = 1.0  # octaves of rows over which points that were never seen take part in a correction
MOST_TRUST = 50.0


def _rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The rising numbers nearest to `values` by weighted squares: neighbours out of order join."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] >= value:
            before, heavy, many = blocks.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, count = weight + heavy, count + many
        blocks.append((value, weight, count))
    return np.repeat([b[0] for b in blocks], [b[2] for b in blocks])


class StepCost:
    """Milliseconds of a step that never fall with rows or context.

    `points` are numbers of rows, of which those up to `graphs` have a graph, `contexts` sums of the
    lengths of a step's sequences, and `ms[c][p]` the time of each pair.
    """

    def __init__(
        self,
        points: Sequence[int],
        contexts: Sequence[int],
        ms: Sequence[Sequence[float]] | np.ndarray,
        *,
        graphs: int,
    ):
        self.points_P, self.contexts_C = np.array(points), np.array(contexts)
        times_CP = np.array(ms, dtype=np.float64)
        for name, axis in (("rows", self.points_P), ("contexts", self.contexts_C)):
            if axis.ndim != 1 or len(axis) == 0 or (np.diff(axis) <= 0).any() or axis[0] < 0:
                raise ValueError(f"a table of step times needs rising {name}, got {axis.tolist()}")
        if times_CP.shape != (len(contexts), len(points)):
            raise ValueError(
                f"a table of step times needs {len(contexts)} rows of {len(points)} times, "
                f"got shape {times_CP.shape}"
            )
        if not (np.isfinite(times_CP).all() and (times_CP > 0).all()):
            raise ValueError("a table of step times needs numbers above 0: measure it again")
        self.graphs = graphs
        self._points, self._contexts = self.points_P.tolist(), self.contexts_C.tolist()
        self._first_without_graph = bisect_right(self._points, graphs)
        self._octaves_P = np.log2(np.maximum(self.points_P, 1))
        self.log_CP = np.log(times_CP)
        self.visits_CP = np.zeros_like(times_CP)
        self.spread = SPREAD
        self._smooth()

    def ms(self, rows: int | np.ndarray, context: int) -> np.ndarray:
        """Of steps with these rows, as FP64 of their shape."""
        rows_X = np.asarray(rows)
        (low, high), share = _between(self._contexts, context)
        curve_P = self.times_CP[low] * (1 - share) + self.times_CP[high] * share
        climb = self.climbs_C[low] * (1 - share) + self.climbs_C[high] * share
        # Behind the last context the lines of different rows may cross.
        curve_P = np.maximum.accumulate(curve_P)
        first = self._first_without_graph
        at_X = np.searchsorted(self.points_P[:first], rows_X).clip(max=max(first - 1, 0))
        tail = slice(first if first < len(self.points_P) else 0, None)
        beyond_X = np.interp(rows_X, self.points_P[tail], curve_P[tail])
        beyond_X = beyond_X + climb * np.maximum(rows_X - self.points_P[-1], 0)
        return np.where((rows_X <= self.graphs) & (first > 0), curve_P[at_X], beyond_X)

    def of_one(self, rows: int, context: int) -> float:
        """Of a step with so many rows."""
        inside = rows <= self._points[-1] and context <= self._contexts[-1]
        if not inside:  # where lines of different rows may cross
            return float(self.ms(rows, context))
        return float(
            sum(self.times_CP[c, p] * weight for c, p, weight in self._near(rows, context))
        )

    def __str__(self) -> str:
        """A line for each context, with the time of each number of rows."""
        return "\n".join(
            f"  {context} tokens before: "
            + ", ".join(f"{rows} {ms:.4g}" for rows, ms in zip(self.points_P, times, strict=True))
            for context, times in zip(self.contexts_C, self.times_CP, strict=True)
        )

    def observe(self, rows: int, context: int, ms: float) -> None:
        """Correct the points around a step by the time that it took; outliers count little."""
        if not (math.isfinite(ms) and ms > 0):
            return
        near = self._near(rows, context)
        expected = sum(math.exp(self.log_CP[c, p]) * weight for c, p, weight in near)
        # Off the grid the nearest points take the blame in proportion.
        inside = min(rows, self._points[-1]), min(context, self._contexts[-1])
        if inside != (rows, context):
            expected *= self.of_one(rows, context) / self.of_one(*inside)
        off = math.log(ms / expected)
        far = OUTLIER * self.spread
        self.spread += WIDENING * (min(abs(off), 2 * far) - self.spread)
        self.spread = max(self.spread, LEAST_SPREAD)
        self._move(near, rows, max(-far, min(far, off)))

    def _move(self, near: list[tuple[int, int, float]], rows: int, off: float) -> None:
        """Correct the points `near` a step by `off`, and less those that were hardly ever seen."""
        rates = [max(RATE / (1 + self.visits_CP[c, p]), LEAST_RATE) for c, p, _ in near]
        values = [self.log_CP[c, p] for c, p, _ in near]
        rate = sum(rate * weight for rate, (_, _, weight) in zip(rates, near, strict=True))
        octaves_P = np.abs(self._octaves_P - math.log2(max(rows, 1)))
        self.log_CP += off * rate * np.exp(-octaves_P / REACH) / (1 + self.visits_CP)
        most = max(weight for _, _, weight in near)
        for (c, p, weight), value, own in zip(near, values, rates, strict=True):
            self.log_CP[c, p] = value + off * own * weight / most
            self.visits_CP[c, p] += weight
        self._smooth()

    def _smooth(self) -> None:
        trust_CP = 1 + np.minimum(self.visits_CP, MOST_TRUST)
        rising_CP = self.log_CP.copy()
        for c in np.flatnonzero((np.diff(rising_CP) < 0).any(axis=1)):
            rising_CP[c] = _rising(rising_CP[c], trust_CP[c])
        self.times_CP = np.maximum.accumulate(np.exp(rising_CP), axis=0)
        if len(self.points_P) > 1:
            width = self._points[-1] - self._points[-2]
            climbs_C = (self.times_CP[:, -1] - self.times_CP[:, -2]) / width
        else:
            climbs_C = self.times_CP[:, 0] / max(self._points[0], 1)
        self.climbs_C = np.maximum.accumulate(climbs_C)  # a row behind the last point

    def _near(self, rows: int, context: int) -> list[tuple[int, int, float]]:
        """The points of the grid that a step lies at or between, and the share of each."""
        first, last = self._first_without_graph, len(self._points) - 1
        if rows <= self.graphs and first > 0:
            at = min(bisect_left(self._points, rows), first - 1)
            points = [(at, 1.0)]
        else:
            points = _shares(self._points, rows, first=min(first, last))
        return [
            (c, p, share * part)
            for c, share in _shares(self._contexts, context)
            for p, part in points
        ]


def _between(axis: list[int], value: int, first: int = 0) -> tuple[tuple[int, int], float]:
    """The points around a value, none before the `first`, and its share of the second; above 1
    behind the last."""
    last = len(axis) - 1
    if first == last or value <= axis[first]:
        return (first, first), 0.0
    high = min(bisect_left(axis, value), last)
    return (high - 1, high), (value - axis[high - 1]) / (axis[high] - axis[high - 1])


def _shares(axis: list[int], value: int, first: int = 0) -> list[tuple[int, float]]:
    """The same as each point's share; behind the last it has all."""
    (low, high), share = _between(axis, value, first)
    share = min(share, 1.0)
    each = [(low, 1.0 - share), (high, share)]
    return [(at, part) for at, part in each if part > 0]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of steps by their kind, and of drafting by the sequences that it is for."""

    steps: Mapping[StepKind, StepCost]
    drafting: StepCost

    def step_ms(self, kind: StepKind, rows: int, context: int) -> float:
        return self.steps[kind].of_one(rows, context)

    def draft_ms(self, sequences: int) -> float:
        return self.drafting.of_one(sequences, 0)

    def observe(self, times: StepTimes) -> None:
        """Correct what a step like this one is thought to take."""
        self.steps[times.kind].observe(times.rows, times.context, times.verify_ms)
        if times.draft_ms is not None:
            self.drafting.observe(times.sequences, 0, times.draft_ms)

    def __str__(self) -> str:
        each = [f"{kind} steps take (ms)\n{cost}" for kind, cost in self.steps.items()]
        return "\n".join([*each, f"drafting takes (ms)\n{self.drafting}"])
