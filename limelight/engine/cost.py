"""How long a step takes, by its rows and by the context that they read. NumPy, no torch.

Measured on a grid at the start, and corrected by every step that is timed while serving. A step
of few rows is padded to the next size on the grid, since it replays a graph of that size; beyond
the largest graph times lie on lines between the points.

That is the device's part. Small models wait for the host, whose part is learned while serving: it
goes by sequences, not by rows.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from limelight.engine.pace import HostTime, octave_of
from limelight.steps import StepKind, StepTimes

SPREAD = 0.05  # log of how far times of the same step lie apart, until it is known
LEAST_SPREAD = 0.005
OUTLIER = 3.0  # spreads beyond which a time counts as just that far
WIDENING = 0.2  # how fast the spread follows: what is late again and again is no outlier
FIRST = math.log(4.0)  # the same of the first at a point: the start found it by a few tries
RATE, LEAST_RATE = 0.8, 0.04  # of a point's first correction, and of all in the long run
REACH = 1.0  # octaves of rows over which points that were never seen take part in a correction
MOST_TRUST = 50.0
FIXED = 16  # sequences that take the host as long as what is the same in every step
HOST_RATE = 0.5  # how fast the host's time follows
DOUBTING = 0.003  # of it, each time that the other kind of as many sequences is learned of


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
        far = FIRST
        if sum(self.visits_CP[c, p] * weight for c, p, weight in near) >= 0.5:
            far = OUTLIER * self.spread
            self.spread += WIDENING * (min(abs(off), 2 * far) - self.spread)
            self.spread = max(self.spread, LEAST_SPREAD)
        self._move(near, rows, max(-far, min(far, off)))

    def _move(self, near: list[tuple[int, int, float]], rows: int, off: float) -> None:
        """Correct the points `near` a step by `off`, and less those that were hardly ever seen."""
        rates = [max(RATE / (1 + self.visits_CP[c, p]), LEAST_RATE) for c, p, _ in near]
        rate = sum(rate * weight for rate, (_, _, weight) in zip(rates, near, strict=True))
        octaves_P = np.abs(self._octaves_P - math.log2(max(rows, 1)))
        rate_CP = rate * np.exp(-octaves_P / REACH) / (1 + self.visits_CP)
        most = max(weight for _, _, weight in near)
        for (c, p, weight), own in zip(near, rates, strict=True):
            # One that was never seen moves no less than those that are farther away.
            least = rate_CP[c, p] if self.visits_CP[c, p] == 0 else 0.0
            rate_CP[c, p] = max(own * weight / most, least)
            self.visits_CP[c, p] += weight
        self.log_CP += off * rate_CP
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


class HostCost:
    """Milliseconds that steps with drafts and without take the host, by their sequences.

    Of what was never seen as little is said as there can be: if it would be the better one then, it
    is tried, and seen. What has not been seen for long is doubted more and more for the same end.
    """

    def __init__(self) -> None:
        # For each sequence and the `FIXED` beside them, by octave, without drafts and with them.
        self.plain: dict[int, float] = {}
        self.drafted: dict[int, float] = {}
        self.overlaps = True

    def observe(self, times: Sequence[HostTime]) -> None:
        """Learn from some steps: of like ones from the middle time."""
        alike: dict[tuple[bool, int], list[float]] = {}
        for one in times:
            self.overlaps = one.overlaps
            ms = one.ms / (one.sequences + FIXED)
            alike.setdefault((one.drafts, octave_of(one.sequences)), []).append(ms)
        for (drafts, octave), found in alike.items():
            middle = median(found)
            known, other = (self.drafted, self.plain)[:: 1 if drafts else -1]
            before = known.setdefault(octave, middle)
            known[octave] = before + HOST_RATE * (middle - before)
            if octave in other and (not drafts, octave) not in alike:
                other[octave] *= 1 - DOUBTING

    def plain_ms(self, sequences: int) -> float:
        """Of a step without drafts of so many."""
        octave = octave_of(sequences)
        if octave in self.drafted and octave not in self.plain:
            return self.drafted[octave] * min(self._shares(), default=0.0) * (sequences + FIXED)
        return _nearest(self.plain, octave) * (sequences + FIXED)

    def drafted_ms(self, sequences: int) -> float:
        """Of one with drafts, which does all that one without does."""
        octave, plain_ms = octave_of(sequences), self.plain_ms(sequences)
        if octave in self.plain and octave not in self.drafted:
            return plain_ms / max(self._shares(), default=1.0)
        return max(plain_ms, _nearest(self.drafted, octave) * (sequences + FIXED))

    def _shares(self) -> list[float]:
        """What a step without drafts takes of one with them, wherever both are known."""
        both = self.plain.keys() & self.drafted.keys()
        return [min(1.0, self.plain[octave] / self.drafted[octave]) for octave in both]


def _nearest(known: dict[int, float], octave: int) -> float:
    """What is known of the octave, or else of the one nearest to it."""
    return known[min(known, key=lambda one: abs(one - octave))] if known else 0.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of steps by their kind, of drafting by the sequences that it is for, and of the host."""

    steps: Mapping[StepKind, StepCost]
    drafting: StepCost
    host: HostCost = field(default_factory=HostCost)

    def step_ms(self, kind: StepKind, rows: int, context: int) -> float:
        return self.steps[kind].of_one(rows, context)

    def draft_ms(self, sequences: int) -> float:
        return self.drafting.of_one(sequences, 0)

    def plain_ms(self, sequences: int, context: int) -> float:
        """Of a step without drafts, from one to the next."""
        device_ms = self.step_ms(StepKind.PLAIN, sequences, context)
        host_ms = self.host.plain_ms(sequences)
        return max(device_ms, host_ms) if self.host.overlaps else device_ms + host_ms

    def drafted_ms(
        self, rows: int | np.ndarray, sequences: int, context: int, kind: StepKind
    ) -> np.ndarray:
        """The same of a step with drafts that makes some for the next, FP64 of the rows' shape."""
        device_ms = self.steps[kind].ms(rows, context) + self.draft_ms(sequences)
        host_ms = self.host.drafted_ms(sequences)
        return np.maximum(device_ms, host_ms) if self.host.overlaps else device_ms + host_ms

    def observe(self, times: StepTimes) -> None:
        """Correct what a step like this one is thought to take."""
        self.steps[times.kind].observe(times.rows, times.context, times.verify_ms)
        if times.draft_ms is not None:
            self.drafting.observe(times.sequences, 0, times.draft_ms)

    def __str__(self) -> str:
        each = [f"{kind} steps take (ms)\n{cost}" for kind, cost in self.steps.items()]
        return "\n".join([*each, f"drafting takes (ms)\n{self.drafting}"])
