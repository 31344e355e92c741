"""Requests whose drafts are accepted at known rates, on a machine whose times are known."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from limelight.engine.cost import StepCost, StepCosts
from limelight.engine.pace import HostTime
from limelight.engine.speculation import Load, Speculation
from limelight.ops.trim import split
from limelight.steps import StepKind, StepTimes

GRAPHS = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
POINTS = [*GRAPHS, 768, 1024, 2048, 4096]
CONTEXTS = [0, 20_000, 200_000, 1_000_000]
REQUESTS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@dataclass
class Machine:
    """`verify(rows, context)` and `draft(sequences)` are its milliseconds; a step without drafts
    takes `plain` times that of one that verifies as many rows. The `host` works meanwhile: so long
    for a step without drafts, and so long for one with them."""

    verify: Callable[[int, int], float]
    draft: Callable[[int], float]
    plain: float = 1.0
    noise: float = 0.02
    outliers: float = 0.01
    host: tuple[float, float] = (0.0, 0.0)

    def ms(self, rows: int, context: int, kind: StepKind = StepKind.DRAFTED) -> float:
        padded = next((size for size in GRAPHS if size >= rows), rows)
        return self.verify(padded, context) * (self.plain if kind is StepKind.PLAIN else 1.0)

    def timed(self, ms: float, rng: np.random.Generator) -> float:
        late = 8.0 if rng.random() < self.outliers else 1.0
        return ms * late * math.exp(self.noise * rng.standard_normal())

    def costs(self, wrong: Callable[[int], float] = lambda rows: 1.0) -> StepCosts:
        drafting = [[self.draft(n) for n in REQUESTS]]
        return StepCosts(
            {kind: self._table(kind, wrong) for kind in StepKind},
            StepCost(REQUESTS, [0], drafting, graphs=REQUESTS[-1]),
        )

    def _table(self, kind: StepKind, wrong: Callable[[int], float]) -> StepCost:
        times = [[self.ms(rows, c, kind) * wrong(rows) for rows in POINTS] for c in CONTEXTS]
        return StepCost(POINTS, CONTEXTS, times, graphs=GRAPHS[-1])


@dataclass
class Traffic:
    """Log odds of drafts, [steps, batch, N], and the chance with which each is accepted."""

    odds: np.ndarray
    chance: np.ndarray

    @classmethod
    def made(
        cls, *, steps: int, batch: int, level: float, slope=0.9, num_drafts=7, seed=0
    ) -> "Traffic":
        """Some requests are easier than others, and some of their places."""
        rng = np.random.default_rng(seed)
        easy_B = rng.normal(level, 1.0, batch) if batch > 1 else np.array([level])
        odds = easy_B[:, None] + rng.normal(0, 1.5, (steps, batch, num_drafts))
        intercepts_N = 0.2 - 0.1 * np.arange(num_drafts)
        return cls(odds, 1 / (1 + np.exp(-(slope * odds + intercepts_N))))

    @property
    def survival(self) -> np.ndarray:
        return self.chance.cumprod(axis=-1)


def context_of(batch: int) -> int:
    return 2000 * batch


def rate_of_none(machine: Machine, batch: int) -> float:
    return batch / max(machine.ms(batch, context_of(batch), StepKind.PLAIN), machine.host[False])


def rate_of_fixed(machine: Machine, traffic: Traffic, first: int) -> float:
    batch, num_drafts = traffic.odds.shape[1:]
    rows = batch * (num_drafts + 1)
    ms = max(machine.ms(rows, context_of(batch)) + machine.draft(batch), machine.host[True])
    return (batch + traffic.survival[first:].sum(axis=(1, 2)).mean()) / ms


class Clock:
    """Seconds, of which one look at it takes as many as a decision does here."""

    def __init__(self, seconds: float = 0.0003):
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def make(machine: Machine, batch: int, num_drafts: int = 7, clock=None, **costs) -> Speculation:
    return Speculation(
        num_drafts=num_drafts, max_seqs=batch, costs=machine.costs(**costs), max_rows=4096,
        clock=clock or Clock(),
    )  # fmt: skip


def rate_of_adaptive(
    machine: Machine, traffic: Traffic, speculation: Speculation, first: int, *, seed: int = 1
) -> float:
    """Tokens that can be expected a millisecond, from step `first` on."""
    steps, batch, num_drafts = traffic.odds.shape
    rng, slots, context = np.random.default_rng(seed), list(range(batch)), context_of(batch)
    accepts = rng.random(traffic.odds.shape) < traffic.chance
    ready, tokens, time = False, 0.0, 0.0
    for step in range(steps):
        drafts = [num_drafts if ready else 0] * batch
        decision = speculation.choose(Load(slots, drafts, batch, context))
        kept_B = np.zeros(batch, dtype=np.int64)
        if ready:
            live_BN = speculation.acceptance.survival(traffic.odds[step])
            kept_B = split(torch.from_numpy(live_BN), torch.tensor(drafts), decision.budget).numpy()
            assert kept_B.sum() == decision.budget
        rows = batch + int(kept_B.sum())
        kind = StepKind.DRAFTED if ready or decision.drafts else StepKind.PLAIN
        ms = machine.ms(rows, context, kind)
        draft_ms = machine.draft(batch) if decision.drafts else None
        speculation.timed(
            StepTimes(
                kind,
                machine.timed(ms, rng),
                rows,
                context,
                None if draft_ms is None else machine.timed(draft_ms, rng),
                batch,
            )  # fmt: skip
        )
        ms = max(ms + (draft_ms or 0.0), machine.host[kind is StepKind.DRAFTED])
        if machine.host[True] and decision.drafts == (kind is StepKind.DRAFTED):
            host_ms = machine.timed(machine.host[decision.drafts], rng)
            speculation.hosted(HostTime(decision.drafts, batch, host_ms, overlaps=True))
        if step >= first:
            kept_BN = np.arange(num_drafts) < kept_B[:, None]
            tokens += batch + float(traffic.survival[step][kept_BN].sum())
            time += ms
        if ready:
            accepted_B = np.minimum(accepts[step].cumprod(axis=-1).sum(axis=-1), kept_B)
            speculation.settled(traffic.odds[step], kept_B.tolist(), accepted_B.tolist())
        # What a pass tells is known only when the step behind the next is planned.
        if ready and step:
            speculation.drafted(slots, traffic.odds[step])
        ready = decision.drafts
    return tokens / time
