"""Figures of a steady load: speed as its clients see it, and what became of drafts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from limelight.bench.closed_loop import Window
from limelight.bench.record import spread
from limelight.stats import SpeculationStats
from limelight.steps import StepTimes


def rate(window: Window) -> float:
    """Tokens a second."""
    return window.tokens / sum(window.seconds)


def figures(windows: list[Window]) -> dict[str, object]:
    """Of all rounds of one load."""
    done = [asked for window in windows for asked in window.done]
    paces = [1e3 * (one.last - one.first) / (one.tokens - 1) for one in done if one.tokens > 1]
    steps = sum(len(window.seconds) for window in windows)
    row: dict[str, object] = {
        "tokens_per_s": spread([rate(window) for window in windows]),
        "ttft_ms": spread([1e3 * (asked.first - asked.sent) for asked in done if asked.tokens]),
        "step_ms": spread([1e3 * second for window in windows for second in window.seconds]),
        "steps": steps,
        "answers": len(done),
        "tokens_per_step": digits(sum(window.tokens for window in windows) / steps),
    }
    if paces:
        row["tpot_ms"] = spread(paces) | {"p99": digits(percentile(paces, 0.99))}
    changes = [
        Change.between(window.before.speculation, window.after.speculation)
        for window in windows
        if window.before.speculation is not None and window.after.speculation is not None
    ]
    if not changes:
        return row
    return row | acceptance(changes, steps) | parts([t for window in windows for t in window.times])


@dataclass(frozen=True, slots=True)
class Change:
    """By how much the engine's counters of drafts rose."""

    synthetic: bool
    verifications: int
    offered: int
    verified_at: list[int]
    accepted_at: list[int]

    @classmethod
    def between(cls, before: SpeculationStats, after: SpeculationStats) -> "Change":
        return cls(
            after.synthetic,
            after.steps - before.steps,
            after.offered - before.offered,
            [b - a for a, b in zip(before.verified_at, after.verified_at, strict=True)],
            [b - a for a, b in zip(before.accepted_at, after.accepted_at, strict=True)],
        )


def acceptance(changes: list[Change], steps: int) -> dict[str, object]:
    """What became of drafts in so many steps of the engine."""
    verifications = sum(one.verifications for one in changes)
    verified_at = [sum(at) for at in zip(*(one.verified_at for one in changes), strict=True)]
    accepted_at = [sum(at) for at in zip(*(one.accepted_at for one in changes), strict=True)]
    verified, accepted = sum(verified_at), sum(accepted_at)
    row: dict[str, object] = {
        "acceptance": "synthetic" if changes[0].synthetic else "real",
        "num_drafts": len(verified_at),
        "verifications": verifications,
        "verified_at": verified_at,
        "accepted_at": accepted_at,
        "verified_per_step": digits(verified / steps),
    }
    # A drafter that rests leaves nothing to divide by.
    if offered := sum(one.offered for one in changes):
        row["verified_share"] = digits(verified / offered)
    if verifications:
        row["acceptance_length"] = digits(1 + accepted / verifications)
        row["rates"] = list(rates(accepted_at, verified_at))
        row["accepted_share"] = digits(accepted / verified)
    return row


def rates(accepted_at: Iterable[int], verified_at: Iterable[int]) -> Iterator[float]:
    """Of each place, the share of its verified drafts that stood with all before them.

    Ready for synthetic_acceptance_rates, so none is above the one before. Where drafts are trimmed
    those that were left out are missing, and the shares are too high.
    """
    before = 1.0
    for accepted, verified in zip(accepted_at, verified_at, strict=True):
        before = min(before, digits(accepted / verified) if verified else 0.0)
        yield before


def parts(times: list[StepTimes]) -> dict[str, object]:
    """How long the target and the drafter took in each step that was timed, and the drafter's share
    of both."""
    if not times:
        return {"drafting_steps": 0}
    drafting = [one.draft_ms for one in times if one.draft_ms is not None]
    row: dict[str, object] = {"forward_ms": spread([one.verify_ms for one in times])}
    if drafting:
        row["draft_ms"] = spread(drafting)
        total = sum(drafting) + sum(one.verify_ms for one in times)
        row["drafting_share"] = digits(sum(drafting) / total)
    return row | {"drafting_steps": len(drafting)}


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all is not above."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def digits(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")
