"""What a block of drafts does on its way through the drafter: attention and convolution.

A block is Q rows of one sequence at the positions behind its context. In attention row i sees

    keys j of context and block with |p_i - p_j| < window,   and p_j <= p_i in a causal layer

(`decode.py` has the kernel) and the convolution runs along the rows of the block alone, its kernel
made anew for each row:

    y_i = sum over k of (base_k + change_ik of the channel's group) * x_(i - k),   i >= k

FP32, rounded once; behind a sublayer it is added to the stream, whose norm the next begins with.
Nothing here waits for the device: lengths and tables are read where they are.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import cdiv, decode, next_power_of_2, op, pdl, rope
from limelight.ops.attention import attend
from limelight.ops.keys import End
from limelight.ops.norm import add_rmsnorm_reference, normalized, whole_row
from limelight.ops.paging import LayerCache, PagedLayout
from limelight.ops.rope import Heads, Rotation


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of Q rows each, for the layers that share a block table and are causal, or are not.

    Positions rise by one from each block's first, except that some last may stand still at the
    longest length. Nothing of the contents is known on the host.
    """

    positions_T: torch.Tensor
    rows: int
    layout: PagedLayout
    causal: bool

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the reference: slots [B, L] of all keys that blocks may see, and the bias [B, Q, L]:
        0, or -inf if hidden. Whatever no row sees is read from slot 0."""
        layout, window = self.layout, self.layout.window
        positions_BQ = self.positions_T.unflatten(0, (-1, self.rows))
        reach = layout.max_len if window is None else min(window - 1, layout.max_len)
        columns_L = torch.arange(-reach, self.rows, device=positions_BQ.device)
        keys_BL = positions_BQ[:, :1] + columns_L
        real_BL = (keys_BL >= 0) & (keys_BL < layout.seq_lens_B[:, None])
        at_BL = (keys_BL // layout.block_size).clamp(0, layout.tables_SN.shape[1] - 1)
        blocks_BL = layout.tables_SN[layout.rows_B[:, None], at_BL].long()
        slots_BL = blocks_BL * layout.block_size + keys_BL % layout.block_size
        ahead_BQL = keys_BL[:, None] - positions_BQ[..., None]
        hidden_BQL = ~real_BL[:, None].expand_as(ahead_BQL)
        if self.causal:
            hidden_BQL = hidden_BQL | (ahead_BQL > 0)
        if window is not None:
            hidden_BQL = hidden_BQL | (ahead_BQL.abs() >= window)
        # A key that is hidden still meets a weight of zero, which makes NaN of NaN.
        slots_BL = slots_BL.where(~hidden_BQL.all(dim=1), 0)
        bias_BQL = torch.zeros(hidden_BQL.shape, device=hidden_BQL.device)
        return slots_BL, bias_BQL.masked_fill(hidden_BQL, float("-inf"))


def block_attention_reference(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    blocks: BlockLayout,
    *,
    heads: Heads,
    scale: float,
    turn: Rotation,
) -> torch.Tensor:
    """Attention of blocks over the cache, which their keys and values enter too: [T, H, C].

    Rows are [q | k | v].
    """
    slots_T = blocks.layout.slots_T
    q_THC = rope.prepare(qkv_TN, weight_2C, cache, slots_T, heads=heads, turn=turn)
    slots_BL, bias_BQL = blocks.keys
    k_KBLC, v_KBLC = cache.read(slots_BL)
    q_BQHC = q_THC.unflatten(0, bias_BQL.shape[:2])
    if cache.scales_2 is not None:
        # FP8 times its scale is more than the queries' type can hold: all is FP32.
        q_BQHC = q_BQHC.float()
    out_BQHC = attend(q_BQHC, k_KBLC, v_KBLC, bias_BQL, scale=scale)
    return out_BQHC.flatten(0, 1).to(q_THC.dtype)


def _launch_block_attention(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    blocks: BlockLayout,
    *,
    heads: Heads,
    scale: float,
    turn: Rotation,
) -> torch.Tensor:
    shape = (len(qkv_TN), heads.queries, weight_2C.shape[1])
    out_THC = torch.empty(shape, dtype=qkv_TN.dtype, device=qkv_TN.device)
    # The new keys come from the projection, so it does not matter when they enter the cache.
    decode.launch(
        qkv_TN, cache, blocks.layout, out_THC, End(None, None, None),
        fresh=decode.Preparation(weight_2C, heads, turn, None), scale=scale,
        blocks=decode.Rows(blocks.rows, blocks.positions_T, blocks.causal),
    )  # fmt: skip
    return out_THC


block_attention = op(reference=block_attention_reference, kernel=_launch_block_attention)


def dynamic_conv_reference(
    x_TD: torch.Tensor, base_PD: torch.Tensor, change_TPG: torch.Tensor, *, rows: int
) -> torch.Tensor:
    """The convolution above of blocks of `rows` rows, over P taps and G groups of channels."""
    taps, size = base_PD.shape
    change_TPGX = change_TPG.float()[..., None].expand(-1, -1, -1, size // change_TPG.shape[-1])
    kernel_BQPD = (base_PD.float() + change_TPGX.flatten(2)).unflatten(0, (-1, rows))
    x_BQD = x_TD.float().unflatten(0, (-1, rows))
    y_BQD = kernel_BQPD[:, :, 0] * x_BQD
    for k in range(1, min(taps, rows)):
        y_BQD = y_BQD + kernel_BQPD[:, :, k] * F.pad(x_BQD[:, :-k], (0, 0, k, 0))
    return y_BQD.flatten(0, 1).to(x_TD.dtype)


def conv_add_rmsnorm_reference(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    base_PD: torch.Tensor,
    change_TPG: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    rows: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + the convolution of x, and the norm of it."""
    x_TD = dynamic_conv_reference(x_TD, base_PD, change_TPG, rows=rows)
    return add_rmsnorm_reference(h_TD, x_TD, weight_D, eps=eps)


