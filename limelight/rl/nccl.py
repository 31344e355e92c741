"""A communicator of NCCL between a trainer and the ranks of engines, by a unique id that one tells.

torch's own process groups choose their id themselves, so the library that torch has loaded is
called here. `rank` 0 is the trainer, who broadcasts.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from limelight.rl.pickled import Call, Name, read_pickled

ID_BYTES = 128
ID_KEY = "broadcast_from/0/0"
ID_TYPE = Name("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
TYPES = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
SUM = 0
SECONDS_BETWEEN_LOOKS = 0.0005


class UniqueId(ctypes.Structure):
    """What the members of a communicator know each other by."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def read_unique_id(data: bytes) -> bytes:
    """The 128 bytes of an id that a trainer has written to the store; `ValueError` if it is none.

    It comes as the pickle of an object with these bytes in it.
    """
    match read_pickled(data):
        case Call(Name("_ctypes", "_unpickle"), (name, (_, bytes(id)))) if name == ID_TYPE:
            if len(id) == ID_BYTES:
                return id
    raise ValueError("what the trainer has put into its store is no unique id of NCCL")


def fetch_unique_id(host: str, port: int, *, world_size: int, seconds: float) -> bytes:
    """The id that the trainer, whose store is at this address, has written there."""
    wait = timedelta(seconds=seconds)
    try:
        store = TCPStore(
            host, port, world_size, is_master=False, timeout=wait,
            wait_for_workers=True, use_libuv=False,
        )  # fmt: skip
        return read_unique_id(store.get(ID_KEY))
    except RuntimeError as error:
        raise TimeoutError(
            f"the trainer's store at {host}:{port} does not answer: {error}"[:500]
        ) from error


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of libnccl.so.2, each of which raises `RuntimeError` unless it succeeds."""

    lib: ctypes.CDLL

    @classmethod
    def load(cls) -> "Library":
        try:
            return cls(ctypes.CDLL("libnccl.so.2"))
        except OSError as error:
            raise RuntimeError(f"NCCL cannot be loaded: {error}") from error

    def call(self, name: str, *arguments: object) -> None:
        function: Callable[..., int] = getattr(self.lib, name)
        if code := function(*arguments):
            text = self.lib.ncclGetErrorString
            text.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {text(code).decode()}")

    def unique_id(self) -> bytes:
        id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(id))
        return bytes(id)


class NCCLGroup:
    """A member of the communicator. After an error or a timeout it can only be closed.

    `watch` is called while others are waited for, and may raise.
    """

    def __init__(
        self,
        unique_id: bytes,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        seconds: float,
        watch: Callable[[], None] | None = None,
    ):
        """Wait for all others; `TimeoutError` if they do not come."""
        self.library, self.device, self.seconds = Library.load(), device, seconds
        self.watch = watch or (lambda: None)
        self.comm: ctypes.c_void_p | None = None
        self._meet(unique_id, rank, world_size)
        # All others begin with this, too.
        warm_up = torch.zeros(1, dtype=torch.float32, device=device)
        self.library.call(
            "ncclAllReduce", *_pointers(warm_up), *_kind(warm_up), SUM, self.comm, self._stream
        )
        self.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with rank 0's, on the current stream."""
        arguments = (*_pointers(tensor), *_kind(tensor), 0, self.comm, self._stream)
        self.library.call("ncclBroadcast", *arguments)

    def wait(self) -> None:
        """Until all that was launched is done; `TimeoutError` if it takes too long."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + self.seconds
        try:
            while not done.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing has come, or gone, for {self.seconds:g} s")
                self.watch()
                time.sleep(SECONDS_BETWEEN_LOOKS)
        except BaseException:
            # The device waits, too, until the communicator is gone.
            self.close()
            raise

    def close(self) -> None:
        """Leave, whatever is under way."""
        comm, self.comm = self.comm, None
        if comm is not None:
            self.library.call("ncclCommAbort", comm)

    @property
    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _meet(self, unique_id: bytes, rank: int, world_size: int) -> None:
        comm, faults = ctypes.c_void_p(), []
        # `cuda` without a number means another device in another thread.
        index = torch.cuda.current_device() if self.device.index is None else self.device.index

        def meet() -> None:
            try:
                torch.cuda.set_device(index)
                id = UniqueId.from_buffer_copy(unique_id)
                self.library.call("ncclCommInitRank", ctypes.byref(comm), world_size, id, rank)
            except Exception as error:
                faults.append(error)

        # NCCL waits for the others without end; a thread of its own can be left to that.
        thread = threading.Thread(target=meet, name="nccl-init", daemon=True)
        thread.start()
        deadline = time.monotonic() + self.seconds
        while thread.is_alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {world_size} ranks have come in {self.seconds:g} s")
            self.watch()
            thread.join(SECONDS_BETWEEN_LOOKS)
        if faults:
            raise RuntimeError(f"the trainer cannot be met: {faults[0]}") from faults[0]
        self.comm = comm


def _pointers(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """Of what is sent and of what is received: the same."""
    assert tensor.is_contiguous()
    return (ctypes.c_void_p(tensor.data_ptr()),) * 2


def _kind(tensor: torch.Tensor) -> tuple[ctypes.c_size_t, int]:
    return ctypes.c_size_t(tensor.numel()), TYPES[tensor.dtype]
