"""Another rank's process as rank 0 holds it: a child with pipes, or what torchrun has started.

Both end when rank 0 takes its end of the line away, whatever they are doing.
"""

import socket
import subprocess
import sys
from contextlib import suppress
from io import FileIO
from typing import Protocol, cast

from limelight.engine.pipes import Sender, ends_of

PROGRAM = (sys.executable, "-P", "-m", "limelight.engine.worker")
SECONDS_TO_END = 5.0


class Link(Protocol):
    """The process of a rank, and the line to it."""

    commands: Sender
    words: FileIO

    def how_ended(self) -> str: ...
    def ask_to_end(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> None: ...


class Child:
    """A process of this machine, which rank 0 starts."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.commands = Sender(cast(FileIO, self.process.stdin))
        self.words = cast(FileIO, self.process.stdout)

    def how_ended(self) -> str:
        return f"has ended with exit code {self.process.wait()}"

    def ask_to_end(self) -> None:
        """Its input closes, by which it knows."""
        with self.commands.lock:
            self.commands.pipe.close()

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        """Make sure that it has ended."""
        try:
            self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Connection:
    """A process that torchrun has started, on any machine: it ends with the connection."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.words, self.commands = ends_of(connection)

    def how_ended(self) -> str:
        return "has ended; torchrun says how, on its machine"

    def ask_to_end(self) -> None:
        self.kill()

    def kill(self) -> None:
        with suppress(OSError):  # the other end has done so already
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """torchrun waits for it."""
