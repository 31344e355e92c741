"""Keys and values that a CPU keeps side by side while the same sequences decode.

Finding them in their pages anew costs a decode step more than its products do. While the same
sequences get one token each, step after step, those of a layer stay as they were read, and a step
adds its own:

    column 0    the zero key of the sink, whose score is its bias; hidden without sinks
    column c    the c-th of the keys that are seen; behind a window's end the oldest are replaced

The order of keys does not matter to attention. Keys lie channel by channel, as their product with
a query is then three times as fast. Both are FP32, which a CPU multiplies fastest; the weights of
values are rounded as always.
"""

from dataclasses import dataclass

import numpy as np
import torch

from limelight.ops.paging import LayerCache, PagedLayout

# So much is kept at most, over all layers; longer sequences are read from their pages.
KEPT_BYTES = 2**26
# Columns for the steps to come, after which all is read again.
COLUMNS_AHEAD = 64


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """The keys and values of one layer, and what is added to their scores; Z is B * K."""

    k_ZCL: torch.Tensor
    v_ZLC: torch.Tensor
    bias_ZGL: torch.Tensor
    dtype: torch.dtype  # of the cache

    @classmethod
    def read(
        cls, cache: LayerCache, slots_BL: torch.Tensor, hidden_BL: torch.Tensor, *,
        columns: int, sinks_H: torch.Tensor,
    ) -> "KeptLayer":  # fmt: skip
        """Those of these slots, of which some are hidden, with room for all `columns`."""
        k_ZLC, v_ZLC = (x_KBLC.transpose(0, 1).flatten(0, 1) for x_KBLC in cache.read(slots_BL))
        pairs, read, size = k_ZLC.shape
        sinks_ZG = sinks_H.view(pairs // len(slots_BL), -1).repeat(len(slots_BL), 1)
        kept = cls(
            sinks_ZG.new_empty(pairs, size, columns),
            sinks_ZG.new_empty(pairs, columns, size),
            sinks_ZG.new_zeros(*sinks_ZG.shape, columns),
            k_ZLC.dtype,
        )
        kept.k_ZCL[..., :read] = k_ZLC.mT
        kept.v_ZLC[:, :read] = v_ZLC
        hidden_ZL = hidden_BL.repeat_interleave(pairs // len(slots_BL), dim=0)
        kept.bias_ZGL[..., :read].masked_fill_(hidden_ZL[:, None], float("-inf"))
        kept.bias_ZGL[..., 0] = sinks_ZG
        return kept

    def put(self, column: int, k_BKC: torch.Tensor, v_BKC: torch.Tensor) -> None:
        """Let the next key and value of each sequence be seen, as the cache has them."""
        k_ZC, v_ZC = self.k_ZCL.select(2, column), self.v_ZLC.select(1, column)
        k_ZC.copy_(k_BKC.to(self.dtype).reshape(k_ZC.shape))
        v_ZC.copy_(v_BKC.to(self.dtype).reshape(v_ZC.shape))

    def attend(self, q_BHC: torch.Tensor, columns: int, *, scale: float) -> torch.Tensor:
        """Of one query a sequence to the first `columns`: [B, H, C]."""
        q_ZGC = q_BHC.float().reshape(len(self.k_ZCL), -1, q_BHC.shape[2])
        bias_ZGL, k_ZCL = (x.narrow(2, 0, columns) for x in (self.bias_ZGL, self.k_ZCL))
        scores_ZGL = torch.baddbmm(bias_ZGL, q_ZGC, k_ZCL, alpha=scale)
        weights_ZGL = torch.softmax(scores_ZGL, dim=-1).to(self.dtype).float()
        out_ZGC = torch.bmm(weights_ZGL, self.v_ZLC.narrow(1, 0, columns))
        return out_ZGC.view(q_BHC.shape).to(q_BHC.dtype)


class Kept:
    """What is kept for the layers that share a block table.

    It need not see every step: behind one that it has not seen the ends of sequences do not follow.
    `room` is how many keys a layer may keep.
    """

    def __init__(self, *, window: int | None, num_layers: int, room: int):
        self.window, self.num_layers, self.room = window, num_layers, room
        self.stop()

    def stop(self) -> None:
        """Let go of all."""
        self.layers: dict[LayerCache, KeptLayer] = {}
        self.rows_B = self.ends_B = np.zeros(0, dtype=np.int32)
        self.blocks_BN = np.zeros((0, 0), dtype=np.int32)
        self.seen = self.columns = self.attended = 0

    def follow(self, layout: PagedLayout) -> bool:
        """Whether keys are kept: behind a step of the same sequences, if few enough are seen."""
        assert layout.window == self.window
        rows_B, ends_B = layout.rows_B.numpy().copy(), layout.seq_lens_B.numpy().copy()
        if layout.max_query > 1 or not self._fit(ends_B):
            self.stop()
            return False
        width = -(-int(ends_B.max()) // layout.block_size)
        blocks_BN = layout.tables_SN.numpy()[rows_B, :width]
        if not self._go_on(rows_B, ends_B, blocks_BN, layout.block_size):
            # Only from the next step on, for reading all costs more than one step gains.
            self.stop()
        elif self.attended == self.num_layers and (self._wraps or self.seen < self.columns - 1):
            self.seen += 1
        else:
            self._begin(ends_B, blocks_BN, layout.block_size)
        self.rows_B, self.ends_B, self.blocks_BN, self.attended = rows_B, ends_B, blocks_BN, 0
        return self.seen > 0

    def attend(
        self,
        q_BHC: torch.Tensor,
        k_BKC: torch.Tensor,
        v_BKC: torch.Tensor,
        cache: LayerCache,
        *,
        sinks_H: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Attention of a step that `follow` has seen, whose keys the cache has: [B, H, C]."""
        self.attended += 1
        if (kept := self.layers.get(cache)) is None:
            if sinks_H is None:
                sinks_H = q_BHC.new_full(q_BHC.shape[1:2], float("-inf"))
            kept = KeptLayer.read(
                cache, self.slots_BL, self.hidden_BL, columns=self.columns, sinks_H=sinks_H.float()
            )
            self.layers[cache] = kept
        else:
            kept.put(self._column, k_BKC, v_BKC)
            if self.ragged and self.seen >= self.columns:
                # What is replaced may have been no key.
                kept.bias_ZGL.select(2, self._column).zero_()
        return kept.attend(q_BHC, min(self.seen + 1, self.columns), scale=scale)

    @property
    def _wraps(self) -> bool:
        """Whether all of a window has its column, so that the oldest is replaced."""
        return self.columns - 1 == self.window

    @property
    def _column(self) -> int:
        """Of this step's keys."""
        return 1 + (self.seen - 1) % (self.columns - 1)

    def _longest(self, ends_B: np.ndarray) -> int:
        """How many keys the longest sequence sees."""
        longest = int(ends_B.max())
        return longest if self.window is None else min(longest, self.window)

    def _fit(self, ends_B: np.ndarray) -> bool:
        if not ends_B.min() > 0:
            return False
        columns = self._longest(ends_B) + 1 + COLUMNS_AHEAD
        reach = self.window or columns
        padded, all_seen = len(ends_B) * columns, int(np.minimum(ends_B, reach).sum())
        return padded <= min(self.room, 2 * (all_seen + len(ends_B) * (1 + COLUMNS_AHEAD)))

    def _go_on(
        self, rows_B: np.ndarray, ends_B: np.ndarray, blocks_BN: np.ndarray, size: int
    ) -> bool:
        """Whether this step is the next of the same sequences, in the same blocks."""
        if not np.array_equal(rows_B, self.rows_B) or not (ends_B == self.ends_B + 1).all():
            return False
        # Behind its end a table may hold anything.
        other_BN = blocks_BN[:, : self.blocks_BN.shape[1]] != self.blocks_BN
        if other_BN.any():
            behind_B1 = -(-self.ends_B // size)[:, None]
            other_BN &= np.arange(other_BN.shape[1]) < behind_B1
        return not other_BN.any()

    def _begin(self, ends_B: np.ndarray, blocks_BN: np.ndarray, size: int) -> None:
        """Have every layer read the keys that are seen now: those before each end."""
        self.layers, self.seen = {}, self._longest(ends_B)
        columns = self.seen + COLUMNS_AHEAD
        self.columns = 1 + (columns if self.window is None else min(columns, self.window))
        at_BL = ends_B[:, None] - self.seen + np.arange(-1, self.seen)
        hidden_BL = at_BL < 0
        at_BL = np.maximum(at_BL, 0)
        slots_BL = np.take_along_axis(blocks_BN, at_BL // size, axis=1) * size + at_BL % size
        slots_BL[hidden_BL] = 0
        slots_BL[:, 0], hidden_BL[:, 0] = 0, False
        self.slots_BL, self.hidden_BL = torch.from_numpy(slots_BL), torch.from_numpy(hidden_BL)
        self.ragged = bool(hidden_BL.any())
