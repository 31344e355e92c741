"""Where a token stands in its row of logits: what its log-probability and its rank are made of.

    logprob = (z - best) / temperature - log(sum of exp((z_v - best) / temperature))
    rank = 1 + how many z_v > z

The sum is over what cut-offs leave of the row, its summands are FP32 and it is FP64. It takes the
pieces that sampling begins with (`pieces.py`), and a piece is read a second time only where it has
a logit that is larger, or where cut-offs end.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import next_power_of_2, op, pdl, pieces
from limelight.ops.pieces import (
    PIECE,
    TILE_COLUMNS,
    TILE_ROWS,
    Cuts,
    best_of,
    kept,
    logits_at,
    picked,
    weight_of,
)
from limelight.ops.sample import probabilities

FIGURES = 5


def standing_reference(
    logits_RV: torch.Tensor,
    rows_X: torch.Tensor,
    logit_X: torch.Tensor,
    temperature_X: torch.Tensor,
    *,
    cuts: Cuts | None = None,
) -> torch.Tensor:
    """Of each logit z in row `rows_X[x]` (int64) of FP32 logits, FP64 [5, X]:

        z, the row's largest logit, the sum, how many logits are larger, how many cut-offs leave

    Temperatures are above 0, and cut-offs by x. Of a row with a NaN the second and third are NaN;
    of row -1 what is told means nothing.
    """
    row_XV = logits_RV[rows_X]
    best_X = row_XV.amax(dim=-1)
    larger_X = (row_XV > logit_X[:, None]).sum(dim=-1)
    weight_XV = row_XV.double().sub_(best_X.double()[:, None]).div_(temperature_X[:, None]).exp_()
    left_X = torch.full_like(larger_X, row_XV.shape[1])
    if cuts is not None:
        off_X = (cuts.top_k_B >= row_XV.shape[1]) & (cuts.top_p_B >= 1) & (cuts.min_p_B <= 0)
        left_XV = (probabilities(row_XV, temperature_X, cuts) > 0) | off_X[:, None]
        weight_XV, left_X = weight_XV * left_XV, left_XV.sum(dim=-1)
    figures = (logit_X, best_X, weight_XV.sum(dim=-1), larger_X, left_X)
    return torch.stack([x.double() for x in figures])


@triton.jit
def _standing_kernel(
    logits, rows, logit_X, temperature, min_p, piece_best, piece_sum, cut_X, last_X, figures,
    stride, V, pieces,
    PIECES: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x, count = tl.program_id(0), tl.num_programs(0)
    logits, there = picked(logits, rows, x, stride)
    if not there:
        return
    z, warmth = tl.load(logit_X + x), tl.load(temperature + x)
    p = tl.arange(0, PIECES)
    best_P = tl.load(piece_best + x * pieces + p, mask=p < pieces, other=float("-inf"))
    sum_P = tl.load(piece_sum + x * pieces + p, mask=p < pieces, other=0.0)
    best, _at = best_of(best_P, 0)
    # A piece without a finite logit has the sum 0.
    scale_P = tl.exp((best_P - best) / warmth).to(tl.float64)
    weight = tl.sum(tl.where(best_P == float("-inf"), 0.0, sum_P * scale_P), axis=0)
    some = False
    if cut_X is not None:
        cut, last, least = tl.load(cut_X + x), tl.load(last_X + x), tl.load(min_p + x)
        some = (cut > float("-inf")) | (least > 0)
    AT_ONCE: tl.constexpr = ROWS * COLUMNS // PIECE
    v_RX = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    larger_X, left_X = tl.zeros((COLUMNS,), tl.int32), tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, pieces, AT_ONCE):
        q = first + tl.arange(0, AT_ONCE)
        best_Q = tl.load(piece_best + x * pieces + q, mask=q < pieces, other=float("-inf"))
        top = tl.max(best_Q, axis=0)
        looks = top > z
        if cut_X is not None:
            looks = looks | (some & (top >= cut))
        if looks:
            v = first * PIECE + v_RX
            z_RX = logits_at(logits, x, v, stride, V, None)
            larger_X += tl.sum((z_RX > z).to(tl.int32), axis=0)
            if cut_X is not None:
                left_RX = kept(z_RX, v, best, warmth, cut, last, least)
                left_RX = left_RX & (weight_of(z_RX, best, warmth) > 0)
                left_X += tl.sum(left_RX.to(tl.int32), axis=0)
    left = V + tl.sum(left_X, axis=0) * 0
    if cut_X is not None:
        left = tl.where(some, tl.sum(left_X, axis=0), V)
    tl.store(figures + x, z.to(tl.float64))
    tl.store(figures + count + x, best.to(tl.float64))
    tl.store(figures + 2 * count + x, weight)
    tl.store(figures + 3 * count + x, tl.sum(larger_X, axis=0).to(tl.float64))
    tl.store(figures + 4 * count + x, left.to(tl.float64))


def _launch_standing(
    logits_RV: torch.Tensor,
    rows_X: torch.Tensor,
    logit_X: torch.Tensor,
    temperature_X: torch.Tensor,
    *,
    cuts: Cuts | None = None,
) -> torch.Tensor:
    assert logit_X.shape == temperature_X.shape == rows_X.shape and logit_X.is_contiguous()
    assert logit_X.dtype == temperature_X.dtype == torch.float32
    made = pieces.launch(logits_RV, temperature_X, greedy_below=0.0, cuts=cuts, rows_R=rows_X)
    count, vocabulary = len(rows_X), logits_RV.shape[1]
    figures_5X = torch.empty(FIGURES, count, dtype=torch.float64, device=logits_RV.device)
    if count:
        held = pieces.count_of(vocabulary)
        _standing_kernel[(count,)](
            logits_RV, rows_X, logit_X, temperature_X, None if cuts is None else cuts.min_p_B,
            made.best_RP, made.sum_RP, made.cut_R, made.last_R, figures_5X,
            logits_RV.stride(0), vocabulary, held, PIECES=next_power_of_2(held), PIECE=PIECE,
            ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, num_warps=8, **pdl(logits_RV),
        )  # fmt: skip
    return figures_5X


standing = op(reference=standing_reference, kernel=_launch_standing)
