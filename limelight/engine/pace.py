"""What a step takes the host: all the time between two plans in which it does not wait.

On a GPU the loop plans and settles while the device runs, so a step takes as long as the longer of
both; where it waits for each step before it plans the next, as long as both together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from limelight.steps import StepPlan, StepResult

# One of so many sequences may be new, and so many rows there may be for each one: to admit prompts
# and to read them is no part of what each step takes.
SELDOM, MOST_ROWS = 32, 8
LEAST_MS = 1e-3  # where clocks of host and device disagree


@dataclass(frozen=True, slots=True)
class HostTime:
    """Milliseconds that a step of so many sequences took the host, with drafts or without any, and
    with the device at work meanwhile or not."""

    drafts: bool
    sequences: int
    ms: float
    overlaps: bool


class Pace:
    """Looks at the steps that are timed, of which those count that came behind one of their kind:
    the host settles that one meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """`clock` tells seconds."""
        self.clock = clock
        # Whether the last step and the one before have drafts; None: they are not looked at.
        self.drafts: bool | None = None
        self.before: bool | None = None
        # Of the last one, in seconds, and when its planning was over but for its drafts.
        self.sequences, self.began, self.entered = 0, 0.0, 0.0
        self.apart_ms: float | None = None  # of it, that were not the host's

    def begin(self, plan: StepPlan, *, fresh: bool) -> None:
        """A step has been decided about; what a `fresh` decision took is no part of it."""
        self.before, self.drafts = self.drafts, None
        # Between drafts and none are others.
        if plan.timed and (plan.drafts or plan.is_plain) and not (_admits(plan) or _reads(plan)):
            self.drafts, self.sequences, self.apart_ms = plan.drafts, len(plan.grants), None
            self.began = self.clock() if fresh else self.entered

    def skip(self) -> None:
        """A step is made that is not looked at."""
        self.drafts = None

    def heard(self, result: StepResult, *, overlaps: bool) -> None:
        """What came of a step: with overlap the one before the last, and else the last."""
        if overlaps:
            self.apart_ms = result.waited_ms
        elif result.times is not None:
            self.apart_ms = result.times.verify_ms + (result.times.draft_ms or 0.0)

    def end(self, plan: StepPlan, *, overlaps: bool) -> HostTime | None:
        """The next step is about to be decided about: what the last one took, if that is known."""
        self.entered = self.clock()
        drafts, apart_ms = self.drafts, self.apart_ms
        if drafts is None or apart_ms is None or drafts is not self.before or _admits(plan):
            return None
        ms = 1e3 * (self.entered - self.began) - apart_ms
        return HostTime(drafts, self.sequences, max(ms, LEAST_MS), overlaps)


def octave_of(sequences: int) -> int:
    """Loads of about as many: each power of two is in the middle of those with its number."""
    return (2 * sequences // 3).bit_length()


def _admits(plan: StepPlan) -> bool:
    """Whether many of its sequences are new; if all are, there was nothing to do before."""
    return SELDOM * len(plan.admissions) >= len(plan.grants)


def _reads(plan: StepPlan) -> bool:
    """Whether it has much of prompts."""
    rows = sum([grant.num_tokens - grant.num_drafts for grant in plan.grants])
    return rows > MOST_ROWS * len(plan.grants)
