"""The memory plan: what the weights, the work space and the KV cache take, and what fits.

Made from shapes alone, before any memory is taken; `limelight inspect` and the start print it.
"""

import math
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, GroupSpec
from limelight.cache.storage import BlockShape
from limelight.config import EngineConfig
from limelight.models.loader import Model
from limelight.models.unpacked import unpacked_numbers
from limelight.ops.fp4 import FP4
from limelight.ops.weight import Weight

GIB = 2**30
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# A CPU's memory is shared with all else that runs there, so its cache is bounded by default.
CPU_CACHE_LIMIT = 4 * GIB
# Projections are kept unpacked too if that takes no more than this share of a GPU's memory.
MOST_UNPACKED = 1 / 32
UNPACKED = "attention, unpacked"
KINDS = (
    ("embedding", re.compile(r"embed_tokens")),
    ("LM head", re.compile(r"lm_head")),
    ("routed experts", re.compile(r"\.mlp\.experts\.")),
    ("shared experts", re.compile(r"\.mlp\.shared_expert\.")),
    ("router", re.compile(r"\.mlp\.gate\.")),
    ("attention", re.compile(r"\.self_attn\.")),
    ("dense feed-forward", re.compile(r"\.mlp\.")),
    ("norms", re.compile(r"norm")),
)


@dataclass(frozen=True, slots=True)
class WeightKind:
    """One kind of tensor: how many numbers and bytes it has in all."""

    name: str
    parameters: int
    nbytes: int
    format: str


def weight_kinds(outline: Model) -> list[WeightKind]:
    """Parameters and bytes by kind of tensor, of a model that may be on the meta device."""
    counts: dict[str, tuple[int, int]] = {}
    formats: dict[str, set[str]] = {}
    for name, target in outline.targets.items():
        kind = next(kind for kind, pattern in KINDS if pattern.search(name))
        parameters, nbytes = counts.get(kind, (0, 0))
        counts[kind] = parameters + math.prod(target.into.shape), nbytes + target.into.nbytes
        formats.setdefault(kind, set()).add(format_of(target.into))
    return [
        WeightKind(kind, *counts[kind], format=", ".join(sorted(formats[kind]))) for kind in counts
    ]


def unpacked_kinds(outline: Model, device: torch.device, dtype: torch.dtype) -> list[WeightKind]:
    """What is kept of NVFP4 projections beside them: one kind, or none."""
    nbytes = dtype.itemsize * unpacked_numbers(outline)
    if device.type != "cuda" or not 0 < nbytes <= MOST_UNPACKED * device_memory(device)[1]:
        return []
    return [WeightKind(UNPACKED, 0, nbytes, format=str(dtype).removeprefix("torch."))]


def format_of(weight: Weight) -> str:
    """How a tensor's values are held."""
    if isinstance(weight, torch.Tensor):
        return str(weight.dtype).removeprefix("torch.")
    return "nvfp4" if isinstance(weight, FP4) else "mxfp8"


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on the device now, and those that shares are taken of.

    These are all that a GPU has, and what is free of a CPU's memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    return (_free_host_memory(),) * 2


