"""The process in which constraints are tried before the engine compiles them.

What a user sends may take for ever to compile, or for ever to follow, or all memory. So each is
compiled and followed for some tokens in a fork of this process, which has limits and can be killed;
only what does well there comes near the engine. Frames of msgpack go over standard input and
output; when the input closes, this process and its forks end.
"""

import json
import os
import re
import resource
import select
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np

from limelight.runner.grammar import TOO_SLOW

if TYPE_CHECKING:
    import xgrammar

# Of a core's time; on a machine with no time to spare a trial may be under way for longer.
SECONDS_OF_TRIAL, PATIENCE = 1.5, 8
BYTES_OF_TRIAL = 512 * 2**20
# A trial has a short time first, and begins again behind the others if that does not do: so what
# takes long never keeps what does not from its turn.
SECONDS_OF_FIRST_TRIAL = 0.25
SHORT_AT_ONCE, LONG_AT_ONCE = 3, 2
MOST_LONG = 4  # that wait
BUSY = "too many constraints that take long to compile are being tried; try again later"
TOO_LONG = f"it takes more than {SECONDS_OF_TRIAL} s to compile and try"
# Following a grammar is tried with this many tokens, for at most so many CPU seconds.
TRIED_TOKENS, SECONDS_OF_FOLLOWING = 96, 0.5
# A token of a harmless grammar takes up to 5 ms (150,000 tokens, strings of bounded length); what
# takes longer this early grows with each token, by and by to seconds.
SECONDS_OF_TOKEN = 0.02
# What xgrammar says begins with the time and the place in its source.
PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*\) is false: )?")
LONGEST_REASON = 500
HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token of a tokenizer, how many a model has, and which end its answers."""

    tokens: list[bytes]
    size: int
    ends: list[int]

    @classmethod
    def load(cls, folder: Path, size: int, ends: list[int]) -> "Vocabulary":
        """As xgrammar takes it; `ValueError` for a folder without a tokenizer."""
        from limelight.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        return cls(tokens, size, ends)

    def compiler(self, marks: list[int]) -> "xgrammar.GrammarCompiler":
        """A compiler to which the tokens `marks` are no text: no text has a byte 0xff."""
        import xgrammar

        tokens = list(self.tokens[: self.size])
        for mark in marks:
            tokens[mark] = b"\xff" + tokens[mark]
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=self.size, stop_token_ids=self.ends
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@dataclass(frozen=True, slots=True)
class Trial:
    """A tag to try."""

    number: int
    tag: str
    marks: list[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial: nothing wrong, or what is; not for good if there was only no time."""

    number: int
    refused: str | None = None
    for_good: bool = True


@dataclass(slots=True)
class Fork:
    """A trial under way in a process of its own, and the pipe on which it tells its verdict."""

    trial: Trial
    pid: int
    pipe: int
    deadline: float
    is_long: bool


@dataclass(slots=True)
class Frames:
    """Cuts what comes on a pipe into frames: a length, then as many bytes."""

    data: bytearray = field(default_factory=bytearray)

    def push(self, data: bytes) -> list[bytes]:
        self.data += data
        frames = []
        while len(self.data) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self.data)[0]
            if len(self.data) < end:
                break
            frames.append(bytes(self.data[HEADER.size : end]))
            del self.data[:end]
        return frames


