"""How many drafts a step verifies, and whether drafts are made at all. NumPy, no torch.

    expected tokens of a step = R + S_1 + ... + S_B    the B likeliest drafts of R sequences
    rate = max over B of expected tokens / time of a step
    B = argmax of expected tokens - rate * time of a step

A step takes the time of verifying and of drafting, or the host's where that is longer.

S comes from earlier passes of the drafter (`ops/trim.py` says why), so B knows nothing of the
drafts that it is for; which B drafts are kept is decided on the device. Without drafts a step makes
R tokens; if that is the better rate, the drafter rests but for a trial now and then. Both rates are
those of steps without prompts: what these take, they take once, with drafts beside them or without.

To decide may take longer than a step does, so a decision holds for as many steps as pay for it,
and what they tell is learned before the next one.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from limelight.engine.acceptance import Acceptance, Counts
from limelight.engine.cost import StepCosts
from limelight.engine.observed import Labels, Observed, Pass
from limelight.engine.pace import HostTime, octave_of
from limelight.stats import SpeculationStats
from limelight.steps import StepKind, StepTimes, Trim

PASSES = 128  # passes of a sequence that are remembered
SAMPLES = 256  # sequences times passes that an estimate is made of, if there are as many
RESTING_SAMPLES = 32  # while passes are rare: better times must not be overlooked for long
FORGETTING = 0.02  # of the average over all sequences, a sequence of a pass
# Of the rate: by how much plain steps must be better for the drafter to rest, and drafts for it to
# work again. Resting by mistake is found out later than working by mistake, so the first also has
# DOUBT over the root of the labels that the rate rests on.
REST_MARGIN, WORK_MARGIN, DOUBT = 0.005, 0.002, 1.0
TRIAL_COST = 0.004  # share of the time that trials may take while the drafter rests
TRIAL_EVERY = (8, 4096)  # steps between trials, at least and at most
# Steps without drafts while it works, the share of the time that they may cost, and steps between
# looks at least: what they take would not be known else, and the start may have timed them wrong.
LOOK_STEPS, LOOK_COST, LOOK_EVERY = 6, 0.004, 64
TRIAL_SHARE = 4  # one of so many sequences, or all places of one, are verified in a trial at least
DECIDING_SHARE, RESTING_SHARE = 0.01, 0.002  # of the time of steps that decisions may take
SHARE_RATE = 0.05  # how fast the share of drafts that are offered follows, a step
COLD_STEPS = 8  # that a decision holds for at most before the drafter is known
STEPS_OF_A_DECISION = 4  # that it holds for at least while the same load goes on
TIMED_STEPS = 8  # behind a decision: to time one takes a while, too
SURPRISE = 2.0  # times what decisions take, beyond which one counts as just that long
FOLLOWING = 0.2  # how fast what they take follows
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

    @property
    def size(self) -> tuple[int, int]:
        """Octaves of its sequences and, where it has a prompt, of its rows; 0: it has none."""
        prompt = self.rows > len(self.slots)
        return octave_of(len(self.slots)), self.rows.bit_length() if prompt else 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`budget`: drafts verified in the step; `drafts`: whether it makes some for the next one;
    `timed`: whether its parts are timed; `fresh`: whether it was made just now, at some cost."""

    budget: int
    drafts: bool
    timed: bool = True
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A decision for some time: verify `budget` of as many drafts as were `offered`."""

    budget: int
    offered: int
    step_ms: float  # of the steps that it is for, as far as is known

    def of(self, offered: int) -> int:
        """The same share of so many."""
        return self.budget * offered // self.offered


class Speculation:
    """Decides step by step, and learns from what steps gave and how long they took."""

    def __init__(
        self,
        *,
        num_drafts: int,
        max_seqs: int,
        costs: StepCosts,
        max_rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`max_rows` is the most rows of logits of a step; `clock` tells seconds."""
        self.num_drafts, self.max_rows, self.costs, self.clock = num_drafts, max_rows, costs, clock
        self.acceptance = Acceptance(num_drafts)
        self.odds_HSN = np.zeros((PASSES, max_seqs, num_drafts))
        self.passes_S = np.zeros(max_seqs, dtype=np.int64)
        # Sequences that are new count as the average of all; before any, as never refused.
        self.average_N = np.ones(num_drafts)
        self.sequences = 0  # of the last step, in octaves
        self.rests: dict[int, bool] = {}  # by such
        self.last_plain: dict[int, int] = {}  # the last step without drafts, by such
        self.shares: dict[int, float] = {}  # of all drafts that could be, those that are offered
        self.trial = self.looks = False  # the last steps of a decision that looks make no drafts
        self.passes = 0
        self.counts = Counts(num_drafts)
        self.observed = Observed()
        self.held: dict[tuple[int, int], Held] = {}  # by the size of the load
        self.takes_ms = 0.0  # of a decision, and of learning before it
        # Steps: now, the last pass and decision, when the next one is paid for, and when the
        # next trial of a resting drafter is due, or something is to be learned of the last.
        self.step = self.last_pass = self.decided = self.due = self.next_look = 0
        self._averaged = False
        self._predicted, self._learned = 0.0, 0  # of so many verified drafts
        self._last = (0, 0)  # budget and other rows

    @property
    def warm(self) -> bool:
        """Whether enough is known of the drafter to let it rest."""
        return self.passes >= WARM_PASSES or self.acceptance.total >= WARM_LABELS

    @property
    def resting(self) -> bool:
        """Whether steps of as many sequences as the last one make no drafts."""
        return self.rests.get(self.sequences, False)

    def goes_on_resting(self) -> bool:
        """Whether the next step is like the last one, which had no drafts and made none, in that
        as well. It is if nothing says otherwise, which is asked when there is time for it."""
        if not self.resting or self.trial or self.step + 1 >= self.due:
            return False
        self.step += 1
        return True

    def choose(self, load: Load) -> Decision:
        """What a step does, by what is known before its drafts are."""
        self.step += 1
        if len(load.slots) == 0:
            return Decision(0, False, timed=False)
        offered = sum(load.drafts)
        self.counts.offered += offered
        self.sequences, _ = load.size
        held = self.held.get(load.size)
        if offered:
            share = offered / (len(load.slots) * self.num_drafts)
            before = self.shares.get(self.sequences, share)
            self.shares[self.sequences] = before + SHARE_RATE * (share - before)
        if held is None or self.trial or self.step >= self.due:
            held = self._decide(load, offered)
        room = max(self.max_rows - len(load.slots), 0)
        self._last = min(held.of(offered), room), load.rows
        looks = self.looks and self.step >= self.due - LOOK_STEPS
        drafts = self.trial or not (self.resting or looks)
        if drafts:
            self.last_pass = self.step
        else:
            self.last_plain[self.sequences] = self.step
        timed = looks or self.step < self.decided + TIMED_STEPS
        return Decision(self._last[0], drafts, timed, fresh=self.step == self.decided)

    def drafted(self, slots: Sequence[int], odds_BN: np.ndarray) -> None:
        """The log odds of the drafts that a pass made, in the order of the passes."""
        self.passes += 1
        self.counts.drafted += len(slots) * self.num_drafts
        self.observed.passes.append(Pass(slots, odds_BN))

    def settled(
        self, odds_BN: np.ndarray, verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What became of drafts with these log odds; without placeholders and what was trimmed."""
        if not any(verified):
            return
        assert len(odds_BN) == len(verified) == len(accepted)
        self.counts.settled(verified, accepted)
        self.observed.labels.append(Labels(odds_BN, verified, accepted))

    def trim(self, budget: int) -> Trim | None:
        """How the device is to choose a budget's drafts."""
        return Trim(budget, self.acceptance.slope, self.acceptance.intercepts_N.tolist())

    def timed(self, times: StepTimes) -> None:
        """What a step took."""
        self.observed.times.append(times)

    def hosted(self, host: HostTime) -> None:
        """What a step took the host."""
        self.observed.hosts.append(host)

    def forget(self, slot: int) -> None:
        """The slot's sequence has left it, or will be computed anew."""
        self.observed.passes.append(slot)

    def learn(self) -> None:
        """From all that has been told since the last time."""
        told, self.observed = self.observed, Observed()
        if told.passes:
            self._remember(told.newest_passes())
        if told.labels:
            labels = told.newest_labels()
            seen_BN = np.arange(self.num_drafts) < np.asarray(labels.verified)[:, None]
            likely = float(self.acceptance.survival(labels.odds_BN)[seen_BN].sum())
            every, self._learned = self.counts.verified - self._learned, self.counts.verified
            self._predicted += likely * every / sum(labels.verified)
            self.acceptance.observe(*labels, steps=len(told.labels))
        for times in told.middle_times():
            self.costs.observe(times)
        self.costs.host.observe(told.hosts)

    def stats(self) -> SpeculationStats:
        """Counts since the start, and what was believed at the last decision."""
        return replace(
            self.counts.stats(),
            predicted=self._predicted,
            budget=self._last[0],
            rows=self._last[1],
            drafting=not self.resting,
            slope=self.acceptance.slope,
            intercepts=self.acceptance.intercepts_N.tolist(),
        )

    def _remember(self, passes: Sequence[Pass | int]) -> None:
        """Passes, and slots that are forgotten in between, in the order in which they came."""
        seen: list[np.ndarray] = []
        for one in passes:
            if isinstance(one, int):
                self.passes_S[one] = 0
                continue
            at_B, odds_HBN = np.asarray(one.slots), one.odds_BN[-PASSES:]
            at_HB = self.passes_S[at_B] + np.arange(len(odds_HBN))[:, None]
            self.odds_HSN[at_HB % PASSES, at_B] = odds_HBN
            self.passes_S[at_B] += len(odds_HBN)
            seen.append(odds_HBN.reshape(-1, self.num_drafts))
        if seen:
            survival_XN = self.acceptance.survival(np.concatenate(seen))
            mean_N = survival_XN.mean(axis=0)
            # The first have nothing to be weighed against.
            left = (1 - FORGETTING) ** len(survival_XN) if self._averaged else 0.0
            self.average_N, self._averaged = mean_N + left * (self.average_N - mean_N), True

    def _decide(self, load: Load, offered: int) -> Held:
        """Learn, decide, and let it hold until it is paid for."""
        started = self.clock()
        self.learn()
        held = self.held[load.size] = self._weigh(load, offered)
        took_ms = 1e3 * (self.clock() - started)
        if self.takes_ms:
            took_ms = min(took_ms, SURPRISE * self.takes_ms)
            took_ms = self.takes_ms + FOLLOWING * (took_ms - self.takes_ms)
        self.takes_ms = took_ms
        self.decided, self.due = self.step, self.step + self._holds(held.step_ms)
        return held

    def _holds(self, step_ms: float) -> int:
        """For how many steps that take so long a decision holds."""
        least, most = (
            max(math.ceil(self.takes_ms / (share * step_ms)), STEPS_OF_A_DECISION)
            for share in (DECIDING_SHARE, RESTING_SHARE)
        )
        if not self.warm:  # what is learned at first weighs most
            return max(1, min(least, self.passes, COLD_STEPS))
        if self.looks:
            seldom = self.sequences in self.last_plain
            return max(least if seldom else 0, LOOK_STEPS)
        if not self.resting or self.trial:
            return least
        host = self.costs.host
        if host.drafted and not host.plain:  # it rests as if the host took no time
            return TIMED_STEPS
        return max(least, min(most, self.next_look - self.step))

    def _weigh(self, load: Load, offered: int) -> Held:
        """How many of a step's drafts are verified, and whether steps like it make some."""
        sequences, context = len(load.slots), load.context
        survival_HBN = self._recent(load.slots)
        gains = self._gains(survival_HBN, np.full(sequences, self.num_drafts), sequences)
        # Beside prompts fewer are offered; where prompts never end, that is all there is.
        gains = gains[: math.ceil(self.shares.get(self.sequences, 1.0) * len(gains))]
        # What a token is worth is told by steps without prompts: those take the time they take.
        plain_ms = self.costs.plain_ms(sequences, context)
        rows = sequences + np.arange(len(gains) + 1)
        each_ms = self.costs.drafted_ms(rows, sequences, context, StepKind.DRAFTED)
        rates = (sequences + _sums(gains)) / each_ms
        budget = int(rates.argmax())
        rate, plain = float(rates[budget]), sequences / plain_ms
        self._rest_or_work(rate, plain)
        every = max(LOOK_STEPS * (1 - plain / rate) / LOOK_COST, LOOK_EVERY)
        last = self.last_plain.get(self.sequences)
        self.looks = self.warm and not self.resting and (last is None or self.step >= last + every)
        # Whatever is thought of the drafts, some must be seen to know better.
        seen = self.trial or not self.warm
        self._look_out(sequences, context, gains, plain_ms, seen=seen)
        step_ms = plain_ms if self.resting else float(each_ms[budget])
        if not offered:
            return Held(budget, sequences * self.num_drafts, step_ms)
        gains = self._gains(survival_HBN, np.asarray(load.drafts), sequences)
        rows = load.rows + np.arange(len(gains) + 1)
        each_ms = self.costs.drafted_ms(rows, sequences, context, load.kind(StepKind.DRAFTED))
        budget = int((_sums(gains) - (plain if self.resting else rate) * each_ms).argmax())
        budget = max(budget, self._tried(gains, sequences) if seen else 0)
        return Held(budget, offered, step_ms)

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

    def _rest_or_work(self, rate: float, plain: float) -> None:
        """Let the drafter rest if steps without drafts have the better rate, by some margin."""
        margin = WORK_MARGIN
        if not self.resting:
            margin = -REST_MARGIN - DOUBT / math.sqrt(max(self.acceptance.total, 1))
        self.rests[self.sequences] = self.warm and rate < plain * (1 + margin)

    def _tried(self, gains: np.ndarray, sequences: int) -> int:
        """Drafts that a trial verifies at least."""
        return min(len(gains), max(self.num_drafts, -(-sequences // TRIAL_SHARE)))

    def _look_out(
        self,
        sequences: int,
        context: int,
        gains: np.ndarray,
        plain_ms: float,
        *,
        seen: bool,
    ) -> None:
        """Say when a resting drafter is tried, so that trials, and to decide about them, take a
        small share of the time; what comes of one that is `seen` is to be known soon."""
        count = self._tried(gains, sequences)
        rows = sequences + count
        with_ms = float(self.costs.drafted_ms(rows, sequences, context, StepKind.DRAFTED))
        won_ms = float(gains[:count].sum()) * plain_ms / sequences
        lost_ms = max(with_ms - plain_ms - won_ms, 0.0) + self.takes_ms
        least, most = TRIAL_EVERY
        steps = max(least, min(most, math.ceil(lost_ms / (TRIAL_COST * plain_ms))))
        self.trial = self.resting and self.step >= self.last_pass + steps
        self.next_look = self.step if seen else self.last_pass + steps


def _sums(gains: np.ndarray) -> np.ndarray:
    """What none, the first, the first two, ... of them add."""
    return np.concatenate([[0.0], gains.cumsum()])
