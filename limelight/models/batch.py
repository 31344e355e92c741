"""What one forward reads beside its token ids: positions, and where keys and values live."""

from dataclasses import dataclass

import torch

from limelight.ops.attention import LayerCache, PagedLayout, packed_attention, paged_attention


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values in the cache: one layout for each group of layers, one cache a layer."""

    layouts: list[PagedLayout]
    group_of_layer: list[int]
    caches: list[LayerCache]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of several sequences, one after the other.

    With `paged` their earlier keys and values are in the cache. Without, `lengths` cuts the tokens
    into whole sequences that start at position 0, and every op is differentiable.
    """

    positions_T: torch.Tensor
    paged: Paged | None = None
    lengths: list[int] | None = None

    @classmethod
    def packed(cls, lengths: list[int], *, device: torch.device | str = "cpu") -> "Batch":
        """Whole sequences of these lengths, without a cache."""
        positions_T = torch.cat([torch.arange(n, device=device) for n in lengths])
        return cls(positions_T=positions_T, lengths=lengths)

    def attend(
        self,
        layer: int,
        q_THC: torch.Tensor,
        k_TKC: torch.Tensor,
        v_TKC: torch.Tensor,
        *,
        window: int | None,
        sinks_H: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Attention of `layer` for these tokens, [T, H, C]; keys and values enter the cache."""
        if self.paged is None:
            assert self.lengths is not None
            return packed_attention(
                q_THC, k_TKC, v_TKC, self.lengths, window=window, sinks_H=sinks_H, scale=scale
            )
        layout = self.paged.layouts[self.paged.group_of_layer[layer]]
        cache = self.paged.caches[layer]
        cache.write(layout.slots_T, k_TKC, v_TKC)
        return paged_attention(q_THC, cache, layout, sinks_H=sinks_H, scale=scale)
