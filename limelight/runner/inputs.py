"""What a step reads, packed on the host and brought to the device in one copy.

Every size of step has its tensors at fixed addresses, so that a CUDA graph captured with them can
be replayed with other contents.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

ALIGNMENT = 16
# One set of host memory is filled while the copy of the one before may still run.
STAGES = 2
ON_DEVICE = -1
MOST_CARVED = 1024
Size = tuple[int, int, int]  # tokens, sequences, rows that sample


@dataclass(frozen=True)
class StepTensors:
    """T tokens of B sequences, of which R rows sample; on the host or on the device.

    `tokens_T` holds ids, or -1 - slot for the last token of a slot, which only the device knows.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor  # where keys and values go, by group of layers; -1: nowhere
    rows_B: torch.Tensor  # the slot of each sequence: its row in the block tables
    seq_lens_B: torch.Tensor  # with this step's tokens; 0: padding
    starts_B: torch.Tensor  # [B + 1]: each sequence's first token in the step
    samples_R: torch.Tensor  # which of the T rows sample
    sample_slots_R: torch.Tensor
    temperature_R: torch.Tensor
    uniform_R: torch.Tensor

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The same memory, where it is the host's."""
        return {item.name: getattr(self, item.name).numpy() for item in fields(self)}


def _carve(buffer: torch.Tensor, groups: int, size: Size) -> tuple[StepTensors, int]:
    """The tensors of one size of step in `buffer`, and the bytes that they span."""
    tokens, seqs, samples = size
    shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (torch.int64, (tokens,)),
        (torch.int64, (tokens,)),
        (torch.int64, (groups, tokens)),
        (torch.int32, (seqs,)),
        (torch.int32, (seqs,)),
        (torch.int32, (seqs + 1,)),
        (torch.int64, (samples,)),
        (torch.int64, (samples,)),
        (torch.float32, (samples,)),
        (torch.float32, (samples,)),
    ]
    at, views = 0, []
    for dtype, shape in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(buffer[at : at + nbytes].view(dtype).view(shape))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return StepTensors(*views), at


class StepInputs:
    """Host and device memory for the largest step."""

    def __init__(self, *, max_tokens: int, max_seqs: int, groups: int, device: torch.device):
        self.groups, self.device = groups, device
        self.on_host = device.type == "cpu"
        largest = (8 * (2 + groups) + 4) * max_tokens + 40 * (max_seqs + 1) + 16 * ALIGNMENT
        self.memory = torch.zeros(largest, dtype=torch.uint8, device=device)
        self.stages = [
            torch.zeros(largest, dtype=torch.uint8, pin_memory=True)
            for _ in range(0 if self.on_host else STAGES)
        ]
        self.copied: list[torch.cuda.Event | None] = [None] * len(self.stages)
        self.turn = 0
        # Steps of the sizes that come again and again find their tensors here.
        self.carved: dict[tuple[int, Size], tuple[StepTensors, int]] = {}

    def stage(self, size: Size) -> StepTensors:
        """Host memory to fill for a step of this size, before `send`."""
        if self.on_host:
            return self._tensors(ON_DEVICE, size)[0]
        self.turn = (self.turn + 1) % STAGES
        if (event := self.copied[self.turn]) is not None:
            event.synchronize()
        return self._tensors(self.turn, size)[0]

    def send(self, size: Size) -> StepTensors:
        """What was staged, on the device."""
        tensors, nbytes = self._tensors(ON_DEVICE, size)
        if not self.on_host:
            self.memory[:nbytes].copy_(self.stages[self.turn][:nbytes], non_blocking=True)
            self.copied[self.turn] = event = torch.cuda.Event()
            event.record()
        return tensors

    def _tensors(self, place: int, size: Size) -> tuple[StepTensors, int]:
        """Those of a stage or of the device, and their bytes."""
        if (place, size) not in self.carved:
            memory = self.memory if place == ON_DEVICE else self.stages[place]
            if len(self.carved) >= MOST_CARVED:
                self.carved.clear()
            self.carved[place, size] = _carve(memory, self.groups, size)
        return self.carved[place, size]


class BlockTables:
    """Which block holds which positions of the sequence in each slot, for each group of layers.

    Kept on the host to compute addresses from, and on the device for the kernels to read. The last
    row belongs to no one: padding points at it. Entries behind a window keep stale ids; attention
    never looks there.
    """

    def __init__(self, *, groups: int, slots: int, max_blocks: int, device: torch.device):
        self.host = np.zeros((groups, slots + 1, max_blocks), dtype=np.int32)
        self.tensor = torch.from_numpy(self.host).to(device)
        self.on_host = device.type == "cpu"

    @property
    def nobody(self) -> int:
        """The row of no sequence; the rows before it are the slots."""
        return self.host.shape[1] - 1

    def update(self, changes: Iterable[tuple[int, list[tuple[int, list[int]]]]]) -> None:
        """Take over (slot, for each group (first index, blocks)) of several sequences."""
        places: list[int] = []
        values: list[int] = []
        width = self.host.shape[2]
        for slot, tables in changes:
            for group, (first, blocks) in enumerate(tables):
                if not blocks:
                    continue
                self.host[group, slot, first : first + len(blocks)] = blocks
                if not self.on_host:
                    at = (group * self.host.shape[1] + slot) * width + first
                    places += range(at, at + len(blocks))
                    values += blocks
        if places:
            # From pinned memory, for else the host waits here until the step before has ended.
            at_X = torch.tensor(places, dtype=torch.int64, pin_memory=True)
            blocks_X = torch.tensor(values, dtype=torch.int32, pin_memory=True)
            device = self.tensor.device
            self.tensor.view(-1).index_copy_(
                0, at_X.to(device, non_blocking=True), blocks_X.to(device, non_blocking=True)
            )
