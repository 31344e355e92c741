"""The next token of each row of logits: the best one, or one drawn by inversion.

    z = cap * tanh(logits / cap) where there is a cap;  p = softmax(z / temperature)
    token = the first v with p_0 + ... + p_v > uniform * (p_0 + ... + p_V)

Below `GREEDY_BELOW` the temperature counts as 0: the first of the largest logits. The probabilities
are FP32, their sums over the vocabulary FP64.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import op, pdl
from limelight.ops.activation import softcap

GREEDY_BELOW = 1e-5
PIECE = 2048  # logits a program of the first kernel


def sample_reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    *,
    cap: float | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64 [R], and the largest logit of each row, FP32 [R], NaN if one is NaN.

    `uniform_R` holds numbers of [0, 1]; with a NaN or without a finite logit the token means
    nothing. `into` are tokens by slot, int64 [S], which also receive each row's, and the rows'
    slots, int64 [R]; of rows with the same slot any may win.
    """
    if cap is not None:
        logits_RV = softcap(logits_RV, cap=cap)
    best_R, token_R = logits_RV.max(dim=-1)
    rows = (temperature_R >= GREEDY_BELOW).nonzero()[:, 0]
    if len(rows):
        scaled_RV = logits_RV[rows] / temperature_R[rows, None]
        token_R[rows] = invert(torch.softmax(scaled_RV, dim=-1), uniform_R[rows])
    if into is not None:
        into[0].index_copy_(0, into[1], token_R)
    return token_R, best_R


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
    probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    kept_RV = before_RV < top_p_R[:, None]
    kept_RV[:, 0] = True
    return probs_RV * kept_RV


@triton.jit
def _piece(logits, row, piece, stride, V, cap, PIECE: tl.constexpr):
    """The logits of one piece, under their cap; -inf behind the end."""
    v = piece * PIECE + tl.arange(0, PIECE)
    at = logits + row.to(tl.int64) * stride + v
    z_V = tl.load(at, mask=v < V, other=float("-inf"))
    if cap is not None:
        shrunk_V = tl.exp(-2.0 * tl.abs(z_V / cap))
        tanh_V = (1.0 - shrunk_V) / (1.0 + shrunk_V)
        z_V = tl.where(v < V, tl.where(z_V < 0, -cap, cap) * tanh_V, float("-inf"))
    return z_V


@triton.jit
def _best(z_V):
    """The largest number, NaN if one is NaN, and its first index."""
    bad_V = z_V != z_V
    best, at = tl.max(tl.where(bad_V, float("-inf"), z_V), axis=0, return_indices=True)
    return tl.where(tl.max(bad_V.to(tl.int32), axis=0) > 0, float("nan"), best), at


@triton.jit
def _pieces_kernel(
    logits, temperature, piece_best, piece_at, piece_sum, stride, V, cap, greedy_below,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one piece of a row: its best logit, where, and sum exp((z - best) / temperature).

    A greedy row has no use for the sum.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, piece = tl.program_id(0), tl.program_id(1)
    z_V = _piece(logits, row, piece, stride, V, cap, PIECE)
    best, at = _best(z_V)
    to = row * tl.num_programs(1) + piece
    tl.store(piece_best + to, best)
    tl.store(piece_at + to, piece * PIECE + at)
    warmth = tl.load(temperature + row).to(tl.float32)
    if warmth >= greedy_below:
        p_V = tl.where(z_V == float("-inf"), 0.0, tl.exp((z_V - best) / warmth))
        tl.store(piece_sum + to, tl.sum(p_V.to(tl.float64), axis=0))


@triton.jit
def _inverted(weight_V, target):
    """The first index whose cumulated weight passes the target, or else the last with a weight.

    Also the weight before it.
    """
    v = tl.arange(0, weight_V.shape[0])
    cumulated_V = tl.cumsum(weight_V, axis=0)
    passed = tl.sum((cumulated_V <= target).to(tl.int32), axis=0)
    chosen = tl.maximum(tl.minimum(passed, tl.max(tl.where(weight_V > 0, v, 0), axis=0)), 0)
    return chosen, tl.sum(tl.where(v < chosen, weight_V, 0.0), axis=0)


@triton.jit
def _rows_kernel(
    logits, temperature, uniform, piece_best, piece_at, piece_sum, token, best_R, last_tokens,
    slots, stride, V, cap, greedy_below, pieces,
    PIECES: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of one row: its piece by the pieces' sums, then itself within the piece."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    p = tl.arange(0, PIECES)
    best_P = tl.load(piece_best + row * pieces + p, mask=p < pieces, other=float("-inf"))
    best, piece = _best(best_P)
    chosen = tl.load(piece_at + row * pieces + piece)
    warmth = tl.load(temperature + row).to(tl.float32)
    if warmth >= greedy_below:
        sum_P = tl.load(piece_sum + row * pieces + p, mask=p < pieces, other=0.0)
        # A piece without a finite logit has the sum 0.
        weight_P = tl.where(sum_P > 0, sum_P * tl.exp((best_P - best) / warmth).to(tl.float64), 0.0)
        target = tl.load(uniform + row).to(tl.float64) * tl.sum(weight_P, axis=0)
        piece, before = _inverted(weight_P, target)
        z_V = _piece(logits, row, piece, stride, V, cap, PIECE)
        p_V = tl.where(z_V == float("-inf"), 0.0, tl.exp((z_V - best) / warmth)).to(tl.float64)
        chosen = piece * PIECE + _inverted(p_V, target - before)[0]
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
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits_RV.shape
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1 and vocabulary > 0
    assert all(x_R.shape == (rows,) and x_R.is_contiguous() for x_R in (temperature_R, uniform_R))
    last_tokens_S, slots_R = into or (None, None)
    if last_tokens_S is not None and slots_R is not None:
        assert last_tokens_S.dtype == slots_R.dtype == torch.int64 and slots_R.shape == (rows,)
        assert last_tokens_S.is_contiguous() and slots_R.is_contiguous()
    pieces = triton.cdiv(vocabulary, PIECE)
    device = logits_RV.device
    piece_best_RP = torch.empty(rows, pieces, dtype=torch.float32, device=device)
    piece_at_RP = torch.empty(rows, pieces, dtype=torch.int32, device=device)
    piece_sum_RP = torch.empty(rows, pieces, dtype=torch.float64, device=device)
    token_R = torch.empty(rows, dtype=torch.int64, device=device)
    best_R = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        parts = (piece_best_RP, piece_at_RP, piece_sum_RP)
        shape = (logits_RV.stride(0), vocabulary, cap, GREEDY_BELOW)
        _pieces_kernel[(rows, pieces)](
            logits_RV, temperature_R, *parts, *shape, PIECE=PIECE, num_warps=4, **pdl(logits_RV)
        )
        _rows_kernel[(rows,)](
            logits_RV, temperature_R, uniform_R, *parts, token_R, best_R, last_tokens_S, slots_R,
            *shape, pieces, PIECES=triton.next_power_of_2(pieces), PIECE=PIECE, num_warps=4,
            **pdl(logits_RV),
        )  # fmt: skip
    return token_R, best_R


sample = op(reference=sample_reference, kernel=_launch_sample)
