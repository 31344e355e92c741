"""What one forward reads beside its token ids: positions, and where keys and values live."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from limelight.ops.attention import packed_attention, paged_attention
from limelight.ops.block import BlockLayout, block_attention
from limelight.ops.paging import LayerCache, PagedLayout
from limelight.ops.rope import Heads, Rotation
from limelight.ops.router import Routed


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values in the cache: one layout for each group of layers, one cache a layer.

    The ids of experts may be kept beside those of the first group, integers [S, L, N].
    """

    layouts: list[PagedLayout]
    group_of_layer: list[int]
    caches: list[LayerCache]
    routed_SLN: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of several sequences, one after the other.

    With `paged` their earlier keys and values are in the cache, and a token may be given as -1 - s
    for the one in `last_tokens_S[s]`. Without, `lengths` cuts the tokens into whole sequences that
    start at position 0, and every op is differentiable.
    """

    positions_T: torch.Tensor
    paged: Paged | None = None
    last_tokens_S: torch.Tensor | None = None
    lengths: list[int] | None = None

    @classmethod
    def packed(cls, lengths: list[int], *, device: torch.device | str = "cpu") -> "Batch":
        """Whole sequences of these lengths, without a cache."""
        lengths_B = torch.tensor(lengths)
        starts_T = (lengths_B.cumsum(0) - lengths_B).repeat_interleave(lengths_B)
        positions_T = (torch.arange(len(starts_T)) - starts_T).to(device)
        return cls(positions_T=positions_T, lengths=lengths)

    def routed(self, layer: int) -> Routed | None:
        """Where the ids of the experts of `layer` are kept for these tokens, if they are."""
        if self.paged is None or self.paged.routed_SLN is None:
            return None
        return Routed(self.paged.routed_SLN[:, layer], self.paged.layouts[0].slots_T)

    def attend(
        self,
        layer: int,
        qkv_TN: torch.Tensor,
        norm_2C: torch.Tensor,
        *,
        heads: Heads,
        window: int | None,
        scale: float,
        turn: Rotation | None = None,
        ssmax_T: torch.Tensor | None = None,
        sinks_H: torch.Tensor | None = None,
        gate_bias_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `layer` for these tokens, [T, H * C]; keys and values enter the cache.

        A row of `qkv_TN` is [q | k | v], and with a gate's bias [q | k | v | gate]; `turn` and
        `ssmax_T` are what positions do to this layer's queries and keys.
        """
        ends = {"sinks_H": sinks_H, "gate_bias_H": gate_bias_H}
        if self.paged is None:
            assert self.lengths is not None
            return packed_attention(
                qkv_TN, norm_2C, self.lengths,
                heads=heads, window=window, scale=scale, turn=turn, ssmax_T=ssmax_T, **ends,
            ).flatten(1)  # fmt: skip
        layout = self.paged.layouts[self.paged.group_of_layer[layer]]
        assert layout.window == window
        return paged_attention(
            qkv_TN, norm_2C, self.paged.caches[layer], layout,
            heads=heads, scale=scale, turn=turn, ssmax_T=ssmax_T, **ends,
        ).flatten(1)  # fmt: skip


class Blocks(Protocol):
    """T rows of drafters' blocks, as many of each sequence, at these positions."""

    @property
    def positions_T(self) -> torch.Tensor: ...

    @property
    def rows(self) -> int: ...

    def attend(
        self,
        layer: int,
        qkv_TN: torch.Tensor,
        norm_2C: torch.Tensor,
        *,
        heads: Heads,
        window: int | None,
        causal: bool,
        scale: float,
        turn: Rotation,
    ) -> torch.Tensor:
        """Attention of `layer` for rows [q | k | v], over context and block: [T, H * C]."""


@dataclass(frozen=True, slots=True)
class PagedBlocks:
    """Blocks of `rows` rows behind contexts in the cache, into which their keys and values go too.

    A layout's sequence b is block b: `seq_lens_B[b]` counts its context and its rows, but no more
    than the longest length, where its positions then end.
    """

    positions_T: torch.Tensor
    rows: int
    paged: Paged
    _layouts: dict[tuple[int, bool], BlockLayout] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        qkv_TN: torch.Tensor,
        norm_2C: torch.Tensor,
        *,
        heads: Heads,
        window: int | None,
        causal: bool,
        scale: float,
        turn: Rotation,
    ) -> torch.Tensor:
        group = self.paged.group_of_layer[layer]
        layout = self.paged.layouts[group]
        assert layout.window == window
        if (group, causal) not in self._layouts:
            blocks = BlockLayout(self.positions_T, self.rows, layout, causal)
            self._layouts[group, causal] = blocks
        return block_attention(
            qkv_TN, norm_2C, self.paged.caches[layer], self._layouts[group, causal],
            heads=heads, scale=scale, turn=turn,
        ).flatten(1)  # fmt: skip
