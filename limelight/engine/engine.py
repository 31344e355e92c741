"""The loop: schedule -> run -> settle. Knows no torch, no text and no process."""

import logging
from typing import Protocol

from limelight.engine.scheduler import Scheduler
from limelight.types import (
    EngineStats,
    FinishReason,
    Grant,
    Output,
    Request,
    Sampled,
    Sequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What executes a plan: `ModelRunner`, or a scripted one in tests."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class Engine:
    """Takes requests, makes one step at a time, and tells what each step brought."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, eos_token_ids: list[int]):
        self.scheduler, self.runner = scheduler, runner
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.steps = self.step_tokens = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request; it must fit the model's length, which `make_requests` sees to."""
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs[request.id] = [None]
        self.scheduler.add(Sequence(request))

    def abort(self, request_id: str) -> Output | None:
        """Forget a request at once; its last output, or None if it is not here any more."""
        if self.scheduler.abort(request_id) is None:
            return None
        self.prompt_logprobs.pop(request_id, None)
        return Output(request_id=request_id, token_ids=[], finish_reason="abort")

    def stats(self) -> EngineStats:
        return EngineStats(**self.scheduler.stats(), steps=self.steps, step_tokens=self.step_tokens)

    def step(self) -> list[Output]:
        """One step. If it fails, its sequences end with the error and the others go on."""
        plan = self.scheduler.schedule()
        if not plan.grants:
            return []
        running = {grant.slot: self.scheduler.running[grant.slot] for grant in plan.grants}
        try:
            result = self.runner.execute(plan)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(running))
            return [self._fail(sequence, str(error)) for sequence in running.values()]
        self.steps += 1
        self.step_tokens += plan.num_tokens
        self.scheduler.advance(plan)
        outputs = [
            self._settle(running[grant.slot], grant, sampled)
            for grant, sampled in zip(plan.grants, result.sampled, strict=True)
        ]
        return [output for output in outputs if output is not None]

    def _fail(self, sequence: Sequence, error: str) -> Output:
        self.scheduler.finish(sequence)
        request_id = sequence.request.id
        self.prompt_logprobs.pop(request_id, None)
        return Output(request_id=request_id, token_ids=[], finish_reason="error", error=error)

    def _settle(self, sequence: Sequence, grant: Grant, sampled: Sampled) -> Output | None:
        """Append what one sequence was given; None when there is nothing to tell yet."""
        request = sequence.request
        if sampled.prompt_logprobs and request.id in self.prompt_logprobs:
            # After a preemption the prompt is computed again; each position is told once.
            known = self.prompt_logprobs[request.id]
            known += sampled.prompt_logprobs[len(known) - (grant.start + 1) :]
        if sampled.error is not None:
            return self._fail(sequence, sampled.error)
        if not grant.samples:
            return None
        first = not sequence.output_token_ids
        sequence.output_token_ids += sampled.token_ids
        finish_reason, stop_reason = self._end(sequence)
        if finish_reason is not None:
            self.scheduler.finish(sequence)
        started = sequence.first_scheduled or request.arrival
        return Output(
            request_id=request.id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=self.prompt_logprobs.pop(request.id, None) if first else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached=sequence.num_cached,
            queued_seconds=max(0.0, started - request.arrival),
        )

    def _end(self, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
        """Whether the last token ends the sequence, and the stop token that did."""
        request, made = sequence.request, len(sequence.output_token_ids)
        params, last = request.params, sequence.output_token_ids[-1]
        if last in self.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if last in (params.stop_token_ids or ()):
            return "stop", last
        return ("length", None) if made >= request.max_tokens else (None, None)
