"""How many drafts a step verifies, and whether drafts are made at all. NumPy, no torch.

    expected tokens of a step = R + S_1 + ... + S_B    the B likeliest drafts of R sequences
    B = argmax of expected tokens / (time of verifying + time of drafting)

S comes from earlier passes of the drafter (`ops/trim.py` says why), so B knows nothing of the
drafts that it is for; which B drafts are kept is decided on the device. Without drafts a step makes
R tokens; if that is the better rate, the drafter rests but for a trial now and then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from limelight.engine.acceptance import Acceptance
from limelight.engine.cost import StepCosts
from limelight.stats import SpeculationStats
from limelight.steps import StepKind, StepTimes, Trim

PASSES = 128  # passes of a sequence that are remembered
SAMPLES = 256  # sequences times passes that an estimate is made of, if there are as many
RESTING_SAMPLES = 32  # while passes are rare: better times must not be overlooked for long
FORGETTING = 0.02  # of the average over all sequences, a pass
# Of the rate: by how much plain steps must be better for the drafter to rest, and drafts for it to
# work again. Resting by mistake is found out later than working by mistake, so the first also has
# DOUBT over the root of the labels that the rate rests on.
REST_MARGIN, WORK_MARGIN, DOUBT = 0.005, 0.002, 1.0
TRIAL_COST = 0.004  # share of the time that trials may take while the drafter rests
TRIAL_EVERY = (8, 4096)  # steps between trials, at least and at most
TRIAL_SHARE = 4  # one of so many sequences, or all places of one, are verified in a trial at least
# While the same sequences go on, a decision holds for so many steps, and one of so many is timed: a
# step of one sequence takes little longer than to decide about it.
STEPS_OF_A_DECISION, STEPS_OF_A_TIME = 4, 4
# Labels or passes before which the drafter does not rest, for nothing is known of it.
WARM_LABELS, WARM_PASSES = 1024, 64


@dataclass(frozen=True, slots=True)
class Load:
    """A step before its drafts are trimmed.

    `slots` are those of the sequences that sample and `drafts` how many each could verify;
    `rows` counts all others: prompt tokens and one for each sequence that decodes. `context` is
    the sum of the lengths of all sequences in the step.
    """

    slots: Sequence[int]
    drafts: Sequence[int]
    rows: int
    context: int

    def kind(self, otherwise: StepKind) -> StepKind:
        """That of a step with rows of a prompt, if it has any."""
        return StepKind.PROMPT if self.rows > len(self.slots) else otherwise


@dataclass(frozen=True, slots=True)
class Decision:
    """`budget`: drafts verified in the step; `drafts`: whether it makes some for the next one."""

    budget: int
    drafts: bool


class Counts:
    """What became of drafts since the start."""

    def __init__(self, num_drafts: int):
        self.steps = self.drafted = self.offered = self.verified = self.accepted = 0
        self.verified_N = np.zeros(num_drafts, dtype=np.int64)
        self.accepted_N = np.zeros(num_drafts, dtype=np.int64)

    def settled(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Of sequences with drafts, how many were verified and how many stood."""
        verified_B, accepted_B = np.asarray(verified), np.asarray(accepted)
        place_N = np.arange(len(self.verified_N))
        self.verified_N += (place_N < verified_B[:, None]).sum(axis=0)
        self.accepted_N += (place_N < accepted_B[:, None]).sum(axis=0)
        self.steps += int((verified_B > 0).sum())
        self.verified += int(verified_B.sum())
        self.accepted += int(accepted_B.sum())

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            steps=self.steps,
            drafted=self.drafted,
            offered=self.offered,
            verified=self.verified,
            accepted=self.accepted,
            verified_at=self.verified_N.tolist(),
            accepted_at=self.accepted_N.tolist(),
        )


