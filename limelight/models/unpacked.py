"""NVFP4 projections that a GPU keeps unpacked too.

Few rows meet a weight as it is stored; where more do, decoding it costs more than reading four
times the bytes, and unpacking it anew in each step more than either. The projections of attention
are few enough to be kept both ways. What both hold is the same, to the bit.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from limelight.models.layers import ColumnParallelLinear, RowParallelLinear, SwiGLU
from limelight.ops.fp4 import FP4, unpack
from limelight.ops.lora import Adapted

Projection = ColumnParallelLinear | RowParallelLinear
# A product for each; a checkpoint has at most one for each tensor of a projection.
MOST_RUNS = 4


def packed_projections(model: nn.Module) -> Iterator[tuple[Projection, FP4]]:
    """Those of the layers' attention that are NVFP4, with their weights."""
    inner = {one for mlp in model.modules() if isinstance(mlp, SwiGLU) for one in mlp.modules()}
    for module in model.modules():
        if isinstance(module, Projection) and module not in inner:
            held = module.weight
            weight = held.base if isinstance(held, Adapted) else held
            if isinstance(weight, FP4):
                yield module, weight


def unpacked_numbers(model: nn.Module) -> int:
    """How many numbers they have; the model may be an outline."""
    return sum(math.prod(weight.shape) for _, weight in packed_projections(model))


def runs_of(rows_N: torch.Tensor) -> tuple[tuple[int, float], ...]:
    """Where rows of one scale end, and that scale; nothing of more than MOST_RUNS."""
    rows_N = rows_N.cpu()
    last_N = rows_N.diff().nonzero().flatten().tolist()
    if len(last_N) >= MOST_RUNS:
        return ()
    last_N.append(len(rows_N) - 1)
    scales = rows_N[last_N].tolist()
    return tuple((last + 1, scale) for last, scale in zip(last_N, scales, strict=True))


def keep_unpacked(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep them unpacked in `dtype`; those that are kept already are made anew where they lie."""
    for module, weight in packed_projections(model):
        values_NK = unpack(weight.codes, weight.scales, dtype=dtype)
        if weight.values is not None:
            values_NK = weight.values.copy_(values_NK)
        held, kept = module.weight, replace(weight, values=values_NK, runs=runs_of(weight.rows))
        module.weight = replace(held, base=kept) if isinstance(held, Adapted) else kept


def kept_unpacked(model: nn.Module) -> list[torch.Tensor]:
    """The values of those that are kept."""
    values = [weight.values for _, weight in packed_projections(model)]
    return [held_NK for held_NK in values if held_NK is not None]
