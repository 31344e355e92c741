"""Between the engine and what decides about drafts: its questions, and what became of its answers.

What a pass of the drafter says of its drafts is told only after the step that verifies them has
its budget: a budget that knew it would choose among drafts by what they are (`ops/trim.py`).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from operator import attrgetter

import numpy as np

from limelight.engine.acceptance import Counts
from limelight.engine.pace import HostTime, Pace
from limelight.engine.speculation import Decision, Load, Speculation
from limelight.stats import SpeculationStats
from limelight.steps import Drafted, Grant, Sampled, StepPlan, StepResult, StepTimes, Trim

logger = logging.getLogger(__name__)
# Of so many verified drafts a drafter that fits its target gets more than this share accepted.
TELLING, LEAST_ACCEPTED = 500, 0.02


class AllDrafts:
    """Drafts in every step, and verifies all of them."""

    def __init__(self, num_drafts: int):
        self.counts, self._last = Counts(num_drafts), (0, 0)

    def goes_on_resting(self) -> bool:
        return False

    def choose(self, load: Load) -> Decision:
        offered = sum(load.drafts)
        self.counts.offered += offered
        self._last = offered, load.rows
        return Decision(offered, bool(load.slots))

    def trim(self, budget: int) -> Trim | None:
        return None

    def drafted(self, slots: Sequence[int], odds_BN: np.ndarray) -> None:
        self.counts.drafted += odds_BN.size

    def settled(
        self, odds_BN: np.ndarray, verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self.counts.settled(verified, accepted)

    def timed(self, times: StepTimes) -> None:
        pass

    def hosted(self, host: HostTime) -> None:
        pass

    def learn(self) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def stats(self) -> SpeculationStats:
        budget, rows = self._last
        return replace(self.counts.stats(), budget=budget, rows=rows)


class Drafting:
    """Asks a policy about every step, and tells it how the step went."""

    def __init__(self, policy: AllDrafts | Speculation, *, synthetic: bool = False):
        """With `synthetic` drafts stand at rates that were told, which the figures must say."""
        self.policy, self.synthetic, self.pace = policy, synthetic, Pace()
        self.times: StepTimes | None = None  # of the last step that was timed
        self.waiting: Drafted | None = None  # drafts of the last step that was heard of
        self.untold: Drafted | None = None  # the same, until the policy has heard of them
        # Sequences of the last step, if it was without drafts in every way and all of them decode.
        self.quiet: int | None = None
        self._stats: SpeculationStats | None = None
        self.verified = self.accepted = 0
        self.told = False  # whether it is known if the drafter fits

    def decide(self, plan: StepPlan, *, overlaps: bool = True) -> StepPlan:
        """The plan, and what becomes of its drafts; with `overlaps` the step before it runs."""
        host = self.pace.end(plan, overlaps=overlaps)
        if host is not None:
            self.policy.hosted(host)
        if len(plan.grants) == self.quiet and not plan.admissions and self.policy.goes_on_resting():
            self.pace.skip()
            return plan
        self._stats = None
        for admission in plan.admissions:
            self.policy.forget(admission.slot)
        load = load_of(plan.grants)
        decision = self.policy.choose(load)
        if self.untold is not None:
            # Who takes a slot has nothing to do with the drafts that were made for it.
            admitted = {admission.slot for admission in plan.admissions}
            untold = _of(self.untold, set(self.untold.slots) - admitted)
            if untold.slots:
                self.policy.drafted(untold.slots, untold.odds_BN)
            self.untold = None
        offered = any(load.drafts)
        trim = self.policy.trim(decision.budget) if offered else None
        loud = offered or decision.drafts or decision.timed
        # Who reads a prompt will decode, which is another load.
        loud = loud or len(load.slots) < len(plan.grants)
        self.quiet = None if loud else len(plan.grants)
        plan = replace(plan, trim=trim, drafts=decision.drafts, timed=decision.timed)
        self.pace.begin(plan, fresh=decision.fresh)
        return plan

    def learn(
        self,
        settled: Sequence[Sampled],
        going_on: set[int],
        result: StepResult,
        *,
        overlaps: bool = True,
    ) -> None:
        """What came of a step's sequences; those in the slots `going_on` have not ended."""
        self._stats = None
        self.pace.heard(result, overlaps=overlaps)
        if result.times is not None:
            self.times = result.times
            self.policy.timed(result.times)
        if self.waiting is not None and settled:
            self._tell(self.waiting, settled)
        self.waiting = self.untold = None
        if result.drafted is not None:
            self.waiting = self.untold = _of(result.drafted, going_on)
        if not going_on:  # there is time for it, and figures are looked at when all is done
            self.policy.learn()

    def _tell(self, waited: Drafted, settled: Sequence[Sampled]) -> None:
        """What became of the drafts that waited for a step, which are verified in it or never."""
        slots, verified, accepted = all_of(settled, "slot", "num_verified", "num_accepted")
        odds_BN = waited.odds_BN
        if slots != waited.slots:
            rows = dict(zip(waited.slots, range(len(waited.slots)), strict=True))
            there = [slot in rows for slot in slots]
            odds_BN = odds_BN[[rows[slot] for slot in compress(slots, there)]]
            verified, accepted = (list(compress(each, there)) for each in (verified, accepted))
        self.policy.settled(odds_BN, verified, accepted)
        if not self.told:
            self._watch(sum(verified), sum(accepted))

    def _watch(self, verified: int, accepted: int) -> None:
        """Say so if hardly a draft is accepted: the text is right, and all drafting in vain."""
        self.verified += verified
        self.accepted += accepted
        if self.verified < TELLING:
            return
        self.told = True
        if self.accepted < LEAST_ACCEPTED * self.verified:
            logger.warning(
                "of the first %d drafts only %d were accepted: is the drafter one of this model?",
                self.verified, self.accepted,
            )  # fmt: skip

    def stats(self) -> SpeculationStats:
        """What the policy knows, and whether any of it is true of the models."""
        if self._stats is None:  # they are asked for after each step
            stats = self.policy.stats()
            self._stats = replace(stats, synthetic=True) if self.synthetic else stats
        return self._stats


def load_of(grants: Sequence[Grant]) -> Load:
    """What a policy is told of a step."""
    samples, slots, drafts = all_of(grants, "samples", "slot", "num_drafts")
    tokens, starts = map(sum, all_of(grants, "num_tokens", "start"))
    rows = tokens - sum(drafts)
    if not all(samples):
        slots, drafts = (list(compress(each, samples)) for each in (slots, drafts))
    return Load(slots, drafts, rows, starts + tokens)


def all_of(each: Sequence[Grant] | Sequence[Sampled], *names: str) -> list[list[int]]:
    """A list of each of these facts: with many sequences a step is no longer than some passes over
    them, and this is the fastest one."""
    return [list(map(attrgetter(name), each)) for name in names]


def _of(drafted: Drafted, slots: set[int]) -> Drafted:
    """Those in some slots alone."""
    if slots.issuperset(drafted.slots):
        return drafted
    kept = [i for i, slot in enumerate(drafted.slots) if slot in slots]
    return Drafted([drafted.slots[i] for i in kept], drafted.odds_BN[kept])
