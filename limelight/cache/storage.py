"""The memory of the KV cache: how many bytes a block takes, how many fit, and each layer's part.

One tensor for all groups of layers: group g's i-th layer uses row i, and a block belongs to one
group at a time. Block 0 belongs to no one and stays zero: padding points at it.
"""

from dataclasses import dataclass

import torch

from limelight.cache.groups import GroupSpec
from limelight.ops.paging import LayerCache


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block holds: `rows` layers of `size` tokens, with keys and values by head."""

    rows: int
    size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.size * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVStorage:
    """`num_blocks` usable blocks of one shape, and the null block."""

    def __init__(
        self, groups: list[GroupSpec], shape: BlockShape, num_blocks: int, device: torch.device
    ):
        slots = (num_blocks + 1) * shape.size
        # Zeros: attention reads slot 0 as the key and value of no token.
        self.pool = torch.zeros(
            shape.rows, 2, shape.kv_heads, slots, shape.head_dim, dtype=shape.dtype, device=device
        )
        self.groups, self.shape, self.num_blocks = groups, shape, num_blocks
        self.group_of_layer = [0] * sum(len(group.layers) for group in groups)
        self.caches = [LayerCache(self.pool[0])] * len(self.group_of_layer)
        for g, group in enumerate(groups):
            for row, layer in enumerate(group.layers):
                self.group_of_layer[layer] = g
                self.caches[layer] = LayerCache(self.pool[row])
