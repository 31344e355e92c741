"""Which adapters can be asked for, which are in host memory, and which in slots of the device.

Integers, names and folders only; the runner has the tensors (`rl/lora.py`). What is to happen to
them goes with the next plan: so all ranks do it between the same two steps.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol

from limelight.orders import ReadAdapter
from limelight.steps import AdapterMove
from limelight.types import LoRARequest, RequestError


class AdapterReader(Protocol):
    """What reads adapters on all ranks: their devices, or a scripted one in tests."""

    def carry_out(self, order: ReadAdapter) -> object:
        """Take an adapter into host memory; `ValueError` says what is wrong with its files. After
        any error all is as before."""


@dataclass(slots=True)
class Known:
    """A loaded adapter. `version` tells one reading of its files from another."""

    request: LoRARequest
    version: int
    is_leaving: bool = False


class Adapters:
    """The loaded adapters of an engine, by id.

    At most `max_loras` run in a step, each in a slot of the device, which it keeps until another
    one needs it. Host memory keeps the `max_cpu_loras` that were asked for last, and more only
    while requests for them are open; others are read again when they are asked for.

    An engine that `merges` adapters with its weights has one slot, for which the base model, as the
    adapter 0, is one of those that take turns.
    """

    def __init__(
        self,
        reader: AdapterReader | None,
        *,
        max_loras: int,
        max_cpu_loras: int,
        merges: bool = False,
    ):
        self.reader, self.max_cpu_loras, self.merges = reader, max_cpu_loras, merges
        self._known: dict[int, Known] = {}
        self._held: OrderedDict[int, None] = OrderedDict()  # the one asked for last is the last
        self._slots: OrderedDict[int, int] = OrderedDict()  # of adapters, as recent
        self._free = list(range(max_loras, 0, -1))
        self._running: Counter[int] = Counter()  # sequences
        self._open: dict[str, int] = {}  # adapters of requests
        self._versions = 0
        self._moves: list[AdapterMove] = []

    @classmethod
    def none(cls) -> "Adapters":
        """Of an engine without room for any, which refuses them."""
        return cls(None, max_loras=0, max_cpu_loras=0)

    def load(self, request: LoRARequest) -> int:
        """Read an adapter, or a new version of one with `load_inplace`; the version.

        Requests that run go on with the new one from their next step on. `RequestError`: nothing
        has changed.
        """
        if request.lora_int_id in self and not request.load_inplace:
            raise RequestError(
                f"an adapter with the id {request.lora_int_id} is there already; load_inplace "
                f"replaces it",
                param="lora_int_id",
            )
        try:
            return self._read(request)
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(str(error), param="lora_path") from error

    def __contains__(self, adapter_id: int) -> bool:
        """Whether requests may come for it."""
        known = self._known.get(adapter_id)
        return known is not None and not known.is_leaving

    def unload(self, adapter_id: int) -> None:
        """Take no more requests for an adapter; those that are open keep it until they end."""
        if adapter_id not in self:
            raise RequestError(f"there is no adapter with the id {adapter_id}", param="lora_int_id")
        self._known[adapter_id].is_leaving = True
        self._forget_if_over(adapter_id)

    def enter(self, request_id: str, adapter_id: int) -> None:
        """A request has come: its adapter is in host memory until it leaves. `ValueError` if it is
        not loaded, or can no longer be read."""
        if adapter_id not in self:
            self._room()
            raise RequestError("the adapter of this request is not loaded", param="model")
        self._open[request_id] = adapter_id
        if adapter_id in self._held:
            self._held.move_to_end(adapter_id)
            return
        try:
            self._read(self._known[adapter_id].request)
        except Exception:
            del self._open[request_id]
            raise

    def leave(self, request_id: str) -> None:
        """A request has ended, if it had an adapter."""
        if (adapter_id := self._open.pop(request_id, None)) is not None:
            self._forget_if_over(adapter_id)
            self._shrink()

    def version(self, adapter_id: int) -> int:
        """What keys of the prefix cache name beside the id; 0 without an adapter."""
        return self._known[adapter_id].version if adapter_id else 0

    def takes_slot(self, adapter_id: int) -> bool:
        """Whether a sequence with this adapter, or 0, needs one."""
        return self.merges or adapter_id != 0

    def has_room(self, adapter_id: int) -> bool:
        """Whether a sequence with this adapter can join those that run."""
        return adapter_id in self._slots or bool(self._free) or self._idle() is not None

    def acquire(self, adapter_id: int) -> int:
        """The slot of an adapter for one more sequence, where `has_room`."""
        if adapter_id not in self._slots:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "the caller looks at has_room first"
                self._free.append(self._slots.pop(idle))
            self._slots[adapter_id] = self._free.pop()
            self._place(adapter_id)
        self._slots.move_to_end(adapter_id)
        self._running[adapter_id] += 1
        return self._slots[adapter_id]

    def release(self, adapter_id: int) -> None:
        """A sequence of an adapter runs no longer."""
        self._running[adapter_id] -= 1

    def take_moves(self) -> list[AdapterMove]:
        """What the next plan brings about."""
        moves, self._moves = self._moves, []
        return moves

    def undo(self, moves: list[AdapterMove]) -> None:
        """The step that was to bring these about has failed: a slot that it filled has no one."""
        for move in moves:
            adapter_id = move.adapter_id
            if move.kind == "drop":
                # Once more does no harm.
                if adapter_id not in self._held:
                    self._moves.append(move)
            elif self._slots.get(adapter_id) == move.slot and self._running[adapter_id]:
                self._place(adapter_id)
            elif self._slots.get(adapter_id) == move.slot:
                self._free.append(self._slots.pop(adapter_id))

    def check(self) -> None:
        """Assert that slots, memory and requests agree."""
        assert len(set(self._slots.values())) == len(self._slots)
        assert not set(self._slots.values()) & set(self._free)
        assert all(count >= 0 for count in self._running.values())
        assert all(self._running[one] == 0 or one in self._slots for one in self._running)
        assert set(self._open.values()) <= self._held.keys() <= self._known.keys()
        assert self._slots.keys() <= self._known.keys() | {0}

    def _idle(self) -> int | None:
        """The adapter in a slot that no sequence runs with, and that was used least lately."""
        return next((one for one in self._slots if not self._running[one]), None)

    def _read(self, request: LoRARequest) -> int:
        adapter_id = request.lora_int_id
        self._room().carry_out(ReadAdapter(adapter_id, request.lora_path))
        self._moves = [move for move in self._moves if move != AdapterMove("drop", adapter_id)]
        self._versions += 1
        self._known[adapter_id] = Known(request, self._versions)
        self._held[adapter_id] = None
        self._held.move_to_end(adapter_id)
        if adapter_id in self._slots:
            self._place(adapter_id)
        self._shrink()
        return self._versions

    def _room(self) -> AdapterReader:
        """Who reads adapters, where there is room for some."""
        if self.reader is None:
            raise RequestError("there is no room for adapters: start with --enable-lora")
        return self.reader

    def _place(self, adapter_id: int) -> None:
        self._moves.append(AdapterMove("place", adapter_id, slot=self._slots[adapter_id]))

    def _shrink(self) -> None:
        """Let go of what was not asked for lately and is not needed."""
        in_use = {*self._open.values(), *(move.adapter_id for move in self._moves)}
        spare = [one for one in self._held if one not in in_use]
        for adapter_id in spare[: max(0, len(self._held) - self.max_cpu_loras)]:
            self._drop(adapter_id)

    def _drop(self, adapter_id: int) -> None:
        self._held.pop(adapter_id, None)
        self._moves = [move for move in self._moves if move.adapter_id != adapter_id]
        self._moves.append(AdapterMove("drop", adapter_id))

    def _forget_if_over(self, adapter_id: int) -> None:
        if not self._known[adapter_id].is_leaving or adapter_id in self._open.values():
            return
        del self._known[adapter_id]
        self._running.pop(adapter_id, None)
        if adapter_id in self._slots:
            self._free.append(self._slots.pop(adapter_id))
        self._drop(adapter_id)
