"""Which experts a token goes to, and with what weight; FP32 throughout.

    s = sigmoid(y W^T);  choice = s + bias;  the N best by choice;  weight = s / sum of the N

Flint has no bias, and its `norm_route` begins with the residual add and norm that make y, each
rounded to the type of the activations. With groups (DeepSeek-V3), as in Beam, experts compete only
inside the best groups; a group's score is the sum of its two best choices. Of equal choices the
kernel takes the first expert. The ids that the experts get can be kept beside the keys and values
of their tokens (`Routed`), for whoever asks later.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import (
    by_size,
    cdiv,
    invariant,
    is_batch_invariant,
    next_power_of_2,
    op,
    pdl,
)
from limelight.ops.boundary import Partial, Summand, sum_add_rmsnorm, whole
from limelight.ops.norm import add_rmsnorm, add_rmsnorm_reference

GROUPED_EPSILON = 1e-20


@dataclass(frozen=True, slots=True)
class Routed:
    """Where the ids of a layer's experts are kept: token t's in row `slots_T[t]`, or nowhere at -1.

    `ids_SN` is of any integer type that holds them, and its rows may lie apart; `slots_T` is int64.
    """

    ids_SN: torch.Tensor
    slots_T: torch.Tensor

    def keep(self, ids_TN: torch.Tensor) -> None:
        held_T = self.slots_T >= 0
        self.ids_SN[self.slots_T[held_T]] = ids_TN[held_T].to(self.ids_SN.dtype)

    def check(self, rows: int, count: int) -> None:
        """What kernels take for granted."""
        assert self.ids_SN.shape[1] == count and self.ids_SN.stride(1) == 1
        assert self.slots_T.shape == (rows,) and self.slots_T.dtype == torch.int64
        assert self.slots_T.is_contiguous()


def sigmoid_scores(y_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """sigmoid(y W^T), FP32 [T, E], whatever the type of `y_TD`."""
    if is_batch_invariant():
        return invariant.sigmoid(invariant.linear(y_TD.float(), router_ED))
    return torch.sigmoid(F.linear(y_TD.float(), router_ED))


def top_experts(scores_TE: torch.Tensor, *, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights FP32 [T, N] and expert ids [T, N] of the `count` best by score."""
    weights_TN, ids_TN = torch.topk(scores_TE, count, dim=-1)
    return weights_TN / weights_TN.sum(dim=-1, keepdim=True), ids_TN


