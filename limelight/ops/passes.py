"""What a pass of a drafter begins and ends with: its blocks laid out, and what it has drafted.

A block is Q rows behind the tokens of its slot: the newest token and N = Q - 1 masks. Its positions
rise by one, up to the longest length, where the last ones stand still and write nothing. The last
of the slots is no one's: padding points at it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, op, pdl
from limelight.ops.rows import Slots, places_of

BLOCK = 128


@dataclass(frozen=True, slots=True)
class LaidBlocks:
    """B blocks of Q rows each, T in all, as a drafter takes them."""

    anchors_B: torch.Tensor  # the newest tokens, int64
    next_B: torch.Tensor  # the position of each block's first draft, int32
    positions_T: torch.Tensor
    slots_GT: torch.Tensor  # where keys and values go, by group of layers; -1: nowhere
    seq_lens_B: torch.Tensor  # of context and block; 0: padding
    starts_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """N drafts of each of B sequences, or of S slots, and what they were drawn from."""

    tokens_BN: torch.Tensor  # int64
    ids_BNK: torch.Tensor  # int64
    scores_BNK: torch.Tensor  # FP32
    odds_BN: torch.Tensor  # FP32

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens_BN, self.ids_BNK, self.scores_BNK, self.odds_BN

    def check(self) -> None:
        """What kernels take for granted."""
        assert self.tokens_BN.dtype == self.ids_BNK.dtype == torch.int64
        assert self.scores_BNK.dtype == self.odds_BN.dtype == torch.float32
        assert self.ids_BNK.shape == self.scores_BNK.shape
        assert self.ids_BNK.shape[:2] == self.tokens_BN.shape == self.odds_BN.shape
        assert all(x.is_contiguous() for x in self.arguments)


def lay_blocks_reference(
    rows_B: torch.Tensor, slots: Slots, *, rows: int, longest: int
) -> LaidBlocks:
    """A block of so many rows behind the tokens of each of the slots `rows_B`, int32."""
    rows_B, at_Q = rows_B.long(), torch.arange(rows, device=rows_B.device)
    real_B, first_B = rows_B < slots.nobody, slots.lengths_S[rows_B]
    positions_BQ = first_B[:, None] + at_Q
    inside_BQ = (positions_BQ < longest) & real_B[:, None]
    positions_T = positions_BQ.clamp(max=longest - 1).flatten()
    slots_GT = slots.places(rows_B.repeat_interleave(rows), positions_T)
    ends_B = (first_B + rows).clamp(max=longest)
    starts_B = torch.arange(0, len(positions_T) + 1, rows, device=rows_B.device)
    return LaidBlocks(
        slots.last_tokens_S[rows_B], first_B + 1, positions_T,
        torch.where(inside_BQ.flatten(), slots_GT, -1),
        torch.where(real_B, ends_B, 0), starts_B.int(),
    )  # fmt: skip


def store_reference(rows_B: torch.Tensor, drafted: Drafted, into: Drafted) -> None:
    """Drafts of B sequences into the slots `rows_B`; of those with the same slot any may win."""
    for new_BX, old_SX in zip(drafted.arguments, into.arguments, strict=True):
        old_SX.index_copy_(0, rows_B.long(), new_BX)


@triton.jit(do_not_specialize=["sequences", "longest", "slots", "width"])
def _blocks_kernel(
    rows_of, lengths, last_tokens, tables,
    anchors, next_B, positions, places, seq_lens, starts, sequences, longest, slots, width,
    Q: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows; the first one of a block also writes what there is once a block."""
    # None may begin before the layout is whole: attention reads it without waiting.
    if PDL:
        tl.extra.cuda.gdc_wait()
    t, rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), sequences * Q
    b, i, held = t // Q, t % Q, t < rows
    slot_T = tl.load(rows_of + b, mask=held, other=0)
    first_T = tl.load(lengths + slot_T)
    inside_T = (first_T + i < longest) & (slot_T < slots - 1)
    position_T = tl.minimum(first_T + i, longest - 1)
    tl.store(positions + t, position_T.to(tl.int64), mask=held)
    for g in tl.static_range(G):
        place_T = places_of(tables, g, slot_T, position_T, slots, width, SIZE)
        into = places + g * rows.to(tl.int64) + t
        tl.store(into, tl.where(inside_T, place_T, -1), mask=held)
    once = held & (i == 0)
    end_T = tl.where(slot_T < slots - 1, tl.minimum(first_T + Q, longest), 0)
    tl.store(anchors + b, tl.load(last_tokens + slot_T), mask=once)
    tl.store(next_B + b, first_T + 1, mask=once)
    tl.store(seq_lens + b, end_T, mask=once)
    tl.store(starts + b, t, mask=once)
    tl.store(starts + b + 1, t + 1, mask=t == rows - 1)


