"""Reads expert ids out of the cache, behind the steps that have put them there."""

from dataclasses import dataclass

import numpy as np
import torch

from limelight.cache.storage import KVStorage
from limelight.runner.launched import device_faults
from limelight.runner.transfers import on_its_way


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are on their way to the host."""

    ids_XLN: torch.Tensor
    done: torch.cuda.Event | None

    def result(self) -> bytes:
        """The ids in C order, once what was launched before has run."""
        with device_faults(self.ids_XLN.device):
            if self.done is not None:
                self.done.synchronize()
        return self.ids_XLN.numpy().tobytes()


class RoutedReader:
    """Reads rows of sequences whose blocks no later step has been given yet."""

    def __init__(self, storage: KVStorage):
        assert storage.routed_SLN is not None
        self.routed_SLN, self.block_size = storage.routed_SLN, storage.shape.size
        _, self.layers, self.chosen = self.routed_SLN.shape
        self.dtype = str(self.routed_SLN.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def read(self, blocks: list[int], first: int, last: int) -> Rows:
        """Of the positions [first, last) of a sequence with these blocks in the first group."""
        positions = np.arange(first, last)
        held = np.array(blocks, dtype=np.int64)[positions // self.block_size]
        slots_X = torch.from_numpy(held * self.block_size + positions % self.block_size)
        device = self.routed_SLN.device
        if device.type != "cuda":
            return Rows(self.routed_SLN[slots_X], None)
        slots_X = slots_X.pin_memory().to(device, non_blocking=True)
        ids_XLN = on_its_way(self.routed_SLN[slots_X])
        done = torch.cuda.Event()
        done.record()
        return Rows(ids_XLN, done)
