"""New weights for a running engine, from a trainer, into the memory that holds the old ones.

    init -> start -> update, any number of times -> finish -> start -> ...

One rank's side: all ranks do the same. A tensor's name, type and shape are judged before anything
is received; where a checkpoint's tensor goes is the loader's knowledge (`models/loader.py`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from limelight.models.loader import Place
from limelight.models.targets import Targets, coded
from limelight.ops.fp4 import FP4
from limelight.parallel.mesh import Mesh
from limelight.quant.stored import SCALE
from limelight.rl.announced import Announced, Landing, read_announcement
from limelight.rl.broadcasts import Broadcasts
from limelight.rl.gloo import GlooGroup, join_store
from limelight.rl.ipc import IPC
from limelight.rl.meeting import Meeting
from limelight.rl.nccl import NCCLGroup, fetch_unique_id

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """How tensors come; after an error in `receive` it can only be closed."""

    def check(self, announced: Sequence[Announced], info: dict[str, object]) -> None: ...
    def receive(
        self, announced: Sequence[Announced], info: dict[str, object]
    ) -> Iterator[tuple[str, torch.Tensor]]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def _meet_by_nccl(info: dict[str, object], rank: int, device: torch.device, seconds: float):
    if device.type != "cuda":
        raise ValueError("NCCL needs an engine on a GPU; on a CPU the backend is gloo")
    at = Meeting.read(info, rank_in_engines=rank)
    if (id := at.unique_id) is None:
        assert at.host is not None and at.port is not None
        id = fetch_unique_id(at.host, at.port, world_size=at.world_size, seconds=seconds)
    group = NCCLGroup(id, rank=at.rank, world_size=at.world_size, device=device, seconds=seconds)
    return Broadcasts(group, device, packed=at.packed, buffer_bytes=at.buffer_bytes)


def _meet_by_gloo(info: dict[str, object], rank: int, device: torch.device, seconds: float):
    at = Meeting.read(info, rank_in_engines=rank)
    if at.host is None or at.port is None:
        raise ValueError("gloo needs master_address and master_port")
    if device.type != "cpu":
        raise ValueError("gloo is for engines on a CPU; on a GPU the backend is nccl")
    store = join_store(at.host, at.port, world_size=at.world_size, seconds=seconds)
    group = GlooGroup(store, rank=at.rank, world_size=at.world_size, seconds=seconds)
    return Broadcasts(group, device, packed=at.packed, buffer_bytes=at.buffer_bytes)


def _meet_by_ipc(info: dict[str, object], rank: int, device: torch.device, seconds: float):
    return IPC.on(device, packed=bool(info.get("packed", False)))


Meet = Callable[[dict[str, object], int, torch.device, float], Transport]
BACKENDS: dict[str, Meet] = {"nccl": _meet_by_nccl, "gloo": _meet_by_gloo, "ipc": _meet_by_ipc}


class WeightSync:
    """One rank's session with a trainer.

    `kept_names` are endings of names that trainers may never send, so that their values stay.
    `stale` has the names of weights that are worth nothing until an update brings them.
    """

    def __init__(
        self,
        targets: Targets,
        renames: dict[str, str],
        *,
        kept_names: Iterable[str],
        mesh: Mesh,
        device: torch.device,
        backend: str | None,
        seconds: float,
    ):
        self.targets, self.renames, self.mesh, self.device = targets, renames, mesh, device
        self.backend, self.seconds = backend, seconds
        self.replaced = {name for name in targets if not name.endswith(tuple(kept_names))}
        self.coded = coded(targets)
        self.transport: Transport | None = None
        self.is_active = False
        self.stale: set[str] = set()
        self._places: set[Place] = set()
        self._last: list[Announced] = []

    def needed_backend(self) -> str:
        """How weights come; `ValueError` where no trainer can ever bring any."""
        if self.backend is None:
            raise ValueError(
                "this server has no weight transfer; start it with --weight-transfer-config "
                '\'{"backend": "nccl"}\''
            )
        packed = next((name for name, one in self.targets.items() if type(one.into) is FP4), None)
        if packed is not None:
            raise ValueError(
                f"{packed} is held as NVFP4, which a running update cannot replace: serve the "
                f"BF16 checkpoint to train with"
            )
        return self.backend

    def init(self, info: dict[str, object], *, replica: int) -> None:
        """Meet the trainer, in place of any that was met before; an open update of that fails."""
        backend = self.needed_backend()
        self.end()
        rank = replica * self.mesh.size + self.mesh.rank
        self.transport = BACKENDS[backend](info, rank, self.device, self.seconds)

    def end(self) -> None:
        """Part from the trainer; an open update counts as failed."""
        if self.is_active:
            self._fail()
        transport, self.transport = self.transport, None
        self._last = []
        if transport is not None:
            transport.close()

    def start(self) -> None:
        """Begin an update; `ValueError` if one is open, or there is no trainer."""
        if self.transport is None:
            raise ValueError("no trainer was met: POST /init_weight_transfer_engine comes first")
        if self.is_active:
            raise ValueError(
                "a weight update is open already: finish it, or begin anew with "
                "POST /init_weight_transfer_engine"
            )
        self.is_active = True
        self._places = set()

    @torch.no_grad()
    def update(self, info: dict[str, object]) -> None:
        """Take the announced tensors; `ValueError` at once for what cannot be taken.

        After any error the update is over, and all weights count as stale.
        """
        transport = self._open()
        is_receiving = False
        try:
            announced = read_announcement(info) or self._last
            if not announced:
                raise ValueError("update_info announces no tensors, and none were announced before")
            landing = Landing.plan(announced, self.targets, self.renames)
            transport.check(announced, info)
            is_receiving = True
            landing.put(transport.receive(announced, info))
        except Exception:
            self._fail()
            if is_receiving:
                # What is still on its way would be taken for the next tensors.
                self.end()
            raise
        self._places |= landing.places
        self._last = announced

    def finish(self) -> dict[str, object]:
        """End an update: how many tensors came, were missing, and are still stale; `ValueError` if
        it has brought codes of MXFP8 without their scales, or the other way round."""
        transport = self._open()
        self._check_pairs()
        self.is_active = False
        transport.finish()
        missing = [name for name in self.targets if not self._is_whole(name)]
        if missing:
            logger.warning(
                "the update left %d of %d weights as they were, %s among them",
                len(missing), len(self.targets), missing[0],
            )  # fmt: skip
        self.stale &= set(missing)
        return {"missing": len(missing), "stale": len(self.stale)}

    def _check_pairs(self) -> None:
        for name, expert in self._places:
            other = name.removesuffix(SCALE) if name.endswith(SCALE) else name + SCALE
            paired = (other, expert) in self._places or self._is_whole(other)
            if name in self.coded and not paired:
                self._fail()
                one = "" if expert is None else f" of expert {expert}"
                raise ValueError(f"the update has brought {name}{one} without {other}")

    def _is_whole(self, name: str) -> bool:
        """Whether the update has brought all of a weight, in one or expert by expert."""
        target, places = self.targets.get(name) or self.coded.get(name), self._places
        experts = range(0 if target is None else target.shape[0])
        return (name, None) in places or all((name, expert) in places for expert in experts)

    def discard(self) -> None:
        """The weights are worth nothing from now on."""
        self.stale = set(self.replaced)

    def _open(self) -> Transport:
        if not self.is_active or self.transport is None:
            raise ValueError("no weight update is open: POST /start_weight_update comes first")
        return self.transport

    def _fail(self) -> None:
        self.is_active = False
        self.discard()
