"""Token ids to vectors, where the last token of a sequence may be known to the device alone.

    y_t = weight[code_t],  or weight[last_tokens[s]] where code_t = -1 - s

So a step can be launched before the one that chooses its tokens has ended.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import cdiv, op, pdl


def embed_reference(
    codes_T: torch.Tensor, last_tokens_S: torch.Tensor, weight_VD: torch.Tensor
) -> torch.Tensor:
    """Rows [T, D] of the weight, by int64 codes: token ids, or -1 - slot."""
    last_T = last_tokens_S[(-1 - codes_T).clamp(min=0)]
    return F.embedding(torch.where(codes_T < 0, last_T, codes_T), weight_VD)


@triton.jit
def _embed_kernel(
    codes, last_tokens, weight, out, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):
    """A piece of one row a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0)
    token = tl.load(codes + t)
    if token < 0:
        token = tl.load(last_tokens + (-1 - token))
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_D = tl.load(weight + token * D + d, mask=d < D)
    tl.store(out + t.to(tl.int64) * D + d, row_D, mask=d < D)


def _launch_embed(
    codes_T: torch.Tensor, last_tokens_S: torch.Tensor, weight_VD: torch.Tensor
) -> torch.Tensor:
    count, size = len(codes_T), weight_VD.shape[1]
    assert codes_T.dtype == last_tokens_S.dtype == torch.int64
    assert codes_T.is_contiguous() and last_tokens_S.is_contiguous() and weight_VD.is_contiguous()
    out_TD = weight_VD.new_empty(count, size)
    if count:
        _embed_kernel[(count, cdiv(size, 1024))](
            codes_T, last_tokens_S, weight_VD, out_TD, D=size, BLOCK_D=1024, num_warps=4,
            **pdl(weight_VD),
        )  # fmt: skip
    return out_TD


embed = op(reference=embed_reference, kernel=_launch_embed)
