"""Steps that may still run on the device, and what comes of them once they have."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import torch

from limelight.ops.verify import NOTHING
from limelight.runner.graphs import lent
from limelight.runner.logprobs import NOT_FINITE, Told, is_finite
from limelight.runner.sampler import NOT_NUMBERS, Rules, Run, Sampler
from limelight.runner.transfers import on_its_way, sent
from limelight.steps import Drafted, Grant, Sampled, StepPlan, StepResult, StepTimes
from limelight.types import DeviceLost, TokenLogprobs


@contextmanager
def device_faults(device: torch.device) -> Iterator[None]:
    """Tell an error of one step from a device that does nothing any more: `DeviceLost`."""
    try:
        yield
    except RuntimeError as error:
        if device.type == "cuda":
            try:
                torch.zeros((), device=device).item()
            except RuntimeError:
                raise DeviceLost(str(error)) from error
        raise


@dataclass(frozen=True, slots=True)
class Judged:
    """What the device made of B sequences: tokens, best logits, and of drafts how many there were
    and how many stood. Rows behind the sequences are padding."""

    tokens_BQ: torch.Tensor
    best_B: torch.Tensor
    kept_B: torch.Tensor | None = None
    accepted_B: torch.Tensor | None = None

    def on_its_way(self) -> "Judged":
        """The same for the host, there once the step has run."""
        each = (self.kept_B, self.accepted_B)
        drafts = (None if x_B is None else on_its_way(x_B) for x_B in each)
        return Judged(on_its_way(self.tokens_BQ), on_its_way(self.best_B), *drafts)

    def runs(self, count: int) -> list[Run]:
        """Of the first sequences, once all is there."""
        drafts = [
            [0] * count if x_B is None else x_B[:count].tolist()
            for x_B in (self.kept_B, self.accepted_B)
        ]
        rows = (x[:count].tolist() for x in (self.tokens_BQ, self.best_B))
        return [_run(*row) for row in zip(*rows, *drafts, strict=True)]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows of logits of sequences with drafts begin, one for each draft and one behind;
    the first gives the token at `next_B`."""

    starts_B: torch.Tensor
    next_B: torch.Tensor
    kept_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves on the device: what was made of its logits, and those, which stay until
    the next graph runs.

    They are those of this rank. Row b is that of sequence b, or they are packed.
    """

    judged: Judged
    logits_RV: torch.Tensor
    packed: PackedRows | None = None

    def lent(self) -> "Outcome":
        """The same with logits in memory that another graph may use after this one."""
        return replace(self, logits_RV=lent(self.logits_RV))

    def logprobs(self, rules: dict[int, Rules], sampler: Sampler) -> "StepLogprobs | None":
        """Those of the tokens of these sequences that tell any by their rules; None without."""
        asked = {b: rule for b, rule in rules.items() if rule.reports}
        if not asked:
            return None
        members_A = sent(list(asked), torch.int64, self.logits_RV.device)
        tokens_AQ = self.judged.tokens_BQ[members_A]
        places = tokens_AQ.shape[1]
        firsts_A = members_A if self.packed is None else self.packed.starts_B[members_A]
        rows_AQ = firsts_A[:, None] + torch.arange(places, device=members_A.device)
        rows_AQ = torch.where(tokens_AQ == NOTHING, -1, rows_AQ)
        each = [rule for rule in asked.values() for _ in range(places)]
        rows_X, tokens_X = rows_AQ.flatten(), tokens_AQ.flatten()
        told = sampler.tell(self.logits_RV, rows_X, tokens_X, each)
        return StepLogprobs(list(asked), places, told)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of the first tokens, `places` at most, of some of a step's sequences."""

    members: list[int]
    places: int
    told: Told

    def on_its_way(self) -> "StepLogprobs":
        return replace(self, told=self.told.on_its_way())

    def join(self, runs: list[Run]) -> None:
        """Give the runs of all sequences of the step what is told of theirs, once it is there."""
        firsts = {b: a * self.places for a, b in enumerate(self.members)}
        at = [first + i for b, first in firsts.items() for i in range(len(runs[b].token_ids))]
        ids = [token_id for b in firsts for token_id in runs[b].token_ids]
        reports = iter(self.told.reports(at, ids))
        for b in firsts:
            runs[b].tell(list(islice(reports, len(runs[b].token_ids))))


