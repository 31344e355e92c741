"""The kernel that judges the drafts of a sequence and draws the token behind those that stand.

One program a sequence; it starts from the pieces of its rows (`pieces.py`), and beside them reads
the logits of drafts and candidates, and one piece of one row. What of a piece is left after a
refused draft is its sum without the candidates in it, and what p has more than q of each of these.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import next_power_of_2, pdl, pieces
from limelight.ops.noise import ACCEPT, PLAIN, RESIDUAL, number_of
from limelight.ops.pieces import PIECE, Cuts, Pieces, best_of, inverted, kept, logits_at, weight_of

_ACCEPT, _PLAIN, _RESIDUAL = tl.constexpr(ACCEPT), tl.constexpr(PLAIN), tl.constexpr(RESIDUAL)
# Of a sum of FP64 that its summands are taken from, what is less than this is rounding.
NOTHING_LEFT = tl.constexpr(1e-12)


@triton.jit
def candidate_probs(score_XK, k_K, count, warmth, greedy_below, axis: tl.constexpr):
    """For kernels: `verify.draft_probs` of the first `count` along the axis, FP32."""
    real_XK = (score_XK == score_XK) & (tl.abs(score_XK) < float("inf")) & (k_K < count)
    score_XK = tl.where(real_XK, score_XK, float("-inf"))
    best_X1 = tl.max(score_XK, axis=axis, keep_dims=True)
    first_X1 = tl.min(tl.where(score_XK == best_X1, k_K, count), axis=axis, keep_dims=True)
    w_XK = tl.where(real_XK, tl.exp((score_XK - best_X1) / warmth), 0.0)
    p_XK = w_XK / tl.sum(w_XK, axis=axis, keep_dims=True)
    warm_X1 = tl.where(warmth >= greedy_below, best_X1, float("-inf")) > float("-inf")
    return tl.where(warm_X1, p_XK, (k_K == first_X1).to(tl.float32))


@triton.jit
def _row_sums(
    piece_best, piece_at, piece_sum, row_Q, warmth, pieces,
    PIECES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Each row's best logit, where that is, and the weight of all that is left in it."""
    p = tl.arange(0, PIECES)
    at_QP, held = row_Q[:, None] * pieces + p[None, :], (p < pieces)[None, :]
    best_QP = tl.load(piece_best + at_QP, mask=held, other=float("-inf"))
    best_Q, piece_Q = best_of(best_QP, 1)
    token_Q = tl.load(piece_at + row_Q * pieces + piece_Q)
    total_Q = tl.zeros(row_Q.shape, tl.float64)
    if SAMPLED:
        sum_QP = tl.load(piece_sum + at_QP, mask=held, other=0.0)
        scale_QP = tl.exp((best_QP - best_Q[:, None]) / warmth).to(tl.float64)
        total_Q = tl.sum(tl.where(sum_QP > 0, sum_QP * scale_QP, 0.0), axis=1)
    return best_Q, token_Q, total_Q


