"""What a step reads, packed on the host and brought to the device in one copy.

Every size of step has its tensors at fixed addresses, so that a CUDA graph captured with them can
be replayed with other contents.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch

from limelight.cache.storage import KVStorage
from limelight.ops import is_batch_invariant
from limelight.ops.far import WITHOUT_GRAPH, chosen
from limelight.ops.kept import KEPT_BYTES, Kept
from limelight.ops.paging import FEW_QUERIES, FP8, PagedLayout, Prompt
from limelight.steps import Grant
from limelight.types import Request

ALIGNMENT = 16
# One set of host memory is filled while the copy of the one before may still run.
STAGES = 2
ON_DEVICE = -1
MOST_CARVED = 1024
Size = tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """Tensors that lie one after the other, on the host or on the device."""

    @classmethod
    def shapes(cls, groups: int, size: Size) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each, in order."""
        raise NotImplementedError

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The same memory, where it is the host's."""
        return {item.name: getattr(self, item.name).numpy() for item in fields(self)}


@dataclass(frozen=True)
class StepTensors(Packed):
    """T tokens of B sequences, of which R rows sample: a size is (T, B, R).

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
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor

    @classmethod
    def shapes(cls, groups: int, size: Size) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        tokens, seqs, samples = size
        return [
            (torch.int64, (tokens,)),
            (torch.int64, (tokens,)),
            (torch.int64, (groups, tokens)),
            (torch.int32, (seqs,)),
            (torch.int32, (seqs,)),
            (torch.int32, (seqs + 1,)),
            (torch.int64, (samples,)),
            (torch.int64, (samples,)),
            *[(torch.float32, (samples,))] * 2,
            (torch.int32, (samples,)),
            *[(torch.float32, (samples,))] * 2,
        ]


@dataclass(frozen=True)
class DraftedTensors(Packed):
    """T rows of B sequences in a step with drafts, as far as the host knows them: (T, B, N).

    `tokens_T` holds ids of prompts, and -1 where the device knows the token. Sequence b has
    `bases_B[b]` rows and those of the drafts that are kept of its `offered_B[b]`. It starts at
    `firsts_B[b]`, or where the device says that it stands: -1. Padding has the slot of no one.
    """

    tokens_T: torch.Tensor
    seeds_B: torch.Tensor
    rows_B: torch.Tensor  # the slot of each sequence
    bases_B: torch.Tensor
    offered_B: torch.Tensor
    firsts_B: torch.Tensor
    samples_B: torch.Tensor  # 1: its last row has a next token
    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    budget_1: torch.Tensor
    trim_M: torch.Tensor  # the slope of acceptance, and the intercepts of N places

    @classmethod
    def shapes(cls, groups: int, size: Size) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        tokens, seqs, drafts = size
        return [
            (torch.int64, (tokens,)),
            (torch.int64, (seqs,)),
            *[(torch.int32, (seqs,))] * 5,
            (torch.float32, (seqs,)),
            (torch.int32, (seqs,)),
            *[(torch.float32, (seqs,))] * 2,
            (torch.int32, (1,)),
            (torch.float32, (1 + drafts,)),
        ]


@dataclass(frozen=True)
class PassTensors(Packed):
    """The B sequences that are drafted for: their slots, seeds and temperatures."""

    seeds_B: torch.Tensor
    rows_B: torch.Tensor
    temperature_B: torch.Tensor

    @classmethod
    def shapes(cls, groups: int, size: Size) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(dtype, size) for dtype in (torch.int64, torch.int32, torch.float32)]


Form = TypeVar("Form", bound=Packed)


@dataclass(frozen=True, slots=True)
class Extent:
    """What the host knows of a step: how many rows and rows of logits, how many sequences in all
    and first with few queries (or `mixed`, at most so many, wherever they are) and likely to be no
    padding, bounds of queries and tokens, which work nobody needs, and all of some prompts."""

    rows: int
    picks: int
    seqs: int
    few: int
    bounds: tuple[int, int]
    trims: bool
    greedy: bool
    cuts: bool
    busy: int | None = None  # None: all
    mixed: int | None = None
    prompts: tuple[Prompt, ...] = ()


class StepInputs(Generic[Form]):
    """Host and device memory for steps of one form, up to the largest size."""

    def __init__(self, form: type[Form], largest: Size, *, groups: int, device: torch.device):
        self.form, self.groups, self.device = form, groups, device
        self.on_host = device.type == "cpu"
        nbytes = sum(_room(*shape) for shape in form.shapes(groups, largest))
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.stages = [
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(0 if self.on_host else STAGES)
        ]
        self.copied: list[torch.cuda.Event | None] = [None] * len(self.stages)
        self.turn = 0
        # Steps of the sizes that come again and again find their tensors here.
        self.carved: dict[tuple[int, Size], tuple[Form, int]] = {}

    def stage(self, size: Size) -> Form:
        """Host memory to fill for a step of this size, before `send`."""
        if self.on_host:
            return self._tensors(ON_DEVICE, size)[0]
        self.turn = (self.turn + 1) % STAGES
        if (event := self.copied[self.turn]) is not None:
            event.synchronize()
        return self._tensors(self.turn, size)[0]

    def send(self, size: Size) -> Form:
        """What was staged, on the device."""
        tensors, nbytes = self._tensors(ON_DEVICE, size)
        if not self.on_host:
            self.memory[:nbytes].copy_(self.stages[self.turn][:nbytes], non_blocking=True)
            self.copied[self.turn] = event = torch.cuda.Event()
            event.record()
        return tensors

    def _tensors(self, place: int, size: Size) -> tuple[Form, int]:
        """Those of a stage or of the device, and their bytes."""
        if (place, size) not in self.carved:
            memory = self.memory if place == ON_DEVICE else self.stages[place]
            if len(self.carved) >= MOST_CARVED:
                self.carved.clear()
            self.carved[place, size] = self._carve(memory, size)
        return self.carved[place, size]

    def _carve(self, memory: torch.Tensor, size: Size) -> tuple[Form, int]:
        at, views = 0, []
        for dtype, shape in self.form.shapes(self.groups, size):
            nbytes = math.prod(shape) * dtype.itemsize
            views.append(memory[at : at + nbytes].view(dtype).view(shape))
            at += _room(dtype, shape)
        return self.form(*views), at


def _room(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor up to where the next one begins."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Slot:
    """What the runner knows of the sequence in a slot."""

    request: Request
    token_ids: list[int]  # known on the host: the prompt, and the output before a preemption

    def codes(self, grant: Grant) -> list[int]:
        """The ids of a grant's tokens, or the code of the last token of its slot."""
        if grant.num_tokens == 1 and grant.start >= len(self.token_ids):
            return [-1 - grant.slot]
        ids = self.token_ids[grant.start : grant.start + grant.num_tokens]
        assert len(ids) == grant.num_tokens, "only the last token can be unknown on the host"
        return ids


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
        places: list[np.ndarray] = []
        width = self.host.shape[2]
        for slot, tables in changes:
            for group, (first, blocks) in enumerate(tables):
                if not blocks:
                    continue
                self.host[group, slot, first : first + len(blocks)] = blocks
                if not self.on_host:
                    at = (group * self.host.shape[1] + slot) * width + first
                    places.append(np.arange(at, at + len(blocks)))
        if places:
            changed = np.concatenate(places)
            # From pinned memory, for else the host waits here until the step before has ended.
            at_X = torch.from_numpy(changed).pin_memory()
            blocks_X = torch.from_numpy(self.host.ravel()[changed]).pin_memory()
            device = self.tensor.device
            self.tensor.view(-1).index_copy_(
                0, at_X.to(device, non_blocking=True), blocks_X.to(device, non_blocking=True)
            )