def _run(tokens: list[int], best: float, kept: int, accepted: int) -> Run:
    """Without the last token if its logits are no numbers."""
    if best != best:
        return Run(tokens[:accepted], kept, accepted, error=NOT_NUMBERS)
    return Run(tokens[: accepted + 1], kept, accepted)


@dataclass(slots=True)
class Launched:
    """A step that may still run on the device; `result` waits for it."""

    plan: StepPlan
    order: list[Grant]  # of the sequences, as they lie in `judged`
    device: torch.device
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by slot
    runs: dict[int, Run] = field(default_factory=dict)  # by slot, where the host chose
    judged: Judged | None = None  # where the device did
    logprobs: StepLogprobs | None = None  # of its tokens
    odds_PN: torch.Tensor | None = None  # of new drafts, for those of `order` that sample
    times: "Stopwatch | None" = None
    done: torch.cuda.Event | None = None

    def end(self) -> "Launched":
        """Nothing more is launched: what the device made is on its way to the host."""
        self.judged = None if self.judged is None else self.judged.on_its_way()
        self.logprobs = None if self.logprobs is None else self.logprobs.on_its_way()
        self.odds_PN = None if self.odds_PN is None else on_its_way(self.odds_PN)
        waits = (self.judged, self.odds_PN, self.times) != (None, None, None)
        if waits and self.device.type == "cuda":
            self.done = torch.cuda.Event()
            self.done.record()
        return self

    def result(self) -> StepResult:
        """One `Sampled` for each grant, in the plan's order."""
        waited_ms = 0.0
        with device_faults(self.device):
            if self.done is not None:
                began = time.perf_counter()
                self.done.synchronize()
                waited_ms = 1e3 * (time.perf_counter() - began)
        if self.judged is not None:
            made = self.judged.runs(len(self.order))
            if self.logprobs is not None:
                self.logprobs.join(made)
            runs = zip(self.order, made, strict=True)
            self.runs = {grant.slot: run for grant, run in runs if grant.samples} | self.runs
        drafted = None
        if self.odds_PN is not None:
            sampling = [grant.slot for grant in self.order if grant.samples]
            # Whoever learns from them keeps them for many steps, and as long as pinned memory is
            # kept other has to be pinned for the next one, which takes longer than a small step.
            drafted = Drafted(sampling, self.odds_PN.numpy().copy())
        sampled = [self._sampled(grant) for grant in self.plan.grants]
        times = None if self.times is None else self.times.read()
        return StepResult(sampled, drafted, times, waited_ms)

    def _sampled(self, grant: Grant) -> Sampled:
        run = self.runs.get(grant.slot) or Run([])
        of_prompt = self.prompt_logprobs.get(grant.slot) if self.prompt_logprobs else None
        if of_prompt is not None and not all(map(is_finite, of_prompt)):
            run = Run([], error=NOT_FINITE)
        return Sampled(
            slot=grant.slot,
            token_ids=run.token_ids,
            logprobs=run.logprobs or None,
            prompt_logprobs=of_prompt,
            error=run.error,
            refused=run.refused,
            is_whole=run.is_whole,
            num_verified=run.verified,
            num_accepted=run.accepted,
        )


class Stopwatch:
    """Times the two parts of a step where they run."""

    def __init__(self, device: torch.device, plan: StepPlan, *, rows: int):
        self.on_gpu = device.type == "cuda"
        self.kind, self.context = plan.kind, plan.num_read
        self.rows, self.sequences = rows, 0
        self.marks: list[float | torch.cuda.Event] = []
        self.mark()

    def drafted(self, sequences: int) -> None:
        """The end of a second part, which drafts for so many."""
        self.sequences = sequences
        self.mark()

    def mark(self) -> None:
        """The end of one part, and the beginning of the next."""
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def read(self) -> StepTimes:
        """Once all of it has run."""
        parts = [
            first.elapsed_time(last)
            if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event)
            else 1000 * (last - first)  # type: ignore[operator]
            for first, last in pairwise(self.marks)
        ]
        return StepTimes(
            kind=self.kind,
            verify_ms=parts[0],
            rows=self.rows,
            context=self.context,
            draft_ms=parts[1] if self.sequences else None,
            sequences=self.sequences,
        )
