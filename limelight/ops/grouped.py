"""The experts for many rows: `moe` of `experts.py` as products of blocks of rows.

Pairs of a token and one of its experts are sorted by expert, in order, and each expert's fill
blocks of BLOCK_M rows, the last perhaps in part. The number of blocks that this may take is known
from the shapes alone; those not taken are left at once. The shared expert's blocks are the tokens
as they come. Kernels: the sort (`pairs.py`); gate and up with SwiGLU; down; the
weighted sum. NVFP4 weights are decoded as they are read, by a kernel that is both gate and up and
down; for many pairs an expert they are unpacked first, and the row's scale follows the product.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from limelight.ops import (
    by_size,
    cdiv,
    grouped_fp4,
    is_batch_invariant,
    pdl,
    stages,
)
from limelight.ops.activation import rounded_swiglu
from limelight.ops.combine import Unsummed
from limelight.ops.fp4 import (
    FP4,
    Matrices,
    PlainOrFP4,
    Unpacked,
    product_tile,
    scale_words,
    unpack,
)
from limelight.ops.fp4_codes import words_of
from limelight.ops.pairs import sort_pairs


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    """With a mask only where some of the tile may be outside."""
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _gate_up_tile(
    y, gate_up, factors, e, out, token_M, row_M, valid_M, first, stride_y,
    SIZE: tl.constexpr, INNER: tl.constexpr, FP32: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """SwiGLU of rows `token_M` of y for BLOCK_N channels of expert e, into rows `row_M`.

    The tile of the weights has BLOCK_N rows of the gate, then as many of up. They are those of
    all experts if DESCRIBED, else of this one. `factors` are scales of its rows, or None.
    """
    EVEN: tl.constexpr = SIZE % BLOCK_K == 0 and INNER % BLOCK_N == 0
    BLOCK_M: tl.constexpr = valid_M.shape[0]
    k, g = tl.arange(0, BLOCK_K), tl.arange(0, 2 * BLOCK_N)
    y_MK = y + token_M.to(tl.int64)[:, None] * stride_y + k[None, :]
    if not DESCRIBED:
        f_G = first + g % BLOCK_N
        gate_up_KG = gate_up + (g // BLOCK_N * INNER + f_G)[None, :] * SIZE + k[:, None]
    sum_MG = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        # The weights first: they do not wait for `token_M` to be known.
        if DESCRIBED:
            tile_GK = gate_up.load([2 * e, first, start]).reshape(2 * BLOCK_N, BLOCK_K)
            tile_KG = tl.trans(tile_GK)
        else:
            inside_KG = (start + k < SIZE)[:, None] & (f_G < INNER)[None, :]
            tile_KG = _load(gate_up_KG + start, inside_KG, EVEN)
        inside_MK = valid_M[:, None]
        if SIZE % BLOCK_K != 0:
            inside_MK = inside_MK & (start + k < SIZE)[None, :]
        tile_MK = tl.load(y_MK + start, mask=inside_MK, other=0.0)
        sum_MG = tl.dot(tile_MK, tile_KG, sum_MG, input_precision="ieee")
    sum_MNX = tl.trans(tl.reshape(sum_MG, (BLOCK_M, 2, BLOCK_N)), 0, 2, 1)
    gate_MN, up_MN = tl.split(sum_MNX)
    if factors is not None:
        at_N = factors + first + tl.arange(0, BLOCK_N)
        inside_N = first + tl.arange(0, BLOCK_N) < INNER
        gate_MN = gate_MN * tl.load(at_N, mask=inside_N, other=0.0)[None, :]
        up_MN = up_MN * tl.load(at_N + INNER, mask=inside_N, other=0.0)[None, :]
    value_MN = rounded_swiglu(gate_MN, up_MN, FP32, out.dtype.element_ty)
    f = first + tl.arange(0, BLOCK_N)
    into_MN = out + row_M.to(tl.int64)[:, None] * INNER + f[None, :]
    tl.store(into_MN, value_MN, mask=valid_M[:, None] & (f < INNER)[None, :])


@triton.jit
def _routed_gate_up(
    y, gate_up, factors, e, out, rows, valid, first, stride_y, BLOCK_M: tl.constexpr,
    COUNT: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, FP32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The tile for the `valid` pairs at `rows`."""
    m = tl.arange(0, BLOCK_M)
    pair_M = tl.load(rows + m, mask=m < valid, other=0)
    if not DESCRIBED:
        gate_up += e.to(tl.int64) * (2 * INNER * SIZE)
    if factors is not None:
        factors += e.to(tl.int64) * (2 * INNER)
    _gate_up_tile(
        y, gate_up, factors, e, out, pair_M // COUNT, pair_M, m < valid, first, stride_y,
        SIZE, INNER, FP32, BLOCK_N, BLOCK_K, DESCRIBED,
    )  # fmt: skip