def keep(storage: KVStorage, *, heads: int) -> list[Kept] | None:
    """For each group of layers, of `heads` query heads, what a CPU may keep between steps."""
    shape, layers = storage.shape, len(storage.group_of_layer)
    if storage.pool.device.type != "cpu" or shape.dtype == FP8:
        return None
    # Keys, values and biases are FP32.
    nbytes = 4 * (2 * shape.kv_heads * shape.head_dim + heads)
    room = KEPT_BYTES // (nbytes * layers)
    return [
        Kept(window=group.window, num_layers=len(group.layers), room=room)
        for group in storage.groups
    ]


def lay_out(
    tables: BlockTables,
    storage: KVStorage,
    *,
    rows_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    starts_B: torch.Tensor,
    slots_GT: torch.Tensor,
    few: int,
    bounds: tuple[int, int],
    busy: int | None = None,
    mixed: int | None = None,
    prompts: tuple[Prompt, ...] = (),
    kept: list[Kept] | None = None,
) -> list[PagedLayout]:
    """For each group of layers, where the keys and values of a step are and go.

    The first `few` sequences have few queries, or with `mixed` any that have so many at most;
    `bounds` are the most queries and tokens, and `busy` sequences are likely to be no padding; of
    `prompts` all is known. On a CPU steps without drafts may keep what they read.
    """
    return [
        PagedLayout(
            tables_SN=tables.tensor[g],
            rows_B=rows_B,
            seq_lens_B=seq_lens_B,
            starts_B=starts_B,
            slots_T=slots_GT[g],
            block_size=storage.shape.size,
            window=group.window,
            few=few,
            max_query=bounds[0],
            max_len=bounds[1],
            busy=busy,
            mixed=mixed,
            prompts=prompts,
            kept=None if kept is None else kept[g],
        )
        for g, group in enumerate(storage.groups)
    ]


