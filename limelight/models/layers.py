"""The layers both models are made of. Each knows its shard and where checkpoint tensors go.

`targets(prefix)` maps a checkpoint name to its `Target`; the loader fills them, and `dummy` says
how to fill them without a checkpoint.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from limelight.ops import experts, linear, norm
from limelight.ops.embed import embed
from limelight.ops.rope import Heads
from limelight.parallel.collectives import all_gather, all_reduce
from limelight.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Dummy:
    """The distribution of a tensor's random values: normal, with this mean and deviation."""

    mean: float
    std: float


# As benchmarks of these models use them: routing is uniform and activations stay finite.
PROJECTION = Dummy(0.0, 0.02)
OUTPUT_PROJECTION = Dummy(0.0, 0.002)
UNIT = Dummy(0.0, 1.0)
ONES = Dummy(1.0, 0.0)
ZEROS = Dummy(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes.

    The tensor has `shape`; `take` is the part that this rank holds and `into` the piece of a
    parameter that receives it.
    """

    into: torch.Tensor
    shape: tuple[int, ...]
    take: tuple[slice, ...]
    dummy: Dummy


Targets = dict[str, Target]
EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True)
class Placement:
    """What every layer of a model is built with; an outline has shapes and types, and no memory."""

    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    outline: bool = False

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An unset parameter; inference is the default, training turns gradients on."""
        device = torch.device("meta") if self.outline else self.device
        value = torch.empty(shape, dtype=dtype or self.dtype, device=device)
        return nn.Parameter(value, requires_grad=False)

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Unset weights [..., out, in] of a product.

        FP32 on a CPU keeps the input dimension outermost in memory: for the few rows of a decode
        step the CPU's matrix product is then up to 1.7 times as fast.
        """
        if self.device.type != "cpu" or (dtype or self.dtype) != torch.float32:
            return self.empty(*shape, dtype=dtype)
        value = self.empty(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1)
        return nn.Parameter(value, requires_grad=False)


def whole(parameter: torch.Tensor, *, dummy: Dummy) -> Target:
    """The target of a tensor that every rank holds in full."""
    return Target(parameter, tuple(parameter.shape), (EVERYTHING,) * parameter.ndim, dummy)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with its weight."""

    def __init__(self, size: int, place: Placement, *, eps: float):
        super().__init__()
        self.weight = place.empty(size)
        self.eps = eps

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return norm.rmsnorm(x_TD, self.weight, eps=self.eps)

    def targets(self, prefix: str) -> Targets:
        return {f"{prefix}.weight": whole(self.weight, dummy=ONES)}


@dataclass(frozen=True, slots=True)
class Part:
    """One of the projections that share a packed matrix: its full size, and this rank's rows."""

    name: str
    size: int
    take: slice

    @property
    def held(self) -> int:
        return self.take.stop - self.take.start


class ColumnParallelLinear(nn.Module):
    """Projections of one input as one matrix; each rank holds some of the outputs of each."""

    def __init__(self, in_features: int, parts: list[Part], place: Placement):
        super().__init__()
        self.parts = parts
        self.weight = place.matrix(sum(part.held for part in parts), in_features)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return linear.project(x_TD, self.weight)

    def targets(self, prefix: str) -> Targets:
        rows = self.weight.split([part.held for part in self.parts])
        return {
            f"{prefix}.{part.name}.weight": Target(
                into, (part.size, into.shape[1]), (part.take, EVERYTHING), PROJECTION
            )
            for part, into in zip(self.parts, rows, strict=True)
        }


class RowParallelLinear(nn.Module):
    """A projection whose input is divided among the ranks; its results are summed over them."""

    def __init__(self, in_features: int, take: slice, out_features: int, place: Placement):
        super().__init__()
        self.in_features, self.take, self.mesh = in_features, take, place.mesh
        self.weight = place.matrix(out_features, take.stop - take.start)

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        return all_reduce(linear.project(x_TF, self.weight), self.mesh)

    def targets(self, prefix: str) -> Targets:
        shape = (self.weight.shape[0], self.in_features)
        target = Target(self.weight, shape, (EVERYTHING, self.take), OUTPUT_PROJECTION)
        return {f"{prefix}.weight": target}


class HeadProjections(ColumnParallelLinear):
    """Queries, keys and values (and any further full-width projection) of one input, by head.

    This rank holds some of the heads: `heads` of the queries, `kv_heads` of keys and values.
    """

    def __init__(
        self, size: int, heads: int, kv_heads: int, head_dim: int, place: Placement,
        *, extra: tuple[str, ...] = (),
    ):  # fmt: skip
        self.heads = place.mesh.shard(heads, what="query heads")
        self.kv_heads = place.mesh.kv_shard(kv_heads)
        self.head_dim = head_dim
        self.channels = self._channels(self.heads)
        query = Part("q_proj", heads * head_dim, self.channels)
        kv = (kv_heads * head_dim, self._channels(self.kv_heads))
        more = [Part(name, query.size, query.take) for name in extra]
        super().__init__(size, [query, Part("k_proj", *kv), Part("v_proj", *kv), *more], place)

    def _channels(self, heads: slice) -> slice:
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)