class AllDrafts:
    """Drafts in every step, and verifies all of them."""

    def __init__(self, num_drafts: int):
        self.counts, self._last = Counts(num_drafts), (0, 0)

    def choose(self, load: Load) -> Decision:
        self.counts.offered += sum(load.drafts)
        self._last = sum(load.drafts), load.rows
        return Decision(sum(load.drafts), bool(load.slots))

    def trim(self, budget: int) -> Trim | None:
        return None

    def drafted(self, slots: Sequence[int], odds_BN: np.ndarray) -> None:
        self.counts.drafted += odds_BN.size

    def settled(
        self,
        slots: Sequence[int],
        odds_BN: np.ndarray,
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        self.counts.settled(verified, accepted)

    def timed(self, times: StepTimes) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def stats(self) -> SpeculationStats:
        budget, rows = self._last
        return replace(self.counts.stats(), budget=budget, rows=rows)


class Speculation:
    """Decides step by step, and learns from what steps gave and how long they took."""

    def __init__(
        self,
        *,
        num_drafts: int,
        max_seqs: int,
        costs: StepCosts,
        max_rows: int,
    ):
        """`max_rows` is the most rows of logits of a step."""
        self.num_drafts, self.max_rows, self.costs = num_drafts, max_rows, costs
        self.acceptance = Acceptance(num_drafts)
        self.odds_HSN = np.zeros((PASSES, max_seqs, num_drafts))
        self.passes_S = np.zeros(max_seqs, dtype=np.int64)
        # Sequences that are new count as the average of all; before any, as never refused.
        self.average_N = np.ones(num_drafts)
        self.resting = False
        self.rested = 0  # steps since the last pass
        self.trial = False
        self.passes = 0
        self.counts = Counts(num_drafts)
        self._predicted = 0.0
        self._decided: tuple[Load, Decision, int] | None = None  # and how often it served
        self._times = 0
        self._last = (0, 0)  # budget and other rows

    @property
    def warm(self) -> bool:
        """Whether enough is known of the drafter to let it rest."""
        return self.acceptance.total >= WARM_LABELS or self.passes >= WARM_PASSES

    def choose(self, load: Load) -> Decision:
        """What a step does, by what is known before its drafts are."""
        if len(load.slots) == 0:
            return Decision(0, False)
        self.counts.offered += sum(load.drafts)
        decision = self._again(load) or self._decide(load)
        self._last = (decision.budget, load.rows)
        return decision

    def _again(self, load: Load) -> Decision | None:
        """The last decision, if it was about the same sequences, and nothing is being tried."""
        if self._decided is None or self.trial or not self.warm:
            return None
        before, decision, served = self._decided
        same = (load.slots, load.drafts, load.rows) == (before.slots, before.drafts, before.rows)
        if not same or served >= STEPS_OF_A_DECISION:
            return None
        self._decided = before, decision, served + 1
        self.rested += self.resting
        return decision

    def _decide(self, load: Load) -> Decision:
        sequences = len(load.slots)
        survival_HBN = self._recent(load.slots)
        drafting = self._pays(load, survival_HBN)
        cost = self.costs.draft_ms(sequences) if drafting else 0.0
        gains = self._gains(survival_HBN, np.asarray(load.drafts), sequences)
        budget = self._best(load, gains, cost)[0]
        if self.trial or not self.warm:
            # Whatever is thought of the drafts, some must be seen to know better.
            budget = max(budget, self._tried(gains, sequences))
        self.trial = drafting and self.resting
        decision = Decision(budget, drafting)
        self._decided = load, decision, 1
        return decision

    def drafted(self, slots: Sequence[int], odds_BN: np.ndarray) -> None:
        """The log odds of the drafts that a pass made, in the order of the passes."""
        at_B = np.asarray(slots, dtype=np.int64)
        self.odds_HSN[self.passes_S[at_B] % PASSES, at_B] = odds_BN
        self.passes_S[at_B] += 1
        survival_BN = self.acceptance.survival(odds_BN)
        weight = 1 - (1 - FORGETTING) ** len(at_B)
        if not self.counts.drafted and len(at_B):
            weight = 1.0
        if len(at_B):
            self.average_N = self.average_N + weight * (survival_BN.mean(axis=0) - self.average_N)
        self.passes += 1
        self.counts.drafted += len(at_B) * self.num_drafts

    def settled(
        self,
        slots: Sequence[int],
        odds_BN: np.ndarray,
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """What became of drafts with these log odds; without placeholders and what was trimmed."""
        if not any(verified):
            return
        assert len(slots) == len(odds_BN) == len(verified) == len(accepted)
        seen_BN = np.arange(self.num_drafts) < np.asarray(verified)[:, None]
        self._predicted += float(self.acceptance.survival(odds_BN)[seen_BN].sum())
        self.counts.settled(verified, accepted)
        self.acceptance.observe(odds_BN, verified, accepted)

    def trim(self, budget: int) -> Trim | None:
        """How the device is to choose a budget's drafts."""
        return Trim(budget, self.acceptance.slope, self.acceptance.intercepts_N.tolist())

    def timed(self, times: StepTimes) -> None:
        """Correct what steps are thought to take."""
        self._times += 1
        if self._times % STEPS_OF_A_TIME and self.warm:
            return
        self.costs.observe(times)

    def forget(self, slot: int) -> None:
        """The slot's sequence has left it, or will be computed anew."""
        self.passes_S[slot] = 0

    def stats(self) -> SpeculationStats:
        """Counts since the start, and what is believed now."""
        return replace(
            self.counts.stats(),
            predicted=self._predicted,
            budget=self._last[0],
            rows=self._last[1],
            drafting=not self.resting,
            slope=self.acceptance.slope,
            intercepts=self.acceptance.intercepts_N.tolist(),
        )

    def _recent(self, slots: Sequence[int]) -> np.ndarray:
        """S of the last passes of each sequence, [H, B, N]; H falls as there are more of them."""
        at_B = np.asarray(slots, dtype=np.int64)
        samples = RESTING_SAMPLES if self.resting else SAMPLES
        depth = max(1, min(PASSES, samples // len(at_B)))
        back_HB = self.passes_S[at_B] - 1 - np.arange(depth)[:, None]
        survival_HBN = self.acceptance.survival(self.odds_HSN[back_HB % PASSES, at_B])
        return np.where((back_HB >= 0)[..., None], survival_HBN, self.average_N)

    def _gains(self, survival_HBN: np.ndarray, drafts_B: np.ndarray, rows: int) -> np.ndarray:
        """What the first, second, ... likeliest draft of a step can be expected to add."""
        total = min(int(drafts_B.sum()), max(self.max_rows - rows, 0))
        offered_BN = np.arange(self.num_drafts) < drafts_B[:, None]
        likely_HX = np.where(offered_BN, survival_HBN, -1.0).reshape(len(survival_HBN), -1)
        # Sorted within each pass: no pass can choose among the drafts of another.
        return -np.sort(-likely_HX, axis=1)[:, :total].mean(axis=0)

    def _best(self, load: Load, gains: np.ndarray, draft_ms: float) -> tuple[int, float]:
        """The budget with the most tokens a millisecond, and how many that are."""
        tokens = len(load.slots) + np.concatenate([[0.0], gains.cumsum()])
        rows = load.rows + np.arange(len(tokens))
        step_ms = self.costs.step_ms(load.kind(StepKind.DRAFTED), rows, load.context)
        rates = tokens / (step_ms + draft_ms)
        best = int(rates.argmax())
        return best, float(rates[best])

    def _pays(self, load: Load, survival_HBN: np.ndarray) -> bool:
        """Whether the next step shall have drafts, as far as it is like this one."""
        sequences = len(load.slots)
        draft_ms = self.costs.draft_ms(sequences)
        every_B = np.full(sequences, self.num_drafts)
        gains = self._gains(survival_HBN, every_B, sequences)
        _, rate = self._best(load, gains, draft_ms)
        plain_ms = float(self.costs.step_ms(load.kind(StepKind.PLAIN), load.rows, load.context))
        plain = sequences / plain_ms
        margin = WORK_MARGIN
        if not self.resting:
            margin = -REST_MARGIN - DOUBT / math.sqrt(max(self.acceptance.total, 1))
        self.resting = rate < plain * (1 + margin)
        self.resting = self.resting and self.warm
        if not self.resting:
            self.rested = 0
            return True
        self.rested += 1
        if self.rested < self._trial_every(load, gains, draft_ms, plain_ms):
            return False
        self.rested = 0
        return True

    def _tried(self, gains: np.ndarray, sequences: int) -> int:
        """Drafts that a trial verifies at least."""
        return min(len(gains), max(self.num_drafts, -(-sequences // TRIAL_SHARE)))

    def _trial_every(self, load: Load, gains: np.ndarray, draft_ms: float, plain_ms: float) -> int:
        """Steps between trials, so that what these cost stays a small share."""
        sequences = len(load.slots)
        count = self._tried(gains, sequences)
        kind = load.kind(StepKind.DRAFTED)
        with_ms = float(self.costs.step_ms(kind, load.rows + count, load.context))
        won_ms = float(gains[:count].sum()) * plain_ms / sequences
        lost_ms = max(draft_ms + with_ms - plain_ms - won_ms, 0.0)
        least, most = TRIAL_EVERY
        return max(least, min(most, math.ceil(lost_ms / (TRIAL_COST * plain_ms))))
