"""Keys and values that a CPU keeps side by side while the same sequences decode.

Finding them in their pages anew costs a decode step more than its products do. While the same
sequences get one token each, step after step, those of a layer stay as they were read, and a step
adds its own:

    column 0    the zero key of the sink, whose score is its bias
    column c    the c-th of the keys that are seen; behind a window's end the oldest are replaced

The order of keys does not matter to attention. Keys lie channel by channel, as their product with
a query is then three times as fast, and are FP32, as scores are.
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
    """The keys and values of one layer, and what is added to their scores."""

    k_KBCL: torch.Tensor
    v_KBLC: torch.Tensor
    bias_KBGL: torch.Tensor

    @classmethod
    def read(
        cls, cache: LayerCache, slots_BL: torch.Tensor, hidden_BL: torch.Tensor, *,
        columns: int, sinks_H: torch.Tensor,
    ) -> "KeptLayer":  # fmt: skip
        """Those of these slots, of which some are hidden, with room for all `columns`."""
        k_KBLC, v_KBLC = cache.read(slots_BL)
        kv_heads, batch, read, size = k_KBLC.shape
        kept = cls(
            k_KBLC.new_empty(kv_heads, batch, size, columns, dtype=torch.float32),
            v_KBLC.new_empty(kv_heads, batch, columns, size),
            sinks_H.new_zeros(kv_heads, batch, len(sinks_H) // kv_heads, columns),
        )
        kept.k_KBCL[..., :read] = k_KBLC.mT
        kept.v_KBLC[:, :, :read] = v_KBLC
        kept.bias_KBGL[..., :read].masked_fill_(hidden_BL[:, None], float("-inf"))
        kept.bias_KBGL[..., 0] = sinks_H.view(kv_heads, 1, -1)
        return kept

    def put(self, column: int, k_BKC: torch.Tensor, v_BKC: torch.Tensor) -> None:
        """Let the next key and value of each sequence be seen."""
        k_BKC = k_BKC.to(self.v_KBLC.dtype)  # as the cache has it
        self.k_KBCL.select(3, column).copy_(k_BKC.transpose(0, 1))
        self.v_KBLC.select(2, column).copy_(v_BKC.transpose(0, 1))

    def attend(self, q_BHC: torch.Tensor, columns: int, *, scale: float) -> torch.Tensor:
        """Of one query a sequence to the first `columns`: [B, H, C]."""
        (kv_heads, batch, size, _), dtype = self.k_KBCL.shape, self.v_KBLC.dtype
        q_KBGC = q_BHC.float().view(batch, kv_heads, -1, size).transpose(0, 1)
        q_ZGC, k_ZCL = q_KBGC.flatten(0, 1), self.k_KBCL.flatten(0, 1)
        bias_ZGL, v_ZLC = self.bias_KBGL.flatten(0, 1), self.v_KBLC.flatten(0, 1)
        scores_ZGL = torch.baddbmm(
            bias_ZGL.narrow(2, 0, columns), q_ZGC, k_ZCL.narrow(2, 0, columns), alpha=scale
        )
        weights_ZGL = torch.softmax(scores_ZGL, dim=-1).to(dtype)
        out_ZGC = torch.bmm(weights_ZGL, v_ZLC.narrow(1, 0, columns))
        return out_ZGC.view(q_KBGC.shape).transpose(0, 1).reshape(q_BHC.shape).to(q_BHC.dtype)


class Kept:
    """What is kept for the layers that share a block table; sees every step that they make.

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
        """Whether all sequences of a step decode, and few enough keys are seen to be kept."""
        assert layout.window == self.window
        rows_B, ends_B = layout.rows_B.numpy().copy(), layout.seq_lens_B.numpy().copy()
        if layout.max_query > 1 or not self._fit(ends_B):
            self.stop()
            return False
        width = -(-int(ends_B.max()) // layout.block_size)
        blocks_BN = layout.tables_SN.numpy()[rows_B, :width]
        if self._go_on(rows_B, ends_B, blocks_BN, layout.block_size):
            self.seen += 1
        else:
            self._begin(ends_B, blocks_BN, layout.block_size)
        self.rows_B, self.ends_B, self.blocks_BN, self.attended = rows_B, ends_B, blocks_BN, 0
        return True

    def attend(
        self,
        q_BHC: torch.Tensor,
        k_BKC: torch.Tensor,
        v_BKC: torch.Tensor,
        cache: LayerCache,
        *,
        sinks_H: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of a step that `follow` has seen, whose keys the cache has: [B, H, C]."""
        self.attended += 1
        if (kept := self.layers.get(cache)) is None:
            kept = KeptLayer.read(
                cache, self.slots_BL, self.hidden_BL, columns=self.columns, sinks_H=sinks_H.float()
            )
            self.layers[cache] = kept
        else:
            kept.put(self._column, k_BKC, v_BKC)
            if self.ragged and self.seen >= self.columns:
                # What is replaced may have been no key.
                kept.bias_KBGL.select(3, self._column).zero_()
        return kept.attend(q_BHC, min(self.seen + 1, self.columns), scale=scale)

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
        full = self.window is None and self.seen + 1 >= self.columns
        if full or self.attended < self.num_layers or len(rows_B) != len(self.rows_B):
            return False
        if not ((rows_B == self.rows_B).all() and (ends_B == self.ends_B + 1).all()):
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
        self.columns = 1 + (self.window or self.seen + COLUMNS_AHEAD)
        at_BL = ends_B[:, None] - self.seen + np.arange(-1, self.seen)
        hidden_BL = at_BL < 0
        at_BL = np.maximum(at_BL, 0)
        slots_BL = np.take_along_axis(blocks_BN, at_BL // size, axis=1) * size + at_BL % size
        slots_BL[hidden_BL] = 0
        slots_BL[:, 0], hidden_BL[:, 0] = 0, False
        self.slots_BL, self.hidden_BL = torch.from_numpy(slots_BL), torch.from_numpy(hidden_BL)
        self.ragged = bool(hidden_BL.any())