def prompts_of(grants: list[Grant], rows: int) -> tuple[Prompt, ...]:
    """Those of a step of so many rows, in which sequences with drafts come first."""
    if not any([grant.num_tokens > FEW_QUERIES for grant in grants]):
        return ()
    starts = rows - np.cumsum([grant.num_tokens for grant in reversed(grants)])[::-1]
    return tuple(
        Prompt(b, int(start), grant.num_tokens, grant.start)
        for b, (grant, start) in enumerate(zip(grants, starts, strict=True))
        if grant.num_tokens > FEW_QUERIES
    )


def gains_nothing_by_a_graph(prompts: tuple[Prompt, ...], storage: KVStorage) -> bool:
    """Whether a step's attention is long enough, and faster where the host knows its prompts."""
    # The model's type is the cache's wherever pieces can be read.
    cache, size = storage.caches[0], storage.shape.size
    dtype = cache.pairs_2KSC.dtype
    found = chosen(prompts, cache, dtype=dtype, block_size=size, least=WITHOUT_GRAPH)
    return found is not None and not is_batch_invariant()


def fill(to: np.ndarray, values: "np.ndarray | list[int] | list[float]", rest: float) -> None:
    """`values`, then `rest` in what is left."""
    to[: len(values)] = values
    to[len(values) :] = rest


def fill_rows(
    to: dict[str, np.ndarray],
    tables: BlockTables,
    grants: list[Grant],
    sampling: list[Grant],
    codes: np.ndarray,
    *,
    block_size: int,
) -> None:
    """What rows and sequences a step has, into the arrays of `StepTensors`; `codes` are its tokens.

    Rows beyond the grants' are padding: one for each sequence beyond theirs, and what is left for
    the last of these.
    """
    slots = np.array([grant.slot for grant in grants], dtype=np.int64)
    starts = np.array([grant.start for grant in grants], dtype=np.int64)
    counts = np.array([grant.num_tokens for grant in grants], dtype=np.int64)
    tokens, seqs = int(counts.sum()), len(grants)
    assert tokens == 0 or int((starts + counts).max()) <= tables.host.shape[2] * block_size
    firsts = counts.cumsum() - counts
    positions = np.arange(tokens) + np.repeat(starts - firsts, counts)
    entries, offsets = np.divmod(positions, block_size)
    entries += np.repeat(slots * tables.host.shape[2], counts)
    fill(to["tokens_T"], codes, 0)
    fill(to["positions_T"], positions, 0)
    # Group by group in one dimension, which takes a tenth of the time of all at once.
    for slots_T, blocks in zip(to["slots_GT"], tables.host, strict=True):
        fill(slots_T, blocks.ravel()[entries].astype(np.int64) * block_size + offsets, -1)
    fill(to["rows_B"], slots, tables.nobody)
    fill(to["seq_lens_B"], starts + counts, 0)
    rows, ends = len(to["tokens_T"]), np.arange(tokens + 1, tokens + len(to["starts_B"]) - seqs)
    to["starts_B"][: seqs + 1] = np.append(firsts, tokens)
    to["starts_B"][seqs + 1 :] = np.minimum(ends, rows)
    to["starts_B"][-1] = rows
    last_rows = dict(zip(slots.tolist(), (firsts + counts - 1).tolist(), strict=True))
    fill(to["samples_R"], [last_rows[grant.slot] for grant in sampling], 0)
    fill(to["sample_slots_R"], [grant.slot for grant in sampling], tables.nobody)
