"""The experts: sum over a token's N experts of weight * down(act(gate_up y)), and a shared one.

Gate and up are rounded to the type of the activations before SwiGLU, which rounds as the model
does (`fp32`, or silu and product apart); each expert's output is rounded, their weighted sum is
FP32 and rounded once. Then come the scale and the shared expert's rounded output, each rounded.

A few rows go through two kernels that read the chosen experts alone, each row's by itself: weights
stay in registers and are multiplied on the FP32 units. Many rows are sorted by expert first
(`grouped.py`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import op, pdl
from limelight.ops.activation import rounded_swiglu, swiglu, swiglu_fp32
from limelight.ops.grouped import grouped_moe
from limelight.ops.prefetch import prefetch
from limelight.ops.router import (
    best_experts,
    check_norm_route,
    few_logits,
    norm_route,
    norm_route_reference,
)

# On a CPU, for the few tokens of a decode step, calls cost more than arithmetic: all experts at
# once, in two products, beat a loop over those chosen while they are at most this many times the
# work.
ALL_AT_ONCE_TOKENS = 64
ALL_AT_ONCE_WASTE = 4


def moe_reference(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """[T, D] -> [T, D]; a matrix `gate_up` holds gate above up, G = 2F; `weights_TN` is FP32.

    The shared expert, where there is one, may be of another width."""
    act = swiglu_fp32 if fp32 else swiglu
    experts, count = len(gate_up_EGD), ids_TN.shape[1]
    if len(y_TD) <= ALL_AT_ONCE_TOKENS and experts <= ALL_AT_ONCE_WASTE * count:
        gate_up_TG = F.linear(y_TD, gate_up_EGD.flatten(0, 1))
        inner_ETF = act(gate_up_TG.unflatten(1, (experts, -1))).transpose(0, 1)
        out_TXD = torch.bmm(inner_ETF, down_EDF.transpose(1, 2)).transpose(0, 1)
        weights_TX = weights_TN.new_zeros(len(y_TD), experts).scatter(1, ids_TN, weights_TN)
    else:
        order_P = ids_TN.flatten().argsort(stable=True)
        sizes = torch.bincount(ids_TN.flatten(), minlength=experts).tolist()
        rows_PD = y_TD[order_P // count]
        parts = [
            F.linear(act(F.linear(part_XD, gate_up_EGD[e])), down_EDF[e])
            for e, part_XD in enumerate(rows_PD.split(sizes))
            if sizes[e]
        ]
        out_PD = torch.cat([rows_PD[:0], *parts])[order_P.argsort()]
        out_TXD, weights_TX = out_PD.unflatten(0, ids_TN.shape), weights_TN
    out_TD = torch.bmm(weights_TX[:, None], out_TXD.float())[:, 0].to(y_TD.dtype)
    if scale != 1.0:
        out_TD = out_TD * scale
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        out_TD = out_TD + F.linear(act(F.linear(y_TD, shared_gate_up_GD)), shared_down_DF)
    return out_TD


@triton.jit
def _held(
    weight, first, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of a weight [ROWS, SIZE] from `first` on: tiles [BLOCK_R, CHUNK].

    With as many warps as rows, and 8 columns of CHUNK a thread, sums cross no warps.
    """
    row, column = first + tl.arange(0, BLOCK_R), tl.arange(0, CHUNK)
    at_RC = weight + row[:, None] * SIZE + column[None, :]
    tiles = ()
    for start in tl.static_range(0, SIZE, CHUNK):
        if ROWS % BLOCK_R == 0 and SIZE % CHUNK == 0:
            tile = tl.load(at_RC + start, eviction_policy=EVICT)
        else:
            inside_RC = (row < ROWS)[:, None] & (start + column < SIZE)[None, :]
            tile = tl.load(at_RC + start, mask=inside_RC, other=0.0, eviction_policy=EVICT)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _held_swiglu(gates, ups, x, SIZE: tl.constexpr, FP32: tl.constexpr, dtype: tl.constexpr):
    """SwiGLU [BLOCK_R] of held weights times the row at x, which each warp loads for itself."""
    BLOCK_R: tl.constexpr = gates[0].shape[0]
    CHUNK: tl.constexpr = gates[0].shape[1]
    column = tl.arange(0, CHUNK)[None, :] + tl.zeros((BLOCK_R, 1), tl.int32)
    row = ()
    for start in tl.static_range(0, SIZE, CHUNK):
        part = tl.load(x + start + column, mask=start + column < SIZE, other=0.0)
        row = row + (part,)  # type: ignore[assignment]
    gate_RC = tl.zeros((BLOCK_R, CHUNK), tl.float32)
    up_RC = tl.zeros((BLOCK_R, CHUNK), tl.float32)
    for c in tl.static_range(len(row)):
        x_RC = row[c].to(tl.float32)
        gate_RC += gates[c].to(tl.float32) * x_RC
        up_RC += ups[c].to(tl.float32) * x_RC
    return rounded_swiglu(tl.sum(gate_RC, axis=1), tl.sum(up_RC, axis=1), FP32, dtype)