def norm_route_reference(
    h_TD: torch.Tensor,
    x_TD: Summand,
    norm_D: torch.Tensor,
    router_ED: torch.Tensor,
    *,
    eps: float,
    count: int,
    routed: Routed | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """h + x, its RMSNorm y, and of y the weights FP32 [T, N] and ids [T, N] of the best experts."""
    h_TD, y_TD = add_rmsnorm_reference(h_TD, whole(x_TD), norm_D, eps=eps)
    weights_TN, ids_TN = top_experts(sigmoid_scores(y_TD, router_ED), count=count)
    if routed is not None:
        routed.keep(ids_TN)
    return h_TD, y_TD, weights_TN, ids_TN


def route_reference(
    y_TD: torch.Tensor,
    router_ED: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    count: int,
    groups: int,
    kept_groups: int,
    routed: Routed | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights FP32 [T, N] and ids [T, N] of the best by score + bias in the best groups."""
    scores_TE = sigmoid_scores(y_TD, router_ED)
    choice_TGX = (scores_TE + bias_E).unflatten(-1, (groups, -1))
    best_TG = choice_TGX.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best_TG, dtype=torch.bool)
    kept.scatter_(1, best_TG.topk(kept_groups, dim=-1).indices, True)
    choice_TE = choice_TGX.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids_TN = choice_TE.topk(count, dim=-1).indices
    if routed is not None:
        routed.keep(ids_TN)
    weights_TN = scores_TE.gather(1, ids_TN)
    return weights_TN / (weights_TN.sum(dim=-1, keepdim=True) + GROUPED_EPSILON), ids_TN


@triton.jit
def _row_logits_kernel(
    h, x, norm, router, out_h, out_y, logits, stride_h, stride_x, experts, eps,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of some experts for one row; without x, h is y.

    Each program works out the row's norm for itself; the first ones write it.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.arange(0, CHUNK)
    tiles, norms, row = (), (), ()
    for start in tl.static_range(0, SIZE, CHUNK):
        inside = start + d < SIZE
        inside_ED = (e < experts)[:, None] & inside[None, :]
        tile = tl.load(router + e[:, None] * SIZE + start + d[None, :], mask=inside_ED, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
        if x is not None:
            part = tl.load(norm + start + d, mask=inside, other=0.0)
            norms = norms + (part,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, SIZE, CHUNK):
        part = tl.load(h + t * stride_h + start + d, mask=start + d < SIZE, other=0.0)
        if x is not None:
            added = tl.load(x + t * stride_x + start + d, mask=start + d < SIZE, other=0.0)
            part = (part.to(tl.float32) + added.to(tl.float32)).to(out_h.dtype.element_ty)
        row = row + (part,)  # type: ignore[assignment]
    if x is not None:
        square_D = tl.zeros((CHUNK,), tl.float32)
        for c in tl.static_range(len(row)):
            square_D += row[c].to(tl.float32) * row[c].to(tl.float32)
        scale = tl.rsqrt(tl.sum(square_D, axis=0) / SIZE + eps)
    sum_ED = tl.zeros((BLOCK_E, CHUNK), tl.float32)
    for c in tl.static_range(len(row)):
        y_D = row[c].to(out_y.dtype.element_ty)  # type: ignore[var-annotated]
        if x is not None:
            y_D = (y_D.to(tl.float32) * scale * norms[c].to(tl.float32)).to(y_D.dtype)
            inside = (c * CHUNK + d < SIZE) & (tl.program_id(0) == 0)
            tl.store(out_h + t * SIZE + c * CHUNK + d, row[c], mask=inside)
            tl.store(out_y + t * SIZE + c * CHUNK + d, y_D, mask=inside)
        sum_ED += tiles[c] * y_D.to(tl.float32)[None, :]
    tl.store(logits + t * experts + e, tl.sum(sum_ED, axis=1), mask=e < experts)


@triton.jit
def _exact_dot(router_ED, y_DT, total_ET):
    """FP32 weights times rounded activations, on tensor cores.

    The weights fall into three pieces of the activations' type, whose products are exact in FP32.
    """
    if y_DT.dtype == tl.float32:
        total_ET = tl.dot(router_ED, y_DT, total_ET, input_precision="ieee")
    else:
        for _ in tl.static_range(3):
            piece_ED = router_ED.to(y_DT.dtype)
            total_ET = tl.dot(piece_ED, y_DT, total_ET)
            router_ED -= piece_ED.to(tl.float32)
    return total_ET


@triton.jit
def _logits_kernel(
    y, router, logits, rows, experts, stride_y,
    SIZE: tl.constexpr, SHARE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of logits summed over SHARE of the channels: [shares, T, E]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.program_id(2) * SHARE + tl.arange(0, BLOCK_D)
    router_ED = router + e[:, None] * SIZE + d[None, :]
    y_DT = y + t[None, :] * stride_y + d[:, None]
    total_ET = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    if SHARE <= BLOCK_D:
        # The only weights of this program are there before the wait.
        inside_ED = (e < experts)[:, None] & (d < SIZE)[None, :]
        weight_ED = tl.load(router_ED, mask=inside_ED, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        tile_DT = tl.load(y_DT, mask=(t < rows)[None, :] & (d < SIZE)[:, None], other=0.0)
        total_ET = _exact_dot(weight_ED, tile_DT, total_ET)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for first in range(0, SHARE, BLOCK_D):
            inside = first + d < SIZE
            inside_ED = (e < experts)[:, None] & inside[None, :]
            weight_ED = tl.load(router_ED + first, mask=inside_ED, other=0.0)
            inside_DT = (t < rows)[None, :] & inside[:, None]
            tile_DT = tl.load(y_DT + first, mask=inside_DT, other=0.0)
            total_ET = _exact_dot(weight_ED, tile_DT, total_ET)
    into = logits + (tl.program_id(2) * rows + t[None, :]) * experts + e[:, None]
    tl.store(into, total_ET, mask=(e < experts)[:, None] & (t < rows)[None, :])


@triton.jit
def _ordered(x):
    """int32 in the order of the floats, and the float of such an int: it is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_groups(key_GX, x_X, KEPT: tl.constexpr):
    """Whether each group is among those whose two best choices have the largest sums."""
    LEAST: tl.constexpr = -(2**31)
    first_G = tl.max(key_GX, axis=1)
    place_G = tl.min(tl.where(key_GX == first_G[:, None], x_X[None, :], key_GX.shape[1]), axis=1)
    rest_GX = tl.where(x_X[None, :] == place_G[:, None], LEAST, key_GX)
    second_G = _ordered(tl.max(rest_GX, axis=1)).to(tl.float32, bitcast=True)
    score_G = _ordered(_ordered(first_G).to(tl.float32, bitcast=True) + second_G)
    # What is no group would be a NaN, which some devices place above all numbers.
    score_G = tl.where(first_G == LEAST, LEAST, score_G)
    g = tl.arange(0, key_GX.shape[0])
    ahead_GG = score_G[None, :] > score_G[:, None]
    ahead_GG |= (score_G[None, :] == score_G[:, None]) & (g[None, :] < g[:, None])
    return tl.sum(ahead_GG.to(tl.int32), axis=1) < KEPT


@triton.jit
def _select_kernel(
    logits, bias, weights, ids, routed, slots, rows, epsilon, stride,
    PARTS: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best experts of one row, from the parts of its logits; a group has SIZE experts.

    The search is for the largest integer, which a warp finds in one instruction. It gives the id
    of an expert whatever the logits hold.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    LEAST: tl.constexpr = -(2**31)
    experts: tl.constexpr = GROUPS * SIZE
    t = tl.program_id(0).to(tl.int64)
    g, x = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_X)
    inside_GX = (g < GROUPS)[:, None] & (x < SIZE)[None, :]
    index_GX = g[:, None] * SIZE + x[None, :]
    parts = ()
    for p in tl.static_range(PARTS):
        row = logits + (p * rows + t) * experts
        part = tl.load(row + index_GX, mask=inside_GX, other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]
    logits_GX = tl.zeros((BLOCK_G, BLOCK_X), tl.float32)
    for p in tl.static_range(PARTS):
        logits_GX += parts[p]
    scores_GX = tl.sigmoid(logits_GX)
    if bias is None:
        choice_GX = scores_GX
    else:
        choice_GX = scores_GX + tl.load(bias + index_GX, mask=inside_GX, other=0.0)
    key_GX = tl.where(inside_GX, _ordered(choice_GX), LEAST)
    index_GX = tl.where(inside_GX, index_GX, experts)
    if KEPT < GROUPS:
        key_GX = tl.where(_best_groups(key_GX, x, KEPT)[:, None], key_GX, LEAST)
    n_N = tl.arange(0, BLOCK_N)
    ids_N = tl.zeros((BLOCK_N,), tl.int32)
    weights_N = tl.zeros((BLOCK_N,), tl.float32)
    for n in tl.static_range(COUNT):
        best = tl.max(tl.max(key_GX, axis=1), axis=0)
        place_GX = tl.where(key_GX == best, index_GX, experts)
        e = tl.min(tl.min(place_GX, axis=1), axis=0)
        if bias is None:
            score = _ordered(best).to(tl.float32, bitcast=True)
        else:
            bits_GX = tl.where(index_GX == e, scores_GX.to(tl.int32, bitcast=True), LEAST)
            score = tl.max(tl.max(bits_GX, axis=1), axis=0).to(tl.float32, bitcast=True)
        ids_N = tl.where(n_N == n, e, ids_N)
        weights_N = tl.where(n_N == n, score, weights_N)
        key_GX = tl.where(index_GX == e, LEAST, key_GX)
    weights_N /= tl.sum(weights_N, axis=0) + epsilon
    tl.store(weights + t * COUNT + n_N, weights_N, mask=n_N < COUNT)
    tl.store(ids + t * COUNT + n_N, ids_N.to(ids.dtype.element_ty), mask=n_N < COUNT)
    if routed is not None:
        slot = tl.load(slots + t)
        kept_N = (n_N < COUNT) & (slot >= 0)
        tl.store(routed + slot * stride + n_N, ids_N.to(routed.dtype.element_ty), mask=kept_N)


# Up to so many parts of a row's logits are read at once in any case.
FEW_PARTS = 4
# Up to this many rows, a program has one row and reads its experts' weights before it waits.
FEW = 8
# Experts a program and its warps, for one row and for a few; by the most columns.
FEW_TILES = {2048: ((2, 4), (8, 8)), 2**31: ((2, 8), (4, 8))}
# By the most rows: of decode steps, of prefill. The more rows, the fewer share the channels out.
TILES = {
    64: {"BLOCK_E": 64, "BLOCK_T": 32, "BLOCK_D": 128, "SHARE": 128, "num_warps": 4},
    256: {"BLOCK_E": 64, "BLOCK_T": 64, "BLOCK_D": 128, "SHARE": 128, "num_warps": 4},
    4096: {"BLOCK_E": 64, "BLOCK_T": 128, "BLOCK_D": 64, "SHARE": 512, "num_warps": 4},
    2**31: {"BLOCK_E": 64, "BLOCK_T": 128, "BLOCK_D": 64, "SHARE": 2**31, "num_warps": 4},
}


def _check(rows_TD: torch.Tensor, router_ED: torch.Tensor) -> None:
    assert rows_TD.ndim == 2 and rows_TD.stride(1) == 1
    assert router_ED.dtype == torch.float32 and router_ED.is_contiguous()
    assert router_ED.shape[1] == rows_TD.shape[1]


def _few_logits(
    h_TD: torch.Tensor,
    router_ED: torch.Tensor,
    x_TD: torch.Tensor | None = None,
    norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h + x, its norm, and of it the logits [1, T, E]; without x, of h."""
    (rows, size), experts = h_TD.shape, len(router_ED)
    logits_1TE = h_TD.new_empty(1, rows, experts, dtype=torch.float32)
    out_TD = y_TD = h_TD
    if x_TD is not None:
        out_TD, y_TD = (h_TD.new_empty(rows, size) for _ in "hy")
    if rows:
        block_e, warps = by_size(FEW_TILES, size)[rows > 1]
        programs = cdiv(experts, block_e)
        _row_logits_kernel[(programs, rows)](
            h_TD, x_TD, norm_D, router_ED, out_TD, y_TD, logits_1TE,
            h_TD.stride(0), 0 if x_TD is None else x_TD.stride(0), experts, eps,
            SIZE=size, CHUNK=min(128 * warps, next_power_of_2(size)),
            BLOCK_E=block_e, num_warps=warps, **pdl(h_TD),
        )  # fmt: skip
    return out_TD, y_TD, logits_1TE


def _logits(y_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """[parts, T, E], whose parts are to be summed."""
    _check(y_TD, router_ED)
    (rows, size), experts = y_TD.shape, len(router_ED)
    if rows <= FEW and not is_batch_invariant():
        return _few_logits(y_TD, router_ED)[2]
    tile = dict(by_size(TILES, 1 if is_batch_invariant() else rows))
    tile["SHARE"] = min(tile["SHARE"], size)
    parts = cdiv(size, tile["SHARE"])
    logits_PTE = y_TD.new_empty(parts, rows, experts, dtype=torch.float32)
    grid = cdiv(experts, tile["BLOCK_E"]), cdiv(rows, tile["BLOCK_T"]), parts
    _logits_kernel[grid](
        y_TD, router_ED, logits_PTE, rows, experts, y_TD.stride(0),
        SIZE=size, **tile, **pdl(y_TD),
    )  # fmt: skip
    return logits_PTE


def _select(
    logits_PTE: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    *,
    count: int,
    groups: int = 1,
    kept_groups: int = 1,
    epsilon: float = 0.0,
    routed: Routed | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts, rows, experts = logits_PTE.shape
    size = experts // groups
    assert experts == groups * size and kept_groups <= groups and count <= kept_groups * size
    weights_TN = logits_PTE.new_empty(rows, count)
    ids_TN = logits_PTE.new_empty(rows, count, dtype=torch.int64)
    if routed is not None:
        routed.check(rows, count)
    into = (None, None) if routed is None else (routed.ids_SN, routed.slots_T)
    stride = 0 if routed is None else routed.ids_SN.stride(0)
    # Without a bound the compiler saves registers and reads some parts after others.
    bound = {"maxnreg": 255} if parts > FEW_PARTS else {}
    if rows:
        _select_kernel[(rows,)](
            logits_PTE, bias_E, weights_TN, ids_TN, *into, rows, epsilon, stride,
            PARTS=parts, COUNT=count, GROUPS=groups, KEPT=kept_groups, SIZE=size,
            BLOCK_N=next_power_of_2(count), BLOCK_G=next_power_of_2(groups),
            BLOCK_X=next_power_of_2(size), num_warps=1, **bound, **pdl(logits_PTE),
        )  # fmt: skip
    return weights_TN, ids_TN


def _launch_norm_route(
    h_TD: torch.Tensor,
    x_TD: Summand,
    norm_D: torch.Tensor,
    router_ED: torch.Tensor,
    *,
    eps: float,
    count: int,
    routed: Routed | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(h_TD, router_ED)
    assert norm_D.shape == h_TD.shape[1:] and norm_D.is_contiguous()
    if isinstance(x_TD, Partial):
        h_TD, y_TD = sum_add_rmsnorm.kernel(h_TD, x_TD, norm_D, eps=eps)
        return h_TD, y_TD, *_select(_logits(y_TD, router_ED), count=count, routed=routed)
    _check(x_TD, router_ED)
    assert h_TD.shape == x_TD.shape and h_TD.dtype == x_TD.dtype
    if len(h_TD) <= FEW and not is_batch_invariant():
        h_TD, y_TD, logits_PTE = _few_logits(h_TD, router_ED, x_TD, norm_D, eps)
    else:
        h_TD, y_TD = add_rmsnorm.kernel(h_TD, x_TD, norm_D, eps=eps)
        logits_PTE = _logits(y_TD, router_ED)
    return h_TD, y_TD, *_select(logits_PTE, count=count, routed=routed)


def _launch_route(
    y_TD: torch.Tensor,
    router_ED: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    count: int,
    groups: int,
    kept_groups: int,
    routed: Routed | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert bias_E.dtype == torch.float32 and bias_E.is_contiguous()
    return _select(
        _logits(y_TD, router_ED), bias_E,
        count=count, groups=groups, kept_groups=kept_groups, epsilon=GROUPED_EPSILON,
        routed=routed,
    )  # fmt: skip


norm_route = op(reference=norm_route_reference, kernel=_launch_norm_route)
route = op(reference=route_reference, kernel=_launch_route)
