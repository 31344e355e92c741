"""The next token of each row of logits: the best one, or one drawn by inversion.

    z = cap * tanh(logits / cap) where there is a cap;  p = softmax(z / temperature)
    token = the first v with p_0 + ... + p_v > uniform * (p_0 + ... + p_V)

Below `GREEDY_BELOW` the temperature counts as 0: the first of the largest logits. The probabilities
are FP32, their sums over the vocabulary FP64. With cut-offs p is 0 for what they leave out, and the
others keep the order of the vocabulary.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import next_power_of_2, op, pdl, pieces
from limelight.ops.activation import softcap
from limelight.ops.noise import PLAIN, number_of
from limelight.ops.pieces import (
    PIECE,
    Cuts,
    Pieces,
    best_of,
    inverted,
    kept,
    logits_at,
    sequence_of,
    weight_of,
)

GREEDY_BELOW = 1e-5
_PLAIN = tl.constexpr(PLAIN)


def sample_reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    *,
    cap: float | None = None,
    cuts: Cuts | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64 [R], and the largest logit of each row, FP32 [R], NaN if one is NaN.

    `uniform_R` holds numbers of [0, 1]; with a NaN or without a finite logit the token means
    nothing. Each row has cut-offs of its own. `into` are tokens by slot, int64 [S], which also
    receive each row's, and the rows' slots, int64 [R]; of rows with the same slot any may win.
    """
    if cap is not None:
        logits_RV = softcap(logits_RV, cap=cap)
    best_R, token_R = logits_RV.max(dim=-1)
    rows = (temperature_R >= GREEDY_BELOW).nonzero()[:, 0]
    if len(rows):
        own = None if cuts is None else Cuts(*(x_B[rows] for x_B in cuts.arguments))
        token_R[rows] = invert(
            probabilities(logits_RV[rows], temperature_R[rows], own), uniform_R[rows]
        )
    if into is not None:
        into[0].index_copy_(0, into[1], token_R)
    return token_R, best_R


def probabilities(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, cuts: Cuts | None
) -> torch.Tensor:
    """p of each row, FP32 [R, V]; with cut-offs of its own what they leave of it, up to a factor.

    A temperature that counts as 0 is 1 here.
    """
    warmth_R = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0)
    probs_RV = torch.softmax(logits_RV / warmth_R[:, None], dim=-1)
    if cuts is None:
        return probs_RV
    off_R = (cuts.top_k_B >= logits_RV.shape[1]) & (cuts.top_p_B >= 1) & (cuts.min_p_B <= 0)
    order_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    left_RV = truncate(probs_RV.gather(1, order_RV), *cuts.arguments)
    left_RV = torch.empty_like(probs_RV).scatter_(1, order_RV, left_RV)
    return torch.where(off_R[:, None], probs_RV, left_RV)