@triton.jit
def _gate_up_kernel(
    y, gate_up, shared_gate_up, down, ids, logits, inner, rows, stride_y, quiet,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    EXPERTS: tl.constexpr, FP32: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_F channels of a chosen expert of one row, or of the shared expert of all rows.

    The shared expert's programs come first: they have their weights before the router is done.
    Programs are ordered by channel: where rows share an expert, its weights are read from memory
    once and found in L2 soon after. From program `quiet` on, each has a piece of its expert's
    `down` brought to L2. With `logits` in place of `ids`, programs choose the experts themselves.
    """
    WIDTH: tl.constexpr = COUNT * INNER + SHARED
    SHARED_BLOCKS: tl.constexpr = (SHARED + BLOCK_F - 1) // BLOCK_F
    BLOCKS: tl.constexpr = (INNER + BLOCK_F - 1) // BLOCK_F
    dtype: tl.constexpr = inner.dtype.element_ty
    program = tl.program_id(0)
    if program < SHARED_BLOCKS:
        if SHARED:
            first = program * BLOCK_F
            ups = shared_gate_up + SHARED * SIZE
            gates = _held(shared_gate_up, first, SHARED, SIZE, BLOCK_F, CHUNK, EVICT)
            ups = _held(ups, first, SHARED, SIZE, BLOCK_F, CHUNK, EVICT)
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            f = first + tl.arange(0, BLOCK_F)
            into_F = inner + COUNT * INNER + f
            for t in range(rows):
                value_F = _held_swiglu(gates, ups, y + t * stride_y, SIZE, FP32, dtype)
                tl.store(into_F + t * WIDTH, value_F, mask=f < SHARED)
    else:
        # The next kernel starts when all programs of this one have come so far: the choice, for
        # which this one waits, is then there for it too.
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        pair = (program - SHARED_BLOCKS) % (rows * COUNT)
        block = (program - SHARED_BLOCKS) // (rows * COUNT)
        t, n = pair // COUNT, pair % COUNT
        if logits is None:
            e = tl.load(ids + pair)
        else:
            ids_N, _ = best_experts(logits + t * EXPERTS, n + 1, EXPERTS, BLOCK_N)
            e = tl.sum(tl.where(tl.arange(0, BLOCK_N) == n, ids_N, 0), axis=0)
        e = e.to(tl.int64)
        first = block * BLOCK_F
        gates = gate_up + e * (2 * INNER * SIZE)
        ups = gates + INNER * SIZE
        gates = _held(gates, first, INNER, SIZE, BLOCK_F, CHUNK, EVICT)
        ups = _held(ups, first, INNER, SIZE, BLOCK_F, CHUNK, EVICT)
        if PDL:
            if program >= quiet:
                # The next kernel begins with the first channels: they are asked for last.
                PIECE: tl.constexpr = (INNER * SIZE + BLOCKS - 1) // BLOCKS
                start = tl.minimum((BLOCKS - 1 - block) * PIECE, INNER * SIZE - PIECE)
                prefetch(down + e * (INNER * SIZE) + start, PIECE)
        f = first + tl.arange(0, BLOCK_F)
        value_F = _held_swiglu(gates, ups, y + t * stride_y, SIZE, FP32, dtype)
        tl.store(inner + t * WIDTH + n * INNER + f, value_F, mask=f < INNER)


@triton.jit
def _held_down(
    down, shared_down, e_N, d_XD,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Channels `d_XD` of all experts of a row: tiles [BLOCK_N, X, D, CHUNK].

    The shared expert counts as several, of INNER columns each.
    """
    BLOCK_N: tl.constexpr = e_N.shape[0]
    EVEN: tl.constexpr = COUNT * INNER + SHARED == BLOCK_N * INNER and SIZE % BLOCK_D == 0
    n, f = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    first_N = down + e_N.to(tl.int64) * (SIZE * INNER)
    stride_N = tl.full((BLOCK_N,), INNER, tl.int32)
    if SHARED:
        first_N = tl.where(n < COUNT, first_N, shared_down + (n - COUNT) * INNER)
        stride_N = tl.where(n < COUNT, INNER, SHARED)
    n = n[:, None, None]
    at = first_N[:, None, None] + d_XD[None] * stride_N[:, None, None]
    at = at[:, :, :, None] + f[None, None, None, :]
    width = tl.where(d_XD < SIZE, INNER, 0)[None]
    width = tl.minimum(COUNT * INNER + SHARED - n * INNER, width)[:, :, :, None]
    tiles = ()
    for start in tl.static_range(0, INNER, CHUNK):
        if EVEN and INNER % CHUNK == 0:
            tile = tl.load(at + start, eviction_policy=EVICT)
        else:
            inside = start + f[None, None, None, :] < width
            tile = tl.load(at + start, mask=inside, other=0.0, eviction_policy=EVICT)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _both(routed, shared, more_routed, more_shared):
    return routed + more_routed, shared + more_shared


@triton.jit
def _down_kernel(
    inner, down, shared_down, weights, ids, logits, out, rows, scale,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    EXPERTS: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, COPIES: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_D channels of one row's result.

    The inner channels are loaded once by all threads together, or COPIES times where there are
    fewer of them than threads. With as many warps as experts, each warp has an expert of its own.

    The weights are asked for before the wait. That needs the choice of experts, which is not the
    previous kernel's result: that kernel waited for it before it let this one start.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = COUNT * INNER + SHARED
    t = tl.program_id(0) % rows
    d_XD = tl.program_id(0) // rows * BLOCK_D
    d_XD += tl.reshape(tl.arange(0, BLOCK_D), (COPIES, BLOCK_D // COPIES))
    n = tl.arange(0, BLOCK_N)
    # From L2, for a line of L1 may be older than the choice.
    if logits is None:
        inside = n < COUNT
        e_N = tl.load(ids + t * COUNT + n, mask=inside, other=0, cache_modifier=".cg")
        weights_N = tl.load(weights + t * COUNT + n, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        e_N, weights_N = best_experts(logits + t * EXPERTS, COUNT, EXPERTS, BLOCK_N)
    tiles = _held_down(
        down, shared_down, e_N, d_XD, SIZE, INNER, SHARED, COUNT, BLOCK_D, CHUNK, EVICT
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    f = (tl.arange(0, CHUNK)[None, :] + tl.zeros((COPIES, 1), tl.int32))[None, :, None, :]
    n = n[:, None, None]
    width = tl.minimum(WIDTH - n * INNER, INNER)[:, :, :, None]
    at = inner + t * WIDTH + n[:, :, :, None] * INNER + f
    row = ()
    for start in tl.static_range(0, INNER, CHUNK):
        part = tl.load(at + start, mask=start + f < width, other=0.0)
        row = row + (part,)  # type: ignore[assignment]
    sums = tl.zeros((BLOCK_N, COPIES, BLOCK_D // COPIES, CHUNK), tl.float32)
    for c in tl.static_range(len(tiles)):
        sums += tiles[c].to(tl.float32) * row[c].to(tl.float32)
    out_NXD = tl.sum(sums, axis=3)
    rounded_NXD = weights_N[:, None, None] * out_NXD.to(dtype).to(tl.float32)
    parts = tl.where(n < COUNT, rounded_NXD, 0.0), tl.where(n < COUNT, 0.0, out_NXD)
    total_XD, shared_XD = tl.reduce(parts, 0, _both)
    total_XD = total_XD.to(dtype)
    if SCALED:
        total_XD = (total_XD.to(tl.float32) * scale).to(dtype)
    if SHARED:
        total_XD = (total_XD.to(tl.float32) + shared_XD.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + t * SIZE + d_XD, total_XD, mask=d_XD < SIZE)


# Up to this many rows, each goes to its experts by itself.
FEW = 8
# Up to this many, the experts' kernels choose them, each program for itself.
CHOOSING = 1
# Rows of weight a program, columns at a time and warps, for one row and for a few; by the most
# columns of gate and up, and by the most of the down matrices of a row together.
GATE_UP = {
    4096: (
        {"BLOCK_F": 8, "CHUNK": 256, "num_warps": 8, "EVICT": ""},
        {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 8, "EVICT": ""},
    ),
    2**31: ({"BLOCK_F": 4, "CHUNK": 512, "num_warps": 8, "EVICT": ""},) * 2,
}
DOWN = {
    3072: ({"BLOCK_D": 8, "CHUNK": 256, "num_warps": 4, "EVICT": ""},) * 2,
    2**31: (
        {"BLOCK_D": 16, "CHUNK": 256, "num_warps": 8, "EVICT": ""},
        {"BLOCK_D": 8, "CHUNK": 256, "num_warps": 8, "EVICT": ""},
    ),
}
# How much of the down matrices the kernel before may bring to L2, in bytes.
AHEAD = 26 * 2**20


def _tile(table: dict[int, tuple], columns: int, rows: int, size: int) -> dict:
    """The tile for so many columns; its CHUNK divides `size` if a power of two of any use does."""
    tile = dict(table[min(most for most in table if columns <= most)][rows > 1])
    chunk = size & -size
    tile["CHUNK"] = min(tile["CHUNK"], chunk if chunk >= 32 else triton.next_power_of_2(size))
    return tile


def _launch_few(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor | None,
    ids_TN: torch.Tensor | None,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    count: int,
    fp32: bool,
    scale: float = 1.0,
    logits_TE: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe` of a few rows; with `logits_TE` the kernels choose the experts, else they are given."""
    (rows, size), (experts, _, width) = y_TD.shape, down_EDF.shape
    shared = 0 if shared_down_DF is None else shared_down_DF.shape[1]
    columns = count * width + shared
    inner_TF, out_TD = y_TD.new_empty(rows, columns), y_TD.new_empty(rows, size)
    sizes = {
        "SIZE": size, "INNER": width, "SHARED": shared, "COUNT": count, "EXPERTS": experts,
        "BLOCK_N": triton.next_power_of_2(triton.cdiv(columns, width)),
    }  # fmt: skip
    tile = _tile(GATE_UP, size, rows, size)
    blocks = triton.cdiv(width, tile["BLOCK_F"])
    shared_blocks = triton.cdiv(shared, tile["BLOCK_F"])
    ahead = min(rows * count * blocks, AHEAD * blocks // down_EDF[0].nbytes)
    programs = shared_blocks + rows * count * blocks
    _gate_up_kernel[(programs,)](
        y_TD, gate_up_EGD, shared_gate_up_GD, down_EDF, ids_TN, logits_TE, inner_TF, rows,
        y_TD.stride(0), programs - ahead, **sizes, FP32=fp32, **tile, **pdl(y_TD),
    )  # fmt: skip
    tile = _tile(DOWN, columns, rows, width)
    copies = tile["num_warps"] * 32 * 8 // (sizes["BLOCK_N"] * tile["CHUNK"])
    copies = min(max(copies, 1), tile["BLOCK_D"])
    _down_kernel[(rows * triton.cdiv(size, tile["BLOCK_D"]),)](
        inner_TF, down_EDF, shared_down_DF, weights_TN, ids_TN, logits_TE, out_TD, rows, scale,
        **sizes, SCALED=scale != 1.0, COPIES=copies, **tile, **pdl(y_TD),
    )  # fmt: skip
    return out_TD


def _check(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
) -> None:
    experts, size, width = down_EDF.shape
    assert y_TD.shape[1] == size and y_TD.stride(1) == 1
    assert gate_up_EGD.shape == (experts, 2 * width, size)
    held = [gate_up_EGD, down_EDF]
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        assert shared_gate_up_GD.shape == (2 * shared_down_DF.shape[1], size)
        assert len(shared_down_DF) == size
        held += [shared_gate_up_GD, shared_down_DF]
    assert all(weight.is_contiguous() and weight.dtype == y_TD.dtype for weight in held)


def _launch_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    _check(y_TD, gate_up_EGD, down_EDF, shared_gate_up_GD, shared_down_DF)
    assert weights_TN.shape == ids_TN.shape and len(ids_TN) == len(y_TD)
    assert weights_TN.dtype == torch.float32
    assert weights_TN.is_contiguous() and ids_TN.is_contiguous()
    if not len(y_TD):
        return torch.empty_like(y_TD)
    args = (
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF
    )  # fmt: skip
    if len(y_TD) <= FEW:
        return _launch_few(*args, count=ids_TN.shape[1], fp32=fp32, scale=scale)
    return grouped_moe(*args, fp32=fp32, scale=scale)


moe = op(reference=moe_reference, kernel=_launch_moe)


def norm_moe_reference(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    router_ED: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    eps: float,
    count: int,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x, and the experts of its norm, which `norm_route` chooses."""
    h_TD, y_TD, weights_TN, ids_TN = norm_route_reference(
        h_TD, x_TD, norm_D, router_ED, eps=eps, count=count
    )
    return h_TD, moe_reference(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        fp32=fp32,
    )  # fmt: skip


def _launch_norm_moe(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    router_ED: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    eps: float,
    count: int,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shared = shared_gate_up_GD, shared_down_DF
    if not 0 < len(h_TD) <= CHOOSING:
        h_TD, y_TD, *choice = norm_route.kernel(h_TD, x_TD, norm_D, router_ED, eps=eps, count=count)
        return h_TD, moe.kernel(y_TD, gate_up_EGD, down_EDF, *choice, *shared, fp32=fp32)
    check_norm_route(h_TD, x_TD, norm_D, router_ED)
    _check(h_TD, gate_up_EGD, down_EDF, *shared)
    h_TD, y_TD, logits_1TE = few_logits(h_TD, router_ED, x_TD, norm_D, eps, ahead=shared)
    return h_TD, _launch_few(
        y_TD, gate_up_EGD, down_EDF, None, None, *shared,
        count=count, fp32=fp32, logits_TE=logits_1TE[0],
    )  # fmt: skip


norm_moe = op(reference=norm_moe_reference, kernel=_launch_norm_moe)
