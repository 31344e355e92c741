"""The memory of the KV cache: how many bytes a block takes, how many fit, and each layer's part.

One tensor for all groups of layers: group g's i-th layer uses row i, and a block belongs to one
group at a time. Block 0 belongs to no one and stays zero: padding points at it.
"""

from dataclasses import dataclass

import torch

from limelight.cache.groups import GroupSpec
from limelight.models.batch import Paged
from limelight.models.config import ModelConfig
from limelight.ops.paging import FP8, LayerCache, PagedLayout


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """The expert ids of one token: `chosen` of `experts` in each of all `layers`."""

    layers: int
    chosen: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def nbytes(self) -> int:
        return self.layers * self.chosen * self.dtype.itemsize


def routed_shape(model: ModelConfig) -> RoutedShape:
    """That of a model; `ValueError` if it has nothing to keep, or nowhere."""
    if not any(model.sparse):
        raise ValueError("--enable-return-routed-experts: this model has no routed experts")
    if None not in model.windows:
        raise ValueError(
            "--enable-return-routed-experts needs a layer of full attention, whose blocks a "
            "sequence keeps to its end; this model has only window layers"
        )
    return RoutedShape(model.num_layers, model.experts_per_token, model.num_experts)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block holds: `rows` layers of `size` tokens, with keys and values by head.

    Beside each of its tokens there may be room for `routed` expert ids.
    """

    rows: int
    size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    routed: RoutedShape | None = None

    @property
    def layer_nbytes(self) -> int:
        """The keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        beside = 0 if self.routed is None else self.routed.nbytes
        return self.size * (self.rows * self.layer_nbytes + beside)


class KVStorage:
    """`num_blocks` usable blocks of one shape, and the null block."""

    def __init__(
        self,
        groups: list[GroupSpec],
        shape: BlockShape,
        num_blocks: int,
        device: torch.device,
        *,
        scales_L2: torch.Tensor | None = None,
    ):
        """`scales_L2`: of keys and of values of the first layers, if the cache is FP8; else 1."""
        slots = (num_blocks + 1) * shape.size
        # Zeros: attention reads slot 0 as the key and value of no token.
        self.pool = torch.zeros(
            shape.rows, 2, shape.kv_heads, slots, shape.head_dim, dtype=shape.dtype, device=device
        )
        self.groups, self.shape, self.num_blocks = groups, shape, num_blocks
        # A token's ids are kept in its slot of the first group, which sees all tokens, and so live
        # as long as its keys there. Layers without experts keep the zeros.
        self.routed_SLN: torch.Tensor | None = None
        if (routed := shape.routed) is not None:
            assert groups[0].window is None
            self.routed_SLN = torch.zeros(
                slots, routed.layers, routed.chosen, dtype=routed.dtype, device=device
            )
        self.group_of_layer = [0] * sum(len(group.layers) for group in groups)
        self.scales_L2 = _scales(scales_L2, len(self.group_of_layer), device)
        self.caches = [LayerCache(self.pool[0])] * len(self.group_of_layer)
        for g, group in enumerate(groups):
            for row, layer in enumerate(group.layers):
                self.group_of_layer[layer] = g
                scales_2 = self.scales_L2[layer] if shape.dtype == FP8 else None
                self.caches[layer] = LayerCache(self.pool[row], scales_2)

    def paged(self, layouts: list[PagedLayout]) -> Paged:
        """What the model's layers read and write of it, by these layouts of its groups."""
        return Paged(layouts, self.group_of_layer, self.caches, self.routed_SLN)


def _scales(given_L2: torch.Tensor | None, layers: int, device: torch.device) -> torch.Tensor:
    """FP32 [L, 2] on the device, each pair where kernels expect a tensor to begin: at 16 bytes."""
    scales_L2 = torch.ones(layers, 4, dtype=torch.float32, device=device)[:, :2]
    if given_L2 is not None:
        if not bool(((given_L2 > 0) & given_L2.isfinite()).all()):
            raise ValueError(f"scales of an FP8 KV cache must be above 0 and finite: {given_L2}")
        scales_L2[: len(given_L2)] = given_L2
    return scales_L2
