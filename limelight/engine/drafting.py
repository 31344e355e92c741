"""Between the engine and what decides about drafts: its questions, and what became of its answers.

What a pass of the drafter says of its drafts is told only after the step that verifies them has
its budget: a budget that knew it would choose among drafts by what they are (`ops/trim.py`).
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from limelight.engine.speculation import AllDrafts, Load, Speculation
from limelight.stats import SpeculationStats
from limelight.steps import Grant, Sampled, StepPlan, StepTimes

logger = logging.getLogger(__name__)
# Of so many verified drafts a drafter that fits its target gets more than this share accepted.
TELLING, LEAST_ACCEPTED = 500, 0.02


class Drafting:
    """Asks a policy about every step, and tells it how the step went."""

    def __init__(self, policy: AllDrafts | Speculation, *, synthetic: bool = False):
        """With `synthetic` drafts stand at rates that were told, which the figures must say."""
        self.policy, self.synthetic = policy, synthetic
        self.times: StepTimes | None = None  # of the last step that has ended
        self.odds: dict[int, list[float]] = {}  # of the drafts that wait in each slot
        self.untold: dict[int, list[float]] = {}
        self.verified = self.accepted = 0
        self.told = False  # whether it is known if the drafter fits

    def decide(self, plan: StepPlan) -> StepPlan:
        """The plan, and what becomes of its drafts."""
        for admission in plan.admissions:
            self.policy.forget(admission.slot)
            self.untold.pop(admission.slot, None)
        sampling = [grant for grant in plan.grants if grant.samples]
        decision = self.policy.choose(
            Load(
                slots=[grant.slot for grant in sampling],
                drafts=[grant.num_drafts for grant in sampling],
                rows=sum(grant.num_tokens - grant.num_drafts for grant in plan.grants),
                context=plan.num_read,
            )
        )
        if self.untold:
            self.policy.drafted(list(self.untold), np.array(list(self.untold.values())))
            self.untold = {}
        trim = self.policy.trim(decision.budget)
        return replace(plan, trim=trim, drafts=decision.drafts)

    def learn(
        self,
        results: Iterable[tuple[Grant, Sampled]],
        going_on: Collection[int],
        times: StepTimes | None,
    ) -> None:
        """What came of a step's sequences; those in the slots `going_on` have not ended."""
        results = [(grant, sampled) for grant, sampled in results if grant.samples]
        tried = [one for grant, one in results if grant.num_drafts and grant.slot in self.odds]
        if tried:
            self.policy.settled(
                [one.slot for one in tried],
                np.array([self.odds[one.slot] for one in tried]),
                [one.num_verified for one in tried],
                [one.num_accepted for one in tried],
            )
        for _, sampled in results:
            self.odds.pop(sampled.slot, None)
            if sampled.odds is not None and sampled.slot in going_on:
                self.odds[sampled.slot] = self.untold[sampled.slot] = sampled.odds
        self.times = times
        if times is not None:
            self.policy.timed(times)
        if not self.told:
            self._watch(tried)

    def _watch(self, tried: list[Sampled]) -> None:
        """Say so if hardly a draft is accepted: the text is right, and all drafting in vain."""
        self.verified += sum(one.num_verified for one in tried)
        self.accepted += sum(one.num_accepted for one in tried)
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
        return replace(self.policy.stats(), synthetic=self.synthetic)