@triton.jit
def _grouped_gate_up_kernel(
    y, gate_up, shared_gate_up, factors, shared_factors, block_rows, blocks, inner, shared_inner,
    rows, stride_y,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    FP32: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of rows by BLOCK_N channels; the shared expert's first, then block by block.

    With HALVES a block that is not half full is done as one of half the size.
    """
    SHARED_TILES: tl.constexpr = (SHARED + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    m = tl.arange(0, BLOCK_M)
    program = tl.program_id(0)
    shared_programs = (rows + BLOCK_M - 1) // BLOCK_M * SHARED_TILES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if program < shared_programs:
        if SHARED:
            row_M = program // SHARED_TILES * BLOCK_M + m
            _gate_up_tile(
                y, shared_gate_up, shared_factors, 0, shared_inner, row_M, row_M, row_M < rows,
                program % SHARED_TILES * BLOCK_N, stride_y,
                SIZE, SHARED, FP32, BLOCK_N, BLOCK_K, DESCRIBED,
            )  # fmt: skip
    else:
        program -= shared_programs
        block = tl.load(blocks + program // TILES)
        e, valid = block // 256, block % 256
        at = block_rows + program // TILES * BLOCK_M
        first = program % TILES * BLOCK_N
        if HALVES and valid <= BLOCK_M // 2:
            if valid > 0:
                _routed_gate_up(
                    y, gate_up, factors, e, inner, at, valid, first, stride_y, BLOCK_M // 2, COUNT,
                    SIZE, INNER, FP32, BLOCK_N, BLOCK_K, DESCRIBED,
                )  # fmt: skip
        elif valid > 0:
            _routed_gate_up(
                y, gate_up, factors, e, inner, at, valid, first, stride_y, BLOCK_M, COUNT,
                SIZE, INNER, FP32, BLOCK_N, BLOCK_K, DESCRIBED,
            )  # fmt: skip


@triton.jit
def _down_tile(
    inner, down, factors, e, out, row_M, valid_M, first,
    SIZE: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Rows `row_M` of `inner` to BLOCK_N channels of expert e, into rows `row_M` of `out`."""
    EVEN: tl.constexpr = INNER % BLOCK_K == 0 and SIZE % BLOCK_N == 0
    k, d = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_N)
    inner_MK = inner + row_M.to(tl.int64)[:, None] * INNER + k[None, :]
    if not DESCRIBED:
        down_KD = down + d[None, :] * INNER + k[:, None]
    total_MD = tl.zeros((valid_M.shape[0], BLOCK_N), tl.float32)
    for start in range(0, INNER, BLOCK_K):
        if DESCRIBED:
            tile_KD = tl.trans(down.load([e * SIZE + first, start]))
        else:
            inside_KD = (start + k < INNER)[:, None] & (d < SIZE)[None, :]
            tile_KD = _load(down_KD + start, inside_KD, EVEN)
        inside_MK = valid_M[:, None]
        if INNER % BLOCK_K != 0:
            inside_MK = inside_MK & (start + k < INNER)[None, :]
        tile_MK = tl.load(inner_MK + start, mask=inside_MK, other=0.0)
        total_MD = tl.dot(tile_MK, tile_KD, total_MD, input_precision="ieee")
    if factors is not None:
        total_MD = total_MD * tl.load(factors + d, mask=d < SIZE, other=0.0)[None, :]
    into_MD = out + row_M.to(tl.int64)[:, None] * SIZE + d[None, :]
    mask_MD = valid_M[:, None] & (d < SIZE)[None, :]
    tl.store(into_MD, total_MD.to(out.dtype.element_ty), mask=mask_MD)