def _launch_lay_blocks(
    rows_B: torch.Tensor, slots: Slots, *, rows: int, longest: int
) -> LaidBlocks:
    sequences, device = len(rows_B), rows_B.device
    groups, num_slots, width = slots.tables_GSM.shape
    assert rows_B.dtype == torch.int32 and rows_B.is_contiguous() and sequences
    slots.check()
    anchors_B = torch.empty(sequences, dtype=torch.int64, device=device)
    next_B, seq_lens_B = (
        torch.empty(sequences, dtype=torch.int32, device=device) for _ in range(2)
    )
    starts_B = torch.empty(sequences + 1, dtype=torch.int32, device=device)
    positions_T = torch.empty(sequences * rows, dtype=torch.int64, device=device)
    slots_GT = torch.empty(groups, sequences * rows, dtype=torch.int64, device=device)
    _blocks_kernel[(cdiv(sequences * rows, BLOCK),)](
        rows_B, slots.lengths_S, slots.last_tokens_S, slots.tables_GSM,
        anchors_B, next_B, positions_T, slots_GT, seq_lens_B, starts_B,
        sequences, longest, num_slots, width,
        Q=rows, G=groups, SIZE=slots.block_size, BLOCK=BLOCK, num_warps=4, **pdl(rows_B),
    )  # fmt: skip
    return LaidBlocks(anchors_B, next_B, positions_T, slots_GT, seq_lens_B, starts_B)


@triton.jit
def _store_kernel(
    rows_of, tokens, ids, scores, odds, to_tokens, to_ids, to_scores, to_odds,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(rows_of + b).to(tl.int64)
    at, to = b * N + x, slot * N + x
    tl.store(to_tokens + to, tl.load(tokens + at, mask=x < N), mask=x < N)
    tl.store(to_odds + to, tl.load(odds + at, mask=x < N), mask=x < N)
    at, to = b * N * K + x, slot * N * K + x
    tl.store(to_ids + to, tl.load(ids + at, mask=x < N * K), mask=x < N * K)
    tl.store(to_scores + to, tl.load(scores + at, mask=x < N * K), mask=x < N * K)


def _launch_store(rows_B: torch.Tensor, drafted: Drafted, into: Drafted) -> None:
    sequences, num_drafts, count = drafted.ids_BNK.shape
    assert rows_B.dtype == torch.int32 and rows_B.shape == (sequences,) and rows_B.is_contiguous()
    drafted.check()
    into.check()
    assert into.ids_BNK.shape[1:] == (num_drafts, count)
    if sequences:
        _store_kernel[(sequences,)](
            rows_B, *drafted.arguments, *into.arguments, N=num_drafts, K=count,
            BLOCK=next_power_of_2(num_drafts * count), num_warps=4, **pdl(rows_B),
        )  # fmt: skip


lay_blocks = op(reference=lay_blocks_reference, kernel=_launch_lay_blocks)
store = op(reference=store_reference, kernel=_launch_store)
