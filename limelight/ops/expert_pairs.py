"""The outputs of single experts: row p through expert `ids_P[p]`, rounded as in `experts.py`.

For ranks that hold some of the experts: rows come from others and their outputs go back there,
where each token sums its own (`placed_sum.py`). An id of E, beyond the last expert, marks a row
that is not for this rank; nothing is computed for it and its output is anything. NVFP4 weights that
more than one chunk of rows would unpack can be unpacked for all of them (`unpack_once`). Those of
MXFP8 are multiplied product by product.
"""

import torch

from limelight.ops import cdiv, mxfp8, op
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.fp4 import FP4, Unpacked, unpack
from limelight.ops.grouped import FP4_TILES, outputs
from limelight.ops.mxfp8 import MXFP8
from limelight.ops.pairs import sort_pairs
from limelight.ops.thin import swiglu_rows
from limelight.ops.weight import Weight, multiply_reference

Matrices = Weight | Unpacked


def unpack_once_reference(y_XD: torch.Tensor, weight: Weight, chunks: list[int]) -> Matrices:
    """The weight for chunks of so many pairs, whose rows have the type of `y_XD`."""
    return weight


def _unpack_once(y_XD: torch.Tensor, weight: Weight, chunks: list[int]) -> Matrices:
    many = [pairs for pairs in chunks if cdiv(pairs, len(weight)) > max(FP4_TILES)]
    if not isinstance(weight, FP4) or len(many) < 2:
        return weight
    return Unpacked(unpack.kernel(weight.codes, weight.scales, dtype=y_XD.dtype), weight.rows)


unpack_once = op(reference=unpack_once_reference, kernel=_unpack_once)


def expert_pairs_reference(
    y_PD: torch.Tensor,
    gate_up_EGD: Matrices,
    down_EDF: Matrices,
    ids_P: torch.Tensor,
    *,
    fp32: bool,
) -> torch.Tensor:
    """[P, D] -> [P, D]; `fp32` is SwiGLU rounded once."""
    assert not isinstance(gate_up_EGD, Unpacked) and not isinstance(down_EDF, Unpacked)
    act = swiglu_fp32 if fp32 else swiglu
    experts = len(gate_up_EGD)
    order_P = ids_P.argsort(stable=True)
    sizes = torch.bincount(ids_P, minlength=experts + 1).tolist()
    rows_PD = y_PD[order_P]
    parts = [
        multiply_reference(act(multiply_reference(part_XD, gate_up_EGD[e])), down_EDF[e])
        for e, part_XD in enumerate(rows_PD.split(sizes)[:experts])
        if sizes[e]
    ]
    absent_XD = rows_PD[len(rows_PD) - sizes[experts] :]
    return torch.cat([rows_PD[:0], *parts, absent_XD])[order_P.argsort()]


def _launch(
    y_PD: torch.Tensor,
    gate_up_EGD: Matrices,
    down_EDF: Matrices,
    ids_P: torch.Tensor,
    *,
    fp32: bool,
) -> torch.Tensor:
    experts, size, width = down_EDF.shape
    assert y_PD.shape == (len(ids_P), size) and y_PD.stride(1) == 1 and ids_P.is_contiguous()
    assert gate_up_EGD.shape == (experts, 2 * width, size)
    for weight in (gate_up_EGD, down_EDF):
        if isinstance(weight, FP4 | MXFP8):
            weight.check()
        else:
            held = weight.values if isinstance(weight, Unpacked) else weight
            assert held.is_contiguous() and held.dtype == y_PD.dtype
    if not len(y_PD):
        return torch.empty_like(y_PD)
    if isinstance(gate_up_EGD, MXFP8) or isinstance(down_EDF, MXFP8):
        assert isinstance(gate_up_EGD, MXFP8) and isinstance(down_EDF, MXFP8)
        block_m = mxfp8.rows_of_block(cdiv(len(ids_P), experts))
        blocks = sort_pairs(ids_P[:, None], experts, block_m, absent=True)
        inner_PF = swiglu_rows(mxfp8.pair_products(y_PD, gate_up_EGD, blocks, 1), fp32=fp32)
        return mxfp8.pair_products(inner_PF, down_EDF, blocks, 1)
    weights = (gate_up_EGD, None), (down_EDF, None)
    return outputs(y_PD, *weights, ids_P[:, None], fp32, absent=True)[0]


expert_pairs = op(reference=expert_pairs_reference, kernel=_launch)
