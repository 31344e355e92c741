"""What an engine keeps on its device, and how it leaves and comes back while the engine sleeps.

Memory is taken from under the tensors: their storages shrink to nothing and grow again, so that
every view of them stays what it is. A storage may then lie elsewhere, so CUDA graphs, which hold
addresses, are let go and captured anew.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from limelight.models.targets import Targets
from limelight.models.unpacked import keep_unpacked, kept_unpacked
from limelight.ops.weight import Weight
from limelight.orders import KV_CACHE, WEIGHTS
from limelight.progress import Progress
from limelight.runner.runner import ModelRunner
from limelight.runner.transfers import carry


@dataclass(frozen=True, slots=True)
class Away:
    """A storage without its memory: how many bytes it had, and a copy of them if one is kept."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: torch.UntypedStorage | None

    @classmethod
    def send(cls, storage: torch.UntypedStorage, *, keep: bool) -> "Away":
        copy = None
        if keep:
            copy = torch.UntypedStorage(storage.nbytes())
            carry(bytes_of(storage), bytes_of(copy))
        away = cls(storage, storage.nbytes(), copy)
        storage.resize_(0)
        return away

    def bring_back(self) -> None:
        """Zeros, where no copy was kept."""
        self.storage.resize_(self.nbytes)
        whole = bytes_of(self.storage)
        if self.copy is None:
            whole.zero_()
        else:
            carry(bytes_of(self.copy), whole)


class Residence:
    """The weights, the cache and the graphs of one rank's runner.

    `kept_names` are endings of weights that a trainer does not send: they outlive a sleep of any
    level, as does a drafter.
    """

    def __init__(self, runner: ModelRunner, *, kept_names: Iterable[str]):
        self.runner, self.kept_names = runner, tuple(kept_names)
        self.away: dict[str, list[Away]] = {}
        self._had_graphs = False

    @torch.no_grad()
    def release(self, tags: list[str], *, keeps_weights: bool, keeps_cache: bool) -> None:
        """Give the memory of `tags` back; what is kept goes to the host."""
        runner = self.runner
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        self._had_graphs |= runner.graphs is not None
        runner.forget_device()
        for tag in tags:
            away = self.away.setdefault(tag, [])
            if tag == KV_CACHE:
                pool = runner.storage.pool.untyped_storage()
                away.append(Away.send(pool, keep=keeps_cache))
                continue
            for storage, stays in self._weights(keeps_weights):
                # Several names may fill one matrix.
                if storage.nbytes() > 0:
                    away.append(Away.send(storage, keep=stays))
        if runner.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self, tags: list[str]) -> None:
        """Take the memory of `tags` again, and capture graphs once all is there.

        Where memory is too short for something, that stays away, and can be asked for again.
        """
        for tag in tags:
            away = self.away.get(tag, [])
            while away:
                away[-1].bring_back()
                away.pop()
            self.away.pop(tag, None)
            if tag == WEIGHTS and (kept := kept_unpacked(self.runner.model)):
                keep_unpacked(self.runner.model, kept[0].dtype)
        if self._had_graphs and not self.away:
            self.runner.capture(Progress(quiet=True))
            self._had_graphs = False

    def _weights(self, keep_all: bool) -> Iterable[tuple[torch.UntypedStorage, bool]]:
        """All storages of weights, and whether what they hold is kept; those that are first."""
        drafted = self.runner.drafted
        stays: list[torch.UntypedStorage] = []
        goes: list[torch.UntypedStorage] = []
        drafter: Targets = {} if drafted is None else drafted.drafter.model.targets
        for target in drafter.values():
            stays += storages(target.into)
        for name, target in self.runner.model.targets.items():
            is_kept = keep_all or name.endswith(self.kept_names)
            (stays if is_kept else goes).extend(storages(target.into))
        # Made anew when the weights are back.
        goes += (held_NK.untyped_storage() for held_NK in kept_unpacked(self.runner.model))
        return [*((one, True) for one in stays), *((one, False) for one in goes)]


def storages(weight: Weight) -> list[torch.UntypedStorage]:
    """The memory that holds a weight."""
    tensors = (weight,) if isinstance(weight, torch.Tensor) else weight.tensors
    return [tensor.untyped_storage() for tensor in tensors]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
