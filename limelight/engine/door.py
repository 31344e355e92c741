"""How ranks that torchrun has started come to rank 0: to a port of its own, known from their store.

With the port the store has a token, which a rank brings. What has none is sent away.
"""

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from limelight.engine.pipes import Hello, Sender, ends_of, receive_bytes

logger = logging.getLogger(__name__)
KEY = "the door of rank 0"
TOKEN_BYTES = 32
MOST_BYTES_OF_HELLO = 256
SECONDS_TO_KNOCK = 10.0
SECONDS_BETWEEN_KNOCKS = 0.2


@dataclass(frozen=True, slots=True)
class Address:
    """Where the door is, what opens it, and the part of the store where those behind it meet."""

    host: str
    port: int
    token: bytes
    meeting: str


class Door:
    """Lets each rank above 0 in once. `welcome` gets its rank, where it is and the connection, in
    another thread. `store` is where they meet: torchrun's keeps what was said before a restart."""

    def __init__(
        self,
        store: Store,
        host: str,
        size: int,
        welcome: Callable[[int, str, socket.socket], None],
    ):
        """`host` is this machine as the others know it; `ValueError` if it is another one."""
        try:
            self.listening = socket.create_server((host, 0), family=_family(host), backlog=size)
        except OSError as error:
            raise ValueError(
                f"rank 0 cannot listen on MASTER_ADDR {host}, which must be an address of its "
                f"own machine: {error}"
            ) from error
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.awaited = set(range(1, size))
        self.welcome = welcome
        self._lock = threading.Lock()
        self._guests: list[socket.socket] = []  # who have not said yet who they are
        port, meeting = self.listening.getsockname()[1], secrets.token_hex(8)
        self.store = PrefixStore(meeting, store)
        address = Address(host, port, self.token, meeting)
        store.set(KEY, msgspec.json.encode(address).decode())
        threading.Thread(target=self._open, name="door", daemon=True).start()

    def close(self) -> None:
        """Nobody comes any more."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        with self._lock:
            for guest in self._guests:
                with suppress(OSError):
                    guest.shutdown(socket.SHUT_RDWR)

    def _open(self) -> None:
        while True:
            try:
                guest, where = self.listening.accept()
            except OSError:  # it is closed
                return
            with self._lock:
                self._guests.append(guest)
            # One who comes and says nothing must not keep the others waiting.
            threading.Thread(
                target=self._let_in, args=(guest, where[0]), name="guest", daemon=True
            ).start()

    def _let_in(self, guest: socket.socket, host: str) -> None:
        rank = self._rank_of(guest)
        with self._lock:
            self._guests.remove(guest)
        if rank is not None:
            return self.welcome(rank, host, guest)
        logger.warning("a connection from %s is refused: it is no rank that is waited for", host)
        guest.close()

    def _rank_of(self, guest: socket.socket) -> int | None:
        """The rank that comes; None if it may not."""
        try:
            data = receive_bytes(FileIO(guest.fileno(), closefd=False), MOST_BYTES_OF_HELLO)
            hello = msgspec.msgpack.decode(data or b"", type=Hello)
        except (OSError, ValueError):
            return None
        with self._lock:
            if not hmac.compare_digest(hello.token, self.token) or hello.rank not in self.awaited:
                return None
            self.awaited.remove(hello.rank)
        return hello.rank


def knock(store: Store, rank: int) -> tuple[FileIO, Sender, Store]:
    """What comes from rank 0 and goes there, for another rank, and where all ranks meet.

    It waits for rank 0 to start, for which `store` must be there. `OSError` if it cannot be had.
    """
    connection = None
    while connection is None:
        try:
            address = msgspec.json.decode(store.get(KEY), type=Address)
        except RuntimeError as error:
            raise OSError(f"rank 0 has not come: {error}"[:500]) from error
        try:
            connection = socket.create_connection((address.host, address.port), SECONDS_TO_KNOCK)
        except ConnectionRefusedError:  # the door of a rank 0 before this one
            time.sleep(SECONDS_BETWEEN_KNOCKS)
    connection.settimeout(None)
    reads, says = ends_of(connection)
    says.send(Hello(address.token, rank))
    return reads, says, PrefixStore(address.meeting, store)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
