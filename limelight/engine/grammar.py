"""Constraints become grammars: tried in a process of their own, compiled in a thread, and kept.

The engine asks and goes on stepping; what is decided comes with one of its next steps.
"""

import hashlib
import importlib
import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from limelight.engine.grammar_worker import Frames, Trial, Verdict, Vocabulary, frame
from limelight.types import Request

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)
PROGRAM = (sys.executable, "-P", "-m", "limelight.engine.grammar_worker")
LONGEST_TAG = 2**20  # characters
BYTES_KEPT = 256 * 2**20
# A fault of a moment, such as a machine with no time, must not be one for good.
SECONDS_OF_REFUSAL = 60.0
MOST_REFUSALS = 1024
# More wait here, where they can still be forgotten.
MOST_TRIED = 10
Key = tuple[str, tuple[int, ...]]  # a tag, and the marks
Made: TypeAlias = "xgrammar.CompiledGrammar | Fault"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no grammar; whether what was asked for is to blame, now or for good."""

    reason: str
    is_users: bool = True
    for_good: bool = True

    def __str__(self) -> str:
        return f"the form that the answer must have cannot be enforced: {self.reason}"


@dataclass(frozen=True, slots=True)
class Decided:
    """A request whose grammar is there, or that cannot have one."""

    request: Request
    fault: Fault | None = None

    @property
    def refused(self) -> str | None:
        return str(self.fault) if self.fault is not None and self.fault.is_users else None

    @property
    def error(self) -> str | None:
        return str(self.fault) if self.fault is not None and not self.fault.is_users else None


@dataclass(slots=True)
class Kept:
    """Grammars and refusals that were made lately, the oldest first."""

    grammars: "OrderedDict[Key, xgrammar.CompiledGrammar]" = field(default_factory=OrderedDict)
    refusals: OrderedDict[bytes, tuple[Fault, float]] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def keep(self, key: Key, grammar: "xgrammar.CompiledGrammar") -> None:
        self.grammars[key] = grammar
        self.num_bytes += _size(key, grammar)
        while self.num_bytes > BYTES_KEPT and len(self.grammars) > 1:
            self.num_bytes -= _size(*self.grammars.popitem(last=False))

    def refuse(self, key: Key, fault: Fault) -> None:
        self.refusals[_digest(key)] = fault, time.monotonic() + SECONDS_OF_REFUSAL
        if len(self.refusals) > MOST_REFUSALS:
            self.refusals.popitem(last=False)

    def grammar(self, key: Key) -> "xgrammar.CompiledGrammar | None":
        if key in self.grammars:
            self.grammars.move_to_end(key)
        return self.grammars.get(key)

    def refusal(self, key: Key) -> Fault | None:
        fault, until = self.refusals.get(_digest(key), (None, 0.0))
        return fault if time.monotonic() < until else None


def _digest(key: Key) -> bytes:
    """What a refusal is known by: tags are long, and there may be many."""
    return hashlib.sha256(repr(key).encode()).digest()


def _size(key: Key, grammar: "xgrammar.CompiledGrammar") -> int:
    return len(key[0]) + int(grammar.memory_size_bytes)


class Grammars:
    """Compiles the constraints of requests, for the vocabulary that `read_vocabulary` gives.

    `of_request` has the grammars of those that were asked for and not forgotten yet. All methods
    are for one thread.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]):
        self.of_request: dict[str, xgrammar.CompiledGrammar] = {}
        self._kept = Kept()
        self._asked: dict[Key, list[Request]] = {}
        self._waiting: OrderedDict[Key, None] = OrderedDict()  # of these, to be tried yet
        self._turns = itertools.cycle((True, False))
        self._ready: list[Decided] = []
        self._compiled: queue.SimpleQueue[tuple[Key, Made]] = queue.SimpleQueue()
        self._compiling = Compiling(read_vocabulary, self._compiled.put)
        # A forgotten engine leaves no process behind either.
        weakref.finalize(self, self._compiling.close)

    def start(self) -> None:
        """Begin to get ready, so that the first constraint need not wait for it."""
        self._compiling.start()

    def ask(self, request: Request) -> None:
        """Have the grammar of a request made; `decided` tells when it is there."""
        constraint = request.constraint
        assert constraint is not None
        key = constraint.tag, tuple(sorted(set(constraint.marks)))
        if len(constraint.tag) > LONGEST_TAG:
            fault = Fault(f"it has more than {LONGEST_TAG} characters")
            self._ready.append(Decided(request, fault))
        elif (grammar := self._kept.grammar(key)) is not None:
            self.of_request[request.id] = grammar
            self._ready.append(Decided(request))
        elif (refusal := self._kept.refusal(key)) is not None:
            self._ready.append(Decided(request, refusal))
        else:
            if key not in self._asked:
                self._waiting[key] = None
            self._asked.setdefault(key, []).append(request)
            self._try_more()

    def decided(self, *, seconds: float = 0.0) -> list[Decided]:
        """What has been decided since the last time; wait at most so long for it."""
        while self._asked:
            self._try_more()
            try:
                wait = seconds > 0 and not self._ready
                key, made = (
                    self._compiled.get(timeout=seconds) if wait else (self._compiled.get_nowait())
                )
            except queue.Empty:
                break
            for request in self._settle(key, made):
                self._ready.append(Decided(request, made if isinstance(made, Fault) else None))
        ready, self._ready = self._ready, []
        return ready

    def _try_more(self) -> None:
        """Have some of those that wait tried: by turns the last and the first that came, so that
        none waits for all that came before it."""
        while self._waiting and len(self._asked) - len(self._waiting) < MOST_TRIED:
            key, _ = self._waiting.popitem(last=next(self._turns))
            self._compiling.put(key)

    def _settle(self, key: Key, made: Made) -> list[Request]:
        requests = self._asked.pop(key)
        if isinstance(made, Fault):
            if made.is_users and made.for_good:
                self._kept.refuse(key, made)
        else:
            self._kept.keep(key, made)
            self.of_request |= {request.id: made for request in requests}
        return requests

    def forget(self, request_id: str) -> None:
        """A request has ended, or is given up; its grammar is only kept if there is room."""
        self.of_request.pop(request_id, None)
        self._ready = [decided for decided in self._ready if decided.request.id != request_id]
        for key, requests in list(self._asked.items()):
            self._asked[key] = [request for request in requests if request.id != request_id]
            if not self._asked[key] and key in self._waiting:
                del self._asked[key], self._waiting[key]

    def close(self) -> None:
        """End the process and the threads."""
        self._compiling.close()


