"""What a block of drafts does on its way through the drafter: attention and convolution.

A block is Q rows of one sequence at the positions behind its context. In attention row i sees

    keys j of context and block with |p_i - p_j| < window,   and p_j <= p_i in a causal layer

(`decode.py` has the kernel) and the convolution runs along the rows of the block alone, its kernel
made anew for each row:

    y_i = sum over k of (base_k + change_ik of the channel's group) * x_(i - k),   i >= k

FP32, rounded once. Nothing here waits for the device: lengths and tables are read where they are.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from limelight.ops import decode, op, rope
from limelight.ops.attention import attend
from limelight.ops.keys import End
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


def dynamic_conv(
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
