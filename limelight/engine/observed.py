"""What steps tell about drafts and about time, kept as it is until it is learned from in one go.

A step of a small model takes no longer than some calls of NumPy, so each only appends here. What
comes of it hangs on all that was told by then, not on the steps that told it. NumPy, no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from limelight.engine.pace import HostTime
from limelight.steps import StepKind, StepTimes

# Sequences whose newest passes, or labels, are learned from at once: more would say little more.
MOST_AT_ONCE = 256
# Kinds of steps whose times are learned from at once, those that came most often.
MOST_TIMES = 3


class Pass(NamedTuple):
    """A pass of the drafter: log odds [B, N] of what it made for these slots."""

    slots: Sequence[int]
    odds_BN: np.ndarray


class Labels(NamedTuple):
    """Drafts with these log odds [B, N], of which each sequence's first `verified` were looked at
    and `accepted` stood."""

    odds_BN: np.ndarray
    verified: Sequence[int]
    accepted: Sequence[int]


@dataclass(slots=True)
class Observed:
    """All that has been told since it was last taken; among the passes, slots that are forgotten
    there."""

    passes: list[Pass | int] = field(default_factory=list)
    labels: list[Labels] = field(default_factory=list)
    times: list[StepTimes] = field(default_factory=list)
    hosts: list[HostTime] = field(default_factory=list)

    def newest_passes(self) -> list[Pass | int]:
        """The last passes, those of the same slots joined: odds are [H, B, N], the oldest first.
        Of those before them only what is forgotten."""
        at, left = len(self.passes), MOST_AT_ONCE
        while at > 0 and left > 0:
            at -= 1
            one = self.passes[at]
            left -= 0 if isinstance(one, int) else len(one.slots)
        found: list[Pass | int] = [one for one in self.passes[:at] if isinstance(one, int)]
        for _, group in groupby(self.passes[at:], lambda x: x if isinstance(x, int) else x.slots):
            alike = list(group)
            passes = [one for one in alike if not isinstance(one, int)]
            if passes:
                found.append(Pass(passes[0].slots, np.stack([one.odds_BN for one in passes])))
            else:
                found += alike
        return found

    def newest_labels(self) -> Labels:
        """The last labels as one; there must be some."""
        at, left = len(self.labels), MOST_AT_ONCE
        while at > 0 and left > 0:
            at -= 1
            left -= len(self.labels[at].verified)
        newest = self.labels[at:]
        return Labels(
            np.concatenate([one.odds_BN for one in newest], dtype=np.float64),
            [n for one in newest for n in one.verified],
            [n for one in newest for n in one.accepted],
        )

    def middle_times(self) -> Iterable[StepTimes]:
        """Of like steps the one that took the middle of their times, which no outlier is."""
        alike: dict[tuple[StepKind, int, int], list[StepTimes]] = {}
        for times in self.times:
            alike.setdefault((times.kind, times.rows, times.sequences), []).append(times)
        often = sorted(alike.values(), key=len, reverse=True)[:MOST_TIMES]
        return [sorted(each, key=_total)[len(each) // 2] for each in often]


def _total(times: StepTimes) -> float:
    return times.verify_ms + (times.draft_ms or 0.0)