class Compiling:
    """The threads behind `Grammars`: one has tags tried, and one compiles those that did well."""

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        tell: Callable[[tuple[Key, Made]], None],
    ):
        self._read_vocabulary, self._tell = read_vocabulary, tell
        self._keys: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._trials: TrialProcess | None = None
        self._vocabulary: Vocabulary | None = None
        self._compilers: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def put(self, key: Key) -> None:
        self.start()
        self._keys.put(key)

    def close(self) -> None:
        if self._thread is not None:
            self._keys.put(None)
            if (trials := self._trials) is not None:
                trials.kill()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._process()
        except (OSError, ValueError) as error:
            # The first tag will find the same, and tell.
            logger.warning("constraints cannot be compiled yet: %s", error)
        while (key := self._keys.get()) is not None:
            try:
                self._process().send(key)
            except UnicodeEncodeError:
                self._tell((key, Fault("its text has half a surrogate pair")))
            except (OSError, ValueError) as error:
                logger.warning("a constraint could not be tried: %s", error)
                self._tell((key, Fault(str(error), is_users=False)))
        if self._trials is not None:
            self._trials.kill()

    def _process(self) -> "TrialProcess":
        """The process that tries tags; a new one if there is none any more."""
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        if self._trials is None or not self._trials.is_alive:
            self._trials = TrialProcess(self._decide)
            self._trials.begin(self._vocabulary)
        return self._trials

    def _decide(self, key: Key, fault: Fault | None) -> None:
        self._tell((key, fault or self._compile(key)))

    def _compile(self, key: Key) -> Made:
        tag, marks = key
        assert self._vocabulary is not None
        try:
            if marks not in self._compilers:
                self._compilers[marks] = self._vocabulary.compiler(list(marks))
            return self._compilers[marks].compile_structural_tag(tag)
        except Exception as error:  # the library raises whatever it meets
            logger.exception("a constraint compiles on trial and not here")
            return Fault(str(error), is_users=False)


class TrialProcess:
    """The process that tries tags, and a thread that tells what it says of each.

    If it ends on its own, what it was asked is refused.
    """

    def __init__(self, decide: Callable[[Key, Fault | None], None]):
        self._decide = decide
        self._ended = "the process that tries it ended"  # or why it did
        self._lock = threading.Lock()
        self._tried: dict[int, Key] = {}
        self._numbers = itertools.count()
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
        )
        threading.Thread(target=self._read, name="verdicts", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, vocabulary: Vocabulary) -> None:
        """Say first of all which tokens there are."""
        self._write(frame(vocabulary))

    def send(self, key: Key) -> None:
        """Have a tag tried; `OSError` if the process has ended, `ValueError` for half a letter."""
        number = next(self._numbers)
        data = frame(Trial(number, key[0], list(key[1])))
        with self._lock:
            self._tried[number] = key
        try:
            self._write(data)
        except OSError:
            # Unless the reading thread has seen it too, and has told.
            if self._take(number) is not None:
                raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        try:
            while view:
                view = view[self._process.stdin.write(view) or 0 :]
        except BrokenPipeError as error:
            raise OSError(self._ended) from error

    def _take(self, number: int) -> Key | None:
        with self._lock:
            return self._tried.pop(number, None)

    def _read(self) -> None:
        try:
            # It takes a second, and so does the start of the process.
            importlib.import_module("xgrammar")
        except ImportError as error:
            self._ended = f"xgrammar cannot be loaded: {error}"
            self._process.kill()
        assert self._process.stdout is not None
        frames = Frames()
        while data := self._process.stdout.read(2**16):
            for message in frames.push(data):
                verdict = msgspec.msgpack.decode(message, type=Verdict)
                if (key := self._take(verdict.number)) is not None:
                    reason = verdict.refused
                    fault = Fault(reason, for_good=verdict.for_good) if reason else None
                    self._decide(key, fault)
        self._process.wait()
        for number in list(self._tried):
            if (key := self._take(number)) is not None:
                self._decide(key, Fault(self._ended, is_users=False))
