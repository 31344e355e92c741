"""The other engines that share this one's experts: met at the start, asked before each step.

An engine alone decides what its step computes, but all must make their steps together. So before
each one it tells the others how many rows it will have, and waits for the same of them. One with
nothing to do waits for a request or for such a call. They speak over sockets in a folder that only
this user can enter, so the end of one is known at once; one that is silent counts as lost too.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from limelight.engine.pipes import Facts, Sender, receive
from limelight.types import DeviceLost

SECONDS_BETWEEN_BEATS = 1.0
SECONDS_BETWEEN_TRIES = 0.05
SECONDS_OF_SILENCE = 8.0
# Imports, checkpoints and compilers keep Python busy.
SECONDS_OF_SILENCE_AT_START = 60.0


@dataclass(frozen=True, slots=True)
class Circle:
    """An engine's rank among those that share experts, and the folder where they meet."""

    rank: int
    size: int
    folder: str


@dataclass(frozen=True, slots=True)
class Hello:
    """The first word to another engine: who this is, what must be the same, and from rank 0 the
    port of the store."""

    rank: int
    facts: Facts
    port: int


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine will do in the next step, and whether a CUDA graph can hold it, and one of
    sequences that decode."""

    rows: int
    graph: bool = False
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """A sign of life, and what there is to say beside it."""

    hello: Hello | None = None
    load: Load | None = None
    is_ready: bool = False


class Peer:
    """Another engine, at the other end of a socket."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.reads = FileIO(os.dup(connection.fileno()), "r")
        self.says = Sender(FileIO(os.dup(connection.fileno()), "w"))
        self.hello: Hello | None = None
        self.loads: deque[Load] = deque()
        self.is_ready = False

    def listen(self, told: Callable[["Peer", Said], None]) -> str:
        """Pass on what it says until it is lost; how it was."""
        poll = select.poll()
        poll.register(self.reads, select.POLLIN)
        while True:
            silence = SECONDS_OF_SILENCE if self.is_ready else SECONDS_OF_SILENCE_AT_START
            if not poll.poll(1000 * silence):
                return f"has given no sign of life for {silence:g} s"
            said = receive(self.reads, Said)
            if said is None:
                return "has ended"
            told(self, said)


class Peers:
    """All other engines. `lost` is None as long as none is, and then how the first one was.

    `waker` becomes readable when one calls for a step.
    """

    def __init__(self, circle: Circle, on_loss: Callable[[str], None] | None = None):
        self.circle, self.on_loss = circle, on_loss
        self.lost: str | None = None
        self.is_closing = False
        self.waker, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._news = threading.Condition()
        self.all: list[Peer] = []

    @property
    def called(self) -> bool:
        """Whether another engine waits for this one to make a step."""
        return any(peer.loads for peer in self.all)

    def meet(self, facts: Facts, port: int) -> list[Hello]:
        """Find all others; what each says of itself, in the order of their ranks.

        It waits for engines that are still starting. `DeviceLost` if one ends meanwhile.
        """
        hello = Hello(self.circle.rank, facts, port)
        for connection in self._connections():
            peer = Peer(connection)
            peer.says.send(Said(hello=hello))
            self.all.append(peer)
        for peer in self.all:
            threading.Thread(target=self._watch, args=(peer,), name="peer", daemon=True).start()
        threading.Thread(target=self._beat, name="peers-beat", daemon=True).start()
        with self._news:
            self._news.wait_for(lambda: self.lost or all(peer.hello for peer in self.all))
        if self.lost is not None:
            raise DeviceLost(self.lost)
        found = [peer.hello for peer in self.all if peer.hello is not None]
        return sorted(found, key=lambda one: one.rank)

    def ready(self) -> None:
        """This engine has started: from now on it is never silent for long."""
        self._tell(Said(is_ready=True))

    def agree(self, load: Load) -> list[Load]:
        """Every engine's next step, by rank; waits until all have said what theirs is."""
        self._tell(Said(load=load))
        with self._news:
            self._news.wait_for(lambda: self.lost or all(peer.loads for peer in self.all))
            if self.lost is not None:
                raise DeviceLost(self.lost)
            loads = {self.circle.rank: load}
            for peer in self.all:
                assert peer.hello is not None
                loads[peer.hello.rank] = peer.loads.popleft()
        return [loads[rank] for rank in range(self.circle.size)]

    def drain(self) -> None:
        """Whoever called has been heard."""
        os.read(self.waker, 4096)

    def close(self) -> None:
        """Take leave of them."""
        self.is_closing = True
        for peer in self.all:
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> list[socket.socket]:
        """To each engine of a lower rank, and from each of a higher one."""
        folder, rank = Path(self.circle.folder), self.circle.rank
        with socket.socket(socket.AF_UNIX) as door:
            # Whoever sees the name may knock: it is there only once someone listens.
            door.bind(str(folder / f"{rank}.new"))
            door.listen(self.circle.size)
            (folder / f"{rank}.new").rename(folder / str(rank))
            found = [_knock(folder / str(other)) for other in range(rank)]
            return found + [door.accept()[0] for _ in range(rank + 1, self.circle.size)]

    def _tell(self, said: Said) -> None:
        for peer in self.all:
            try:
                peer.says.send(said)
            except (OSError, ValueError) as error:
                raise DeviceLost(self._how_lost() or f"another engine: {error}") from error

    def _how_lost(self) -> str | None:
        with self._news:
            self._news.wait_for(lambda: self.lost, 1.0)
        return self.lost

    def _told(self, peer: Peer, said: Said) -> None:
        peer.is_ready |= said.is_ready
        if said.hello is None and said.load is None:
            return
        with self._news:
            peer.hello = said.hello or peer.hello
            if said.load is not None:
                peer.loads.append(said.load)
                with suppress(BlockingIOError):
                    os.write(self._wakes, b"x")
            self._news.notify_all()

    def _watch(self, peer: Peer) -> None:
        try:
            how = peer.listen(self._told)
        except OSError:
            # It had not read all that it was told.
            how = "has ended"
        except Exception as error:
            how = f"says what cannot be read: {error}"
        rank = "?" if peer.hello is None else peer.hello.rank
        with self._news:
            first = self.lost is None and not self.is_closing
            if first:
                self.lost = f"engine {rank}, which shares the experts, {how}"
            self._news.notify_all()
        if first and self.on_loss is not None and self.lost is not None:
            self.on_loss(self.lost)

    def _beat(self) -> None:
        while not self.is_closing:
            time.sleep(SECONDS_BETWEEN_BEATS)
            with suppress(DeviceLost):
                self._tell(Said())


def _knock(path: Path) -> socket.socket:
    while not path.exists():
        time.sleep(SECONDS_BETWEEN_TRIES)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection
