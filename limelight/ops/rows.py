"""Where the rows of a step with drafts stand, and what a step leaves in its sequences' slots.

A sequence has rows for its tokens that are known and for the drafts that are kept of those that
wait in its slot; its first row is at the position that the host gives or, -1, at the length that
the device knows. A row's token is given too, or it is the slot's newest token and then its drafts.
The last of the slots is no one's: padding points at it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, op, pdl
from limelight.ops.trim import packed_starts
from limelight.ops.verify import NOTHING, Verified, packed_rows

_NOTHING = tl.constexpr(NOTHING)
# Rows and sequences that a program looks at together.
BLOCK_T, BLOCK_B = 64, 64


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the sequence in each of S slots stands, and what waits in it."""

    lengths_S: torch.Tensor  # int32: the positions whose keys and values are in the cache for good
    last_tokens_S: torch.Tensor  # int64: the newest token, which stands behind them
    drafts_SN: torch.Tensor  # int64
    tables_GSM: torch.Tensor  # int32: its blocks, by group of layers
    block_size: int

    def places(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Where keys and values of these slots and positions go, [G, T]; -1: nowhere, as padding.

        That is a slot of the cache; a position behind the table's end counts into its last block.
        """
        at_T = (positions_T // self.block_size).clamp(max=self.tables_GSM.shape[2] - 1)
        blocks_GT = self.tables_GSM[:, rows_T, at_T].long()
        places_GT = blocks_GT * self.block_size + positions_T % self.block_size
        return torch.where(rows_T < self.nobody, places_GT, -1)

    @property
    def nobody(self) -> int:
        return len(self.lengths_S) - 1

    def check(self) -> None:
        """What kernels take for granted."""
        assert self.lengths_S.dtype == self.tables_GSM.dtype == torch.int32
        assert self.last_tokens_S.dtype == self.drafts_SN.dtype == torch.int64
        assert self.tables_GSM.shape[1] == len(self.last_tokens_S) == len(self.drafts_SN)
        parts = (self.lengths_S, self.last_tokens_S, self.drafts_SN, self.tables_GSM)
        assert len(self.lengths_S) == len(self.drafts_SN) and all(x.is_contiguous() for x in parts)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for each of B sequences; int32 but for `kept_B`."""

    rows_B: torch.Tensor  # its slot
    bases_B: torch.Tensor  # its rows that are no drafts
    kept_B: torch.Tensor  # int64: of its drafts those that are verified
    firsts_B: torch.Tensor  # the position of its first row; -1: the device knows it
    samples_B: torch.Tensor  # 1: its last row has a next token

    def check(self) -> None:
        """What kernels take for granted."""
        assert self.kept_B.dtype == torch.int64 and self.kept_B.is_contiguous()
        for x_B in (self.rows_B, self.bases_B, self.firsts_B, self.samples_B):
            assert x_B.dtype == torch.int32 and x_B.shape == self.kept_B.shape
            assert x_B.is_contiguous()


@dataclass(frozen=True, slots=True)
class Rows:
    """T rows of B sequences as the target takes them."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor  # where keys and values go, by group of layers; -1: nowhere
    next_B: torch.Tensor  # the position behind its rows that are no drafts
    seq_lens_B: torch.Tensor  # 0: padding
    starts_B: torch.Tensor
    kept_B: torch.Tensor  # drafts among its rows
    picked_R: torch.Tensor | None  # the rows that need logits; None: all
    picked_starts_B: torch.Tensor


def lay_rows_reference(
    tokens_T: torch.Tensor, asked: Asked, slots: Slots, *, picks: int | None
) -> Rows:
    """The rows, of which `tokens_T` holds the given tokens, or -1; with `picks` so many need
    logits.

    Those behind the last sequence count as its own, and picks behind the last one are the last row;
    sequences for which there are no rows have none.
    """
    kept_B, rows_B, given_B = asked.kept_B, asked.rows_B.long(), asked.firsts_B
    counts_B = asked.bases_B + kept_B
    starts_B = packed_starts(counts_B).clamp(max=len(tokens_T))
    sequence_T, place_T = packed_rows(starts_B, len(tokens_T))
    slot_T = rows_B[sequence_T]
    firsts_B = torch.where(given_B >= 0, given_B, slots.lengths_S[rows_B])
    positions_T = firsts_B[sequence_T] + place_T
    drafted_T = slots.drafts_SN[slot_T, (place_T - 1).clamp(0, slots.drafts_SN.shape[1] - 1)]
    known_T = torch.where(place_T == 0, slots.last_tokens_S[slot_T], drafted_T)
    seq_lens_B = torch.where(rows_B < slots.nobody, firsts_B + counts_B, 0).int()
    picked_R, picked_starts_B = None, starts_B
    if picks is not None:
        picked_starts_B = packed_starts(asked.samples_B * (1 + kept_B))
        sequence_R, place_R = packed_rows(picked_starts_B, picks)
        picked_R = starts_B[sequence_R + 1] - 1 - kept_B[sequence_R] + place_R
        picked_R = picked_R.clamp(max=len(tokens_T) - 1)
    return Rows(
        torch.where(tokens_T >= 0, tokens_T, known_T.clamp(min=0)), positions_T,
        slots.places(slot_T, positions_T), firsts_B + asked.bases_B, seq_lens_B, starts_B, kept_B,
        picked_R, picked_starts_B,
    )  # fmt: skip


def stand_reference(
    lengths_S: torch.Tensor,
    last_tokens_S: torch.Tensor,
    rows_B: torch.Tensor,
    next_B: torch.Tensor,
    verified: Verified,
) -> None:
    """Into the slots of B sequences what a step has made of them: their lengths and last tokens.

    A sequence without a new token keeps its last; of those with the same slot any may win.
    """
    rows_B, accepted_B = rows_B.long(), verified.accepted_B
    lengths_S.index_copy_(0, rows_B, (next_B + accepted_B).int())
    last_B = verified.tokens_BQ.gather(1, accepted_B[:, None])[:, 0]
    last_B = torch.where(last_B == NOTHING, last_tokens_S[rows_B], last_B)
    last_tokens_S.index_copy_(0, rows_B, last_B)


@triton.jit
def _counts(b, kept, bases, samples, count):
    """The rows of each sequence and the drafts among them; with `samples` those with a next
    token."""
    kept_B = tl.load(kept + b, mask=b < count, other=0).to(tl.int32)
    if samples is None:
        count_B = tl.load(bases + b, mask=b < count, other=0) + kept_B
    else:
        count_B = tl.load(samples + b, mask=b < count, other=0) * (1 + kept_B)
    return count_B


@triton.jit
def _found(at_T, kept, bases, samples, sequences, BLOCK_B: tl.constexpr):
    """The sequence of each packed row, and where it begins."""
    last = sequences - 1
    sequence_T, start_T = tl.zeros(at_T.shape, tl.int32), tl.zeros(at_T.shape, tl.int32)
    end = last * 0
    for first in range(0, last, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        count_B = _counts(b, kept, bases, samples, last)
        end_B = end + tl.cumsum(count_B, axis=0)
        passed_TB = (end_B[None, :] <= at_T[:, None]) & (b < last)[None, :]
        sequence_T += tl.sum(passed_TB.to(tl.int32), axis=1)
        start_T += tl.sum(tl.where(passed_TB, count_B[None, :], 0), axis=1)
        end += tl.sum(count_B, axis=0)
    return sequence_T, start_T


@triton.jit
def places_of(tables, g, slot_T, position_T, slots, width, SIZE: tl.constexpr):
    """For kernels: `Slots.places` of group g, whatever the slot."""
    at_T = tl.minimum(position_T // SIZE, width - 1)
    row_T = g * slots + slot_T.to(tl.int64)
    return tl.load(tables + row_T * width + at_T).to(tl.int64) * SIZE + position_T % SIZE


@triton.jit
def _lay_rows(
    t, given, kept, bases, firsts, rows_of, lengths, last_tokens, drafts, tables,
    tokens, positions, places, rows, sequences, slots, width,
    N: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Some rows: their tokens and positions, and where their keys and values go."""
    sequence_T, start_T = _found(t, kept, bases, None, sequences, BLOCK_B)
    slot_T, first_T = tl.load(rows_of + sequence_T), tl.load(firsts + sequence_T)
    first_T = tl.where(first_T >= 0, first_T, tl.load(lengths + slot_T))
    place_T = t - start_T
    n = tl.minimum(tl.maximum(place_T - 1, 0), N - 1)
    drafted_T = tl.load(drafts + slot_T * N + n)
    known_T = tl.where(place_T == 0, tl.load(last_tokens + slot_T), drafted_T)
    given_T = tl.load(given + t, mask=t < rows, other=0)
    token_T = tl.where(given_T >= 0, given_T, tl.maximum(known_T, 0))
    tl.store(tokens + t, token_T, mask=t < rows)
    position_T = first_T + place_T
    tl.store(positions + t, position_T.to(tl.int64), mask=t < rows)
    for g in tl.static_range(G):
        place_T = places_of(tables, g, slot_T, position_T, slots, width, SIZE)
        place_T = tl.where(slot_T < slots - 1, place_T, -1)
        tl.store(places + g * rows.to(tl.int64) + t, place_T, mask=t < rows)


@triton.jit
def _pick_rows(r, kept, bases, samples, picked, rows, picks, sequences, BLOCK_B: tl.constexpr):
    """Some of the rows that need logits, which are the last ones of their sequences."""
    sequence_R, start_R = _found(r, kept, bases, samples, sequences, BLOCK_B)
    kept_R = tl.load(kept + sequence_R)
    end_R = tl.zeros(r.shape, tl.int32)
    for first in range(0, sequences, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        count_B = _counts(b, kept, bases, None, sequences)
        before_RB = b[None, :] <= sequence_R[:, None]
        end_R += tl.sum(tl.where(before_RB, count_B[None, :], 0), axis=1)
    row_R = tl.minimum(tl.minimum(end_R, rows) - 1 - kept_R + (r - start_R), rows - 1)
    tl.store(picked + r, row_R, mask=r < picks)


@triton.jit
def _lay_sequences(
    chunk, kept, bases, firsts, samples, rows_of, lengths, next_B, seq_lens, starts, picked_starts,
    rows, sequences, slots, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Some sequences: where they begin in all rows and in those that need logits, and end."""
    end, picked_end = rows * 0, rows * 0
    for first in range(0, chunk * BLOCK_B, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        end += tl.sum(_counts(b, kept, bases, None, sequences), axis=0)
        if picked_starts is not None:
            picked_end += tl.sum(_counts(b, kept, bases, samples, sequences), axis=0)
    b = chunk * BLOCK_B + tl.arange(0, BLOCK_B)
    held = b < sequences
    count_B = _counts(b, kept, bases, None, sequences)
    end_B = tl.minimum(end + tl.cumsum(count_B, axis=0), rows)
    tl.store(starts + 1 + b, end_B, mask=held)
    tl.store(starts + b, 0, mask=b == 0)
    if picked_starts is not None:
        picked_B = tl.cumsum(_counts(b, kept, bases, samples, sequences), axis=0)
        tl.store(picked_starts + 1 + b, picked_end + picked_B, mask=held)
        tl.store(picked_starts + b, 0, mask=b == 0)
    slot_B = tl.load(rows_of + b, mask=held, other=0)
    first_B = tl.load(firsts + b, mask=held, other=0)
    first_B = tl.where(first_B >= 0, first_B, tl.load(lengths + slot_B))
    tl.store(next_B + b, first_B + tl.load(bases + b, mask=held, other=0), mask=held)
    tl.store(seq_lens + b, tl.where(slot_B < slots - 1, first_B + count_B, 0), mask=held)


@triton.jit(do_not_specialize=["rows", "picks", "sequences", "slots", "width"])
def _rows_kernel(
    given, kept, bases, firsts, samples, rows_of, lengths, last_tokens, drafts, tables,
    tokens, positions, places, next_B, seq_lens, starts, picked, picked_starts,
    rows, picks, sequences, slots, width,
    N: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs for rows, then for sequences, then for the rows that need logits."""
    # None may begin before the layout is whole: attention reads it without waiting.
    if PDL:
        tl.extra.cuda.gdc_wait()
    program, of_rows = tl.program_id(0), tl.cdiv(rows, BLOCK_T)
    of_sequences = tl.cdiv(sequences, BLOCK_B)
    if program < of_rows:
        _lay_rows(
            program * BLOCK_T + tl.arange(0, BLOCK_T), given, kept, bases, firsts, rows_of,
            lengths, last_tokens, drafts, tables, tokens, positions, places,
            rows, sequences, slots, width, N, G, SIZE, BLOCK_B,
        )  # fmt: skip
    elif program < of_rows + of_sequences:
        _lay_sequences(
            program - of_rows, kept, bases, firsts, samples, rows_of, lengths, next_B, seq_lens,
            starts, picked_starts, rows, sequences, slots, BLOCK_B,
        )  # fmt: skip
    elif picked is not None:
        r = (program - of_rows - of_sequences) * BLOCK_T + tl.arange(0, BLOCK_T)
        _pick_rows(r, kept, bases, samples, picked, rows, picks, sequences, BLOCK_B)


def _launch_lay_rows(
    tokens_T: torch.Tensor, asked: Asked, slots: Slots, *, picks: int | None
) -> Rows:
    rows, sequences, device = len(tokens_T), len(asked.rows_B), tokens_T.device
    groups, num_slots, width = slots.tables_GSM.shape
    assert tokens_T.dtype == torch.int64 and tokens_T.is_contiguous() and rows and sequences
    slots.check()
    asked.check()
    out_T, positions_T = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    slots_GT = torch.empty(groups, rows, dtype=torch.int64, device=device)
    next_B, seq_lens_B = (
        torch.empty(sequences, dtype=torch.int32, device=device) for _ in range(2)
    )
    starts_B, picked_starts_B = (
        torch.empty(sequences + 1, dtype=torch.int32, device=device) for _ in range(2)
    )
    picked_R = None
    if picks is not None:
        picked_R = torch.empty(picks, dtype=torch.int64, device=device)
    grid = cdiv(rows, BLOCK_T) + cdiv(sequences, BLOCK_B)
    _rows_kernel[(grid + cdiv(picks or 0, BLOCK_T),)](
        tokens_T, asked.kept_B, asked.bases_B, asked.firsts_B, asked.samples_B, asked.rows_B,
        slots.lengths_S, slots.last_tokens_S, slots.drafts_SN, slots.tables_GSM,
        out_T, positions_T, slots_GT, next_B, seq_lens_B, starts_B, picked_R,
        None if picked_R is None else picked_starts_B,
        rows, picks or 0, sequences, num_slots, width,
        N=slots.drafts_SN.shape[1], G=groups, SIZE=slots.block_size,
        BLOCK_T=BLOCK_T, BLOCK_B=BLOCK_B, num_warps=4, **pdl(tokens_T),
    )  # fmt: skip
    return Rows(
        out_T, positions_T, slots_GT, next_B, seq_lens_B, starts_B, asked.kept_B,
        picked_R, starts_B if picked_R is None else picked_starts_B,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sequences"])
def _stand_kernel(
    lengths, last_tokens, rows_of, next_B, accepted, tokens, sequences,
    Q: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    held = b < sequences
    slot_B = tl.load(rows_of + b, mask=held, other=0)
    accepted_B = tl.load(accepted + b, mask=held, other=0)
    length_B = tl.load(next_B + b, mask=held, other=0) + accepted_B
    tl.store(lengths + slot_B, length_B.to(tl.int32), mask=held)
    token_B = tl.load(tokens + b * Q + accepted_B, mask=held, other=_NOTHING)
    tl.store(last_tokens + slot_B, token_B, mask=held & (token_B != _NOTHING))


def _launch_stand(
    lengths_S: torch.Tensor,
    last_tokens_S: torch.Tensor,
    rows_B: torch.Tensor,
    next_B: torch.Tensor,
    verified: Verified,
) -> None:
    accepted_B, tokens_BQ = verified.accepted_B, verified.tokens_BQ
    assert lengths_S.dtype == rows_B.dtype == torch.int32 and next_B.shape == rows_B.shape
    assert last_tokens_S.dtype == accepted_B.dtype == tokens_BQ.dtype == torch.int64
    parts = (lengths_S, last_tokens_S, rows_B, next_B, accepted_B, tokens_BQ)
    assert all(x.is_contiguous() for x in parts) and len(tokens_BQ) == len(rows_B)
    if sequences := len(rows_B):
        _stand_kernel[(cdiv(sequences, BLOCK_B),)](
            lengths_S, last_tokens_S, rows_B, next_B, accepted_B, tokens_BQ, sequences,
            Q=tokens_BQ.shape[1], BLOCK_B=BLOCK_B, num_warps=2, **pdl(lengths_S),
        )  # fmt: skip


lay_rows = op(reference=lay_rows_reference, kernel=_launch_lay_rows)
stand = op(reference=stand_reference, kernel=_launch_stand)