def invert(probs_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulated probabilities holds the number of its row."""
    cumulated_RV = probs_RV.double().cumsum(dim=-1)
    target_R1 = uniform_R.double()[:, None] * cumulated_RV[:, -1:]
    token_R1 = torch.searchsorted(cumulated_RV, target_R1, right=True)
    # Rounding may leave the number at the very end; the last token with a probability is meant.
    last_R1 = torch.searchsorted(cumulated_RV, cumulated_RV[:, -1:].contiguous())
    return torch.minimum(token_R1, last_R1)[:, 0].clamp(0, probs_RV.shape[1] - 1)


def truncate(
    probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """Zero what min-p, top-k and top-p leave out of rows sorted by falling probability.

    Off are min-p 0, top-k as large as the vocabulary, and top-p 1.
    """
    kept_RV = probs_RV >= probs_RV[:, :1] * min_p_R[:, None]
    kept_RV &= torch.arange(probs_RV.shape[1], device=probs_RV.device) < top_k_R[:, None]
    probs_RV = probs_RV * kept_RV
    cumulated_RV = probs_RV.double().cumsum(dim=-1)
    share_R1 = torch.where(top_p_R < 1, top_p_R.double(), 2.0)[:, None]
    kept_RV = cumulated_RV - probs_RV < share_R1 * cumulated_RV[:, -1:]
    kept_RV[:, 0] = True
    return probs_RV * kept_RV


@triton.jit
def _rows_kernel(
    logits, temperature, uniform, starts, seeds, positions, min_p, piece_best, piece_at, piece_sum,
    cut_R, last_R, token, best_R, last_tokens, slots, stride, V, cap, greedy_below, sequences,
    pieces, SEQUENCES: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of one row: its piece by the pieces' sums, then itself within the piece.

    Without `uniform` rows are packed from `starts` on, and have their positions' own numbers.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = sequence_of(starts, row, sequences, SEQUENCES)
    if b >= sequences:
        return
    p = tl.arange(0, PIECES)
    best_P = tl.load(piece_best + row * pieces + p, mask=p < pieces, other=float("-inf"))
    best, piece = best_of(best_P, 0)
    chosen = tl.load(piece_at + row * pieces + piece)
    warmth = tl.load(temperature + b).to(tl.float32)
    if warmth >= greedy_below:
        if uniform is None:
            at = tl.load(positions + b).to(tl.int64) + (row - tl.load(starts + b))
            number = number_of(tl.load(seeds + b), at, at * 0 + _PLAIN).to(tl.float32)
        else:
            number = tl.load(uniform + row)
        sum_P = tl.load(piece_sum + row * pieces + p, mask=p < pieces, other=0.0)
        # A piece without a finite logit has the sum 0.
        weight_P = tl.where(sum_P > 0, sum_P * tl.exp((best_P - best) / warmth).to(tl.float64), 0.0)
        target = number.to(tl.float64) * tl.sum(weight_P, axis=0)
        piece, before = inverted(weight_P, target)
        v = piece * PIECE + tl.arange(0, PIECE)
        z_V = logits_at(logits, row, v, stride, V, cap)
        p_V = weight_of(z_V, best, warmth)
        if cut_R is not None:
            cut, last = tl.load(cut_R + row), tl.load(last_R + row)
            left_V = kept(z_V, v, best, warmth, cut, last, tl.load(min_p + b).to(tl.float32))
            p_V = tl.where(left_V, p_V, 0.0)
        # A sum in another order may end just above the target.
        target = tl.maximum(target - before, 0.0)
        chosen = piece * PIECE + inverted(p_V.to(tl.float64), target)[0]
    tl.store(best_R + row, best)
    chosen = tl.minimum(chosen, V - 1).to(tl.int64)
    tl.store(token + row, chosen)
    if last_tokens is not None:
        tl.store(last_tokens + tl.load(slots + row), chosen)


def _launch_sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    *,
    cap: float | None = None,
    cuts: Cuts | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert uniform_R.shape == (len(logits_RV),) and uniform_R.is_contiguous()
    made = pieces.launch(logits_RV, temperature_R, greedy_below=GREEDY_BELOW, cap=cap, cuts=cuts)
    return draw(logits_RV, made, temperature_R, uniform_R=uniform_R, cap=cap, cuts=cuts, into=into)


@dataclass(frozen=True, slots=True)
class Places:
    """Where packed rows stand in their sequences: for numbers that follow from seed and position.

    Row i of sequence b is that of `starts_B[b]` + i and gives the token at `position_B[b]` + i.
    """

    starts_B: torch.Tensor
    seed_B: torch.Tensor
    position_B: torch.Tensor


def draw(
    logits_RV: torch.Tensor,
    made: Pieces,
    temperature_B: torch.Tensor,
    *,
    uniform_R: torch.Tensor | None = None,
    places: Places | None = None,
    cap: float | None = None,
    cuts: Cuts | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel behind `pieces.launch`: tokens and best logits of rows with numbers of their own,
    or of those at their places; rows behind the last sequence get none."""
    rows, vocabulary = logits_RV.shape
    last_tokens_S, slots_R = into or (None, None)
    if last_tokens_S is not None and slots_R is not None:
        assert last_tokens_S.dtype == slots_R.dtype == torch.int64 and slots_R.shape == (rows,)
        assert last_tokens_S.is_contiguous() and slots_R.is_contiguous()
    packed: tuple[torch.Tensor | None, ...] = (None, None, None)
    sequences = rows
    if places is not None:
        packed = (places.starts_B, places.seed_B, places.position_B)
        sequences = len(places.seed_B)
        assert places.seed_B.dtype == torch.int64
        assert all(x_B is not None and x_B.is_contiguous() for x_B in packed)
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    best_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    if rows:
        count = pieces.count_of(vocabulary)
        bound, block = pieces.bounds_of(sequences, packed=places is not None)
        _rows_kernel[(rows,)](
            logits_RV, temperature_B, uniform_R, *packed, None if cuts is None else cuts.min_p_B,
            *made.arguments, token_R, best_R, last_tokens_S, slots_R,
            logits_RV.stride(0), vocabulary, cap, GREEDY_BELOW, bound, count,
            SEQUENCES=block,
            PIECES=next_power_of_2(count), PIECE=PIECE, num_warps=4, **pdl(logits_RV),
        )  # fmt: skip
    return token_R, best_R


sample = op(reference=sample_reference, kernel=_launch_sample)