@triton.jit
def _routed_down(
    inner, down, factors, e, out, rows, valid, first, BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The tile for the `valid` pairs at `rows`."""
    m = tl.arange(0, BLOCK_M)
    pair_M = tl.load(rows + m, mask=m < valid, other=0)
    if not DESCRIBED:
        down += e.to(tl.int64) * (SIZE * INNER)
    if factors is not None:
        factors += e.to(tl.int64) * SIZE
    _down_tile(
        inner, down, factors, e, out, pair_M, m < valid, first,
        SIZE, INNER, BLOCK_N, BLOCK_K, DESCRIBED,
    )  # fmt: skip


@triton.jit
def grouped_down_kernel(
    inner, shared_inner, down, shared_down, factors, shared_factors, block_rows, blocks,
    out, shared_out, rows,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As the kernel before, in the same blocks; a row for each pair and each token."""
    TILES: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    m = tl.arange(0, BLOCK_M)
    b = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * BLOCK_N
    shared_blocks = (rows + BLOCK_M - 1) // BLOCK_M if SHARED else 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if b < shared_blocks:
        if SHARED:
            row_M = b * BLOCK_M + m
            _down_tile(
                shared_inner, shared_down, shared_factors, 0, shared_out, row_M, row_M < rows,
                first, SIZE, SHARED, BLOCK_N, BLOCK_K, DESCRIBED,
            )  # fmt: skip
    else:
        b -= shared_blocks
        block = tl.load(blocks + b)
        e, valid = block // 256, block % 256
        at = block_rows + b * BLOCK_M
        if HALVES and valid <= BLOCK_M // 2:
            if valid > 0:
                _routed_down(
                    inner, down, factors, e, out, at, valid, first, BLOCK_M // 2,
                    SIZE, INNER, BLOCK_N, BLOCK_K, DESCRIBED,
                )  # fmt: skip
        elif valid > 0:
            _routed_down(
                inner, down, factors, e, out, at, valid, first, BLOCK_M,
                SIZE, INNER, BLOCK_N, BLOCK_K, DESCRIBED,
            )  # fmt: skip


@triton.jit
def grouped_fp4_kernel(
    x, shared_x, words, scales, factors, shared_words, shared_scales, shared_factors,
    block_rows, blocks, out, shared_out, rows, stride_x, stride_shared,
    N: tl.constexpr, K: tl.constexpr, SHARED_N: tl.constexpr, SHARED_K: tl.constexpr,
    COUNT: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both kernels before with weights of four bits; COUNT rows of `out` share a row of x.

    A block by BLOCK_N rows of the weight, of which gated ones give half as many channels.
    """
    KINDS: tl.constexpr = 2 if GATED else 1
    SHARED_TILES: tl.constexpr = (KINDS * SHARED_N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (KINDS * N + BLOCK_N - 1) // BLOCK_N
    m = tl.arange(0, BLOCK_M)
    program = tl.program_id(0)
    shared_programs = (rows + BLOCK_M - 1) // BLOCK_M * SHARED_TILES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if program < shared_programs:
        if SHARED_N:
            row_M = program // SHARED_TILES * BLOCK_M + m
            product_tile(
                shared_x + row_M.to(tl.int64) * stride_shared, row_M < rows,
                shared_words, shared_scales, shared_factors,
                shared_out + row_M.to(tl.int64) * SHARED_N, program % SHARED_TILES * BLOCK_N,
                SHARED_N, SHARED_K, GATED, FP32, BLOCK_N,
            )  # fmt: skip
    else:
        program -= shared_programs
        block = tl.load(blocks + program // TILES)
        e, valid = (block // 256).to(tl.int64) * (KINDS * N), block % 256
        if valid > 0:
            pair_M = tl.load(block_rows + program // TILES * BLOCK_M + m, m < valid, other=0)
            pair_M = pair_M.to(tl.int64)
            per_row: tl.constexpr = 64 if K % 64 == 0 else 16
            product_tile(
                x + pair_M // COUNT * stride_x, m < valid,
                words + e * (K // 8), scales + e * (K // per_row), factors + e,
                out + pair_M * N, program % TILES * BLOCK_N, N, K, GATED, FP32, BLOCK_N,
            )  # fmt: skip


Tile = dict[str, int]
Pair = tuple[Matrices, PlainOrFP4 | None]  # a weight of the routed experts, and of the shared one


def _tile(n: int, k: int, warps: int, stages: int) -> Tile:
    return {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}


def _stream(*tile: int) -> Tile:
    """Of few rows: what they wait for is memory."""
    return _tile(*tile) | {"DESCRIBED": False, "HALVES": False}


def _multiply(*tile: int) -> Tile:
    """Of many rows: what they wait for is arithmetic. The copy engine brings the weights."""
    return _tile(*tile) | {"DESCRIBED": True, "HALVES": True}


# Rows of a block, tile of gate and up (BLOCK_N of each), tile of down; by the most pairs of an
# expert on average.
TILES = {
    1: (16, _stream(32, 256, 4, 3), _stream(128, 128, 4, 3)),
    8: (16, _stream(32, 128, 4, 4), _stream(128, 128, 4, 3)),
    48: (64, _multiply(64, 64, 4, 4), _multiply(128, 64, 4, 3)),
    2**31: (128, _multiply(128, 64, 8, 4), _multiply(256, 64, 8, 3)),
}

# Where rows must not depend on their number, as if there were so many pairs an expert.
EACH_WHERE_INVARIANT = 48
# Of FP32, which the matrix units do not take: larger tiles than those for so many spill.
MOST_EACH_FP32 = 8

# Of NVFP4 weights that are decoded as they are read, up to so many pairs of an expert on average.
# Unpacked ones move eight times the bytes, once for all pairs.
FP4_TILES = {72: {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}}


def _described(
    tile: Tile, *weights: torch.Tensor | None, gate_up: bool
) -> list[torch.Tensor | TensorDescriptor | None]:
    """The weights as their kernel takes them: as pointers, or as what the copy engine needs, which
    brings tiles of gate and up at once."""
    if not tile["DESCRIBED"]:
        return list(weights)
    found: list[torch.Tensor | TensorDescriptor | None] = []
    for weight in weights:
        if weight is None:
            found.append(None)
            continue
        width = weight.shape[-1]
        if gate_up:
            rows = weight.shape[-2] // 2
            shape = [weight.numel() // (rows * width), rows, width]
            strides, block = [rows * width, width, 1], [2, tile["BLOCK_N"], tile["BLOCK_K"]]
        else:
            shape, strides = [weight.numel() // width, width], [width, 1]
            block = [tile["BLOCK_N"], tile["BLOCK_K"]]
        found.append(TensorDescriptor(weight, shape, strides, block))
    return found


def words_of_each(*weights: FP4 | None) -> list[torch.Tensor | None]:
    """The weights as their kernel takes them."""
    found: list[torch.Tensor | None] = []
    for weight in weights:
        if weight is None:
            found += [None, None, None]
        else:
            found += [words_of(weight.codes), scale_words(weight), weight.rows]
    return found


def _decoding(
    y_TD: torch.Tensor,
    gate_up: tuple[FP4, FP4 | None],
    down: tuple[FP4, FP4 | None],
    blocks: tuple[torch.Tensor, torch.Tensor],
    tile: Tile,
    count: int,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each pair's output and the shared expert's, by weights decoded as they are read."""
    (rows, size), width = y_TD.shape, down[0].shape[-1]
    shared = 0 if down[1] is None else down[1].shape[-1]
    inner_PF, shared_TF = y_TD.new_empty(rows * count, width), y_TD.new_empty(rows, shared)
    out_PD = y_TD.new_empty(rows * count, size)
    shared_TD = y_TD.new_empty(rows, size) if shared else None
    most, shared_blocks = len(blocks[1]), cdiv(rows, tile["BLOCK_M"]) if shared else 0

    def launch(x, shared_x, weights, out, shared_out, **sizes: int) -> None:
        kinds = 2 if sizes["GATED"] else 1
        tiles = (cdiv(kinds * sizes[n], tile["BLOCK_N"]) for n in ("N", "SHARED_N"))
        programs = sum(n * b for n, b in zip(tiles, (most, shared_blocks), strict=True))
        grouped_fp4_kernel[(programs,)](
            x, shared_x, *words_of_each(*weights), *blocks, out, shared_out, rows,
            x.stride(0), shared_x.stride(0), **sizes, FP32=fp32, **tile, **pdl(y_TD),
        )  # fmt: skip

    launch(
        y_TD, y_TD, gate_up, inner_PF, shared_TF,
        N=width, K=size, SHARED_N=shared, SHARED_K=size, COUNT=count, GATED=True,
    )  # fmt: skip
    launch(
        inner_PF, shared_TF, down, out_PD, shared_TD,
        N=size, K=width, SHARED_N=size if shared else 0, SHARED_K=shared, COUNT=1, GATED=False,
    )  # fmt: skip
    return out_PD, shared_TD


def fitted(tile: Tile, tensor: torch.Tensor) -> Tile:
    return tile | {"num_stages": stages(tensor, tile["num_stages"])}


def unpacked(
    tile: Tile, weights: Pair, dtype: torch.dtype, *, gate_up: bool
) -> list[torch.Tensor | TensorDescriptor | None]:
    """Weights as their kernel takes them, unpacked, and what scales their rows."""
    held: list[torch.Tensor | None] = []
    factors: list[torch.Tensor | None] = []
    for weight in weights:
        if isinstance(weight, FP4):
            codes = unpack.kernel(weight.codes, weight.scales, dtype=dtype)
            weight = Unpacked(codes, weight.rows)
        held.append(weight.values if isinstance(weight, Unpacked) else weight)
        factors.append(weight.rows if isinstance(weight, Unpacked) else None)
    return [*_described(tile, *held, gate_up=gate_up), *factors]


def _multiplying(
    y_TD: torch.Tensor,
    gate_up_EGD: Pair,
    down_EDF: Pair,
    blocks: tuple[torch.Tensor, torch.Tensor],
    tiles: tuple[Tile, Tile],
    count: int,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same by weights in the type of y; others are unpacked first, one kind after the other."""
    block_m = blocks[0].shape[1]
    (rows, size), width = y_TD.shape, down_EDF[0].shape[-1]
    shared = 0 if down_EDF[1] is None else down_EDF[1].shape[-1]
    # The copy engine wants rows of a multiple of 16 bytes.
    aligned = all(n * y_TD.element_size() % 16 == 0 for n in (size, width, shared))
    gate_up, down = (t | {"DESCRIBED": t["DESCRIBED"] and aligned} for t in tiles)
    inner_PF, shared_TF = y_TD.new_empty(rows * count, width), y_TD.new_empty(rows, shared)
    sizes = {"SIZE": size, "INNER": width, "SHARED": shared, "COUNT": count, "BLOCK_M": block_m}
    most, shared_blocks = len(blocks[1]), cdiv(rows, block_m) if shared else 0
    programs = most * cdiv(width, gate_up["BLOCK_N"])
    programs += shared_blocks * cdiv(shared, gate_up["BLOCK_N"])
    _grouped_gate_up_kernel[(programs,)](
        y_TD, *unpacked(gate_up, gate_up_EGD, y_TD.dtype, gate_up=True), *blocks,
        inner_PF, shared_TF, rows, y_TD.stride(0), **sizes, FP32=fp32, **gate_up, **pdl(y_TD),
    )  # fmt: skip
    out_PD = y_TD.new_empty(rows * count, size)
    shared_TD = y_TD.new_empty(rows, size) if shared else None
    grouped_down_kernel[((most + shared_blocks) * cdiv(size, down["BLOCK_N"]),)](
        inner_PF, shared_TF, *unpacked(down, down_EDF, y_TD.dtype, gate_up=False), *blocks,
        out_PD, shared_TD, rows, **sizes, **down, **pdl(y_TD),
    )  # fmt: skip
    return out_PD, shared_TD


def outputs(
    y_TD: torch.Tensor, gate_up: Pair, down: Pair, ids_TN: torch.Tensor, fp32: bool, *, absent: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each pair's output and the shared expert's; with `absent` an id of E means no expert."""
    count, experts = ids_TN.shape[1], len(down[0])
    each = EACH_WHERE_INVARIANT if is_batch_invariant() else cdiv(ids_TN.numel(), experts)
    if isinstance(gate_up[0], FP4) and isinstance(down[0], FP4) and each <= max(FP4_TILES):
        assert not isinstance(gate_up[1], torch.Tensor) and not isinstance(down[1], torch.Tensor)
        weights = (gate_up[0], gate_up[1]), (down[0], down[1])
        if grouped_fp4.fits(y_TD, weights[1]) and each <= grouped_fp4.MOST_EACH:
            blocks = sort_pairs(ids_TN, experts, grouped_fp4.BLOCK_M, absent=absent)
            return grouped_fp4.some_each(y_TD, *weights, blocks, count, fp32)
        tile = fitted(by_size(FP4_TILES, each), y_TD)
        blocks = sort_pairs(ids_TN, experts, tile["BLOCK_M"], absent=absent)
        return _decoding(y_TD, *weights, blocks, tile, count, fp32)
    if y_TD.dtype == torch.float32:
        each = min(each, MOST_EACH_FP32)
    block_m, *tiles = by_size(TILES, each)
    blocks = sort_pairs(ids_TN, experts, block_m, absent=absent)
    fit = (fitted(tiles[0], y_TD), fitted(tiles[1], y_TD))
    if is_batch_invariant():
        # How full a block is depends on the batch.
        fit = (fit[0] | {"HALVES": False}, fit[1] | {"HALVES": False})
    return _multiplying(y_TD, gate_up, down, blocks, fit, count, fp32)


def unsummed_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: PlainOrFP4,
    down_EDF: PlainOrFP4,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: PlainOrFP4 | None,
    shared_down_DF: PlainOrFP4 | None,
    added_TD: torch.Tensor | None = None,
    *,
    fp32: bool,
    scale: float,
) -> Unsummed:
    """`moe` by sorted blocks, plus `added_TD`; the arguments have been checked."""
    out_PD, shared_TD = outputs(
        y_TD, (gate_up_EGD, shared_gate_up_GD), (down_EDF, shared_down_DF), ids_TN, fp32,
        absent=False,
    )  # fmt: skip
    return Unsummed(out_PD, weights_TN, shared_TD if added_TD is None else added_TD, scale)


def grouped_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: PlainOrFP4,
    down_EDF: PlainOrFP4,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: PlainOrFP4 | None,
    shared_down_DF: PlainOrFP4 | None,
    added_TD: torch.Tensor | None = None,
    *,
    fp32: bool,
    scale: float,
) -> torch.Tensor:
    """The same, summed."""
    return unsummed_moe(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        added_TD, fp32=fp32, scale=scale,
    ).combined()  # fmt: skip