@triton.jit
def shares_of(
    logits, piece_best, cut_R, last_R, row_X, v_X, real_X, best_X, total_X, warmth, least,
    stride, V, pieces, PIECE: tl.constexpr,
):  # fmt: skip
    """Of real tokens their summands in the sums of their pieces, and p; FP64."""
    z_X = logits_at(logits, row_X, tl.where(real_X, v_X, V), stride, V, None)
    top_X = tl.load(piece_best + row_X * pieces + v_X // PIECE, mask=real_X, other=0.0)
    w_X = weight_of(z_X, top_X, warmth)
    if cut_R is not None:
        cut_X, last_X = tl.load(cut_R + row_X), tl.load(last_R + row_X)
        w_X = tl.where(kept(z_X, v_X, best_X, warmth, cut_X, last_X, least), w_X, 0.0)
    w_X = w_X.to(tl.float64)
    return w_X, w_X * tl.exp((top_X - best_X) / warmth).to(tl.float64) / total_X


@triton.jit
def proposed(
    ids, scores, first, V, warmth, greedy_below,
    N: tl.constexpr, K: tl.constexpr, QB: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Ids and q of each draft's candidates [Q, K]."""
    i, k = tl.arange(0, QB)[:, None], tl.arange(0, KB)[None, :]
    at_QK = (first + i) * K + k
    held = (i < N) & (k < K)
    id_QK = tl.load(ids + at_QK, mask=held, other=-1)
    score_QK = tl.load(scores + at_QK, mask=held, other=0.0)
    q_QK = candidate_probs(score_QK, k, K, warmth, greedy_below, 1).to(tl.float64)
    # The draft was one of these, whatever else might have come.
    q_QK = tl.where((id_QK >= 0) & (id_QK < V), q_QK, 0.0)
    return id_QK, q_QK / tl.maximum(tl.sum(q_QK, axis=1, keep_dims=True), 1e-30)


@triton.jit
def left_of_pieces(
    id_K, q_K, w_K, p_K, sum_P, scale_P, KB: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """max(p - q, 0) of each piece, of its sum and those of the candidates in it."""
    k, p = tl.arange(0, KB), tl.arange(0, sum_P.shape[0])
    same_KK = id_K[:, None] == id_K[None, :]
    # A token that is a candidate twice counts once, with both of its q.
    q_K = tl.sum(tl.where(same_KK, q_K[None, :], 0.0), axis=1)
    again_K = tl.sum((same_KK & (k[None, :] < k[:, None])).to(tl.int32), axis=1)
    here_PK = (p[:, None] == (id_K // PIECE)[None, :]) & ((again_K == 0) & (id_K >= 0))[None, :]
    rest_P = sum_P - tl.sum(tl.where(here_PK, w_K[None, :], 0.0), axis=1)
    rest_P = tl.where(rest_P > NOTHING_LEFT * sum_P, rest_P, 0.0)
    more_K = tl.maximum(p_K - q_K, 0.0)
    return rest_P * scale_P + tl.sum(tl.where(here_PK, more_K[None, :], 0.0), axis=1)


@triton.jit
def _piece_weights(
    logits, piece_best, piece_sum, cut_R, last_R, row, id_K, q_K, refused, best, total, warmth,
    least, stride, V, pieces, KB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """What the token is drawn by, piece by piece: max(p - q, 0) in a refused draft's place, else p.

    Also whether it is the former, and what p is in multiples of the summands.
    """
    p = tl.arange(0, PIECES)
    held = p < pieces
    best_P = tl.load(piece_best + row * pieces + p, mask=held, other=float("-inf"))
    sum_P = tl.load(piece_sum + row * pieces + p, mask=held, other=0.0)
    # A piece without a finite logit has the sum 0.
    scale_P = tl.exp((best_P - best) / warmth).to(tl.float64) / total
    scale_P = tl.where(sum_P > 0, scale_P, 0.0)
    real_K = (id_K >= 0) & (id_K < V)
    w_K, p_K = shares_of(
        logits, piece_best, cut_R, last_R, row + tl.zeros(id_K.shape, tl.int32), id_K, real_K,
        best, total, warmth, least, stride, V, pieces, PIECE,
    )  # fmt: skip
    id_K = tl.where(real_K, id_K, -1)
    left_P = left_of_pieces(id_K, q_K, w_K, p_K, sum_P, scale_P, KB, PIECE)
    # Rounding can leave nothing where p and q are the same.
    less = refused & (tl.sum(left_P, axis=0) > 0)
    return tl.where(less, left_P, sum_P * scale_P), less, scale_P


@triton.jit
def token_of(
    logits, piece_best, piece_sum, cut_R, last_R, row, id_K, q_K, refused, number, best, token,
    total, warmth, least, stride, V, pieces,
    K: tl.constexpr, KB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The token whose interval of what it is drawn by holds the number; `token` where nothing is.

    That is max(p - q, 0) in a `refused` draft's place, else p.
    """
    weight_P, less, scale_P = _piece_weights(
        logits, piece_best, piece_sum, cut_R, last_R, row, id_K, q_K, refused, best, total,
        warmth, least, stride, V, pieces, KB, PIECES, PIECE,
    )  # fmt: skip
    target = number * tl.sum(weight_P, axis=0)
    piece, before = inverted(weight_P, target)
    v = piece * PIECE + tl.arange(0, PIECE)
    z_V = logits_at(logits, row, v, stride, V, None)
    w_V = weight_of(z_V, tl.load(piece_best + row * pieces + piece), warmth)
    if cut_R is not None:
        cut, last = tl.load(cut_R + row), tl.load(last_R + row)
        w_V = tl.where(kept(z_V, v, best, warmth, cut, last, least), w_V, 0.0)
    here = tl.arange(0, PIECES) == piece
    w_V = w_V.to(tl.float64) * tl.sum(tl.where(here, scale_P, 0.0), axis=0)
    if less:
        for k in range(K):
            mine_K = tl.arange(0, KB) == k
            candidate = tl.sum(tl.where(mine_K, id_K, 0), axis=0)
            w_V -= tl.where(v == candidate, tl.sum(tl.where(mine_K, q_K, 0.0), axis=0), 0.0)
        w_V = tl.maximum(w_V, 0.0)
    # Sums in another order may end just above the target, or find where nothing is.
    chosen = piece * PIECE + inverted(w_V, tl.maximum(target - before, 0.0))[0]
    return tl.where(tl.max(w_V, axis=0) > 0, chosen, token)


@triton.jit
def number_behind(seed, position, refused):
    """For kernels: what a token is drawn with, in a refused draft's place or behind all; FP64."""
    use = tl.where(refused, _RESIDUAL, _PLAIN)
    return number_of(seed, position, use.to(tl.int64)).to(tl.float32).to(tl.float64)


@triton.jit
def _drawn(
    logits, piece_best, piece_sum, cut_R, last_R, row, exists, id_K, q_K, refused, seed, position,
    best, token, total, warmth, greedy_below, least, stride, V, pieces,
    K: tl.constexpr, KB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The token behind those that stand, where the sequence has rows and samples."""
    if exists & (warmth >= greedy_below):
        token = token_of(
            logits, piece_best, piece_sum, cut_R, last_R, row, id_K, q_K, refused,
            number_behind(seed, position, refused), best, token, total, warmth, least,
            stride, V, pieces, K, KB, PIECES, PIECE,
        )  # fmt: skip
    return token


@triton.jit
def _judge_kernel(
    logits, starts, drafts, slots, drawn, temperature, seeds, positions, ids, scores, min_p,
    piece_best, piece_at, piece_sum, cut_R, last_R, accepted, tokens, best_B,
    stride, V, pieces, greedy_below,
    N: tl.constexpr, K: tl.constexpr, QB: tl.constexpr, KB: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, SAMPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0), tl.arange(0, QB)
    start = tl.load(starts + b).to(tl.int32)
    rows = tl.load(starts + b + 1).to(tl.int32) - start
    warmth, least = 0.0, 0.0
    if SAMPLED:
        warmth = tl.load(temperature + b).to(tl.float32)
    if min_p is not None:
        least = tl.load(min_p + b).to(tl.float32)
    slot = b
    if slots is not None:
        slot = tl.load(slots + b)
    d_Q = tl.load(drafts + slot * N + i, mask=i < tl.minimum(N, rows - 1), other=-1)
    real_Q = (d_Q >= 0) & (d_Q < V)
    # A sequence without rows reads those of another, and says nothing of them.
    row_Q = start + tl.minimum(i, rows - 1)
    row_Q = tl.where(rows > 0, row_Q, 0)
    best_Q, token_Q, total_Q = _row_sums(
        piece_best, piece_at, piece_sum, row_Q, warmth, pieces, PIECES, SAMPLED
    )
    if drawn is not None:
        token_Q = tl.load(drawn + row_Q)
    stands_Q = real_Q & (best_Q > float("-inf")) & (token_Q == d_Q)
    if SAMPLED:
        seed, position = tl.load(seeds + b), tl.load(positions + b).to(tl.int64)
        id_QK, q_QK = proposed(ids, scores, slot * N, V, warmth, greedy_below, N, K, QB, KB)
        q_Q = tl.sum(tl.where(id_QK == d_Q[:, None], q_QK, 0.0), axis=1)
        _w_Q, p_Q = shares_of(
            logits, piece_best, cut_R, last_R, row_Q, d_Q, real_Q, best_Q, total_Q, warmth, least,
            stride, V, pieces, PIECE,
        )  # fmt: skip
        u_Q = number_of(seed, position + i, i * 0 + _ACCEPT)
        possible_Q = real_Q & (q_Q > 0)
        passes_Q = possible_Q & (u_Q * q_Q < p_Q)
        stands_Q = tl.where(warmth >= greedy_below, passes_Q, stands_Q)
    count = tl.min(tl.where(stands_Q, QB, i), axis=0)
    here_Q = i == count
    best = tl.sum(tl.where(here_Q, best_Q, 0.0), axis=0)
    final = tl.sum(tl.where(here_Q, token_Q, 0), axis=0)
    if SAMPLED:
        if_refused = tl.where(here_Q, possible_Q.to(tl.int32), 0)
        final = _drawn(
            logits, piece_best, piece_sum, cut_R, last_R, start + count, rows > 0,
            tl.sum(tl.where(here_Q[:, None], id_QK, 0), axis=0),
            tl.sum(tl.where(here_Q[:, None], q_QK, 0.0), axis=0),
            tl.max(if_refused, axis=0) > 0, seed, position + count, best, final,
            tl.sum(tl.where(here_Q, total_Q, 0.0), axis=0), warmth, greedy_below, least,
            stride, V, pieces, K, KB, PIECES, PIECE,
        )  # fmt: skip
    token_Q = tl.where(i < count, d_Q, tl.where(here_Q & (rows > 0), final, -1))
    tl.store(tokens + b * (N + 1) + i, token_Q.to(tl.int64), mask=i <= N)
    tl.store(accepted + b, count.to(tl.int64))
    tl.store(best_B + b, tl.where(rows > 0, best, 0.0))


def launch_tokens(
    token_R: torch.Tensor,
    best_R: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    vocabulary: int,
    slots_B: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `launch`, where a draft has to be its row's token (int64), with best logits by row."""
    (sequences, drafts), device = drafts_BN.shape, best_R.device
    _check(starts_B, drafts_BN, None, None, slots_B)
    assert token_R.dtype == torch.int64 and best_R.dtype == torch.float32
    assert token_R.is_contiguous() and best_R.is_contiguous()
    sequences = sequences if slots_B is None else len(slots_B)
    accepted_B = torch.empty(sequences, dtype=torch.int64, device=device)
    tokens_BQ = torch.empty(sequences, drafts + 1, dtype=torch.int64, device=device)
    best_B = torch.empty(sequences, dtype=torch.float32, device=device)
    if sequences:
        # A row is as one of a single piece, whose best is known.
        made = (best_R, token_R, None, None, None)
        _judge_kernel[(sequences,)](
            best_R, starts_B, drafts_BN, slots_B, None, *(None,) * 6, *made,
            accepted_B, tokens_BQ, best_B, 1, vocabulary, 1, 0.0,
            N=drafts, K=1, QB=next_power_of_2(drafts + 1), KB=1, PIECES=1, PIECE=PIECE,
            SAMPLED=False, num_warps=1, **pdl(best_R),
        )  # fmt: skip
    return accepted_B, tokens_BQ, best_B


def launch(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    made: Pieces,
    *,
    greedy_below: float,
    drawn_R: torch.Tensor | None = None,
    sampling: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    proposals: tuple[torch.Tensor, torch.Tensor] | None = None,
    cuts: Cuts | None = None,
    slots_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted [B] and tokens [B, Q], int64, and best [B], FP32, as in `Verified`.

    `sampling` is temperature, seed and position by sequence, and `proposals` ids and scores of
    candidates; without them a draft has to be its row's best token, or the one in `drawn_R`. With
    `slots_B` (int32) drafts and proposals are those of slots.
    """
    (sequences, drafts), device = drafts_BN.shape, logits_RV.device
    candidates = 1 if proposals is None else proposals[0].shape[2]
    _check(starts_B, drafts_BN, sampling, proposals, slots_B)
    sequences = sequences if slots_B is None else len(slots_B)
    accepted_B = torch.empty(sequences, dtype=torch.int64, device=device)
    tokens_BQ = torch.empty(sequences, drafts + 1, dtype=torch.int64, device=device)
    best_B = torch.empty(sequences, dtype=torch.float32, device=device)
    if sequences:
        count = pieces.count_of(logits_RV.shape[1])
        _judge_kernel[(sequences,)](
            logits_RV, starts_B, drafts_BN, slots_B, drawn_R, *(sampling or (None, None, None)),
            *(proposals or (None, None)), None if cuts is None else cuts.min_p_B,
            *made.arguments, accepted_B, tokens_BQ, best_B,
            logits_RV.stride(0), logits_RV.shape[1], count, greedy_below,
            N=drafts, K=candidates, QB=next_power_of_2(drafts + 1),
            KB=next_power_of_2(candidates), PIECES=next_power_of_2(count),
            PIECE=PIECE, SAMPLED=sampling is not None, num_warps=8, **pdl(logits_RV),
        )  # fmt: skip
    return accepted_B, tokens_BQ, best_B


@triton.jit
def _by_odds_kernel(
    logits, token_R, best_R, starts, drafts, slots, odds, seeds, positions, accepted, tokens,
    best_B, stride, V,
    N: tl.constexpr, QB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence, whose last row alone is read, unless the best of all rows are known."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0), tl.arange(0, QB)
    start = tl.load(starts + b).to(tl.int32)
    rows = tl.load(starts + b + 1).to(tl.int32) - start
    slot = b
    if slots is not None:
        slot = tl.load(slots + b)
    d_Q = tl.load(drafts + slot * N + i, mask=i < tl.minimum(N, rows - 1), other=-1)
    odds_Q = tl.load(odds + slot * N + i, mask=i < N, other=0.0).to(tl.float64)
    position = tl.load(positions + b).to(tl.int64)
    u_Q = number_of(tl.load(seeds + b), position + i, i * 0 + _ACCEPT)
    stands_Q = (d_Q >= 0) & (d_Q < V) & (u_Q < 1.0 / (1.0 + tl.exp(-odds_Q)))
    count = tl.min(tl.where(stands_Q, QB, i), axis=0)
    best, token = float("-inf"), 0
    if rows > 0:
        if token_R is not None:
            token = tl.load(token_R + start + count).to(tl.int32)
            best = tl.load(best_R + start + count)
        else:
            for first in range(0, V, BLOCK):
                z_V = logits_at(logits, start + count, first + tl.arange(0, BLOCK), stride, V, None)
                top, at = best_of(z_V, 0)
                better = (top > best) | ((top != top) & (best == best))
                token = tl.where(better, first + at, token)
                best = tl.where(better, top, best)
    token_Q = tl.where(i < count, d_Q, tl.where((i == count) & (rows > 0), token, -1))
    tl.store(tokens + b * (N + 1) + i, token_Q.to(tl.int64), mask=i <= N)
    tl.store(accepted + b, count.to(tl.int64))
    tl.store(best_B + b, tl.where(rows > 0, best, 0.0))


def launch_by_odds(
    logits_RV: torch.Tensor | None,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    slots_B: torch.Tensor | None,
    *,
    vocabulary: int,
    best: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `launch`, for drafts that stand by their log odds; `places` are seeds and positions.

    Instead of logits, each row's `best` token (int64) and its logit do.
    """
    drafts, device, sequences = drafts_BN.shape[1], drafts_BN.device, len(starts_B) - 1
    _check(starts_B, drafts_BN, None, None, slots_B)
    assert odds_BN.shape == drafts_BN.shape and odds_BN.is_contiguous()
    stride = 0
    if logits_RV is not None:
        assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
        stride = logits_RV.stride(0)
    assert all(x.shape == (sequences,) and x.is_contiguous() for x in places)
    accepted_B = torch.empty(sequences, dtype=torch.int64, device=device)
    tokens_BQ = torch.empty(sequences, drafts + 1, dtype=torch.int64, device=device)
    best_B = torch.empty(sequences, dtype=torch.float32, device=device)
    if sequences:
        _by_odds_kernel[(sequences,)](
            logits_RV, *(best or (None, None)), starts_B, drafts_BN, slots_B, odds_BN, *places,
            accepted_B, tokens_BQ, best_B, stride, vocabulary,
            N=drafts, QB=next_power_of_2(drafts + 1), BLOCK=4 * PIECE, num_warps=8,
            **pdl(drafts_BN),
        )  # fmt: skip
    return accepted_B, tokens_BQ, best_B


def _check(
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    sampling: tuple[torch.Tensor, ...] | None,
    proposals: tuple[torch.Tensor, torch.Tensor] | None,
    slots_B: torch.Tensor | None,
) -> None:
    slots, drafts = drafts_BN.shape
    sequences = slots if slots_B is None else len(slots_B)
    assert slots_B is None or slots_B.dtype == torch.int32 and slots_B.is_contiguous()
    assert starts_B.shape == (sequences + 1,) and starts_B.is_contiguous()
    assert drafts_BN.dtype == torch.int64 and drafts_BN.is_contiguous()
    assert (sampling is None) == (proposals is None)
    for x_B in sampling or ():
        assert x_B.shape == (sequences,) and x_B.is_contiguous()
    assert sampling is None or sampling[1].dtype == torch.int64
    if proposals is not None:
        ids_BNK, scores_BNK = proposals
        assert ids_BNK.shape == scores_BNK.shape and ids_BNK.shape[:2] == (slots, drafts)
        assert ids_BNK.dtype == torch.int64 and scores_BNK.dtype == torch.float32
        assert ids_BNK.is_contiguous() and scores_BNK.is_contiguous()
