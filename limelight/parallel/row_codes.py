"""How rows travel: as they are, or as FP8 with a scale for each GROUP numbers, in one row of bytes.

scale = max |x| / 448 of a group (1 for zeros);   code = E4M3(x / scale);   x ~ code * scale
"""

import torch

GROUP = 128
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


def encode_rows(x_XD: torch.Tensor, *, fp8: bool) -> torch.Tensor:
    """[X, D]; with `fp8` uint8 [X, D + 4 D / G], where G is GROUP or, if it is no divisor, D."""
    if not fp8:
        return x_XD
    size = x_XD.shape[1]
    groups = x_XD.float().unflatten(1, (-1, GROUP if size % GROUP == 0 else size))
    scale = groups.abs().amax(dim=2, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (groups / scale).clamp(-LARGEST, LARGEST).to(FP8).flatten(1)
    return torch.cat((codes.view(torch.uint8), scale.flatten(1).view(torch.uint8)), dim=1)


def decode_rows(rows: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows [X, `size`] that `encode_rows` was given, in `dtype`, but for rounding."""
    if rows.dtype != torch.uint8:
        return rows
    codes = rows[:, :size].contiguous().view(FP8).float()
    scales = rows[:, size:].contiguous().view(torch.float32)
    return (codes.unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]).flatten(1).to(dtype)
