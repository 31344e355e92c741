"""From a config to a running engine: find, plan, load, warm up."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, plan_groups
from limelight.cache.storage import BlockShape, routed_shape
from limelight.checkpoint import locate
from limelight.config import EngineConfig
from limelight.engine.adapters import Adapters
from limelight.engine.compiling import compiling
from limelight.engine.control import Control
from limelight.engine.drafters import FoundDrafter, drafter_kind, find_drafter
from limelight.engine.drafting import Drafting
from limelight.engine.engine import Engine
from limelight.engine.expert_load import ExpertLoad, load_file
from limelight.engine.experts import expert_mesh, joined
from limelight.engine.formats import declared_for, told_formats
from limelight.engine.grammar import Grammars
from limelight.engine.grammar_worker import Vocabulary
from limelight.engine.lockstep import FixedDevices, JoinedRunner, meet
from limelight.engine.lora import adapter_kinds, make_room, start_adapters
from limelight.engine.memory import (
    MemoryPlan,
    cache_bytes,
    device_memory,
    unpacked_kinds,
    weight_kinds,
)
from limelight.engine.peers import Circle, Peers
from limelight.engine.ranks import LeadingRunner, Ranks, all_devices, facts_of
from limelight.engine.ready import load_models, make_ready
from limelight.engine.routing import Routing
from limelight.engine.scheduler import Scheduler
from limelight.engine.work_space import work_space
from limelight.models.beam import BeamConfig
from limelight.models.config import stop_tokens
from limelight.models.flint import FlintConfig
from limelight.models.layers import Placement
from limelight.models.loader import (
    build,
    find_tensors,
    packing_of,
    read_config,
)
from limelight.ops.ahead import compilations, settle_keys
from limelight.ops.paging import FP8
from limelight.parallel.expert_mesh import ExpertMesh
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.parallel.torchrun import Torchrun
from limelight.progress import Progress
from limelight.quant.declared import Declared
from limelight.quant.stored import Packing, Stored
from limelight.runner.routing import RoutedReader
from limelight.runner.runner import ModelRunner
from limelight.runner.sampler import NO_GRAMMARS
from limelight.stats import ModelInfo

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)
# Products of a model this small (bytes) are too short to share among cores: waiting for each other
# costs what a second core brings, and ten times that where the cores have other work too.
SMALL_MODEL = 256 * 2**20
ALONE = Mesh.single()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KV_DTYPES = DTYPES | {"fp8": FP8, "fp8_e4m3": FP8}
# Numbers in a head for which kernels read FP8.
LEAST_FP8_HEAD = 32


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a config comes to here: the files of the model, its shape, and how it will run.

    `stored` is None for dummy weights of a folder; `declared` is how weights are to be quantized
    that are plain there, and `packing` how each tensor is held.
    """

    weights: Path
    config: Path
    stored: list[Stored] | None
    declared: Declared
    packing: Callable[[str], Packing | None]
    architecture: str
    shape: FlintConfig | BeamConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    drafter: FoundDrafter | None = None

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer."""
        return stop_tokens(self.weights, self.config, vocab_size=self.shape.vocab_size)

    @property
    def identity(self) -> bytes:
        """A hash of all that must be the same on every rank; folders may be elsewhere."""
        tensors = [(one.file.name, one.name, one.dtype, one.shape) for one in self.stored or []]
        drafter = self.drafter and self.drafter.shape
        model = self.architecture, self.shape, self.dtype, self.declared
        parts = (*model, self.max_model_len, tensors, drafter)
        return hashlib.sha256(repr(parts).encode()).digest()


def resolve(config: EngineConfig) -> Resolved:
    """Find the model and settle what is left open; `ValueError` for what cannot be had."""
    weights = locate(config.model, revision=config.revision, weights=config.load_format != "dummy")
    folder = locate(config.hf_config_path, weights=False) if config.hf_config_path else weights
    if folder.is_file():
        raise ValueError(f"{folder} has no config.json: name its folder with --hf-config-path")
    architecture, shape = read_config(folder)
    without = config.load_format == "dummy" and weights.is_dir()
    stored = None if without else find_tensors(weights)
    declared = declared_for(config, folder, has_weights=stored is not None)
    packing = packing_of(stored, declared)
    device = _device(config.device)
    # CPUs multiply small FP32 matrices several times faster than BF16 ones, and more exactly.
    auto = "float32" if device.type == "cpu" else shape.dtype
    dtype = _dtype(auto if config.dtype == "auto" else config.dtype)
    length = config.max_model_len or shape.max_positions
    if length > shape.max_positions:
        raise ValueError(
            f"max_model_len {length} is above the {shape.max_positions} positions of the model"
        )
    drafter = None
    if config.speculative is not None:
        drafter = find_drafter(config.speculative, kv_cache_dtype=config.kv_cache_dtype)
    return Resolved(
        weights, folder, stored, declared, packing, architecture, shape, device, dtype, length,
        drafter,
    )  # fmt: skip


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch finds no CUDA device")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def plan_memory(
    config: EngineConfig,
    found: Resolved,
    mesh: Mesh | None = None,
    experts: ExpertMesh | None = None,
) -> MemoryPlan:
    """What `config` would take on this rank's device, or on that of rank 0; nothing is loaded."""
    mesh = mesh or Mesh(size=config.tensor_parallel_size)
    model, device, dtype = found.shape, found.device, found.dtype
    place = Placement(mesh, dtype, device, outline=True, packing=found.packing, experts=experts)
    room = make_room(config, dtype)
    outline = build(found.architecture, model, replace(place, adapters=room))
    kinds = weight_kinds(outline) + unpacked_kinds(outline, device, dtype) + adapter_kinds(room)
    drafter = found.drafter
    if drafter is not None:
        kinds.append(drafter_kind(drafter, outline, place))
    groups = plan_groups(model.windows, drafter.shape.windows if drafter else None)
    block = _block_shape(config, found, mesh, rows=max(len(group.layers) for group in groups))
    length = found.max_model_len
    # Ranks on CPUs share what is free.
    ranks = config.tensor_parallel_size if device.type == "cpu" else 1
    free, total = (nbytes // ranks for nbytes in device_memory(device))
    plan = MemoryPlan(
        available=free,
        usable=free if config.kv_cache_memory_bytes else int(total * config.gpu_memory_utilization),
        total=total,
        kinds=kinds,
        workspace=work_space(config, found, outline, experts),
        block=block,
        groups=groups,
        num_blocks=0,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        chunk=min(config.max_num_batched_tokens, length),
        ahead=0 if drafter is None else drafter.ahead,
        invariant_on_gpu=config.batch_invariant and device.type == "cuda",
    )
    return plan.with_blocks(cache_bytes(config, plan, device) // block.nbytes)


def _block_shape(config: EngineConfig, found: Resolved, mesh: Mesh, *, rows: int) -> BlockShape:
    """A block of `rows` layers with this rank's KV heads."""
    model, dtype = found.shape, found.dtype
    fp8 = config.kv_cache_dtype.startswith("fp8")
    if fp8 and found.device.type == "cuda" and model.head_dim < LEAST_FP8_HEAD:
        raise ValueError(f"an FP8 KV cache needs heads of {LEAST_FP8_HEAD}; found {model.head_dim}")
    kv_heads = mesh.kv_shard(model.num_kv_heads)
    return BlockShape(
        rows=rows,
        size=config.block_size,
        kv_heads=kv_heads.stop - kv_heads.start,
        head_dim=model.head_dim,
        dtype=dtype if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype],
        routed=routed_shape(model) if config.enable_return_routed_experts else None,
    )


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that is ready to serve, and what others must know of it."""

    engine: Engine
    control: Control
    info: ModelInfo
    plan: MemoryPlan
    folder: Path
    on_gpu: bool


def start_engine(
    config: EngineConfig,
    progress: Progress,
    mesh: Mesh = ALONE,
    *,
    on_loss: Callable[[str], None] | None = None,
    circle: Circle | None = None,
    torchrun: Torchrun | None = None,
) -> Started:
    """Load the model and warm it up, with the other ranks where the config asks for some, and with
    the engines of `circle`, which share its experts. `torchrun` tells of ranks that it has started.

    `ValueError` for what a user can mend. `mesh` is for one rank's part of a model alone. `on_loss`
    is called in another thread when another rank is lost, at the start or later.
    """
    found = resolve(config)
    seat = Seat(size=config.tensor_parallel_size) if torchrun is None else torchrun.seat
    if circle is not None:
        seat = replace(seat, data_rank=circle.rank, data_size=circle.size)
    experts, load = expert_mesh(config, found, seat), load_file(config, seat)
    if seat.world_size == 1:
        return _start(config, found, plan_memory(config, found, mesh), mesh, progress)
    plan = plan_memory(config, found, experts=experts)
    peers = store = host = None
    if torchrun is not None:
        store, host = torchrun.store(), torchrun.host
    if circle is not None:
        peers = Peers(circle, on_loss)
        store = meet(peers, facts_of(plan, found.identity))
    with Ranks.started(config, found.device, on_loss, seat, store, host) as ranks:
        plan = ranks.agree(plan, found.identity)
        mesh = ranks.join(found.shape.hidden_size, found.dtype)
        experts = joined(experts, mesh)
        return _start(
            config, found, plan, mesh, progress, ranks, load=load, experts=experts, peers=peers
        )


def start_runner(
    config: EngineConfig,
    found: Resolved,
    plan: MemoryPlan,
    mesh: Mesh,
    progress: Progress,
    grammars: Mapping[str, "xgrammar.CompiledGrammar"] = NO_GRAMMARS,
    *,
    experts: ExpertMesh | None = None,
    compiles: bool = True,
    compiled: Callable[[], object] = lambda: None,
) -> tuple[ModelRunner, Drafting | None]:
    """This rank's part of the model, loaded and warm, and what decides about drafts.

    All ranks run the same steps here, in the same order, once kernels are compiled, which the rank
    of each machine that `compiles` has done: in `compiled` all wait for that.
    """
    device = found.device
    if device.type == "cpu" and plan.weights < SMALL_MODEL:
        torch.set_num_threads(1)
    elif device.type == "cpu" and mesh.size > 1:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        cores = int(threads) if threads.isdecimal() else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // mesh.size))
    place = Placement(mesh, found.dtype, device, experts=experts)
    with compiling(config, found, plan, mesh, experts, compiles=compiles) as wait:
        loaded = load_models(config, found, place, progress)
        wait(progress)
    compiled()
    settle_keys()
    with compilations() as missed:
        made = make_ready(config, found, plan, loaded, progress, grammars)
    logger.debug("%d kernels were compiled when they were met: %s", len(missed), missed)
    return made


def _start(
    config: EngineConfig,
    found: Resolved,
    plan: MemoryPlan,
    mesh: Mesh,
    progress: Progress,
    ranks: Ranks | None = None,
    *,
    load: Path | None = None,
    experts: ExpertMesh | None = None,
    peers: Peers | None = None,
) -> Started:
    logger.info("%s", plan)
    plan.check()
    ends = found.ends
    grammars = Grammars(lambda: _vocabulary(config, found, ends))
    runner, drafting = start_runner(
        config, found, plan, mesh, progress, grammars.of_request, experts=experts,
        compiled=lambda: None if ranks is None else ranks.go_on(),
    )  # fmt: skip
    leading = runner if ranks is None else LeadingRunner(runner, ranks)
    devices = all_devices(config, runner, ranks)
    adapters = start_adapters(config, devices)
    info = _info(config, found, plan, told_formats(runner.model.targets))
    on_gpu = found.device.type == "cuda"
    if peers is not None:
        peers.ready()
    engine = Engine(
        _scheduler(config, found, plan, adapters),
        leading if peers is None else JoinedRunner(runner, leading.launch, peers),
        # A CPU has nothing to do beside the step.
        eos_token_ids=ends, overlap=config.async_scheduling and on_gpu, grammars=grammars,
        drafting=drafting, ranks=ranks, peers=peers, adapters=adapters,
        expert_load=None if load is None else ExpertLoad(load, runner.experts.loads),
        routing=Routing(RoutedReader(runner.storage)) if info.returns_routed_experts else None,
    )  # fmt: skip
    control = Control(
        engine, devices if experts is None else FixedDevices(),
        seconds=config.weight_transfer.seconds,
    )  # fmt: skip
    return Started(engine, control, info, plan, found.weights, on_gpu)


def _info(
    config: EngineConfig,
    found: Resolved,
    plan: MemoryPlan,
    quantized: dict[str, list[str]] | None,
) -> ModelInfo:
    return ModelInfo(
        architecture=found.architecture,
        vocab_size=found.shape.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=found.ends,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        dtype=str(found.dtype)[6:],
        returns_routed_experts=config.enable_return_routed_experts,
        quantized=quantized,
        logprobs_mode=config.logprobs_mode,
    )


def _scheduler(
    config: EngineConfig, found: Resolved, plan: MemoryPlan, adapters: Adapters | None
) -> Scheduler:
    return Scheduler(
        _cache_groups(config, found, plan),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        longest_chunk=config.long_prefill_token_threshold,
        max_model_len=plan.max_model_len,
        policy=config.scheduling_policy,
        num_drafts=0 if found.drafter is None else found.drafter.num_drafts,
        adapters=adapters,
    )


def _cache_groups(config: EngineConfig, found: Resolved, plan: MemoryPlan) -> CacheGroups:
    where = found.weights.resolve(), found.declared
    identity = (found.architecture, *where, found.dtype, plan.block.dtype)
    return CacheGroups(
        plan.groups,
        BlockPool(plan.num_blocks, block_size=config.block_size),
        prefix_caching=config.enable_prefix_caching,
        hash_seed=config.prefix_hash_seed,
        root=" ".join(map(str, identity)).encode(),
        ahead=plan.ahead,
        longest=plan.max_model_len,
    )


def _vocabulary(config: EngineConfig, found: Resolved, ends: list[int]) -> Vocabulary:
    own = config.text_source == config.model
    folder = found.weights if own else locate(config.text_source, weights=False)
    return Vocabulary.load(folder, found.shape.vocab_size, ends)
