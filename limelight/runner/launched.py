"""Steps that may still run on the device, and what comes of them once they have."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from limelight.runner.logprobs import NOT_FINITE, is_finite
from limelight.runner.sampler import NOT_NUMBERS, Run
from limelight.steps import Grant, Sampled, StepPlan, StepResult, StepTimes
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


def on_its_way(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the host, there once what was launched before it has run."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


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
    odds_PN: torch.Tensor | None = None  # of new drafts, for those of `order` that sample
    times: "Stopwatch | None" = None
    done: torch.cuda.Event | None = None

    def end(self) -> "Launched":
        """Nothing more is launched: what the device made is on its way to the host."""
        self.judged = None if self.judged is None else self.judged.on_its_way()
        self.odds_PN = None if self.odds_PN is None else on_its_way(self.odds_PN)
        waits = (self.judged, self.odds_PN, self.times) != (None, None, None)
        if waits and self.device.type == "cuda":
            self.done = torch.cuda.Event()
            self.done.record()
        return self

    def result(self) -> StepResult:
        """One `Sampled` for each grant, in the plan's order."""
        with device_faults(self.device):
            if self.done is not None:
                self.done.synchronize()
        sampling = [grant.slot for grant in self.order if grant.samples]
        if self.judged is not None:
            runs = zip(self.order, self.judged.runs(len(self.order)), strict=True)
            self.runs = {grant.slot: run for grant, run in runs if grant.samples}
        odds = [None] * len(sampling) if self.odds_PN is None else self.odds_PN.tolist()
        odds_of = dict(zip(sampling, odds, strict=True))
        sampled = [self._sampled(grant, odds_of.get(grant.slot)) for grant in self.plan.grants]
        return StepResult(sampled, None if self.times is None else self.times.read())

    def _sampled(self, grant: Grant, odds: list[float] | None) -> Sampled:
        run = self.runs.get(grant.slot) or Run([])
        of_prompt = self.prompt_logprobs.get(grant.slot)
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
            odds=odds,
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
