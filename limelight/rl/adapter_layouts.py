"""The tensors of an adapter file, in whatever layout, as an A and a B for each projection.

    path.lora_A.weight [r, in], path.lora_B.weight [out, r]   a linear layer, or one expert's
    experts(.base_layer).lora_A.weight [r E, in], .lora_B.weight [out, r E]
        a parameter of all experts (PEFT's target_parameters): A has the ranks of expert 0, then of
        1; in a row of B those of all experts lie side by side for each rank. Of two parameters the
        inner wrapper has gate_up_proj
    experts.gate_up_proj.lora_A.weight                        the same under its own name
    any of these with three dimensions, [E, r, in] and [E, out, r]

PEFT before 0.19 took the two dimensions of such a parameter the other way round: its A is the
transpose of what B is now. Shapes tell, or else another parameter of the file, or the version.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from limelight.models.adapters import Site
from limelight.quant.safetensor_files import Raw
from limelight.rl.adapter_config import AdapterConfig

DTYPES = ("F32", "F16", "BF16")
NAME = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
ONE_EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<kind>\w+_proj)")
ALL_EXPERTS = re.compile(r"(?P<experts>.+\.mlp\.experts)(?P<end>\.base_layer|\.\w+_proj|)")
ROUTER = re.compile(r".+\.mlp\.gate")
GATE_UP = "gate_up_proj"
# The first release of PEFT with the present order, and the last that surely had the former one.
PRESENT, FORMER = (0, 19, 1), (0, 19, 0)


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one path as they lie in the file."""

    path: str
    a: Raw
    b: Raw


@dataclass(frozen=True, slots=True)
class Factors:
    """A [(E,) r, in] and B [(E,) out, r] of projections whose outputs lie one below the other."""

    sites: tuple[Site, ...]
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def find_pairs(raws: Iterable[Raw]) -> dict[str, Pair]:
    """A and B of each path; `ValueError` names what is no part of an adapter."""
    found: dict[str, dict[str, Raw]] = {}
    for raw in raws:
        match = NAME.fullmatch(raw.name)
        if match is None:
            raise ValueError(f"{raw} is not part of a LoRA adapter that can be served")
        if raw.dtype not in DTYPES:
            raise ValueError(f"{raw}: type {raw.dtype}; expected one of {', '.join(DTYPES)}")
        if len(raw.shape) not in (2, 3):
            raise ValueError(f"{raw}: shape {list(raw.shape)}; expected two or three dimensions")
        sides = found.setdefault(match["path"], {})
        if match["side"] in sides:
            raise ValueError(
                f"{raw} stands for {match['path']}, and so does {sides[match['side']]}"
            )
        sides[match["side"]] = raw
    for sides in found.values():
        if len(sides) < 2:
            raise ValueError(f"{next(iter(sides.values()))} is there without its other half")
    return {path: Pair(path, sides["A"], sides["B"]) for path, sides in found.items()}


