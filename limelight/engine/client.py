"""The engine seen from an asyncio process: the only file that knows there are two."""

import asyncio
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from limelight.config import EngineConfig
from limelight.engine.peers import Circle
from limelight.engine.process import Command, Report
from limelight.orders import Asked, EngineState, Order, Reply
from limelight.parallel.torchrun import Torchrun
from limelight.stats import EngineStats, ModelInfo
from limelight.types import Output, Request

logger = logging.getLogger(__name__)
# A sign of life comes every second; a busy machine may delay some.
SECONDS_OF_SILENCE = 10.0
SECONDS_OF_STEP = 120.0
SECONDS_TO_END = 5.0
MILLISECONDS_OF_LAST_WORDS = 200
NOTHING: Mapping[str, str] = {}
PROGRAM = (sys.executable, "-P", "-m", "limelight.engine.process")


class EngineDead(RuntimeError):
    """The engine has ended; the text is its own, or says how it ended."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine is: `healthy` is False once it is dead, silent, or stuck in a step."""

    phase: str
    percent: float
    healthy: bool
    detail: str


class OrderFailed(RuntimeError):
    """An order was not carried out; `refused` if there was something wrong with the order."""

    def __init__(self, text: str, *, refused: bool):
        super().__init__(text)
        self.refused = refused


class AdapterLost(OrderFailed):
    """A new version of an adapter came to some engines only, so that now none has the adapter."""

    def __init__(self, text: str):
        super().__init__(text, refused=False)


