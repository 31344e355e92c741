"""Steps that may still run on the device, and what comes of them once they have."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from limelight.runner.sampler import NOT_NUMBERS, Choice
from limelight.runner.verifier import Run
from limelight.types import (
    DeviceLost,
    Grant,
    Sampled,
    StepPlan,
    StepResult,
    StepTimes,
    TokenLogprobs,
)


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


def end_of_launch(device: torch.device) -> torch.cuda.Event | None:
    """When all that was launched up to here has run; None if it has."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(slots=True)
class Launched:
    """A step that may still run on the device; `result` waits for it."""

    grants: list[Grant]
    slots: list[int]  # of the rows that sample, in their order
    device: torch.device
    choices: list[Choice] | None = None  # of these rows, where the host chose
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by slot
    tokens_R: torch.Tensor | None = None  # where the device did, on the host once `done`
    best_R: torch.Tensor | None = None
    times: "Stopwatch | None" = None
    done: torch.cuda.Event | None = None

    def fetch(self, tokens_R: torch.Tensor, best_R: torch.Tensor) -> "Launched":
        """Send what the device chose on its way to the host; rows beyond `slots` are padding."""
        self.tokens_R, self.best_R = (on_its_way(x[: len(self.slots)]) for x in (tokens_R, best_R))
        self.done = end_of_launch(self.device)
        return self

    def result(self) -> StepResult:
        """One `Sampled` for each grant, in the plan's order."""
        with device_faults(self.device):
            if self.done is not None:
                self.done.synchronize()
        choices = dict(zip(self.slots, self._choices(), strict=True))
        sampled = [self._sampled(grant, choices.get(grant.slot)) for grant in self.grants]
        return StepResult(sampled, None if self.times is None else self.times.read())

    def _choices(self) -> list[Choice]:
        if self.choices is not None:
            return self.choices
        if self.tokens_R is None or self.best_R is None:
            return []
        return [
            Choice(token, error=None if best == best else NOT_NUMBERS)
            for token, best in zip(self.tokens_R.tolist(), self.best_R.tolist(), strict=True)
        ]

    def _sampled(self, grant: Grant, choice: Choice | None) -> Sampled:
        prompt_logprobs = self.prompt_logprobs.get(grant.slot)
        if choice is None:
            return Sampled(grant.slot, [], prompt_logprobs=prompt_logprobs)
        return Sampled(
            slot=grant.slot,
            token_ids=[choice.token_id] if choice.has_token else [],
            logprobs=[choice.logprobs] if choice.logprobs else None,
            prompt_logprobs=prompt_logprobs,
            error=choice.error,
            refused=choice.refused,
            is_whole=choice.is_whole,
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """What the device made of B sequences, on its way to the host once `done`."""

    tokens_BQ: torch.Tensor
    accepted_B: torch.Tensor
    kept_B: torch.Tensor
    best_B: torch.Tensor

    def on_its_way(self) -> "Judged":
        """The same for the host, there once the step has run."""
        parts = (self.tokens_BQ, self.accepted_B, self.kept_B, self.best_B)
        return Judged(*(on_its_way(part) for part in parts))


@dataclass(slots=True)
class DraftedLaunch:
    """A step with drafts that may still run on the device; `result` waits for it."""

    plan: StepPlan
    order: list[Grant]  # as the step's sequences lie
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)  # by slot, where the host chose
    judged: Judged | None = None
    odds_PN: torch.Tensor | None = None  # of those that sample, in order
    times: "Stopwatch | None" = None
    done: torch.cuda.Event | None = None

    def result(self) -> StepResult:
        """One `Sampled` for each grant, in the plan's order."""
        if self.done is not None:
            with device_faults(torch.device("cuda")):
                self.done.synchronize()
        runs = self.runs if self.judged is None else self._runs(self.judged)
        odds: dict[int, list[float]] = {}
        if self.odds_PN is not None:
            sampling = [grant.slot for grant in self.order if grant.samples]
            odds = dict(zip(sampling, self.odds_PN.tolist(), strict=True))
        sampled = [self._sampled(grant, runs.get(grant.slot), odds) for grant in self.plan.grants]
        return StepResult(sampled, None if self.times is None else self.times.read())

    def _runs(self, judged: Judged) -> dict[int, Run]:
        columns = (judged.tokens_BQ, judged.accepted_B, judged.kept_B, judged.best_B)
        rows = zip(self.order, *(column.tolist() for column in columns), strict=False)
        return {
            grant.slot: _run(tokens, accepted, kept, best)
            for grant, tokens, accepted, kept, best in rows
            if grant.samples
        }

    def _sampled(self, grant: Grant, run: Run | None, odds: dict[int, list[float]]) -> Sampled:
        prompt_logprobs = self.prompt_logprobs.get(grant.slot)
        if run is None:
            return Sampled(grant.slot, [], prompt_logprobs=prompt_logprobs)
        return Sampled(
            slot=grant.slot,
            token_ids=run.token_ids,
            logprobs=run.logprobs or None,
            prompt_logprobs=prompt_logprobs,
            error=run.error,
            refused=run.refused,
            is_whole=run.is_whole,
            num_verified=run.verified,
            num_accepted=run.accepted,
            odds=odds.get(grant.slot),
        )


def _run(tokens: list[int], accepted: int, kept: int, best: float) -> Run:
    """Of a sequence that the device judged; without the last token if its logits are no numbers."""
    if best != best:
        return Run(tokens[:accepted], verified=kept, accepted=accepted, error=NOT_NUMBERS)
    return Run(tokens[: accepted + 1], verified=kept, accepted=accepted)


class Stopwatch:
    """Times the two parts of a step where they run."""

    def __init__(self, device: torch.device, rows: int, context: int):
        self.on_gpu, self.rows, self.context, self.sequences = (
            device.type == "cuda",
            rows,
            context,
            0,
        )
        self.marks: list[float | torch.cuda.Event] = []
        self.mark()

    @classmethod
    def of_step(cls, grants: list[Grant], device: torch.device) -> "Stopwatch":
        """Started for a step without drafts."""
        rows = sum(grant.num_tokens for grant in grants)
        return cls(device, rows, sum(grant.start for grant in grants) + rows)

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
            verify_ms=parts[0],
            rows=self.rows,
            context=self.context,
            draft_ms=parts[1] if self.sequences else None,
            sequences=self.sequences,
        )
