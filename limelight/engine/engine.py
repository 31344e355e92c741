"""The loop: schedule -> run -> settle. Knows no torch, no text and no process.

A request with a constraint waits outside the scheduler until its grammar is there.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from limelight.engine.adapters import Adapters
from limelight.engine.drafting import Drafting
from limelight.engine.expert_load import ExpertLoad
from limelight.engine.parts import Closing, Grammars, Joined, Launched, Runner
from limelight.engine.routing import Routing, Told
from limelight.engine.scheduler import Scheduler
from limelight.stats import EngineStats
from limelight.steps import Grant, Sampled, StepPlan
from limelight.types import (
    DeviceLost,
    FinishReason,
    LoRARequest,
    Output,
    Request,
    Sequence,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)
# What `server/preparing.py` and `engine/front.py` add to the id that a client knows.
OF_CLIENT = re.compile(r"(-[0-9a-f]{8}-[0-9]+)?(-[0-9]+)?$")
# With nothing to do but to wait for a grammar, a step takes no longer than this.
SECONDS_OF_WAITING = 0.005


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way, and the sequences that it computes, by slot."""

    plan: StepPlan
    sequences: dict[int, Sequence]
    launched: Launched


class Engine:
    """Takes requests, makes one step at a time, and tells what each step brought.

    With `overlap` a step is planned and started before the one before is settled, so that the
    device does not wait: what `step` tells is then one step behind.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        eos_token_ids: list[int],
        overlap: bool = False,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
        ranks: Closing | None = None,
        peers: Joined | None = None,
        expert_load: ExpertLoad | None = None,
        routing: Routing | None = None,
        adapters: Adapters | None = None,
    ):
        self.scheduler, self.runner, self.overlap = scheduler, runner, overlap
        self.grammars, self.drafting, self.ranks, self.peers = grammars, drafting, ranks, peers
        self.expert_load, self.routing = expert_load, routing
        self.adapters = adapters or Adapters.none()
        # Last outputs, whose rows of routing are on their way: told a step later.
        self.late: list[tuple[Output, Told]] = []
        self.refusals: list[Output] = []  # of requests that came for an adapter that is not there
        self.compiling: dict[str, Request] = {}  # those that wait for their grammar
        self.under_way: Step | None = None
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.steps = self.step_tokens = 0
        self.held = False  # no step is begun; see engine/control.py
        self.weight_version = "0"

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything on."""
        runs = self.scheduler.has_work and not self.held
        waits = self.compiling or self.late or self.refusals
        runs = runs or self.under_way is not None or bool(waits)
        return runs or self.is_called

    @property
    def has_requests(self) -> bool:
        """Whether some request has not been told its end, be it held or not."""
        told_later = self.late or self.refusals or self.under_way is not None
        return self.scheduler.has_work or bool(self.compiling or told_later)

    @property
    def is_called(self) -> bool:
        """Whether another engine waits for this one to make a step."""
        return self.peers is not None and self.peers.called

    def add(self, request: Request) -> None:
        """Queue a request; it must fit the model's length, which `make_requests` sees to."""
        if request.adapter_id and not self._enter(request):
            return
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs[request.id] = [None]
        if request.constraint is None:
            self._queue(request)
            return
        if self.grammars is None:
            raise ValueError(f"request {request.id!r} has a constraint, which nobody compiles here")
        self.compiling[request.id] = request
        self.grammars.ask(request)

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Read an adapter, between two steps; `RequestError`, and nothing has changed."""
        version = self.adapters.load(adapter)
        self.scheduler.renew(adapter.lora_int_id, version)

    def _enter(self, request: Request) -> bool:
        """Make sure that a request's adapter is there, or have the next step tell that it is not"""
        try:
            self.adapters.enter(request.id, request.adapter_id)
        except ValueError as error:
            self.refusals.append(self._without_answer(request, error=None, refused=str(error)))
            return False
        except DeviceLost:
            raise
        except Exception as error:
            logger.error("an adapter could not be read", exc_info=error)
            self.refusals.append(self._without_answer(request, error=str(error), refused=None))
            return False
        return True

    def _queue(self, request: Request) -> None:
        version = self.adapters.version(request.adapter_id)
        self.scheduler.add(Sequence(request, adapter_version=version))

    def abort(self, request_id: str) -> Output | None:
        """Forget a request at once; its last output, or None if it is not here any more."""
        told = self._routed_so_far(request_id)
        compiling = self.compiling.pop(request_id, None)
        if compiling is None and self.scheduler.abort(request_id) is None:
            return None
        self._forget(request_id)
        return Output(
            request_id=request_id,
            token_ids=[],
            finish_reason="abort",
            routed_experts=None if told is None else told.result(),
        )

    def _routed_so_far(self, request_id: str) -> Told | None:
        """The rows of a request that is to be forgotten, if it has made a token."""
        sequence = self.scheduler.find(request_id)
        if self.routing is None or sequence is None or not sequence.output_token_ids:
            return None
        return self.routing.take(sequence)

    def abort_all(self, ids: list[str] | None = None) -> list[Output]:
        """End all requests, or those of which a client has these ids; the last output of each."""
        known = [*self.scheduler.request_ids, *self.compiling]
        if ids is not None:
            names = frozenset(ids)
            known = [id for id in known if id in names or OF_CLIENT.sub("", id) in names]
        return [output for id in known if (output := self.abort(id)) is not None]

    def stats(self) -> EngineStats:
        """The state after a step; who waits for a grammar waits."""
        stats = self.scheduler.stats()
        stats["waiting"] += len(self.compiling)
        stats["waiting_tokens"] += sum(len(r.prompt_token_ids) for r in self.compiling.values())
        speculation = None if self.drafting is None else self.drafting.stats()
        expert_tokens: list[int] = []
        if self.expert_load is not None:
            expert_tokens = self.expert_load.look(self.steps, idle=not self.has_work)
        return EngineStats(
            **stats, steps=self.steps, step_tokens=self.step_tokens, speculation=speculation,
            expert_tokens=expert_tokens,
        )  # fmt: skip

    def close(self) -> None:
        """End what works beside the steps."""
        try:
            if self.expert_load is not None:
                self.expert_load.write()
            if self.grammars is not None:
                self.grammars.close()
        finally:
            for others in filter(None, (self.peers, self.ranks)):
                others.close()

    def step(self) -> list[Output]:
        """One step. If it fails, its sequences end with the error and the others go on.

        Raises `DeviceLost` when no later step could do better.
        """
        late, self.late = self.late, []
        outputs = self._make_step()
        return outputs + [replace(last, routed_experts=told.result()) for last, told in late]

    def _make_step(self) -> list[Output]:
        outputs, self.refusals = self.refusals, []
        outputs += self._take_grammars()
        if self.held and not self.is_called:
            return outputs + self.settle()
        # Whoever is held still lends its experts.
        plan = StepPlan() if self.held else self.scheduler.schedule()
        if self.routing is not None:
            self._follow(self.routing, plan)
        if self.drafting is not None and plan.grants:
            plan = self.drafting.decide(plan, overlaps=self.overlap)
        sequences = {grant.slot: self.scheduler.running[grant.slot] for grant in plan.grants}
        step = None
        if plan.grants or self.is_called:
            try:
                step = Step(plan, sequences, self.runner.launch(plan))
            except Exception as error:
                outputs += self._fail_all(sequences.values(), error)
                self.adapters.undo(plan.moves)
        if step is not None and plan.grants:
            self.steps += 1
            self.step_tokens += plan.num_tokens
            self.scheduler.advance(plan)
        if self.overlap:
            step, self.under_way = self.under_way, step
        return outputs + self._settle_all(step) if step is not None else outputs

    def _follow(self, routing: Routing, plan: StepPlan) -> None:
        """Keep the rows of who gave blocks back, before this plan writes into them."""
        for sequence, blocks, computed in self.scheduler.preempted:
            routing.keep(sequence, blocks, computed)
        for admission in plan.admissions:
            routing.go_on(self.scheduler.running[admission.slot])

    def settle(self) -> list[Output]:
        """Wait for the step under way, if there is one; what it brought."""
        step, self.under_way = self.under_way, None
        return [] if step is None else self._settle_all(step)

    def _take_grammars(self) -> list[Output]:
        """Queue the requests whose grammars are there by now; what is told to those without."""
        outputs: list[Output] = []
        if self.grammars is None or not self.compiling:
            return outputs
        idle = (self.held or not self.scheduler.has_work) and self.under_way is None
        for decided in self.grammars.decided(seconds=SECONDS_OF_WAITING if idle else 0.0):
            request = decided.request
            del self.compiling[request.id]
            if decided.refused is None and decided.error is None:
                self._queue(request)
                continue
            outputs.append(
                self._without_answer(request, error=decided.error, refused=decided.refused)
            )
        return outputs

    def _forget(self, request_id: str) -> None:
        """Let go of what is kept for a request while it lives."""
        self.prompt_logprobs.pop(request_id, None)
        self.adapters.leave(request_id)
        if self.routing is not None:
            self.routing.forget(request_id)
        if self.grammars is not None:
            self.grammars.forget(request_id)

    def _settle_all(self, step: Step) -> list[Output]:
        """Wait for a step; sequences that ended while it ran are passed by."""
        try:
            result = step.launched.result()
        except Exception as error:
            return self._fail_all(step.sequences.values(), error)
        outputs, settled = [], []
        for grant, sampled in zip(step.plan.grants, result.sampled, strict=True):
            sequence = step.sequences[grant.slot]
            if self.scheduler.holds(sequence):
                outputs.append(self._settle(sequence, grant, sampled))
                settled.append(sampled)
        if self.drafting is not None and step.plan.tells_of_drafts:
            running = self.scheduler.running
            going_on = {slot for slot, one in step.sequences.items() if running.get(slot) is one}
            self.drafting.learn(settled, going_on, result, overlaps=self.overlap)
        return [output for output in outputs if output is not None]

    def _fail_all(self, sequences: Iterable[Sequence], error: Exception) -> list[Output]:
        if isinstance(error, DeviceLost):
            raise error
        alive = [sequence for sequence in sequences if self.scheduler.holds(sequence)]
        logger.error("a step of %d sequences failed", len(alive), exc_info=error)
        return [self._fail(sequence, error=str(error)) for sequence in alive]

    def _fail(
        self, sequence: Sequence, *, error: str | None = None, refused: str | None = None
    ) -> Output:
        if error is None:
            self.scheduler.finish(sequence)
        else:
            self.scheduler.fail(sequence)
        return self._without_answer(sequence.request, error=error, refused=refused)

    def _without_answer(
        self, request: Request, *, error: str | None, refused: str | None
    ) -> Output:
        self._forget(request.id)
        return Output(
            request_id=request.id,
            token_ids=[],
            finish_reason="error",
            error=error,
            refused=refused,
        )

    def _settle(self, sequence: Sequence, grant: Grant, sampled: Sampled) -> Output | None:
        """Append what one sequence was given; None when there is nothing to tell yet."""
        request = sequence.request
        if sampled.prompt_logprobs and request.id in self.prompt_logprobs:
            # After a preemption the prompt is computed again; each position is told once.
            known = self.prompt_logprobs[request.id]
            known += sampled.prompt_logprobs[len(known) - (grant.start + 1) :]
        failed = sampled.error is not None or sampled.refused is not None
        if not grant.samples and not failed:
            return None
        first = not sequence.output_token_ids
        count, finish_reason, stop_reason = self._append(sequence, sampled.token_ids)
        # What stands before the fault may end the answer.
        if failed and (finish_reason is None or not sampled.token_ids):
            return self._fail(sequence, error=sampled.error, refused=sampled.refused)
        if sampled.is_whole and finish_reason is None:
            finish_reason = "stop"
        self.scheduler.settle(sequence, grant, sampled.num_accepted)
        prompt_logprobs = self.prompt_logprobs.pop(request.id, None) if first else None
        started = sequence.first_scheduled or request.arrival
        told, sequence.weight_version = sequence.weight_version, self.weight_version
        output = Output(
            request_id=request.id,
            token_ids=sampled.token_ids[:count],
            logprobs=sampled.logprobs and sampled.logprobs[:count],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached=sequence.num_cached,
            queued_seconds=max(0.0, started - request.arrival),
            weight_version=None if told == self.weight_version else self.weight_version,
        )
        return output if finish_reason is None else self._finish(sequence, output)

    def _finish(self, sequence: Sequence, output: Output) -> Output | None:
        """Take out a sequence that has ended; with rows of routing its last output comes later."""
        told = None if self.routing is None else self.routing.take(sequence)
        self.scheduler.finish(sequence)
        self._forget(sequence.request.id)
        if told is None:
            return output
        self.late.append((output, told))
        return None

    def _append(
        self, sequence: Sequence, token_ids: list[int]
    ) -> tuple[int, FinishReason | None, int | None]:
        """How many of these tokens the sequence takes, whether it then ends, and by which stop."""
        if sequence.request.max_tokens == 0:  # only the prompt was asked about
            return 0, "length", None
        params, made = sequence.request.params, sequence.output_token_ids
        left = sequence.request.max_tokens - len(made)
        for count, token_id in enumerate(token_ids, 1):
            made.append(token_id)
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return count, "stop", None
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return count, "stop", token_id
            if count >= left:
                return count, "length", None
        return len(token_ids), None, None