@triton.jit
def _bases(base, d, size, TAPS: tl.constexpr):
    """The kernel's fixed part at channels d, a tap each."""
    taps = ()
    for k in tl.static_range(TAPS):
        tap_D = tl.load(base + k * size + d, mask=d < size, other=0.0)
        taps = taps + (tap_D.to(tl.float32),)  # type: ignore[assignment]
    return taps


@triton.jit
def _convolved(
    x, bases, change, t, d, size, stride_x, stride_t, stride_p,
    ROWS: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Row t at channels d, FP32."""
    i, y_D = t % ROWS, tl.zeros(d.shape, tl.float32)
    for k in tl.static_range(TAPS):
        there = (d < size) & (i >= k)
        change_D = tl.load(change + t * stride_t + k * stride_p + d // GROUP, mask=there, other=0.0)
        x_D = tl.load(x + (t - k) * stride_x + d, mask=there, other=0.0).to(tl.float32)
        y_D += (bases[k] + change_D.to(tl.float32)) * x_D
    return y_D


@triton.jit
def _conv_kernel(
    x, base, change, out, size, stride_x, stride_t, stride_p,
    ROWS: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some channels of one row a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    bases = _bases(base, d, size, TAPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y_D = _convolved(x, bases, change, t, d, size, stride_x, stride_t, stride_p, ROWS, TAPS, GROUP)
    tl.store(out + t * size + d, y_D.to(out.dtype.element_ty), mask=d < size)


@triton.jit
def _conv_norm_kernel(
    h, x, base, change, weight, out_h, out_y, size, stride_h, stride_x, stride_t, stride_p, eps,
    ROWS: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    inside = d < size
    bases = _bases(base, d, size, TAPS)
    weight_D = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h_D = tl.load(h + t * stride_h + d, mask=inside, other=0.0).to(tl.float32)
    y_D = _convolved(x, bases, change, t, d, size, stride_x, stride_t, stride_p, ROWS, TAPS, GROUP)
    h_D += y_D.to(out_h.dtype.element_ty).to(tl.float32)
    rounded_D = h_D.to(out_h.dtype.element_ty)
    tl.store(out_h + t * size + d, rounded_D, mask=inside)
    y_D = normalized(rounded_D.to(tl.float32), weight_D, size, eps)
    tl.store(out_y + t * size + d, y_D.to(out_y.dtype.element_ty), mask=inside)


BLOCK_D = 1024  # channels of a program that has no norm to make


def _shape(
    x_TD: torch.Tensor, base_PD: torch.Tensor, change_TPG: torch.Tensor, rows: int
) -> dict[str, int | bool]:
    """What is compiled in, once it has been checked."""
    (tokens, size), (taps, groups) = x_TD.shape, change_TPG.shape[1:]
    assert tokens % rows == 0 and size % groups == 0 and len(change_TPG) == tokens
    assert base_PD.shape == (taps, size) and base_PD.is_contiguous()
    assert x_TD.stride(1) == 1 and change_TPG.stride(2) == 1
    # A product that is fused with its sum would not be rounded, as it is in the reference.
    return {"ROWS": rows, "TAPS": taps, "GROUP": size // groups, "enable_fp_fusion": False}


def _launch_dynamic_conv(
    x_TD: torch.Tensor, base_PD: torch.Tensor, change_TPG: torch.Tensor, *, rows: int
) -> torch.Tensor:
    tokens, size = x_TD.shape
    shape = _shape(x_TD, base_PD, change_TPG, rows)
    y_TD = torch.empty(tokens, size, dtype=x_TD.dtype, device=x_TD.device)
    if tokens:
        block = min(next_power_of_2(size), BLOCK_D)
        _conv_kernel[(tokens, cdiv(size, block))](
            x_TD, base_PD, change_TPG, y_TD, size, x_TD.stride(0), *change_TPG.stride()[:2],
            BLOCK_D=block, num_warps=4, **shape, **pdl(x_TD),
        )  # fmt: skip
    return y_TD


def _launch_conv_add_rmsnorm(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    base_PD: torch.Tensor,
    change_TPG: torch.Tensor,
    weight_D: torch.Tensor,
    *,
    rows: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, size = x_TD.shape
    shape = _shape(x_TD, base_PD, change_TPG, rows)
    assert h_TD.shape == x_TD.shape and h_TD.dtype == x_TD.dtype and h_TD.stride(1) == 1
    assert weight_D.shape == (size,) and weight_D.is_contiguous()
    out_TD, y_TD = (torch.empty_like(h_TD, memory_format=torch.contiguous_format) for _ in "hy")
    if tokens:
        _conv_norm_kernel[(tokens,)](
            h_TD, x_TD, base_PD, change_TPG, weight_D, out_TD, y_TD, size, h_TD.stride(0),
            x_TD.stride(0), *change_TPG.stride()[:2], eps,
            **whole_row(size), **shape, **pdl(h_TD),
        )  # fmt: skip
    return out_TD, y_TD


dynamic_conv = op(reference=dynamic_conv_reference, kernel=_launch_dynamic_conv)
conv_add_rmsnorm = op(reference=conv_add_rmsnorm_reference, kernel=_launch_conv_add_rmsnorm)
