"""The engine's process: takes commands from a socket, steps, and sends outputs back.

Messages are msgpack of the dataclasses in `types.py`, checked against their types on arrival; the
sockets are files in a folder that only this user can enter. The config comes over standard input,
and when the parent goes, its end of that closes, and this process ends too.
"""

import gc
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import zmq

from limelight.config import EngineConfig
from limelight.engine.peers import Circle
from limelight.orders import Asked, EngineState, Reply
from limelight.parallel.torchrun import Torchrun
from limelight.stats import EngineStats, ModelInfo
from limelight.types import Output, Request

if TYPE_CHECKING:
    from limelight.engine.engine import Engine

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_BEATS = 1.0
SECONDS_TO_TELL = 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """From the client: requests to add, ids to abort, and orders."""

    add: list[Request] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """From the engine: a sign of life, and whatever there is to tell beside it."""

    phase: str
    percent: float = 100.0
    info: ModelInfo | None = None
    outputs: list[Output] = field(default_factory=list)
    stats: EngineStats | None = None
    state: EngineState | None = None
    replies: list[Reply] = field(default_factory=list)
    step_seconds: float = 0.0  # how long the step that now runs has been running
    fault: str | None = None  # why the engine ends; nothing comes after it


class Reporter:
    """Sends reports from any thread, and a sign of life every second."""

    def __init__(self, socket: "zmq.Socket[bytes]"):
        self.socket, self.lock = socket, threading.Lock()
        self.encoder = msgspec.msgpack.Encoder()
        self.phase, self.percent = "starting", 0.0
        self.step_started: float | None = None
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, report: Report) -> None:
        with self.lock:
            self.phase, self.percent = report.phase, report.percent
            self.socket.send(self.encoder.encode(report))

    def progress(self, phase: str, share: float) -> None:
        """A `Progress` listener; whole percents are enough."""
        percent = float(int(100 * share))
        if (phase, percent) != (self.phase, self.percent):
            self.send(Report(phase=phase, percent=percent))

    def end(self, fault: str) -> None:
        """Leave with these last words, whatever the engine is waiting for."""
        self.send(Report(phase="dead", fault=fault))
        time.sleep(SECONDS_TO_TELL)
        os._exit(1)

    def _beat(self) -> None:
        while True:
            time.sleep(SECONDS_BETWEEN_BEATS)
            started = self.step_started
            seconds = time.monotonic() - started if started is not None else 0.0
            with self.lock:
                beat = Report(phase=self.phase, percent=self.percent, step_seconds=seconds)
                self.socket.send(self.encoder.encode(beat))


def end_with_parent(folder: str) -> None:
    """Leave at once when the parent's end of standard input closes, however it ended."""

    def watch() -> None:
        while os.read(0, 4096):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def heard(commands: "zmq.Socket[bytes]", engine: "Engine", seconds: float) -> bool:
    """Whether there is a command; with nothing to do it waits for one, or for a step of others, but
    not longer than `seconds` where these are finite."""
    if engine.peers is None or engine.has_work or not seconds:
        wait = None if math.isinf(seconds) else math.ceil(1000 * seconds)
        return bool(commands.poll(0 if engine.has_work else wait))
    poller = zmq.Poller()
    poller.register(commands, zmq.POLLIN)
    poller.register(engine.peers.waker, zmq.POLLIN)
    if engine.peers.waker in dict(poller.poll()):
        engine.peers.drain()
    return bool(commands.poll(0))


def run(
    config: EngineConfig,
    circle: Circle | None,
    torchrun: Torchrun | None,
    commands: "zmq.Socket[bytes]",
    reporter: Reporter,
) -> None:
    """Start the engine, then serve commands until the process is ended."""
    from limelight.engine.startup import start_engine
    from limelight.progress import Progress

    started = start_engine(
        config, Progress(reporter.progress), on_loss=reporter.end, circle=circle, torchrun=torchrun
    )
    engine, control, decoder = started.engine, started.control, msgspec.msgpack.Decoder(Command)
    if engine.grammars is not None:
        engine.grammars.start()
    # What the start has made stays for good: a collection in a step need not walk through it.
    gc.collect()
    gc.freeze()
    reporter.send(Report(phase="ready", info=started.info, stats=engine.stats()))
    while True:
        outputs: list[Output] = []
        # Between steps, take all commands that are there; what has an end to tell waits for none.
        while heard(commands, engine, 0.0 if outputs else control.seconds_left):
            command = decoder.decode(commands.recv())
            for request in command.add:
                outputs += control.add(request)
            outputs += filter(None, map(engine.abort, command.abort))
            for asked in command.asked:
                outputs += control.take(asked)
            if command.asked:
                break
        control.expire()
        reporter.step_started = time.monotonic()
        outputs += engine.step()
        reporter.step_started = None
        replies = control.replies()
        reporter.send(
            Report(
                phase="ready", outputs=outputs, stats=engine.stats(),
                state=control.state, replies=replies,
            )
        )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Entry of the child: the folder of the sockets. On its input are three lines of JSON: the
    config, where to meet the engines that share its experts, and what torchrun has started."""
    (folder,) = arguments
    # The parent decides when to end, also when a terminal sends its interrupt to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config_json, circle_json, torchrun_json = (sys.stdin.buffer.readline() for _ in range(3))
    end_with_parent(folder)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine: %(message)s")
    context = zmq.Context()
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(f"ipc://{folder}/commands")
    reports.connect(f"ipc://{folder}/reports")
    reporter = Reporter(reports)
    try:
        config = msgspec.json.decode(config_json, type=EngineConfig)
        circle = msgspec.json.decode(circle_json, type=Circle | None)
        torchrun = msgspec.json.decode(torchrun_json, type=Torchrun | None)
        run(config, circle, torchrun, commands, reporter)
    except ValueError as error:
        if reporter.phase == "ready":  # so it is no user's mistake
            logger.exception("the engine failed")
        reporter.send(Report(phase="dead", fault=str(error)))
    except Exception as error:
        logger.exception("the engine failed")
        reporter.send(Report(phase="dead", fault=f"{type(error).__name__}: {error}"))
    context.destroy(linger=1000)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
