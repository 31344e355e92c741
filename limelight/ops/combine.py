"""The last part of the experts where it is a kernel of its own: the sum of a row's outputs.

Rounding points are those of `experts.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, pdl


@triton.jit
def weighted_sum(
    routed, places, shared, weights, t, d, scale,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """For kernels: of row t, the weighted sum of its experts, scaled, and the shared one's.

    Outputs are in the order of rows, or at `places`, of which those below 0 are no output.
    """
    total_D = tl.zeros(d.shape, tl.float32)
    for n in tl.static_range(COUNT):
        pair, here_D = t * COUNT + n, d < SIZE
        weight = tl.load(weights + pair)
        if places is not None:
            pair = tl.load(places + pair).to(tl.int64)
            here_D = here_D & (pair >= 0)
        out_D = tl.load(routed + pair * SIZE + d, mask=here_D, other=0.0)
        total_D += weight * out_D.to(tl.float32)
    total_D = total_D.to(dtype)
    if SCALED:
        total_D = (total_D.to(tl.float32) * scale).to(dtype)
    if shared is not None:
        out_D = tl.load(shared + t * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
        total_D = (total_D.to(tl.float32) + out_D).to(dtype)
    return total_D


@triton.jit
def combine_kernel(
    routed, places, shared, weights, out, scale,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A piece of one token's row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total_D = weighted_sum(
        routed, places, shared, weights, t, d, scale, SIZE, COUNT, SCALED, out.dtype.element_ty
    )  # fmt: skip
    tl.store(out + t * SIZE + d, total_D, mask=d < SIZE)


@dataclass(frozen=True, slots=True)
class Unsummed:
    """Outputs of the experts of T rows, N each, that are still to be summed: see `experts.py`."""

    out_PD: torch.Tensor  # [T * N, D]
    weights_TN: torch.Tensor
    added_TD: torch.Tensor | None
    scale: float

    def __len__(self) -> int:
        return len(self.weights_TN)

    def combined(self) -> torch.Tensor:
        """[T, D]."""
        rows, size = len(self), self.out_PD.shape[1]
        out_TD = self.out_PD.new_empty(rows, size)
        block_d = min(1024, next_power_of_2(size))
        combine_kernel[(rows, cdiv(size, block_d))](
            self.out_PD, None, self.added_TD, self.weights_TN, out_TD, self.scale,
            SIZE=size, COUNT=self.weights_TN.shape[1], SCALED=self.scale != 1.0, BLOCK_D=block_d,
            num_warps=4, **pdl(out_TD),
        )  # fmt: skip
        return out_TD
