"""The routed experts where rows have adapters, or weights of MXFP8: `moe` of `experts.py`, product
by product.

As in `grouped.py`, pairs of a token and one of its experts are sorted by expert. Gate and up are
rounded, their adapters' part is added and rounded (`lora.py`), then come SwiGLU, down and its
adapters' part, and the weighted sum. So such a step takes more launches, and more bytes between
them, than one of the fused kernels.
"""

import torch

from limelight.ops import by_size, cdiv, is_batch_invariant, mxfp8, pdl, thin
from limelight.ops.combine import Unsummed
from limelight.ops.fp4 import FP4
from limelight.ops.grouped import (
    EACH_WHERE_INVARIANT,
    FP4_TILES,
    TILES,
    fitted,
    grouped_down_kernel,
    grouped_fp4_kernel,
    unpacked,
    words_of_each,
)
from limelight.ops.lora import Adapted, Blocks, Matrix, launch_lora, without_adapters
from limelight.ops.mxfp8 import MXFP8
from limelight.ops.pairs import sort_pairs
from limelight.ops.weight import Weight


def _product(x_PK: torch.Tensor, weight_ENK: Weight, blocks: Blocks, each: int) -> torch.Tensor:
    """A row [N] of each pair, by its expert's weight; one row of x for every `each` pairs."""
    if isinstance(weight_ENK, MXFP8):
        return mxfp8.pair_products(x_PK, weight_ENK, blocks, each)
    pairs = len(x_PK) * each
    _, size, width = weight_ENK.shape
    block_m, most = blocks[0].shape[1], len(blocks[1])
    out_PN = x_PK.new_empty(pairs, size)
    tile = _decoding_tile(weight_ENK, pairs)
    if tile is not None and isinstance(weight_ENK, FP4):
        tile = fitted(tile, x_PK)
        programs = most * cdiv(size, tile["BLOCK_N"])
        grouped_fp4_kernel[(programs,)](
            x_PK, x_PK, *words_of_each(weight_ENK, None), *blocks, out_PN, None, len(x_PK),
            x_PK.stride(0), 0, N=size, K=width, SHARED_N=0, SHARED_K=0, COUNT=each, GATED=False,
            FP32=False, **tile, **pdl(x_PK),
        )  # fmt: skip
        return out_PN
    if each > 1:
        x_PK = x_PK.repeat_interleave(each, dim=0)
    # The copy engine wants rows of a multiple of 16 bytes.
    aligned = all(n * x_PK.element_size() % 16 == 0 for n in (size, width))
    tile = fitted(next(down for rows, _, down in TILES.values() if rows == block_m), x_PK)
    # How full a block is depends on the batch.
    halves = tile["HALVES"] and not is_batch_invariant()
    tile = tile | {"DESCRIBED": tile["DESCRIBED"] and aligned, "HALVES": halves}
    grouped_down_kernel[(most * cdiv(size, tile["BLOCK_N"]),)](
        x_PK.contiguous(), x_PK, *unpacked(tile, (weight_ENK, None), x_PK.dtype, gate_up=False),
        *blocks, out_PN, None, pairs,
        SIZE=size, INNER=width, SHARED=0, COUNT=1, BLOCK_M=block_m, **tile, **pdl(x_PK),
    )  # fmt: skip
    return out_PN


def _rows_of_block(weight_ENK: Weight, pairs: int) -> int:
    average = cdiv(pairs, len(weight_ENK))
    if isinstance(weight_ENK, MXFP8):
        return mxfp8.rows_of_block(average)
    tile = _decoding_tile(weight_ENK, pairs)
    average = EACH_WHERE_INVARIANT if is_batch_invariant() else average
    return tile["BLOCK_M"] if tile else by_size(TILES, average)[0]


def _decoding_tile(weight_ENK: Weight, pairs: int) -> dict[str, int] | None:
    """Where the weight is decoded as it is read."""
    average = cdiv(pairs, len(weight_ENK))
    if not isinstance(weight_ENK, FP4) or average > max(FP4_TILES):
        return None
    return by_size(FP4_TILES, average)


def _adapted_product(
    x_XK: torch.Tensor, weight_ENK: Matrix, blocks: Blocks, each: int
) -> torch.Tensor:
    out_PN = _product(x_XK, without_adapters(weight_ENK), blocks, each)
    if not isinstance(weight_ENK, Adapted):
        return out_PN
    adapters_T = weight_ENK.step.of_rows_T
    assert adapters_T is not None
    return launch_lora(
        x_XK, adapters_T, weight_ENK.a, weight_ENK.b, weight_ENK.starts, weight_ENK.sizes,
        onto=out_PN, blocks=blocks,
    )  # fmt: skip


def moe_by_products(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    added_TD: torch.Tensor | None,
    *,
    fp32: bool,
    scale: float,
) -> Unsummed:
    """`moe`, plus `added_TD`, but for the sum; the arguments have been checked."""
    count, experts = ids_TN.shape[1], len(down_EDF)
    sorted_by: dict[int, Blocks] = {}

    def product(x_XK: torch.Tensor, weight_ENK: Matrix, each: int) -> torch.Tensor:
        block_m = _rows_of_block(without_adapters(weight_ENK), ids_TN.numel())
        if block_m not in sorted_by:
            sorted_by[block_m] = sort_pairs(ids_TN, experts, block_m)
        return _adapted_product(x_XK, weight_ENK, sorted_by[block_m], each)

    inner_PF = thin.swiglu_rows(product(y_TD, gate_up_EGD, count), fp32=fp32)
    out_PD = product(inner_PF, down_EDF, 1)
    return Unsummed(out_PD, weights_TN, added_TD, scale)
