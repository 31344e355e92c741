"""A start without weights on a GPU that is not there, for the sake of what it launches.

It runs the code of the real one, `engine/ready.py`, on outlines. What that reads of the device is
zeros; what ranks exchange stays as it is.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from limelight.cache.groups import GroupSpec
from limelight.config import EngineConfig
from limelight.engine import timing
from limelight.engine.experts import expert_mesh, joined
from limelight.engine.memory import format_of
from limelight.engine.ready import make_ready, outline_models
from limelight.engine.startup import plan_memory, resolve
from limelight.models.layers import Placement
from limelight.models.loader import Model
from limelight.ops.absent import (
    AbsentTensors,
    Launch,
    Nothing,
    absent_gpu,
    recorded_launches,
    replaced,
)
from limelight.ops.boundary import Peers
from limelight.parallel import collectives, dispatch
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.progress import Progress
from limelight.runner.graphs import Graphs
from limelight.runner.runner import ModelRunner
from limelight.steps import StepKind, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A start to rehearse: of the rank in `seat`, on a GPU of this capability (90: 9.0) and memory
    (bytes)."""

    config: EngineConfig
    num_blocks: int
    capability: int
    memory: int
    seat: Seat = field(default_factory=Seat)
    is_joined: bool = False  # its ranks exchange, else one is measured without the others
    has_peers: bool = False  # they reach each other's memory


def rehearse(asked: Rehearsal) -> tuple[list[Launch], str | None]:
    """What such a start launches, each kind once, and what ended the rehearsal too early."""
    fault = None
    with (
        absent_gpu(asked.capability, memory=asked.memory) as tensors,
        recorded_launches() as launches,
    ):
        try:
            with _once(tensors):
                _start(asked)
        except Exception as error:  # whatever it is, the real start goes on without
            logger.debug("the start could not be rehearsed", exc_info=True)
            fault = f"{type(error).__name__}: {error}"
    return launches, fault


def _start(asked: Rehearsal) -> None:
    config, seat = asked.config, asked.seat
    found = resolve(config)
    experts = expert_mesh(config, found, seat)
    mesh = Mesh(seat.rank, seat.size)
    plan = plan_memory(config, found, mesh, experts).with_blocks(asked.num_blocks)
    with _others_absent():
        if asked.is_joined:
            mesh = replace(mesh, group=cast(dist.ProcessGroup, object()))
        if asked.has_peers:
            addresses_N = torch.zeros(seat.size, dtype=torch.int64, device=found.device)
            peers = Peers.of(seat.rank, found.shape.hidden_size, found.dtype, addresses_N)
            mesh = replace(mesh, peers=peers)
        place = Placement(mesh, found.dtype, found.device, experts=joined(experts, mesh))
        loaded = outline_models(config, found, place)
        if plan.block.routed is None:  # else each layer has its place among what is kept of them
            run_each_kind_once(loaded.model, plan.groups)
        make_ready(config, found, plan, loaded, Progress(quiet=True))


def run_each_kind_once(model: Model, groups: list[GroupSpec]) -> None:
    """Have a layer that launches what one before it does give what that one gave, in no time."""
    group_of_layer = {layer: g for g, group in enumerate(groups) for layer in group.layers}
    given: dict[object, Any] = {}

    def run(forward: Callable[..., Any], kind: object, is_first: bool, *args: Any) -> Any:
        if is_first:
            given[kind] = forward(*args)
        return given[kind]

    kinds: set[object] = set()
    for i, layer in enumerate(model.layers):
        front = f"model.layers.{i}."
        weights = tuple(
            (name.removeprefix(front), target.into.shape, format_of(target.into))
            for name, target in model.targets.items()
            if name.startswith(front)
        )
        # Nothing is to be added yet in the first one, and groups have tables of their own.
        kind = i == 0, group_of_layer[i], model.config.windows[i], weights
        layer.forward = partial(run, layer.forward, kind, kind not in kinds)
        kinds.add(kind)


@contextmanager
def _once(tensors: AbsentTensors) -> Iterator[None]:
    """Within, a step whose host can make nothing of zeros ends there, what is captured runs once
    and is not replayed, and no step is timed again."""
    execute = ModelRunner.execute

    def execute_so_far(runner: ModelRunner, plan: StepPlan) -> StepResult:
        reads = tensors.reads
        try:
            return execute(runner, plan)
        except Exception:
            if tensors.reads == reads:
                raise
            return StepResult([])

    def run_once(
        graphs: Graphs[Any, Any], step: Callable[[Any], Any], inputs: object, key: tuple[int, bool]
    ) -> None:
        graphs.outcomes[key] = step(inputs)
        graphs.graphs[key] = cast(torch.cuda.CUDAGraph, Nothing())

    with (
        replaced(ModelRunner, {"execute": execute_so_far}),
        replaced(Graphs, {"_capture": run_once}),
        replaced(timing, {"ROUNDS": dict.fromkeys(StepKind, 1)}),
    ):
        yield


@contextmanager
def _others_absent() -> Iterator[None]:
    """Within, nothing comes from other ranks, nor does anyone wait for it."""

    def exchange(*args: object, **kwargs: object) -> None:
        pass

    names = ("all_reduce", "all_gather", "broadcast", "scatter", "all_to_all_single")
    gathering = {"all_gather_single": exchange}
    with (
        replaced(dist, dict.fromkeys(names, exchange)),
        replaced(dispatch, gathering),
        replaced(collectives, gathering),
    ):
        yield
