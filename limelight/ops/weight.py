"""How a weight may be held, and its product with rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from limelight.ops import fp4, invariant, is_batch_invariant, mxfp8
from limelight.ops.fp4 import FP4
from limelight.ops.mxfp8 import MXFP8

Weight = torch.Tensor | FP4 | MXFP8


@dataclass(frozen=True, slots=True)
class Stack:
    """A matrix [N, K] whose rows are not all held alike: `parts`, one below the other."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(map(len, self.parts)), self.parts[0].shape[1]

    def __len__(self) -> int:
        return self.shape[0]


def rows_of(weight: Weight, rows: slice) -> Weight:
    """Some rows of every matrix [..., N, K]."""
    return weight[..., rows, :] if isinstance(weight, torch.Tensor) else weight.narrow(rows)


def device_of(weight: Weight) -> torch.device:
    return (weight if isinstance(weight, torch.Tensor) else weight.codes).device


def multiply_reference(x_TF: torch.Tensor, weight_DF: Weight | Stack) -> torch.Tensor:
    """x W^T in the type of x, rounded once; see `fp4.py` and `mxfp8.py`."""
    if isinstance(weight_DF, Stack):
        return torch.cat([multiply_reference(x_TF, part) for part in weight_DF.parts], dim=-1)
    if isinstance(weight_DF, FP4):
        return fp4.multiply_reference(x_TF, weight_DF)
    if isinstance(weight_DF, MXFP8):
        return mxfp8.multiply_reference(x_TF, weight_DF)
    return (invariant.linear if is_batch_invariant() else F.linear)(x_TF, weight_DF)
