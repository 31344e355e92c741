"""The layers both models are made of. Each knows its shard and which checkpoint tensors fill it.

A layer asks its `Placement` for its weights by their names in the checkpoint; there each becomes a
`Target`, which the loader fills, and `dummy` says how to without a checkpoint.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

from limelight.models.adapters import AdapterRoom
from limelight.models.dummy import ONES, OUTPUT_PROJECTION, PROJECTION, UNIT, Dummy
from limelight.models.expert_parallel import DividedExperts
from limelight.models.targets import Target, Targets
from limelight.ops import activation, experts, fp4, linear, mxfp8, norm
from limelight.ops.boundary import Summand
from limelight.ops.embed import embed
from limelight.ops.fp4 import FP4
from limelight.ops.lora import Matrix, without_adapters
from limelight.ops.mxfp8 import MXFP8
from limelight.ops.rope import Heads
from limelight.ops.weight import Stack, Weight, rows_of
from limelight.parallel.collectives import summed
from limelight.parallel.expert_mesh import ExpertMesh
from limelight.parallel.mesh import Mesh
from limelight.parallel.sampling import Share
from limelight.quant.stored import Packing


@dataclass(frozen=True, slots=True)
class Part:
    """One of the projections that share a packed matrix: its full size, and this rank's rows."""

    name: str
    size: int
    take: slice

    @property
    def held(self) -> int:
        return self.take.stop - self.take.start


def all_of(size: int) -> slice:
    return slice(0, size)


def nothing_is_packed(name: str) -> Packing | None:
    return None