class QKNorm(nn.Module):
    """The weights of the RMSNorm of query heads and of key heads, which `Batch.attend` takes."""

    def __init__(self, projections: HeadProjections, place: Placement, *, eps: float):
        super().__init__()
        self.weight_2C = place.empty(2, projections.head_dim)
        queries, keys = (part.held // projections.head_dim for part in projections.parts[:2])
        self.heads = Heads(queries=queries, keys=keys, eps=eps)

    def targets(self, prefix: str) -> Targets:
        names = zip(("q_norm", "k_norm"), self.weight_2C, strict=True)
        return {f"{prefix}.{name}.weight": whole(weight, dummy=ONES) for name, weight in names}


class PerHead(nn.Module):
    """One learned number for each query head, FP32 if `exact`; this rank holds its heads'."""

    def __init__(self, total: int, take: slice, place: Placement, *, exact: bool):
        super().__init__()
        self.total, self.take = total, take
        dtype = torch.float32 if exact else place.dtype
        self.value_H = place.empty(take.stop - take.start, dtype=dtype)

    def target(self, dummy: Dummy) -> Target:
        return Target(self.value_H, (self.total,), (self.take,), dummy)


class Embedding(nn.Module):
    """Token ids to vectors; every rank holds the whole table."""

    def __init__(self, vocab_size: int, size: int, place: Placement):
        super().__init__()
        self.weight = place.empty(vocab_size, size)

    def forward(self, tokens_T: torch.Tensor, last_tokens_S: torch.Tensor | None) -> torch.Tensor:
        """A token may be given as -1 - s for the one in `last_tokens_S[s]`."""
        if last_tokens_S is None:
            return F.embedding(tokens_T, self.weight)
        return embed(tokens_T, last_tokens_S, self.weight)

    def targets(self, prefix: str) -> Targets:
        return {f"{prefix}.weight": whole(self.weight, dummy=UNIT)}


class LMHead(nn.Module):
    """Hidden states to FP32 logits over the whole vocabulary; each rank holds some of its rows.

    The product is FP32. A CPU has none of BF16 operands with an FP32 result, so there the weight,
    exact in FP32, is held in it.
    """

    def __init__(self, size: int, vocab_size: int, place: Placement):
        super().__init__()
        self.vocab_size, self.mesh = vocab_size, place.mesh
        padded = math.ceil(vocab_size / place.mesh.size) * place.mesh.size
        rows = place.mesh.shard(padded, what="vocabulary rows")
        self.take = slice(rows.start, min(rows.stop, vocab_size))
        dtype = torch.float32 if place.device.type == "cpu" else place.dtype
        self.weight = place.matrix(rows.stop - rows.start, size, dtype=dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = linear.lm_head(x_TD, self.weight)
        return all_gather(logits_TV, self.mesh)[:, : self.vocab_size]

    def targets(self, prefix: str) -> Targets:
        held = self.weight[: self.take.stop - self.take.start]
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{prefix}.weight": Target(held, shape, (self.take, EVERYTHING), UNIT)}


class SwiGLU(nn.Module):
    """The dense feed-forward: down(silu(gate x) * up x), its width divided among the ranks.

    `fp32` chooses its rounding, see `ops.linear`."""

    def __init__(self, size: int, inner: int, place: Placement, *, fp32: bool):
        super().__init__()
        self.fp32 = fp32
        take = place.mesh.shard(inner, what="feed-forward channels")
        parts = [Part("gate_proj", inner, take), Part("up_proj", inner, take)]
        self.gate_up = ColumnParallelLinear(size, parts, place)
        self.down = RowParallelLinear(inner, take, size, place)

    def forward(self, y_TD: torch.Tensor) -> torch.Tensor:
        return self.down(linear.swiglu_project(y_TD, self.gate_up.weight, fp32=self.fp32))

    def targets(self, prefix: str) -> Targets:
        return self.gate_up.targets(prefix) | self.down.targets(f"{prefix}.down_proj")


class Experts(nn.Module):
    """The routed experts of a layer, fused; the inner width of each is divided among the ranks.

    `scale` multiplies their sum, to which the `shared` expert's output is added.
    """

    def __init__(
        self, count: int, size: int, inner: int, place: Placement, *, fp32: bool, scale: float = 1.0
    ):
        super().__init__()
        self.inner, self.mesh, self.fp32, self.scale = inner, place.mesh, fp32, scale
        self.take = place.mesh.shard(inner, what="expert channels")
        held = self.take.stop - self.take.start
        self.gate_up = place.matrix(count, 2 * held, size)
        self.down = place.matrix(count, size, held)

    def forward(
        self,
        y_TD: torch.Tensor,
        weights_TN: torch.Tensor,
        ids_TN: torch.Tensor,
        shared: SwiGLU | None = None,
    ) -> torch.Tensor:
        beside = (None, None) if shared is None else (shared.gate_up.weight, shared.down.weight)
        out_TD = experts.moe(
            y_TD, self.gate_up, self.down, weights_TN, ids_TN, *beside,
            fp32=self.fp32, scale=self.scale,
        )  # fmt: skip
        return all_reduce(out_TD, self.mesh)

    def targets(self, prefix: str) -> Targets:
        size = self.down.shape[1]
        targets: Targets = {}
        for e in range(self.down.shape[0]):
            gate, up = self.gate_up[e].chunk(2)
            rows, columns = (self.take, EVERYTHING), (EVERYTHING, self.take)
            for name, into in (("gate_proj", gate), ("up_proj", up)):
                targets[f"{prefix}.{e}.{name}.weight"] = Target(
                    into, (self.inner, size), rows, PROJECTION
                )
            targets[f"{prefix}.{e}.down_proj.weight"] = Target(
                self.down[e], (size, self.inner), columns, OUTPUT_PROJECTION
            )
        return targets
