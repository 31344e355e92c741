"""Token ids to vectors, where the last token of a sequence may be known to the device alone.

    y_t = weight[code_t],  or weight[last_tokens[s]] where code_t = -1 - s

So a step can be launched before the one that chooses its tokens has ended. The blocks of a drafter
are an anchor and masks each, and may have a vector for the mask, and a scale.
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


def embed_blocks_reference(
    anchors_B: torch.Tensor,
    weight_VD: torch.Tensor,
    mask_D: torch.Tensor | None,
    *,
    rows: int,
    mask: int,
    scale: float,
) -> torch.Tensor:
    """Each anchor and its masks, scaled: [B * rows, D]; with `mask_D` that for every mask."""
    tokens_BQ = anchors_B.new_full((len(anchors_B), rows), mask)
    tokens_BQ[:, 0] = anchors_B
    h_TD = F.embedding(tokens_BQ.flatten(), weight_VD)
    if mask_D is not None:
        h_TD = torch.where((tokens_BQ == mask).view(-1, 1), mask_D, h_TD)
    return h_TD if scale == 1.0 else h_TD * scale


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


@triton.jit
def _embed_blocks_kernel(
    anchors, weight, mask_D, out, mask, scale,
    Q: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of one row a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(anchors + t // Q)
    token = tl.where(t % Q == 0, token, mask)
    if mask_D is None:
        row_D = tl.load(weight + token * D + d, mask=d < D)
    else:
        known_D = tl.load(mask_D + d, mask=d < D)
        row_D = tl.load(weight + token * D + d, mask=(d < D) & (token != mask), other=0.0)
        row_D = tl.where(token == mask, known_D, row_D)
    row_D = (row_D.to(tl.float32) * scale).to(out.dtype.element_ty)
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


def _launch_embed_blocks(
    anchors_B: torch.Tensor,
    weight_VD: torch.Tensor,
    mask_D: torch.Tensor | None,
    *,
    rows: int,
    mask: int,
    scale: float,
) -> torch.Tensor:
    count, size = len(anchors_B) * rows, weight_VD.shape[1]
    assert anchors_B.dtype == torch.int64 and anchors_B.is_contiguous()
    assert weight_VD.is_contiguous()
    assert mask_D is None or mask_D.dtype == weight_VD.dtype and mask_D.is_contiguous()
    out_TD = weight_VD.new_empty(count, size)
    if count:
        _embed_blocks_kernel[(count, cdiv(size, 1024))](
            anchors_B, weight_VD, mask_D, out_TD, mask, scale, Q=rows, D=size, BLOCK_D=1024,
            num_warps=4, **pdl(weight_VD),
        )  # fmt: skip
    return out_TD


embed = op(reference=embed_reference, kernel=_launch_embed)
embed_blocks = op(reference=embed_blocks_reference, kernel=_launch_embed_blocks)
