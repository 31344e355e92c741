"""The best of each row of logits, best first, equal ones by the lowest token; NaN counts as most.

A logit and its place make one integer of 64 bits, whose order is that of the rule, so no two are
equal. The first kernel takes the K best from each piece of a row, the second those of the pieces.
Where more are wanted than a program can look for one by one, rows are sorted.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, op, pdl
from limelight.ops.pieces import PIECE, picked

# Below the integers of all logits; those of NaN are above all others.
LEAST = tl.constexpr(-(2**63))
MOST_PLACE = tl.constexpr(2**32 - 1)
MOST_BY_KERNEL, ROWS_SORTED_AT_ONCE = 32, 8


def top_tokens_reference(
    logits_TV: torch.Tensor, *, count: int, rows_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best of each row, FP32 [T, K], and their tokens, int64 [T, K].

    With `rows_T`, int64, row t is that one of the logits; of -1 what is told means nothing.
    """
    logits_TV = logits_TV if rows_T is None else logits_TV[rows_T]
    # -0 is 0, and one NaN is as good as another.
    clean_TV = torch.where(logits_TV == 0, 0.0, logits_TV)
    bits_TV = clean_TV.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    bits_TV = bits_TV.view(torch.int32)
    bits_TV = (bits_TV ^ ((bits_TV >> 31) & 0x7FFFFFFF)) + logits_TV.isnan().int()
    places_V = 2**32 - 1 - torch.arange(logits_TV.shape[1], device=logits_TV.device)
    keys_TK = ((bits_TV.long() << 32) | places_V).topk(count, dim=1).values
    ids_TK = 2**32 - 1 - (keys_TK & (2**32 - 1))
    return logits_TV.gather(1, ids_TK), ids_TK


@triton.jit
def _best_keys(key_X, K: tl.constexpr, KB: tl.constexpr):
    """The K best of keys that differ, best first."""
    k_K = tl.arange(0, KB)
    best_K = tl.full((KB,), LEAST, tl.int64)
    for k in range(K):
        best = tl.max(key_X, axis=0)
        best_K = tl.where(k_K == k, best, best_K)
        key_X = tl.where(key_X == best, LEAST, key_X)
    return best_K


@triton.jit
def _piece_keys_kernel(
    logits, rows, keys, stride, V, K: tl.constexpr, KB: tl.constexpr, PIECE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best keys of one piece of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, piece, k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, KB)
    logits, there = picked(logits, rows, row, stride)
    if not there:
        return
    v = piece * PIECE + tl.arange(0, PIECE)
    z_V = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf"))
    bad_V = z_V != z_V
    z_V = tl.where(bad_V, float("inf"), tl.where(z_V == 0, 0.0, z_V))
    bits_V = z_V.to(tl.int32, bitcast=True)
    bits_V = (bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)) + bad_V.to(tl.int32)
    key_V = (bits_V.to(tl.int64) << 32) | (MOST_PLACE - v.to(tl.int64))
    best_K = _best_keys(tl.where(v < V, key_V, LEAST), K, KB)
    tl.store(keys + (row * tl.num_programs(1) + piece) * K + k, best_K, mask=k < K)


@triton.jit
def _row_keys_kernel(
    logits, rows, keys, best, ids, stride, size,
    K: tl.constexpr, KB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of the keys of a row's pieces, and the logits they are of."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, x, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, KB)
    logits, there = picked(logits, rows, row, stride)
    if not there:
        return
    key_X = tl.load(keys + row * size + x, mask=x < size, other=LEAST)
    id_K = MOST_PLACE - (_best_keys(key_X, K, KB) & MOST_PLACE)
    tl.store(ids + row * K + k, id_K, mask=k < K)
    best_K = tl.load(logits + row * stride + id_K, mask=k < K)
    tl.store(best + row * K + k, best_K, mask=k < K)


def _sorted(
    logits_TV: torch.Tensor, count: int, rows_T: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    rows = len(logits_TV if rows_T is None else rows_T)
    for at in range(0, rows, ROWS_SORTED_AT_ONCE):
        here = slice(at, at + ROWS_SORTED_AT_ONCE)
        some_TV = logits_TV[here] if rows_T is None else logits_TV[rows_T[here]]
        found = some_TV.sort(dim=1, descending=True, stable=True)
        parts.append((found.values[:, :count].clone(), found.indices[:, :count].clone()))
    best, ids = zip(*parts, strict=True)
    return torch.cat(best), torch.cat(ids)


def _launch_top_tokens(
    logits_TV: torch.Tensor, *, count: int, rows_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, vocabulary), device = logits_TV.shape, logits_TV.device
    assert logits_TV.dtype == torch.float32 and logits_TV.stride(1) == 1
    assert 0 < count <= vocabulary
    if rows_T is not None:
        assert rows_T.dtype == torch.int64 and rows_T.is_contiguous()
        rows = len(rows_T)
    if rows and count > MOST_BY_KERNEL:
        return _sorted(logits_TV, count, rows_T)
    pieces = cdiv(vocabulary, PIECE)
    keys_TPK = torch.empty(rows, pieces, count, dtype=torch.int64, device=device)
    best_TK = torch.empty(rows, count, dtype=torch.float32, device=device)
    ids_TK = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        known = {"K": count, "KB": next_power_of_2(count), **pdl(logits_TV)}
        _piece_keys_kernel[(rows, pieces)](
            logits_TV, rows_T, keys_TPK, logits_TV.stride(0), vocabulary, PIECE=PIECE,
            num_warps=4, **known,
        )  # fmt: skip
        size = pieces * count
        _row_keys_kernel[(rows,)](
            logits_TV, rows_T, keys_TPK, best_TK, ids_TK, logits_TV.stride(0), size,
            BLOCK=next_power_of_2(size), num_warps=4, **known,
        )  # fmt: skip
    return best_TK, ids_TK


top_tokens = op(reference=top_tokens_reference, kernel=_launch_top_tokens)
