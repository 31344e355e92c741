"""What is ordered of a rank's weights and memory, carried out by all ranks alike."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from limelight.orders import (
    WEIGHTS,
    Checksums,
    ClearWeights,
    DeviceOrder,
    EndTransfer,
    FinishUpdate,
    InitTransfer,
    ReadAdapter,
    Release,
    Restore,
    StartUpdate,
    UpdateWeights,
)
from limelight.parallel.mesh import Mesh
from limelight.rl.checksum import checksums
from limelight.rl.lora import Merge, Patch, read_adapter
from limelight.rl.weight_sync import WeightSync
from limelight.runner.residence import Residence, bytes_of, storages
from limelight.runner.runner import ModelRunner

logger = logging.getLogger(__name__)
Result = dict[str, object]


class DeviceControl:
    """One rank's part; an order that fails on one rank fails on all."""

    def __init__(self, runner: ModelRunner, *, backend: str | None, seconds: float):
        """`backend` is how weights come, if at all, and `seconds` how long a trainer may take."""
        model = runner.model
        self.runner, self.mesh = runner, runner.mesh
        self.residence = Residence(runner, kept_names=model.unsent)
        self.sync = WeightSync(
            model.targets, model.renames, kept_names=model.unsent,
            mesh=runner.mesh, device=runner.device, backend=backend, seconds=seconds,
        )  # fmt: skip
        self._read: list[Patch | Merge] = []

    def check(self, order: DeviceOrder) -> None:
        """`ValueError` for what would lose weights that no update could bring back."""
        forgets = isinstance(order, Release) and not order.keeps_weights and WEIGHTS in order.tags
        if forgets or isinstance(order, ClearWeights):
            self.sync.needed_backend()

    def carry_out(self, order: DeviceOrder) -> Result:
        """What came of it; raises what went wrong here, or `RuntimeError` if it did elsewhere."""
        fault: Exception | None = None
        result: Result = {}
        try:
            result = self._carry_out(order)
        except Exception as error:
            fault = error
        failed = _failed_ranks(self.mesh, self.runner.device, fault is not None)
        if fault is not None:
            raise fault
        if failed:
            if isinstance(order, InitTransfer | UpdateWeights):
                self.sync.end()
            raise RuntimeError(f"rank {failed[0]} failed; its log says why")
        if isinstance(order, ReadAdapter):
            self.runner.adapters.bank.held[order.adapter_id] = self._read
        return result

    def _carry_out(self, order: DeviceOrder) -> Result:
        act: Callable[[DeviceOrder], Result] = ACTS[type(order)].__get__(self)
        return act(order)

    def _init(self, order: InitTransfer) -> Result:
        self.sync.init(order.info, replica=order.replica)
        return {}

    def _start(self, order: StartUpdate) -> Result:
        self.sync.start()
        return {}

    def _update(self, order: UpdateWeights) -> Result:
        self.sync.update(order.info)
        return {}

    def _finish(self, order: FinishUpdate) -> Result:
        self.runner.forget_kept()
        return self.sync.finish()

    def _end(self, order: EndTransfer) -> Result:
        self.sync.end()
        return {}

    def _checksums(self, order: Checksums) -> Result:
        return {"tensors": checksums(self.runner.model.targets, self.mesh)}

    @torch.no_grad()
    def _clear(self, order: ClearWeights) -> Result:
        for name in self.sync.replaced:
            for storage in storages(self.runner.model.targets[name].into):
                bytes_of(storage).zero_()
        self.runner.forget_kept()
        self.sync.discard()
        return {}

    def _read_adapter(self, order: ReadAdapter) -> Result:
        """An adapter is held once all ranks have read it."""
        self._read = read_adapter(Path(order.folder), self.runner.adapters.bank.room)
        return {}

    def _release(self, order: Release) -> Result:
        if not order.keeps_weights and WEIGHTS in order.tags:
            # First, for a release that fails may have lost some of them.
            self.sync.discard()
        self.residence.release(
            order.tags, keeps_weights=order.keeps_weights, keeps_cache=order.keeps_cache
        )
        return {}

    def _restore(self, order: Restore) -> Result:
        self.residence.restore(order.tags)
        return {}


ACTS: dict[type, Callable[..., Result]] = {
    InitTransfer: DeviceControl._init,
    StartUpdate: DeviceControl._start,
    UpdateWeights: DeviceControl._update,
    FinishUpdate: DeviceControl._finish,
    EndTransfer: DeviceControl._end,
    Checksums: DeviceControl._checksums,
    ClearWeights: DeviceControl._clear,
    Release: DeviceControl._release,
    Restore: DeviceControl._restore,
    ReadAdapter: DeviceControl._read_adapter,
}


def _failed_ranks(mesh: Mesh, device: torch.device, failed: bool) -> list[int]:
    """Those on which an order failed, as all ranks tell each other."""
    if mesh.group is None:
        return []
    failed_R = torch.zeros(mesh.size, dtype=torch.int32, device=device)
    failed_R[mesh.rank] = int(failed)
    dist.all_reduce(failed_R, group=mesh.group)
    return failed_R.nonzero().flatten().tolist()
