"""A trainer's side of weight transfer: what it takes to send new weights to running engines.

    with WeightSender("http://127.0.0.1:8000", device="cuda") as sender:
        sender.send(model.named_parameters(), version="1")

For trainers that have no client of their own; those of TRL and SkyRL speak the same protocol. Over
NCCL the trainer is on another GPU than the engines.
"""

import base64
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

import torch

from limelight.rl.announced import Announced
from limelight.rl.broadcasts import Group, pieces, sendable
from limelight.rl.gloo import GlooGroup, host_store
from limelight.rl.meeting import BUFFER_BYTES
from limelight.rl.nccl import Library, NCCLGroup

SECONDS = 300.0
Json = dict[str, object]


class SendFailed(RuntimeError):
    """A server has said no, with this text, or could not be reached: begin with a new sender."""


class WeightSender:
    """Meets the engines behind the servers at `urls` and sends them weights; close it at the end.

    `host` is the address by which they reach this machine, where the backend is gloo.
    """

    def __init__(
        self,
        *urls: str,
        backend: str = "nccl",
        device: torch.device | str = "cuda",
        host: str = "127.0.0.1",
        key: str | None = None,
        packed: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        seconds: float = SECONDS,
    ):
        """Raises `SendFailed`, or `TimeoutError` if an engine does not come."""
        self.urls, self.key, self.host, self.seconds = urls, key, host, seconds
        self.device, self.packed, self.buffer_bytes = torch.device(device), packed, buffer_bytes
        self._calls: list[_Call] = []
        sizes = [int(str(self._ask(url, "/get_world_size")["world_size"])) for url in urls]
        world_size = 1 + sum(sizes)
        where, meet = (self._by_nccl if backend == "nccl" else self._by_gloo)(world_size)
        for i, url in enumerate(urls):
            info = where | {
                "rank_offset": 1 + sum(sizes[:i]), "world_size": world_size, "packed": packed,
                "packed_buffer_size_bytes": buffer_bytes,
            }  # fmt: skip
            self._begin(url, "/init_weight_transfer_engine", {"init_info": info})
        self.group: Group = meet()
        self._end()

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @torch.no_grad()
    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: str | None = None
    ) -> None:
        """Replace weights by these tensors, in their types; all servers have them when it ends."""
        named = dict(tensors)
        announced = [Announced(name, x.dtype, tuple(x.shape)) for name, x in named.items()]
        info = {
            "names": [one.name for one in announced],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in announced],
            "shapes": [list(one.shape) for one in announced],
        }
        self._on_all("/start_weight_update", {})
        for url in self.urls:
            self._begin(url, "/update_weights", {"update_info": info})
        cut = pieces(announced, self.buffer_bytes) if self.packed else ([one] for one in announced)
        for piece in cut:
            values = [named[one.name].detach().to(self.device).contiguous() for one in piece]
            data = torch.cat([_bytes(value) for value in values]) if self.packed else values[0]
            self.group.broadcast(sendable(data))
            self.group.wait()
        self._end()
        self._on_all("/finish_weight_update", {"weight_version": version})

    def close(self) -> None:
        """Part from the engines; the next sender may meet them."""
        self.group.close()

    def _by_nccl(self, world_size: int) -> tuple[Json, Callable[[], Group]]:
        id = Library.load().unique_id()
        where: Json = {"nccl_unique_id_b64": base64.b64encode(id).decode()}
        return where, lambda: NCCLGroup(
            id, rank=0, world_size=world_size, device=self.device, seconds=self.seconds,
            watch=self._watch,
        )  # fmt: skip

    def _by_gloo(self, world_size: int) -> tuple[Json, Callable[[], Group]]:
        store = host_store(self.host, 0, world_size=world_size, seconds=self.seconds)
        where: Json = {"master_address": self.host, "master_port": store.port}
        return where, lambda: GlooGroup(
            store, rank=0, world_size=world_size, seconds=self.seconds, watch=self._watch
        )

    def _on_all(self, path: str, body: Json) -> None:
        for url in self.urls:
            self._begin(url, path, body)
        self._end()

    def _begin(self, url: str, path: str, body: Json) -> None:
        self._calls.append(_Call(lambda: self._ask(url, path, body)))

    def _end(self) -> None:
        """Wait for all calls; `SendFailed` with what the first of them was told."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.thread.join()
        for call in calls:
            if call.fault is not None:
                raise call.fault

    def _watch(self) -> None:
        """Raise what a server has said while the others wait for what it will not take."""
        for call in self._calls:
            if call.fault is not None:
                self._calls = []
                raise call.fault

    def _ask(self, url: str, path: str, body: Json | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise SendFailed(f"{url}{path}: {_message(error.read())}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SendFailed(f"{url}{path}: {error}") from error
        if not isinstance(told, dict):
            raise SendFailed(f"{url}{path}: the answer is no JSON object")
        return told


class _Call:
    """A call in a thread, and what went wrong with it."""

    def __init__(self, ask: Callable[[], Json]):
        self.ask = ask
        self.fault: SendFailed | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ask()
        except SendFailed as error:
            self.fault = error


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _message(body: bytes) -> str:
    """What an error says, in whichever of the forms that servers have."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
    return str(error["message"] if isinstance(error, dict) else error)