class Served(Protocol):
    """What a server needs of its engine, or of all of them; `stats` are those of each."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def stats(self) -> Sequence[EngineStats]: ...
    @property
    def status(self) -> EngineStatus: ...
    @property
    def state(self) -> EngineState: ...
    async def order(self, order: Order) -> list[dict[str, object]]: ...
    async def start(self) -> None: ...
    def submit(self, request: Request) -> AsyncGenerator[Output, None]: ...
    def abort(self, request_id: str) -> None: ...
    async def close(self) -> None: ...


class EngineClient:
    """Starts an engine process, sends it requests and hands out its outputs."""

    def __init__(
        self,
        config: EngineConfig,
        env: Mapping[str, str] = NOTHING,
        circle: Circle | None = None,
        torchrun: Torchrun | None = None,
    ):
        """`env` is what the process has in its environment beside what this one has, `circle` where
        it meets the engines that share its experts, `torchrun` what has started its other ranks."""
        self.config, self.env, self.circle, self.torchrun = config, env, circle, torchrun
        self.stats, self.state = EngineStats(), EngineState()
        self._info: ModelInfo | None = None
        self._ready = asyncio.Event()
        self._fault: str | None = None
        self._report = Report(phase="starting", percent=0.0)
        self._last_beat = time.monotonic()
        self._queues: dict[str, asyncio.Queue[Output | EngineDead]] = {}
        self._orders: dict[int, asyncio.Future[Reply]] = {}
        self._order_ids = itertools.count()
        self._folder = Path(tempfile.mkdtemp(prefix="limelight-"))
        self._context = zmq.asyncio.Context()
        # What a dead engine has not read must not hold up the end of this process.
        self._context.setsockopt(zmq.LINGER, 0)
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        self._encoder = msgspec.msgpack.Encoder()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_loaded(self) -> bool:
        """Whether the model is there to be asked about."""
        return self._info is not None

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "the engine is not ready yet"
        return self._info

    @property
    def status(self) -> EngineStatus:
        report, detail = self._report, ""
        if self._fault is not None:
            return EngineStatus("dead", 100.0, False, self._fault)
        silence = time.monotonic() - self._last_beat
        if silence > SECONDS_OF_SILENCE:
            detail = f"no sign of life from the engine for {silence:.0f} s"
        elif report.step_seconds > SECONDS_OF_STEP:
            detail = f"a step has been running for {report.step_seconds:.0f} s"
        return EngineStatus(report.phase, report.percent, not detail, detail)

    async def start(self) -> None:
        """Spawn the process; it loads the model by itself."""
        self._commands.bind(f"ipc://{self._folder}/commands")
        self._reports.bind(f"ipc://{self._folder}/reports")
        self._process = await asyncio.create_subprocess_exec(
            *PROGRAM, str(self._folder), stdin=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, **self.env},
        )  # fmt: skip
        assert self._process.stdin is not None
        # Not among the arguments, which every user of the machine can read.
        for line in (self.config, self.circle, self.torchrun):
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")
        if self._fault is not None:
            self._process.kill()
            await self._process.wait()
            raise EngineDead(self._fault)
        self._last_beat = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def wait_ready(self) -> ModelInfo:
        """Wait until requests are taken; `EngineDead` with the engine's own words if it fails."""
        await self._ready.wait()
        if self._fault is not None:
            raise EngineDead(self._fault)
        return self.info

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The outputs of a request, the last with its finish reason; leaving early aborts it.

        Raises `ValueError` for an id in use.
        """
        if self._fault is not None:
            raise EngineDead(self._fault)
        if request.id in self._queues:
            raise ValueError(f"request {request.id!r} is already being served")
        queue: asyncio.Queue[Output | EngineDead] = asyncio.Queue()
        self._queues[request.id] = queue
        finished = False
        try:
            self._send(Command(add=[request]))
            while not finished:
                output = await queue.get()
                if isinstance(output, EngineDead):
                    finished = True
                    raise output
                finished = output.finish_reason is not None
                yield output
        finally:
            self._queues.pop(request.id, None)
            if not finished:
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """End a request; its iterator, if anyone still listens, yields a last output."""
        if self._fault is None:
            self._send(Command(abort=[request_id]))

    async def order(self, order: Order) -> list[dict[str, object]]:
        """Have an order carried out; its result. Raises `OrderFailed`, `EngineDead`."""
        if self._fault is not None:
            raise EngineDead(self._fault)
        id = next(self._order_ids)
        future = self._orders[id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Command(asked=[Asked(id, order)]))
            reply = await future
        finally:
            del self._orders[id]
        if (fault := reply.refused or reply.failed) is not None:
            raise OrderFailed(fault, refused=reply.refused is not None)
        return [reply.result]

    def tell(self, order: Order) -> None:
        """Have an order carried out once the engine has started; nobody hears what came of it."""
        self._send(Command(asked=[Asked(next(self._order_ids), order)]))

    async def close(self) -> None:
        """End the process and everything that belongs to it."""
        self._die("the engine was closed")
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), SECONDS_TO_END)
            except TimeoutError:
                process.kill()
                await process.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, command: Command) -> None:
        # Not awaited: the socket keeps in order what cannot go yet; a dead engine takes nothing.
        self._commands.send(self._encoder.encode(command))

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Report)
        while True:
            try:
                report = decoder.decode(await self._reports.recv())
            except msgspec.DecodeError as error:
                logger.warning("ignoring a message that is not a report: %s", error)
                continue
            self._last_beat, self._report = time.monotonic(), report
            self.stats, self.state = report.stats or self.stats, report.state or self.state
            if report.info is not None:
                self._info = report.info
                self._ready.set()
            for output in report.outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
            for reply in report.replies:
                if reply.id in self._orders and not self._orders[reply.id].done():
                    self._orders[reply.id].set_result(reply)
            if report.fault is not None:
                self._die(report.fault)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        # Its own last words, which may still be on the way, tell more than its exit code.
        while await self._reports.poll(MILLISECONDS_OF_LAST_WORDS):
            await asyncio.sleep(0)
        self._die(f"the engine process ended with {_how(code)}")

    def _die(self, fault: str) -> None:
        """From now on everyone who waits or comes gets this fault; the first one stays."""
        if self._fault is not None:
            return
        self._fault = fault
        self._ready.set()
        for queue in self._queues.values():
            queue.put_nowait(EngineDead(fault))
        for order in self._orders.values():
            if not order.done():
                order.set_exception(EngineDead(fault))


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