def frame(message: object) -> bytes:
    """A message, ready for the pipe."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data


class Trials:
    """Takes trials in the order in which they come, some at once; those that take long, apart."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.short: list[Trial] = []
        self.long: list[Trial] = []
        self.forks: dict[int, Fork] = {}  # by pipe
        self.compilers: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}

    def begin(self) -> None:
        """Start what may start."""
        num_long = sum(fork.is_long for fork in self.forks.values())
        for _ in range(min(len(self.long), LONG_AT_ONCE - num_long)):
            self._start(self.long.pop(0), is_long=True)
        num_short = sum(not fork.is_long for fork in self.forks.values())
        for _ in range(min(len(self.short), SHORT_AT_ONCE - num_short)):
            self._start(self.short.pop(0), is_long=False)

    def _start(self, trial: Trial, *, is_long: bool) -> None:
        # One model has a set of marks or two; a fork finds their compiler made.
        marks = tuple(sorted(set(trial.marks)))
        if marks not in self.compilers:
            self.compilers[marks] = self.vocabulary.compiler(list(marks))
        out, into = os.pipe()
        seconds = SECONDS_OF_TRIAL if is_long else SECONDS_OF_FIRST_TRIAL
        if (pid := os.fork()) == 0:
            os.nice(15 if is_long else 5)
            # Its signal ends the process.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            _run(into, self.compilers[marks], trial.tag, self.vocabulary.ends)
        os.close(into)
        deadline = time.monotonic() + PATIENCE * seconds
        self.forks[out] = Fork(trial, pid, out, deadline, is_long)

    def end(self, fork: Fork, *, in_time: bool) -> Verdict | None:
        """The verdict on a fork that has told it, has died, or has to be ended; none yet if it is
        to be tried for longer."""
        said = os.read(fork.pipe, 65536) if in_time else b""
        os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        os.close(fork.pipe)
        del self.forks[fork.pipe]
        number = fork.trial.number
        if said:
            return Verdict(number, json.loads(said))
        worked_long = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        if in_time and not worked_long:
            return Verdict(number, "it takes too much memory to compile")
        if fork.is_long:
            return Verdict(number, TOO_LONG if worked_long else BUSY, for_good=worked_long)
        if len(self.long) >= MOST_LONG:
            return Verdict(number, BUSY, for_good=False)
        self.long.append(fork.trial)
        return None

    def wait(self, source: int) -> tuple[bool, list[Verdict]]:
        """Wait for news: whether `source` has something to read, and what has been decided."""
        soonest = min((fork.deadline for fork in self.forks.values()), default=None)
        seconds = None if soonest is None else max(0.0, soonest - time.monotonic())
        ready, _, _ = select.select([source, *self.forks], [], [], seconds)
        verdicts = [self.end(self.forks[pipe], in_time=True) for pipe in ready if pipe != source]
        late = [fork for fork in self.forks.values() if fork.deadline <= time.monotonic()]
        verdicts += [self.end(fork, in_time=False) for fork in late]
        return source in ready, [verdict for verdict in verdicts if verdict is not None]


def _run(pipe: int, compiler: "xgrammar.GrammarCompiler", tag: str, ends: list[int]) -> NoReturn:
    """All that a fork does: it tells the verdict, and runs nothing of its parent's."""
    try:
        os.write(pipe, json.dumps(_try(compiler, tag, ends)).encode())
    finally:
        os._exit(0)


def _try(compiler: "xgrammar.GrammarCompiler", tag: str, ends: list[int]) -> str | None:
    """What is wrong with a tag."""
    _limit_memory()
    try:
        return _follow(compiler.compile_structural_tag(tag), ends)
    except MemoryError:
        return "it takes too much memory to compile"
    except Exception as error:  # the library raises whatever it meets
        return PLACE.sub("", str(error)).strip()[:LONGEST_REASON] or type(error).__name__


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + BYTES_OF_TRIAL
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If this process's parent is killed, no one else ends it.
    seconds = int(2 * SECONDS_OF_TRIAL) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _follow(grammar: "xgrammar.CompiledGrammar", ends: list[int]) -> str | None:
    """What is wrong with a grammar that compiles: some take for ever to be followed."""
    import xgrammar

    vocab_size = grammar.tokenizer_info.vocab_size
    bits_1V, left = xgrammar.allocate_token_bitmask(1, vocab_size), SECONDS_OF_FOLLOWING
    rng, matcher, token_id = np.random.default_rng(0), xgrammar.GrammarMatcher(grammar), None
    for _ in range(TRIED_TOKENS):
        started = time.thread_time()
        if token_id is not None:
            matcher.accept_token(token_id)
        matcher.fill_next_token_bitmask(bits_1V)
        seconds = time.thread_time() - started
        if seconds > SECONDS_OF_TOKEN:
            return TOO_SLOW
        bits_V = np.unpackbits(bits_1V.numpy().view(np.uint8)[0], bitorder="little")
        bits_V[ends] = 0
        allowed = bits_V[:vocab_size].nonzero()[0]
        if token_id is None and not len(allowed):
            return None if matcher.is_completed() else "no answer at all could fulfil it"
        left -= seconds
        if left < 0:
            break
        token_id = int(allowed[rng.integers(len(allowed))]) if len(allowed) else None
        if token_id is None:
            matcher.reset()
    return None


def main() -> int:
    """Entry: the vocabulary comes first, then trials."""
    # The parent decides when to end, also when a terminal sends its interrupt to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    # Libraries that print must not disturb the frames.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    frames, trials = Frames(), None
    while True:
        readable = True
        if trials is not None:
            readable, verdicts = trials.wait(source)
            for verdict in verdicts:
                _write(sink, frame(verdict))
        if readable:
            data = os.read(source, 2**16)
            if not data:
                break
            for message in frames.push(data):
                if trials is None:
                    trials = Trials(msgspec.msgpack.decode(message, type=Vocabulary))
                else:
                    trials.short.append(msgspec.msgpack.decode(message, type=Trial))
        if trials is not None:
            trials.begin()
    for fork in trials.forks.values() if trials is not None else ():
        os.kill(fork.pid, signal.SIGKILL)
    return 0


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


if __name__ == "__main__":
    sys.exit(main())