def _free_host_memory() -> int:
    """Without swapping; where the system does not tell, all that it has."""
    if not MEMINFO.exists():
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError) as error:
            raise ValueError(
                f"this system does not tell how much memory it has: {error}"
            ) from error
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = CGROUP / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # Files that no one has read lately count as used, but go when memory is asked for.
        used = int((CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])
        free = min(free, max(0, int(text) - used))
    return free


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All in bytes on one device. `cache` is the KV cache, `left` what remains for anyone else."""

    available: int
    usable: int  # by this process, as far as it is available
    total: int
    kinds: list[WeightKind]
    workspace: int
    block: BlockShape
    groups: list[GroupSpec]
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    chunk: int  # most tokens of one prompt in a step
    ahead: int = 0  # positions behind these that are held for drafts
    invariant_on_gpu: bool = False  # kernels must not depend on the number of rows

    def with_blocks(self, num_blocks: int) -> "MemoryPlan":
        """The same plan with a cache of that many blocks."""
        return replace(self, num_blocks=num_blocks)

    @property
    def keeps_unpacked(self) -> bool:
        return any(kind.name == UNPACKED for kind in self.kinds)

    @property
    def weights(self) -> int:
        return sum(kind.nbytes for kind in self.kinds)

    @property
    def cache(self) -> int:
        return self.num_blocks * self.block.nbytes

    @property
    def left(self) -> int:
        return self.available - self.weights - self.workspace - self.cache

    @cached_property
    def tables(self) -> CacheGroups:
        """The block tables of a cache of this size, which know what fits."""
        return CacheGroups(
            self.groups, BlockPool(max(1, self.num_blocks), block_size=self.block.size),
            ahead=self.ahead, longest=self.max_model_len,
        )  # fmt: skip

    def blocks_for(self, length: int) -> int:
        """The least blocks that let one sequence reach `length` tokens."""
        return self.tables.blocks_for_length(length, 1)

    def sequences_of(self, length: int) -> int:
        """How many sequences of `length` tokens the cache holds at once."""
        return self.tables.sequences_of_length(length, self.chunk)

    def bytes_per_token(self) -> dict[str, int]:
        """KV bytes that one more token takes, by kind of layer; a window's do not grow for ever."""
        layer = self.block.layer_nbytes
        full = sum(len(g.layers) for g in self.groups if g.window is None)
        window = sum(len(g.layers) for g in self.groups if g.window is not None)
        return {"full": full * layer, "window": window * layer}

    def check(self) -> None:
        """Refuse a plan that cannot run, with numbers that can."""
        packed = [kind.name for kind in self.kinds if "nvfp4" in kind.format]
        if self.invariant_on_gpu and packed:
            raise ValueError(
                f"--batch-invariant takes no NVFP4 weights on a GPU; here are {', '.join(packed)}"
            )
        if self.usable > self.available:
            share = self.available * 100 // self.total / 100
            raise ValueError(
                f"this process is to use {_gib(self.usable)} of the device, but others leave only "
                f"{_gib(self.available)}; start with --gpu-memory-utilization {share}\n{self}"
            )
        if self.weights + self.workspace > self.usable:
            raise ValueError(
                f"the weights ({_gib(self.weights)}) and the work space ({_gib(self.workspace)}) "
                f"do not fit into the {_gib(self.usable)} that may be used\n{self}"
            )
        needed = self.blocks_for(self.max_model_len)
        if needed > self.num_blocks:
            longest = self.tables.longest_sequence(self.max_model_len)
            advice = (
                f"start with --max-model-len {longest}"
                if longest
                else f"the least cache is {_gib(self.blocks_for(1) * self.block.nbytes)}: "
                f"--kv-cache-memory-bytes {self.blocks_for(1) * self.block.nbytes}"
            )
            raise ValueError(
                f"the KV cache of {self.num_blocks} blocks is too small for one sequence of "
                f"{self.max_model_len} tokens, which takes {needed} blocks "
                f"(--kv-cache-memory-bytes {needed * self.block.nbytes}); {advice}\n{self}"
            )

    def __str__(self) -> str:
        per_token = self.bytes_per_token()
        lengths = sorted({min(n, self.max_model_len) for n in (1024, 8192, self.max_model_len)})
        fits = ", ".join(f"{self.sequences_of(n)} of {n}" for n in lengths)
        return "\n".join(
            (
                f"memory plan ({_gib(self.available)} free)",
                f"  weights     {_gib(self.weights):>12}",
                f"  work space  {_gib(self.workspace):>12}",
                f"  KV cache    {_gib(self.cache):>12}  {self.num_blocks} blocks of "
                f"{self.block.size} tokens; a token takes {per_token['full']} bytes in layers "
                f"with full attention and {per_token['window']} in window layers",
                f"  left        {_gib(self.left):>12}",
                f"  sequences that fit at once: {fits} tokens",
            )
        )


def cache_bytes(config: EngineConfig, plan: MemoryPlan, device: torch.device) -> int:
    """As asked; or what is left of the share to use, at most as much as all sequences can fill."""
    if config.kv_cache_memory_bytes is not None:
        free = max(0, plan.available - plan.weights - plan.workspace)
        if config.kv_cache_memory_bytes > free:
            raise ValueError(
                f"a KV cache of {config.kv_cache_memory_bytes} bytes does not fit beside weights "
                f"and work space; ask for at most --kv-cache-memory-bytes {free}"
            )
        return config.kv_cache_memory_bytes
    room = plan.usable - plan.weights - plan.workspace
    if device.type == "cpu":
        room = min(room, CPU_CACHE_LIMIT)
    blocks = plan.tables.blocks_for_length(plan.max_model_len, plan.chunk)
    useful = blocks * plan.max_num_seqs * plan.block.nbytes
    return max(0, min(room, useful))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
