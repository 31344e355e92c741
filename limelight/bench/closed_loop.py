"""Clients that each send a request and, once it is answered, at once the next: a steady load."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from limelight.bench.workload import Steps
from limelight.engine.engine import Engine
from limelight.stats import EngineStats
from limelight.steps import StepTimes
from limelight.types import Output, Request


@dataclass(slots=True)
class Asked:
    """One request: when it was sent, when its first and last tokens came (seconds), how many."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class ClosedLoop:
    """So many clients of an engine, and what came of their requests so far."""

    def __init__(self, engine: Steps, requests: Iterator[Request], clients: int):
        self.engine, self.requests = engine, requests
        self.open: dict[str, Asked] = {}
        self.done: list[Asked] = []
        self.tokens = 0
        for _ in range(clients):
            self._ask()
        self.first = set(self.open)

    @property
    def steady(self) -> bool:
        """Whether every client has had its first answer."""
        return not self.first

    def step(self) -> None:
        """One step of the engine; `ValueError` if a request fails."""
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            self._take(output, now)

    def close(self) -> None:
        """Give up what is open, and leave the engine idle."""
        for request_id in self.open:
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()

    def _ask(self) -> None:
        request = next(self.requests)
        self.open[request.id] = Asked(time.perf_counter())
        self.engine.add(request)

    def _take(self, output: Output, now: float) -> None:
        if output.finish_reason not in (None, "stop", "length"):
            raise ValueError(f"a request ended by {output.finish_reason}: {output.error}")
        asked = self.open[output.request_id]
        if output.token_ids:
            asked.first, asked.last = asked.first or now, now
            asked.tokens += len(output.token_ids)
            self.tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self.done.append(self.open.pop(output.request_id))
            self.first.discard(output.request_id)
            self._ask()


@dataclass(frozen=True, slots=True)
class Window:
    """What happened while a load was steady: requests that ended, seconds of each step, the parts
    of the steps that told them, and the engine's counters at both ends."""

    done: list[Asked]
    tokens: int
    seconds: list[float]
    before: EngineStats
    after: EngineStats
    times: list[StepTimes] = field(default_factory=list)


def watch(engine: Engine, requests: Iterator[Request], *, clients: int, count: int) -> Window:
    """Let so many clients ask, and look on from their second requests until `count` have ended."""
    loop = ClosedLoop(engine, requests, clients)
    # As in a server, no collection walks through what the start has made: that takes 0.1 s.
    gc.collect()
    gc.freeze()
    times: list[StepTimes] = []
    seconds: list[float] = []
    try:
        while not loop.steady:
            loop.step()
        loop.done.clear()
        before, tokens, last = engine.stats(), loop.tokens, time.perf_counter()
        while len(loop.done) < count:
            loop.step()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
            if engine.drafting is not None and engine.drafting.times is not None:
                times.append(engine.drafting.times)
                engine.drafting.times = None
        return Window(loop.done, loop.tokens - tokens, seconds, before, engine.stats(), times)
    finally:
        gc.unfreeze()
        loop.close()