class Layouts:
    """Reads the pairs of one file against the sites of a model."""

    def __init__(self, pairs: Mapping[str, Pair], config: AdapterConfig, sites: Mapping[str, Site]):
        self.pairs, self.config, self.sites = pairs, config, sites

    def factors(self) -> Iterable[Factors]:
        """Of each projection or group of them, the experts' stacked; nothing is left over."""
        single: dict[tuple[str, str], dict[int, Pair]] = {}
        claimed: dict[str, str] = {}
        for path, pair in self.pairs.items():
            one = ONE_EXPERT.fullmatch(path)
            if one is not None and f"{one['experts']}.{one['kind']}" in self.sites:
                single.setdefault((one["experts"], one["kind"]), {})[int(one["index"])] = pair
                continue
            paths = self._paths(pair)
            self._claim(claimed, paths, path)
            yield (
                self._linear(pair)
                if paths == [path] and self._is_linear(path)
                else (self._experts(pair, paths))
            )
        for (experts, kind), pairs in single.items():
            self._claim(claimed, [f"{experts}.{kind}"], f"{experts}.*.{kind}")
            yield self._stacked(f"{experts}.{kind}", pairs)

    def _is_linear(self, path: str) -> bool:
        return path in self.sites and self.sites[path].experts is None

    def _claim(self, claimed: dict[str, str], paths: list[str], name: str) -> None:
        for path in paths:
            if path in claimed:
                raise ValueError(f"{name} and {claimed[path]} are adapters of the same weights")
            claimed[path] = name

    def _paths(self, pair: Pair) -> list[str]:
        """The sites that a pair is for."""
        path = pair.path
        if self._is_linear(path):
            return [path]
        if ROUTER.fullmatch(path):
            raise ValueError(f"{pair.a}: adapters of the router are not supported")
        match = ALL_EXPERTS.fullmatch(path)
        if match is not None and f"{match['experts']}.down_proj" in self.sites:
            experts, end = match["experts"], match["end"].removeprefix(".")
            kind = end if end.endswith("_proj") else self._wrapped(experts, pair)
            names = ["gate_proj", "up_proj"] if kind == GATE_UP else [kind]
            if all(f"{experts}.{name}" in self.sites for name in names):
                return [f"{experts}.{name}" for name in names]
        raise ValueError(f"{pair.a}: the model has no projection {path}")

    def _wrapped(self, experts: str, pair: Pair) -> str:
        """Which parameter the tensors of a wrapper belong to."""
        kinds = [kind for kind in (GATE_UP, "down_proj") if self.config.adapts(f"{experts}.{kind}")]
        inner, outer = (path in self.pairs for path in (f"{experts}.base_layer", experts))
        if inner and outer:
            return GATE_UP if pair.path.endswith(".base_layer") else "down_proj"
        if not kinds:
            kinds = [
                kind
                for kind in (GATE_UP, "down_proj")
                if self._orders(pair, self._of(experts, kind))
            ]
        if inner or len(kinds) != 1:
            raise ValueError(
                f"{pair.a}: nothing tells whether it belongs to {GATE_UP} or down_proj; "
                f"target_parameters in {self.config.source.name} should"
            )
        return kinds[0]

    def _of(self, experts: str, kind: str) -> list[Site]:
        names = ["gate_proj", "up_proj"] if kind == GATE_UP else [kind]
        return [self.sites[f"{experts}.{name}"] for name in names]

    def _linear(self, pair: Pair) -> Factors:
        site = self.sites[pair.path]
        rank = self._rank(pair, pair.path, [site])
        pair.a.expect(pair.a.dtype, (rank, site.inputs))
        pair.b.expect(pair.b.dtype, (site.outputs, rank))
        scale = self.config.scale_of(pair.path)
        return Factors((site,), pair.a.read(), pair.b.read(), scale)

    def _rank(self, pair: Pair, path: str, sites: list[Site]) -> int:
        rank, most = self.config.rank_of(path), sum(site.most for site in sites)
        if rank > most:
            raise ValueError(
                f"{pair.a}: rank {rank} is above the {most} that there is room for; "
                f"start with a larger --max-lora-rank"
            )
        return rank

    def _stacked(self, path: str, pairs: dict[int, Pair]) -> Factors:
        """One expert after the other; those without an adapter have one of zeros."""
        site, experts = self.sites[path], path.rpartition(".")[0]
        assert site.experts is not None
        kind = path.rpartition(".")[2]
        paths = {index: f"{experts}.{index}.{kind}" for index in pairs}
        rank = max(self._rank(pair, paths[i], [site]) for i, pair in pairs.items())
        a_ERK = torch.zeros(site.experts, rank, site.inputs)
        b_ENR = torch.zeros(site.experts, site.outputs, rank)
        for index, pair in pairs.items():
            if index >= site.experts:
                raise ValueError(f"{pair.a}: the model has {site.experts} experts in a layer")
            own = self.config.rank_of(paths[index])
            pair.a.expect(pair.a.dtype, (own, site.inputs))
            pair.b.expect(pair.b.dtype, (site.outputs, own))
            a_ERK[index, :own] = pair.a.read()
            b_ENR[index, :, :own] = pair.b.read().float() * self.config.scale_of(paths[index])
        return Factors((site,), a_ERK, b_ENR, 1.0)

    def _experts(self, pair: Pair, paths: list[str]) -> Factors:
        """A parameter of all experts."""
        sites = [self.sites[path] for path in paths]
        experts = paths[0].rpartition(".")[0]
        name = paths[0] if len(paths) == 1 else f"{experts}.{GATE_UP}"
        rank, count = self._rank(pair, name, sites), sites[0].experts
        assert count is not None
        swapped = self._is_swapped(pair, sites, rank)
        a, b = pair.a.read(), pair.b.read()
        if a.ndim == 2:
            a = a.unflatten(0, (count, rank))
            b = b.unflatten(1, (rank, count)).permute(2, 0, 1)
        if swapped:
            a, b = b.mT, a.mT
        return Factors(tuple(sites), a, b, self.config.scale_of(name))

    def _is_swapped(self, pair: Pair, sites: list[Site], rank: int) -> bool:
        orders = self._orders(pair, sites, rank)
        if not orders:
            inputs, outputs = sites[0].inputs, sum(site.outputs for site in sites)
            raise ValueError(
                f"{pair.a}: {list(pair.a.shape)} and {list(pair.b.shape)} are no adapter of rank "
                f"{rank} of {sites[0].experts} experts with {inputs} inputs and {outputs} outputs"
            )
        if len(orders) == 1:
            return orders[0]
        others = {
            known for other in self.pairs.values() if (known := self._known(other)) is not None
        }
        if len(others) == 1:
            return others.pop()
        version = self.config.version
        if version is not None and version >= PRESENT:
            return False
        if version is not None and version < FORMER:
            return True
        raise ValueError(
            f"{pair.a}: with as many inputs as outputs nothing tells in which order PEFT wrote "
            f"them; {self.config.source.name} should have the peft_version"
        )

    def _known(self, pair: Pair) -> bool | None:
        """Whether another pair of the file is surely swapped, or surely is not."""
        match = ALL_EXPERTS.fullmatch(pair.path)
        if match is None or f"{match['experts']}.down_proj" not in self.sites:
            return None
        orders = self._orders(pair, [self.sites[path] for path in self._paths(pair)])
        return orders[0] if len(orders) == 1 else None

    def _orders(self, pair: Pair, sites: list[Site], rank: int | None = None) -> list[bool]:
        """Whether it may be in the present order (False), in the former one (True)."""
        inputs, outputs = sites[0].inputs, sum(site.outputs for site in sites)
        count = sites[0].experts
        assert count is not None
        orders = []
        for swapped, (first, last) in ((False, (inputs, outputs)), (True, (outputs, inputs))):
            ranks = pair.a.shape[-2] if len(pair.a.shape) == 3 else pair.a.shape[0] // count
            ranks = ranks if rank is None else rank
            flat = (pair.a.shape, pair.b.shape) == ((count * ranks, first), (last, ranks * count))
            stacked = (pair.a.shape, pair.b.shape) == ((count, ranks, first), (count, last, ranks))
            if flat or stacked:
                orders.append(swapped)
        return orders
