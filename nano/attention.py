"""Attention over rows of packed documents, differentiable and compiled: for training on a GPU.

The same as `limelight.ops.attention.packed_attention`, with PyTorch's flex attention instead of a
loop over documents. A sink only enlarges the denominator, so the result without it is multiplied
by sigmoid(lse - sink), where lse is the log of the denominator without it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from limelight.models.batch import Batch
from limelight.ops.activation import output_gate
from limelight.ops.attention import gate_of
from limelight.ops.rope import Heads, Rotation, split_heads

Window = int | None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Stands in for `Batch`: B rows of L tokens one after the other, and a mask for each window."""

    positions_T: torch.Tensor
    masks: dict[Window, BlockMask]
    rows: int
    last_tokens_S: None = None  # all tokens are given

    def routed(self, layer: int) -> None:
        """Where a layer's experts are kept: nowhere."""

    def attend(
        self,
        layer: int,
        qkv_TN: torch.Tensor,
        norm_2C: torch.Tensor,
        *,
        heads: Heads,
        window: Window,
        scale: float,
        turn: Rotation | None = None,
        ssmax_T: torch.Tensor | None = None,
        sinks_H: torch.Tensor | None = None,
        gate_bias_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        parts = split_heads(qkv_TN, norm_2C, heads=heads, turn=turn, ssmax_T=ssmax_T)
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in parts)
        out_BHLC, aux = flex_attention(
            q, k, v, block_mask=self.masks[window], scale=scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        if sinks_H is not None:
            assert aux.lse is not None
            share_BHL = torch.sigmoid(aux.lse - sinks_H.float()[:, None])
            out_BHLC = (out_BHLC.float() * share_BHL[..., None]).to(out_BHLC.dtype)
        out_THC = out_BHLC.transpose(1, 2).flatten(0, 1)
        if gate_bias_H is not None:
            out_THC = output_gate(out_THC, gate_of(qkv_TN, out_THC), gate_bias_H)
        return out_THC.flatten(1)


class RowMasks:
    """The masks of one batch after the other, all of one shape."""

    def __init__(self, rows: int, length: int, windows: set[Window], *, device: torch.device):
        # The masks' functions see this one tensor, so a compiled model meets the same functions
        # with every batch.
        self.starts_BL = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.functions = {window: self._visible(window) for window in windows}
        on_gpu = device.type == "cuda"
        self.build: Callable[..., BlockMask] = (
            torch.compile(create_block_mask) if on_gpu else create_block_mask
        )

    def _visible(self, window: Window) -> Callable[..., torch.Tensor]:
        def visible(b, h, q, k):
            same = self.starts_BL[b, q] == self.starts_BL[b, k]
            seen = same & (k <= q)
            return seen if window is None else seen & (k > q - window)

        return visible

    def batch(self, starts_BL: torch.Tensor) -> RowBatch:
        """The batch whose documents begin at these columns."""
        self.starts_BL.copy_(starts_BL)
        rows, length = self.starts_BL.shape
        device = self.starts_BL.device
        masks = {
            window: self.build(visible, rows, None, length, length, device=device)
            for window, visible in self.functions.items()
        }
        columns_L = torch.arange(length, device=device)
        return RowBatch((columns_L - self.starts_BL).flatten(), masks, rows)


def reference_batch(starts_BL: torch.Tensor) -> Batch:
    """The same batch for the reference ops: slow, and differentiable on a CPU too."""
    lengths = [
        length
        for row in starts_BL
        for length in torch.unique_consecutive(row, return_counts=True)[1].tolist()
    ]
    return Batch.packed(lengths, device=starts_BL.device)
