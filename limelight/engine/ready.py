"""From weights to a runner that is ready to serve: warm, with its graphs, its steps timed.

All that a start launches is launched here, so `engine/rehearsal.py` runs this with outlines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from limelight.cache.storage import KVStorage
from limelight.config import EngineConfig
from limelight.engine.drafters import (
    install_drafter,
    load_found_drafter,
    outline_drafter,
    start_drafting,
)
from limelight.engine.drafting import Drafting
from limelight.engine.lora import make_room
from limelight.engine.memory import MemoryPlan
from limelight.engine.warm_up import warm_up
from limelight.models.adapters import AdapterRoom
from limelight.models.dflash2 import DFlash2
from limelight.models.layers import Placement
from limelight.models.loader import Model, build, cache_scales, load_model
from limelight.models.unpacked import keep_unpacked
from limelight.progress import Progress
from limelight.runner.runner import ModelRunner
from limelight.runner.sampler import NO_GRAMMARS

if TYPE_CHECKING:
    import xgrammar

    from limelight.engine.startup import Resolved


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, the drafter beside it and the room for adapters in it, where there are any."""

    model: Model
    drafter: DFlash2 | None
    room: AdapterRoom | None


def load_models(
    config: EngineConfig, found: "Resolved", place: Placement, progress: Progress
) -> Loaded:
    """This rank's part of the weights."""
    room = make_room(config, found.dtype)
    model = load_model(
        found.weights,
        replace(place, adapters=room),
        config_folder=found.config,
        stored=found.stored,
        declared=found.declared,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        progress=progress,
    )
    drafter = None
    if found.drafter is not None:
        dummy_seed = config.seed if found.drafter.config.load_format == "dummy" else None
        drafter = load_found_drafter(found.drafter, place, model, dummy_seed, progress)
    return Loaded(model, drafter, room)


def outline_models(config: EngineConfig, found: "Resolved", place: Placement) -> Loaded:
    """The same without memory: shapes and types alone."""
    room = make_room(config, found.dtype)
    place = replace(place, outline=True, packing=found.packing)
    model = build(found.architecture, found.shape, replace(place, adapters=room)).eval()
    drafter = None
    if found.drafter is not None:
        drafter = outline_drafter(found.drafter, model, place).eval()
    return Loaded(model, drafter, room)


def make_ready(
    config: EngineConfig,
    found: "Resolved",
    plan: MemoryPlan,
    loaded: Loaded,
    progress: Progress,
    grammars: Mapping[str, "xgrammar.CompiledGrammar"] = NO_GRAMMARS,
) -> tuple[ModelRunner, Drafting | None]:
    """What runs the model, and what decides about drafts."""
    if plan.keeps_unpacked:
        keep_unpacked(loaded.model, found.dtype)
    scales_L2 = cache_scales(found.stored or [], found.shape.num_layers)
    runner = ModelRunner(
        loaded.model,
        KVStorage(plan.groups, plan.block, plan.num_blocks, found.device, scales_L2=scales_L2),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        eos_token_ids=found.ends,
        grammars=grammars,
        logprobs_mode=config.logprobs_mode,
        batch_invariant=config.batch_invariant,
        room=loaded.room,
    )
    if found.drafter is not None and loaded.drafter is not None:
        install_drafter(runner, found.drafter, loaded.drafter)
    warm_up(runner, plan, progress, found.drafter)
    if found.device.type == "cuda" and not config.enforce_eager:
        runner.capture(progress)
    if found.drafter is None:
        return runner, None
    return runner, start_drafting(runner, found.drafter, plan, progress)