@dataclass(frozen=True, slots=True)
class Placement:
    """What every layer of a model is built with; an outline has shapes and types, and no memory.

    `packing` tells how the tensor of a name is packed, if it is. `prefix` is what the
    names of a layer begin with; `targets` gathers them for the whole model. With `adapters` there
    is room for these beside every matrix of a layer. With `experts`
    ranks hold whole experts, and bring rows of their own to them.
    """

    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    outline: bool = False
    packing: Callable[[str], Packing | None] = nothing_is_packed
    prefix: str = ""
    targets: Targets = field(default_factory=dict)
    adapters: AdapterRoom | None = None
    experts: ExpertMesh | None = None

    @property
    def layer(self) -> int:
        """The number of the layer that this is in."""
        found = re.search(r"layers\.(\d+)\.", self.prefix)
        assert found is not None, f"{self.prefix} is in no layer"
        return int(found[1])

    @property
    def beside_experts(self) -> "Placement":
        """For what is computed of the rows that a rank brings to the experts: whole there."""
        return self if self.experts is None else replace(self, mesh=Mesh.single())

    def within(self, name: str) -> "Placement":
        """For a layer whose names go on with `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An unset parameter; inference is the default, training turns gradients on."""
        device = torch.device("meta") if self.outline else self.device
        value = torch.empty(shape, dtype=dtype or self.dtype, device=device)
        return nn.Parameter(value, requires_grad=False)

    def fill(
        self, name: str, into: Weight, shape: tuple[int, ...], take: tuple[slice, ...],
        dummy: Dummy, experts: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Have the loader fill `into` with the part `take` of a tensor."""
        self.targets[self.prefix + name] = Target(into, shape, take, dummy, experts)

    def whole(
        self, name: str, *shape: int, dummy: Dummy, dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """A tensor that every rank holds in full."""
        value = self.empty(*shape, dtype=dtype)
        self.fill(name, value, shape, tuple(map(all_of, shape)), dummy)
        return value

    def matrix(
        self,
        parts: Sequence[Part],
        columns: int,
        *,
        take: slice | None = None,
        count: int | None = None,
        experts: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        dummy: Dummy,
    ) -> Matrix:
        """The weights of a product: `parts` one below the other, of `columns` columns each.

        This rank holds the columns `take`. With `count`, the matrices of so many experts, or of
        those of them that it holds.
        """
        take = take or all_of(columns)
        alike = [(kind, list(run)) for kind, run in groupby(parts, self._packing_of)]
        if len(alike) > 1 and (count or any(kind == "NVFP4" for kind, _ in alike)):
            kinds = [
                f"{self.prefix}{run[0].name}.weight is {kind or 'plain'}" for kind, run in alike
            ]
            raise ValueError(f"{', '.join(kinds)}; held as one matrix, they must be of one kind")
        weights = [
            self._alike(kind, run, columns, take, count, experts, dtype=dtype, dummy=dummy)
            for kind, run in alike
        ]
        matrix = weights[0] if len(weights) == 1 else Stack(tuple(weights))
        if self.adapters is None:
            return matrix
        device = torch.device("meta") if self.outline else self.device
        return self.adapters.beside(matrix, self.prefix, parts, columns, take, device)

    def _alike(
        self, kind: Packing | None, parts: list[Part], columns: int, take: slice,
        count: int | None, experts: tuple[int, ...] | None, *,
        dtype: torch.dtype | None, dummy: Dummy,
    ) -> Weight:  # fmt: skip
        """A matrix whose parts are packed alike."""
        front = () if count is None else (count,)
        held_front = front if experts is None else (len(experts),)
        held = (*held_front, sum(part.held for part in parts), take.stop - take.start)
        name = f"{self.prefix}{parts[0].name}.weight"
        weight = self._packed(kind, name, *held) if kind else self._plain(*held, dtype=dtype)
        first = 0
        for part in parts:
            rows = slice(first, first + part.held)
            first = rows.stop
            into = rows_of(weight, rows)
            shape = (*front, part.size, columns)
            part_take = (*map(all_of, front), part.take, take)
            self.fill(f"{part.name}.weight", into, shape, part_take, dummy, experts)
        return weight

    def _packing_of(self, part: Part) -> Packing | None:
        return self.packing(f"{self.prefix}{part.name}.weight")

    def _plain(self, *shape: int, dtype: torch.dtype | None) -> nn.Parameter:
        """FP32 on a CPU keeps a matrix's input dimension outermost in memory: for the few rows of a
        decode step the CPU's product is then up to 1.7 times as fast."""
        if self.device.type != "cpu" or (dtype or self.dtype) != torch.float32:
            return self.empty(*shape, dtype=dtype)
        *front, rows, columns = shape
        value = self.empty(*front, columns, rows, dtype=dtype).mT
        return nn.Parameter(value, requires_grad=False)

    def _packed(self, kind: Packing, name: str, *shape: int) -> FP4 | MXFP8:
        *rows, columns = shape
        block = fp4.BLOCK if kind == "NVFP4" else mxfp8.BLOCK
        if columns % block:
            raise ValueError(f"{name}: {columns} columns a rank are not whole blocks of {block}")
        if kind == "MXFP8":
            return MXFP8(
                self.empty(*rows, columns, dtype=mxfp8.CODES),
                self.empty(*rows, columns // block, dtype=torch.uint8),
            )
        return FP4(
            self.empty(*rows, columns // 2, dtype=torch.uint8),
            self.empty(*rows, columns // block, dtype=torch.float8_e4m3fn),
            self.empty(*rows, dtype=torch.float32),
        )


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with its weight."""

    def __init__(self, size: int, place: Placement, *, eps: float):
        super().__init__()
        self.weight = place.whole("weight", size, dummy=ONES)
        self.eps = eps

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return norm.rmsnorm(x_TD, self.weight, eps=self.eps)


class ColumnParallelLinear(nn.Module):
    """Projections of one input as one matrix; each rank holds some of the outputs of each."""

    def __init__(self, in_features: int, parts: list[Part], place: Placement):
        super().__init__()
        self.parts = parts
        self.weight = place.matrix(parts, in_features, dummy=PROJECTION)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return linear.project(x_TD, self.weight)


class RowParallelLinear(nn.Module):
    """A projection whose input is divided among the ranks; its results are summed over them."""

    def __init__(
        self, name: str, in_features: int, take: slice, out_features: int, place: Placement
    ):
        super().__init__()
        self.mesh = place.mesh
        part = Part(name, out_features, all_of(out_features))
        self.weight = place.matrix([part], in_features, take=take, dummy=OUTPUT_PROJECTION)

    def forward(self, x_TF: torch.Tensor) -> Summand:
        return summed(linear.project(x_TF, self.weight), self.mesh)


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
        size = projections.head_dim
        self.weight_2C = place.empty(2, size)
        for name, weight_C in zip(("q_norm", "k_norm"), self.weight_2C, strict=True):
            place.fill(f"{name}.weight", weight_C, (size,), (all_of(size),), ONES)
        queries, keys = (part.held // size for part in projections.parts[:2])
        self.heads = Heads(queries=queries, keys=keys, eps=eps)


class PerHead(nn.Module):
    """One learned number for each query head, FP32 if `exact`; this rank holds its heads'."""

    def __init__(
        self, name: str, total: int, take: slice, place: Placement, *, exact: bool, dummy: Dummy
    ):
        super().__init__()
        dtype = torch.float32 if exact else place.dtype
        self.value_H = place.empty(take.stop - take.start, dtype=dtype)
        place.fill(name, self.value_H, (total,), (take,), dummy)


class Embedding(nn.Module):
    """Token ids to vectors; every rank holds the whole table."""

    def __init__(self, vocab_size: int, size: int, place: Placement):
        super().__init__()
        self.weight = place.whole("weight", vocab_size, size, dummy=UNIT)

    def forward(self, tokens_T: torch.Tensor, last_tokens_S: torch.Tensor | None) -> torch.Tensor:
        """A token may be given as -1 - s for the one in `last_tokens_S[s]`."""
        if last_tokens_S is None:
            return F.embedding(tokens_T, self.weight)
        return embed(tokens_T, last_tokens_S, self.weight)


class LMHead(nn.Module):
    """Hidden states to FP32 logits [T, S]; each rank holds S rows of the vocabulary, from `first`
    on, and `share` says so where there are others.

    The product is FP32, but for batch invariance, where it is rounded as a trainer's. A CPU has
    none of BF16 operands with an FP32 result, so there the weight, exact in FP32, is held in it.
    """

    def __init__(self, size: int, vocab_size: int, place: Placement):
        super().__init__()
        self.mesh = mesh = place.mesh
        share = math.ceil(vocab_size / mesh.size)
        self.first = first = min(mesh.rank * share, vocab_size)
        part = Part("lm_head", vocab_size, slice(first, min(first + share, vocab_size)))
        dtype = torch.float32 if place.device.type == "cpu" else place.dtype
        weight = replace(place, adapters=None).matrix([part], size, dtype=dtype, dummy=UNIT)
        self.weight = without_adapters(weight)
        self.share = None if mesh.group is None else Share(mesh, first, vocab_size)
        # One rank's share alone has no others beside it.
        self.outputs = part.held if self.share is None else vocab_size
        self.padding = share - part.held

    def forward(self, x_TD: torch.Tensor, *, cap: float | None = None) -> torch.Tensor:
        """With a soft cap if there is one; padding, as much as makes ranks equal, is ruled out."""
        logits_TV = linear.lm_head(x_TD, self.weight)
        if cap is not None:
            logits_TV = activation.softcap(logits_TV, cap=cap)
        if self.padding:
            logits_TV = F.pad(logits_TV, (0, self.padding), value=float("-inf"))
        return logits_TV


class SwiGLU(nn.Module):
    """The dense feed-forward: down(silu(gate x) * up x), its width divided among the ranks.

    `fp32` chooses its rounding, see `ops.linear`."""

    def __init__(self, size: int, inner: int, place: Placement, *, fp32: bool):
        super().__init__()
        self.fp32 = fp32
        take = place.mesh.shard(inner, what="feed-forward channels")
        parts = [Part("gate_proj", inner, take), Part("up_proj", inner, take)]
        self.gate_up = ColumnParallelLinear(size, parts, place)
        self.down = RowParallelLinear("down_proj", inner, take, size, place)

    def forward(self, y_TD: torch.Tensor) -> Summand:
        return self.down(linear.swiglu_project(y_TD, self.gate_up.weight, fp32=self.fp32))


class Experts(nn.Module):
    """The routed experts of a layer, fused; the inner width of each is divided among the ranks, or
    they are, whole ones.

    `scale` multiplies their sum, to which the `shared` expert's output is added.
    """

    def __init__(
        self, count: int, size: int, inner: int, place: Placement, *, fp32: bool, scale: float = 1.0
    ):
        super().__init__()
        self.mesh, self.fp32, self.scale = place.mesh, fp32, scale
        take, held, self.divided = all_of(inner), None, None
        if place.experts is None:
            take = place.mesh.shard(inner, what="expert channels")
        else:
            held = tuple(place.experts.placement.held(place.layer, place.experts.rank))
            rows_0D = torch.empty(0, size, dtype=place.dtype, device=place.device)
            self.divided = DividedExperts(place.experts, place.layer, rows_0D)
        parts = [Part("gate_proj", inner, take), Part("up_proj", inner, take)]
        self.gate_up = place.matrix(parts, size, count=count, experts=held, dummy=PROJECTION)
        down = [Part("down_proj", size, all_of(size))]
        self.down = place.matrix(
            down, inner, take=take, count=count, experts=held, dummy=OUTPUT_PROJECTION
        )

    def forward(
        self,
        y_TD: torch.Tensor,
        weights_TN: torch.Tensor,
        ids_TN: torch.Tensor,
        shared: SwiGLU | None = None,
    ) -> Summand:
        beside = (None, None) if shared is None else (shared.gate_up.weight, shared.down.weight)
        args = (y_TD, self.gate_up, self.down, weights_TN, ids_TN, *beside)
        if self.divided is not None:
            return self.divided.moe(*args, fp32=self.fp32, scale=self.scale)
        form = experts.unsummed_moe if self.mesh.leaves(len(y_TD)) else experts.moe
        return summed(form(*args, fp32=self.fp32, scale=self.scale), self.mesh)

    def serve(self, count: int) -> None:
        """A step for the rows of other ranks alone, of `count` experts each."""
        assert self.divided is not None
        y_0D = self.divided.rows_0D
        weights_0N = y_0D.new_empty(0, count, dtype=torch.float32)
        self(y_0D, weights_0N, weights_0N.long())
