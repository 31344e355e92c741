"""The end of the experts: a token's weighted sum of their outputs, its scale, and what is added.

    out = round(round(sum_n weight_n * out_n) * scale) + added

The sum is FP32 in the order of the token's experts and rounded once; then come the scale and what
is added (the shared expert), each rounded. Where a token's N outputs do not lie side by side,
`places` says where each is, and -1 that another rank has it: it is left out of the sum.
"""

import torch

from limelight.ops import cdiv, invariant, is_batch_invariant, next_power_of_2, op, pdl
from limelight.ops.combine import combine_kernel


def placed_sum_reference(
    out_PD: torch.Tensor,
    places_TN: torch.Tensor | None,
    weights_TN: torch.Tensor,
    added_TD: torch.Tensor | None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[P, D] -> [T, D] in `dtype`; `weights_TN` is FP32, `places_TN` are rows of `out_PD`."""
    if places_TN is None:
        out_TND = out_PD.unflatten(0, weights_TN.shape)
    else:
        here_TN = places_TN >= 0
        # A row of what nobody wrote may hold anything.
        none_1D = out_PD.new_zeros(1, out_PD.shape[1])
        out_TND = torch.cat([out_PD, none_1D])[torch.where(here_TN, places_TN, len(out_PD))]
    if is_batch_invariant():
        out_TD = invariant.weighted_sum(weights_TN, out_TND).to(dtype)
    else:
        out_TD = torch.bmm(weights_TN[:, None], out_TND.float())[:, 0].to(dtype)
    if scale != 1.0:
        out_TD = out_TD * scale
    return out_TD if added_TD is None else out_TD + added_TD


def _launch(
    out_PD: torch.Tensor,
    places_TN: torch.Tensor | None,
    weights_TN: torch.Tensor,
    added_TD: torch.Tensor | None,
    *,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> torch.Tensor:
    assert weights_TN.dtype == torch.float32 and weights_TN.is_contiguous()
    assert out_PD.is_contiguous() and (added_TD is None or added_TD.is_contiguous())
    assert places_TN is None or places_TN.is_contiguous() and places_TN.shape == weights_TN.shape
    (rows, count), size = weights_TN.shape, out_PD.shape[1]
    out_TD = out_PD.new_empty(rows, size, dtype=dtype)
    block_d = min(1024, next_power_of_2(size))
    if rows:
        combine_kernel[(rows, cdiv(size, block_d))](
            out_PD, places_TN, added_TD, weights_TN, out_TD, scale,
            SIZE=size, COUNT=count, SCALED=scale != 1.0, BLOCK_D=block_d, num_warps=4,
            **pdl(out_PD),
        )  # fmt: skip
    return out_TD


placed_sum = op(reference=placed_sum_reference, kernel=_launch)
