"""Which adapter each row of a step has, told to the weights before they are used."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from limelight.models.adapters import AdapterRoom
from limelight.ops.verify import packed_rows
from limelight.rl.lora import AdapterBank
from limelight.steps import AdapterMove, Grant


class RowAdapters:
    """The adapters of the sequences in all slots of a runner, and of the rows of a step.

    In a step without any, and in a model without `room` for any, the weights are used alone.
    """

    def __init__(self, room: AdapterRoom | None, *, max_num_seqs: int, device: torch.device):
        room = room or AdapterRoom(slots=0, max_rank=0, dtype=torch.float32)
        self.bank, self.step = AdapterBank(room), room.step
        self.has_room = room.slots > 0
        # One more for padding rows, which belong to no sequence.
        self.host = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self.of_slots_S = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.in_step = False

    def move(self, move: AdapterMove) -> None:
        if move.kind == "place":
            self.bank.place(move.adapter_id, move.slot)
        else:
            self.bank.drop(move.adapter_id)

    def admit(self, slot: int, adapter: int) -> None:
        """The sequence that comes into a slot has the adapter in that slot of the device."""
        if self.host[slot] != adapter:
            self.host[slot] = adapter
            self.of_slots_S[slot].fill_(adapter)

    def forget(self) -> None:
        """No slot has a sequence."""
        self.host.fill(0)
        self.of_slots_S.zero_()

    def begin(self, grants: Iterable[Grant]) -> None:
        """A step of these comes next."""
        self.in_step = self.has_room and any(self.host[grant.slot] for grant in grants)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Steps within are made as if some row had an adapter: to compile and capture them."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    @contextmanager
    def of_rows(self, rows_B: torch.Tensor, starts_B: torch.Tensor, rows: int) -> Iterator[None]:
        """The forward within is of so many rows: sequence b is in slot `rows_B[b]`, and its rows
        begin at `starts_B[b]`, int32 [B + 1]."""
        if self.in_step:
            sequence_T, _ = packed_rows(starts_B, rows)
            self.step.of_rows_T = self.of_slots_S[rows_B[sequence_T].long()]
        try:
            yield
        finally:
            self.step.of_rows_T = None
