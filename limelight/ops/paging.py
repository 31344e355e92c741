"""Where the keys and values of a batch lie: the cache of a layer, and the way to its slots."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from limelight.ops.kept import Kept

# The reference reads the keys of neighbours in the batch together, padded to the longest, as long
# as they are not more than this with the padding (one sequence alone may have more) ...
KEYS_AT_ONCE = 2**16
# ... and the padding wastes less than another round of calls costs.
KEYS_WASTED = 2**12
# Prompts are attended at most this many queries at a time, and fewer before more keys than
# SCORES_AT_ONCE allows: it bounds the scores of a head. Window layers score no key in vain.
QUERIES_AT_ONCE = 256
SCORES_AT_ONCE = 2**19
# So many places of keys and masks are kept from one layer to the next; the rest is made again.
MASKS_KEPT = 2**20
# Sequences with at most this many queries are decoding, and verify drafts at most.
FEW_QUERIES = 16
FP8, FP8_MOST = torch.float8_e4m3fn, 448.0


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer: [2, K, S, C], keys and then values, flat over its slots.

    A slot is block * block_size + offset. Slot 0 is never written and holds zeros: a key that
    scores 0 against every query stands there for the sink. One of FP8 (E4M3) holds keys and values
    divided by `scales_2`, FP32 and positive; what lies beyond FP8's reach is its largest number.
    """

    pairs_2KSC: torch.Tensor
    scales_2: torch.Tensor | None = None

    def write(self, slots_T: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> None:
        """Put keys and values of T tokens into their slots, in the cache's type; -1 is nowhere."""
        if any_padding(slots_T):
            kept_T = slots_T >= 0
            slots_T, k_TKC, v_TKC = slots_T[kept_T], k_TKC[kept_T], v_TKC[kept_T]
        self.put(slots_T, k_TKC, v_TKC)

    def put(self, slots_T: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> None:
        """The same where no slot is -1."""
        kv_TJC = torch.cat((k_TKC, v_TKC), dim=1)
        if self.scales_2 is not None:
            scales_J1 = self.scales_2.repeat_interleave(k_TKC.shape[1])[:, None]
            scaled_TJC = (kv_TJC.float() / scales_J1).clamp(-FP8_MOST, FP8_MOST)
            kv_TJC = scaled_TJC.to(FP8).view(torch.uint8)
        into_SJC = self._numbers_JSC.transpose(0, 1)
        into_SJC.index_put_((slots_T,), kv_TJC.to(into_SJC.dtype))

    def read(self, slots_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these slots: [K, B, L, C] each; of FP8 in FP32, and scaled."""
        _, kv_heads, _, size = self.pairs_2KSC.shape
        pairs = self._numbers_JSC.index_select(1, slots_BL.reshape(-1))
        keys, values = pairs.view(2, kv_heads, *slots_BL.shape, size).unbind()
        if self.scales_2 is not None:
            k_scale, v_scale = self.scales_2
            return keys.view(FP8).float() * k_scale, values.view(FP8).float() * v_scale
        return keys, values

    @cached_property
    def _numbers_JSC(self) -> torch.Tensor:
        """The pairs in a type that torch can copy by index: bytes for FP8."""
        pairs_JSC = self.pairs_2KSC.flatten(0, 1)
        return pairs_JSC if self.scales_2 is None else pairs_JSC.view(torch.uint8)

    def check(self) -> None:
        """What kernels take for granted."""
        assert self.pairs_2KSC.is_contiguous()
        assert (self.pairs_2KSC.dtype == FP8) == (self.scales_2 is not None)
        if self.scales_2 is not None:
            assert self.scales_2.shape == (2,) and self.scales_2.dtype == torch.float32
            assert self.scales_2.stride(0) == 1


@dataclass(frozen=True, slots=True)
class Segment:
    """B neighbours in the batch with Q queries each, and the L keys that these may see.

    The last key is the one of slot 0, which only a sink makes visible.
    """

    rows: slice
    slots_BL: torch.Tensor  # where the keys lie in the cache
    bias_BQL: torch.Tensor  # FP32: 0, or -inf where a query must not see a key


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the host knows of sequence `b`: its first row, its queries, and its tokens before."""

    b: int
    start: int
    queries: int
    past: int


@dataclass(frozen=True)
class PagedLayout:
    """B sequences of a batch, for the layers that share a block table; its tensors are int32.

    Sequence b has the queries `starts_B[b]` to `starts_B[b + 1]`, the last of `seq_lens_B[b]`
    tokens (0: padding, with a result of zero), and the blocks of row `rows_B[b]` in the table.
    `slots_T` (int64) is where this step's keys and values go. Nothing else of the contents is
    known on the host, so that a CUDA graph can be replayed with others: only that the `few` first
    sequences have at most FEW_QUERIES queries each, and bounds of the queries and tokens of all.
    With `mixed` not even that: those with at most so many queries count as having few, wherever
    they are. `busy` sequences are likely to be no padding. Of `prompts` all is known, in steps that
    are no graphs.
    """

    tables_SN: torch.Tensor
    rows_B: torch.Tensor
    seq_lens_B: torch.Tensor
    starts_B: torch.Tensor
    slots_T: torch.Tensor
    block_size: int
    window: int | None
    few: int
    max_query: int
    max_len: int
    busy: int | None = None  # None: all
    mixed: int | None = None
    prompts: tuple[Prompt, ...] = ()
    kept: "Kept | None" = None  # on a CPU, what steps with this table keep

    @cached_property
    def padded(self) -> bool:
        """Whether keys of some tokens go nowhere."""
        return any_padding(self.slots_T)

    @cached_property
    def goes_on(self) -> bool:
        """Whether the reference finds the keys of this step side by side."""
        return self.kept is not None and self.kept.follow(self)

    @cached_property
    def on_host(self) -> "Segments":
        """The batch as the reference cuts it."""
        return Segments(self)


def any_padding(slots_T: torch.Tensor) -> bool:
    """Whether a slot is -1."""
    return len(slots_T) > 0 and int(slots_T.min()) < 0


class Segments:
    """A layout cut for the reference: decoding neighbours together, prompts in pieces."""

    def __init__(self, layout: PagedLayout):
        self.layout, self.device = layout, layout.slots_T.device
        self.tables_SN, self.rows_B, self.seq_lens_B, self.starts_B = (
            x.cpu().numpy()
            for x in (layout.tables_SN, layout.rows_B, layout.seq_lens_B, layout.starts_B)
        )
        self.counts_B = np.diff(self.starts_B)
        self.cuts = list(self._cuts())
        self.kept: dict[int, Segment] = {}
        self.room = MASKS_KEPT

    def __iter__(self) -> Iterator[Segment]:
        for i, cut in enumerate(self.cuts):
            segment = self.kept.get(i)
            if segment is None:
                segment = self._segment(*cut)
                size = segment.bias_BQL.numel()
                if size <= self.room:
                    self.kept[i] = segment
                    self.room -= size
            yield segment

    def _cuts(self) -> Iterator[tuple[slice, slice, np.ndarray, int]]:
        """Of each segment its rows, its sequences, their ends, and the queries of each."""
        for first, last in self._neighbours():
            queries, row = int(self.counts_B[first]), int(self.starts_B[first])
            members, at = slice(first, last), 0
            while at < queries:
                size = self._piece(members, at)
                ends_B = self.seq_lens_B[members] - queries + at + size
                yield slice(row + at, row + at + size * (last - first)), members, ends_B, size
                at += size

    def _reach(self, ends_B: np.ndarray, queries: int) -> np.ndarray:
        """How many keys before each end the last `queries` tokens before it see."""
        window = self.layout.window
        return ends_B if window is None else np.minimum(ends_B, window + queries - 1)

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """Ranges of sequences that are attended together: of few queries, and as many each."""
        counts = self.counts_B.tolist()
        keys = self._reach(self.seq_lens_B, FEW_QUERIES).tolist()
        first = longest = total = 0
        for b, (count, length) in enumerate(zip(counts, keys, strict=True)):
            longest, total = max(longest, length), total + length
            padded = (b + 1 - first) * longest
            alike = count == counts[first] <= FEW_QUERIES
            if b > first and not (alike and padded <= min(KEYS_AT_ONCE, 2 * total + KEYS_WASTED)):
                yield first, b
                first, longest, total = b, length, length
        if counts:
            yield first, len(counts)

    def _piece(self, members: slice, at: int) -> int:
        """How many queries to attend at once from the `at`-th on."""
        counts_B, seq_lens_B = self.counts_B[members], self.seq_lens_B[members]
        size = min(QUERIES_AT_ONCE, int(counts_B[0]) - at)
        if len(counts_B) == 1:
            keys = int(self._reach(seq_lens_B - counts_B + at + size, size)[0])
            size = min(size, max(1, SCORES_AT_ONCE // max(keys, 1)))
        return size

    def _segment(self, rows: slice, members: slice, ends_B: np.ndarray, queries: int) -> Segment:
        """Queries are the last `queries` positions before `ends_B` of each member."""
        block_size, window = self.layout.block_size, self.layout.window
        ends_B1 = ends_B[:, None]
        # Padding may have more queries than tokens, which are none.
        firsts_B1 = ends_B1 - np.maximum(self._reach(ends_B1, queries), 0)
        # One more than the longest reach: the last column is slot 0 for everyone.
        keys_BL = firsts_B1 + np.arange((ends_B1 - firsts_B1).max() + 1)
        blocks_BL = (keys_BL // block_size).clip(0, self.tables_SN.shape[1] - 1)
        slots_BL = self.tables_SN[self.rows_B[members][:, None], blocks_BL] * block_size
        # What lies behind a sequence's end is read from slot 0 and hidden.
        slots_BL = np.where(keys_BL < ends_B1, slots_BL + keys_BL % block_size, 0)
        at_BQ1 = (ends_B1 - queries + np.arange(queries))[..., None]
        hidden_BQL = keys_BL[:, None, :] > at_BQ1
        if window is not None:
            hidden_BQL |= keys_BL[:, None, :] <= at_BQ1 - window
        # Padding sees the zeros of slot 0, so that its softmax has a term.
        hidden_BQL[..., -1] = at_BQ1[..., 0] >= 0
        bias_BQL = np.where(hidden_BQL, np.float32("-inf"), np.float32(0.0))
        return Segment(
            rows,
            torch.from_numpy(slots_BL).to(self.device),
            torch.from_numpy(bias_BQL).to(self.device),
        )


def work_space(*, max_len: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes that the reference holds at most beside what it is given and what it returns."""
    keys = max(KEYS_AT_ONCE, max_len + QUERIES_AT_ONCE)
    scores = max(SCORES_AT_ONCE, keys)
    # As read and in FP32; the scores of all heads thrice; masks and places, of several layouts too.
    return 16 * kv_heads * head_dim * keys + (12 * heads + 16) * scores + 96 * MASKS_KEPT
