"""When the server takes requests, and how it ends: drained after a signal, or with its engine."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from limelight.engine.client import Served
from limelight.metrics import Metrics
from limelight.server.generation import Generation
from limelight.server.http import Refused
from limelight.server.protocol import BoundedProtocol

logger = logging.getLogger(__name__)

# Long enough for probes to see that the engine is dead, short enough for a quick restart.
SECONDS_AFTER_DEATH = 10.0
SECONDS_TO_TELL = 1.0
SECONDS_BETWEEN_LOOKS = 0.2
# Load balancers keep connections for 600 s at most, and lose a request on one that closes first.
SECONDS_IDLE = 620


class Lifecycle:
    """Which requests are open, and whether more may come.

    `draining` refuses new ones; `end` ends those that are open.
    """

    def __init__(self, client: Served, metrics: Metrics):
        self.client = client
        self.metrics = metrics
        self.draining = False
        self.ended = False
        self.num_open = 0
        self.generations: set[Generation] = set()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        status, takes = self.client.status, self.client.state.refusal is None
        return status.phase == "ready" and status.healthy and takes and not self.draining

    def admit(self):
        """`Refused` (503) unless requests are taken; a stuck engine may come back, so it counts."""
        phase = self.client.status.phase
        if self.draining:
            reason, text, after = "draining", "the server is shutting down", 1.0
        elif phase == "dead":
            reason, text, after = "dead", "the engine has died", SECONDS_AFTER_DEATH
        elif phase != "ready":
            reason, text, after = "loading", f"the model is not ready yet: {phase}", 5.0
        else:
            return
        self.metrics.rejected(reason).inc()
        raise Refused(503, text, code=f"server_{reason}", retry_after=int(after))

    def admit_generation(self):
        """`Refused` (503) while the engine sleeps, is paused, or has no whole weights."""
        if (why := self.client.state.refusal) is not None:
            self.metrics.rejected("paused").inc()
            raise Refused(503, why, code="engine_paused", retry_after=1)

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Admit a request and count it as open for the length of the block."""
        self.admit()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        """`end` reaches this generation for the length of the block."""
        if self.ended:
            raise _ending()
        self.generations.add(generation)
        try:
            yield
        finally:
            self.generations.discard(generation)

    def end(self):
        """End all that runs, each with an error to its client."""
        self.ended = True
        for generation in self.generations:
            generation.fail(_ending())

    async def drain(self, seconds: float):
        """Take no more, wait until no request is open, and end what is left after `seconds`."""
        self.draining = True
        logger.info("shutting down: %d open requests have %g s to end", self.num_open, seconds)
        await self._wait_for(lambda: self.ended or not self.num_open, seconds)
        if self.num_open:
            logger.warning("ending %d requests that have not ended by themselves", self.num_open)
            self.end()
            await self._wait_for(lambda: not self.num_open, SECONDS_TO_TELL)

    async def _wait_for(self, condition: Callable[[], bool], seconds: float):
        until = time.monotonic() + seconds
        while not condition() and time.monotonic() < until:
            await asyncio.sleep(0.02)


def _ending() -> Refused:
    return Refused(503, "the server is shutting down", code="server_draining", retry_after=1)


class Life:
    """The server process from its first request to its exit code."""

    def __init__(
        self,
        client: Served,
        lifecycle: Lifecycle,
        *,
        seconds_to_drain: float,
        seconds_after_death: float | None = None,
    ):
        self.client = client
        self.lifecycle = lifecycle
        self.seconds_to_drain = seconds_to_drain
        after = SECONDS_AFTER_DEATH if seconds_after_death is None else seconds_after_death
        self.seconds_after_death = after
        self.stopping = asyncio.Event()

    async def serve(self, app: ASGIApp, sock: socket.socket, example: str) -> int:
        """Answer on `sock` while the engine starts, works and ends; then the exit code."""
        server = uvicorn.Server(
            uvicorn.Config(
                app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None,
                log_level="warning", access_log=False, server_header=False,
                timeout_graceful_shutdown=2, timeout_keep_alive=SECONDS_IDLE,
            )
        )  # fmt: skip
        loop = asyncio.get_running_loop()

        def on_signal(sig: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.stop)

        # uvicorn would stop listening at once, but a draining server still has to say no.
        server.handle_exit = on_signal  # type: ignore[method-assign]
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await self.client.start()
            return await self._until_over(example)
        finally:
            server.should_exit = True
            await serving
            await self.client.close()

    def stop(self):
        """A signal: drain at the first one, end everything at the second."""
        if self.stopping.is_set():
            self.lifecycle.end()
        self.stopping.set()

    async def _until_over(self, example: str) -> int:
        announced = False
        while not self.stopping.is_set():
            status = self.client.status
            if status.phase == "dead":
                return await self._mourn(status.detail, announced)
            if status.phase == "ready" and not announced:
                announced = True
                print(f"limelight: ready; try\n  {example}", flush=True)
            await self._stopped_within(SECONDS_BETWEEN_LOOKS)
        await self.lifecycle.drain(self.seconds_to_drain)
        # Whoever ends all because one rank has ended may be faster than the news of it.
        status = self.client.status
        return await self._mourn(status.detail, announced) if status.phase == "dead" else 0

    async def _mourn(self, detail: str, was_ready: bool) -> int:
        if was_ready:
            logger.error("the engine has died: %s", detail)
            await self._stopped_within(self.seconds_after_death)
        else:
            logger.error("the engine did not start: %s", detail)
        return 1

    async def _stopped_within(self, seconds: float):
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
