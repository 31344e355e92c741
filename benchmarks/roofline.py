"""How long a step takes on paper: the bytes, FLOPs, kernels and messages of every operation.

    seconds = kernels * KERNEL_S + max(bytes / read rate, FLOPs / matrix rate)

Operations follow one another and messages hide behind nothing. Experts are chosen uniformly. The
rates of an H200 are measured, those of other GPUs the vendor's times what an H200 reached of its
own; what messages cost is assumed. Nothing here needs torch or a GPU. `docs/scaling.md` has every
constant's source.
"""

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import ceil
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"

# Measured on one H200: reading, products of 8192 x 8192, a reading kernel beside its bytes, and a
# kernel that the host launches without a graph.
READ_TB, MATRIX_TFLOPS, KERNEL_S, HOST_S = 4.41, 772.0, 1.6e-6, 74e-6
# What is left of a rate where operands are gathered or decoded first: products of experts,
# attention over pages, four-bit weights. The one constant fitted (to one card's measurements).
GATHERED = 0.54
# Assumed, measured by nobody here.
NVLINK_S, NETWORK_S, LINK_SHARE = 5e-6, 25e-6, 0.75

FOUR = 0.5625  # bytes of a value in NVFP4, with its share of a scale
DECODED_ROWS, DECODED_PAIRS = 384, 72  # up to here four-bit weights are decoded inside products
CHUNK = 16384  # tokens of prompts in a step


@dataclass(frozen=True)
class GPU:
    """Rates as they are reached; `nvlink` and `network` in one direction."""

    name: str
    read: float  # bytes/s
    matrix: float  # FLOP/s, BF16
    matrix_fp8: float
    memory: float  # bytes
    nvlink: float  # bytes/s
    network: float  # bytes/s
    domain: int  # GPUs that NVLink joins
    gathered: float = GATHERED


def _from_datasheet(
    name: str, *, tb: float, tflops: float, gb: float, nvlink: float, network: float, domain: int
) -> GPU:
    matrix = tflops * 1e12 * MATRIX_TFLOPS / 989
    return GPU(
        name, tb * 1e12 * READ_TB / 4.8, matrix, 2 * matrix, gb * 1e9,
        nvlink * 1e9 * LINK_SHARE, network * 1e9 * LINK_SHARE, domain,
    )  # fmt: skip


GPUS = {
    gpu.name: gpu
    for gpu in (
        _from_datasheet("H200", tb=4.8, tflops=989, gb=141, nvlink=450, network=50, domain=8),
        _from_datasheet("GB200", tb=8, tflops=2500, gb=186, nvlink=900, network=50, domain=72),
        _from_datasheet("GB300", tb=8, tflops=2500, gb=279, nvlink=900, network=100, domain=72),
    )
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes; `four` names the parts that are held in four bits."""

    name: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    sandwich: bool = False  # Beam: four norms a layer, and a gate on attention
    four: frozenset[str] = frozenset()


@cache
def shape(name: str) -> Shape:
    """Of `configs/<name>/config.json`: flint, beam, either with -nvfp4, or flint-dflash2."""
    config = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    layers, beam = config["num_hidden_layers"], config["model_type"] == "beam"
    if beam:
        full = [(i + 1) % 6 == 0 or i == layers - 1 for i in range(layers)]
        sparse = [i >= 3 for i in range(layers)]
    elif config["model_type"] == "flint":
        full = [i < 2 or i % 4 == 1 or i == layers - 1 for i in range(layers)]
        sparse = [i not in config["mlp_only_layers"] for i in range(layers)]
    else:
        full, sparse = [False] * layers, [False] * layers
    return Shape(
        name, config["hidden_size"], config["vocab_size"], config["num_attention_heads"],
        config["num_key_value_heads"], config["head_dim"], config["intermediate_size"],
        windows=tuple(None if seen else config["sliding_window"] for seen in full),
        sparse=tuple(sparse), experts=config.get("num_experts", 0),
        chosen=config.get("num_experts_per_tok", 0),
        expert_inner=config.get("moe_intermediate_size", 0),
        shared_inner=config.get("shared_expert_intermediate_size", 0),
        sandwich=beam, four=_four_bit_parts(config),
    )  # fmt: skip


def _four_bit_parts(config: dict[str, dict[str, list[str]]]) -> frozenset[str]:
    kept = config.get("quantization_config", {}).get("ignore")
    if kept is None:
        return frozenset()
    names = {
        "attention": "model.layers.0.self_attn.q_proj", "dense": "model.layers.0.mlp.up_proj",
        "experts": "model.layers.9.mlp.experts.0.up_proj", "head": "lm_head",
    }  # fmt: skip
    return frozenset(
        part for part, name in names.items() if not any(fnmatchcase(name, k) for k in kept)
    )


# Beam's published drafter, by the first part of its card; it has no file among the configs.
BEAM_DRAFTER = Shape("beam-dflash2", 5120, 151936, 40, 8, 128, 17408, (4096,) * 5, (False,) * 5)
TAPS = {"flint-dflash2": 3, "beam-dflash2": 5}


@dataclass(frozen=True)
class Op:
    """`four` bytes are decoded as they are read; `gathered` products reach less of the rate."""

    name: str
    kernels: int
    bytes: float = 0.0
    four: float = 0.0
    flops: float = 0.0
    gathered: bool = False
    fp8: bool = False

    def seconds(self, gpu: GPU) -> float:
        rate = (gpu.matrix_fp8 if self.fp8 else gpu.matrix) * (gpu.gathered if self.gathered else 1)
        read = self.bytes / gpu.read + self.four / (gpu.read * gpu.gathered)
        return self.kernels * KERNEL_S + max(read, self.flops / rate)


@dataclass(frozen=True)
class Message:
    """An exchange among `ranks`; `bytes` of what is reduced or gathered, or that a rank sends."""

    name: str
    kind: str  # all-reduce, all-gather, all-to-all
    bytes: float
    ranks: int

    def seconds(self, gpu: GPU) -> float:
        near = min(self.ranks, gpu.domain)
        nodes = self.ranks / near
        latency = NVLINK_S * (near > 1) + NETWORK_S * (nodes > 1)
        if self.kind == "all-to-all":
            far = self.bytes * (self.ranks - near) / max(self.ranks - 1, 1)
            return latency + max((self.bytes - far) / gpu.nvlink, far / gpu.network)
        times = 2 if self.kind == "all-reduce" else 1
        within = times * self.bytes * (near - 1) / near / gpu.nvlink
        return latency + within + times * self.bytes / near * (nodes - 1) / nodes / gpu.network


@dataclass(frozen=True)
class Setup:
    """Where a model runs: `tensor` ranks share each layer; `expert` ranks, each with sequences and
    attention of its own, share the experts."""

    gpu: GPU
    shape: Shape
    tensor: int = 1
    expert: int = 1
    kv_bytes: int = 2
    native: bool = False  # experts in four bits go into matrix units as they are, at FP8's rate
    messages: bool = True  # False: one rank of a slice, measured without the others

    @property
    def ranks(self) -> int:
        return self.tensor * self.expert

    @property
    def kv_heads(self) -> float:
        return max(self.shape.kv_heads / self.tensor, 1)


@dataclass(frozen=True)
class Load:
    """What one rank does in a step: `rows` new tokens of each sequence behind `before` others."""

    sequences: float
    rows: int
    before: int
    sampled: float  # rows that reach the LM head

    @property
    def tokens(self) -> float:
        return self.sequences * self.rows


Part = Op | Message


def _product(
    name: str, rows: float, inputs: float, outputs: float, *, four: bool, out_bytes: int = 2
) -> list[Part]:
    """Rows times a weight of [outputs, inputs]; above some rows four bits are unpacked first."""
    values, kernels = inputs * outputs, 1 + (rows > 8)
    moved, flops = rows * (2 * inputs + out_bytes * outputs), 2 * rows * values
    if not four:
        return [Op(name, kernels, 2 * values + moved, flops=flops)]
    if rows <= DECODED_ROWS:
        return [Op(name, kernels, moved, FOUR * values, flops)]
    unpack = Op("unpack", 1, (FOUR + 2) * values)
    return [unpack, Op(name, kernels, 2 * values + moved, flops=flops)]


def visible(rows: int, before: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, of one sequence."""
    if window is None or before + rows <= window:
        return rows * before + rows * (rows + 1) // 2
    short = max(window - 1 - before, 0)  # queries that see less than a window
    return short * before + short * (short + 1) // 2 + (rows - short) * window


def _attention(setup: Setup, load: Load, window: int | None) -> list[Part]:
    s, rows = setup.shape, load.tokens
    heads, four = s.heads / setup.tensor, "attention" in s.four
    wide = (heads * (2 if s.sandwich else 1) + 2 * setup.kv_heads) * s.head_dim
    seen = load.before + load.rows
    keys = seen if window is None else min(seen, window + load.rows - 1)
    cached = load.sequences * keys * 2 * setup.kv_heads * s.head_dim * setup.kv_bytes
    flops = 4 * heads * s.head_dim * load.sequences * visible(load.rows, load.before, window)
    parts = _product("qkv", rows, s.hidden, wide, four=four)
    if load.rows > 16:
        parts.append(Op("heads", 1, 4 * rows * wide))
    moved = 2 * rows * (wide + heads * s.head_dim)
    parts.append(Op("attention", 2 - (load.rows > 16), cached + moved, flops=flops, gathered=True))
    parts += _product("output", rows, heads * s.head_dim, s.hidden, four=four)
    return parts + _all_reduce(setup, rows)


def _all_reduce(setup: Setup, rows: float) -> list[Part]:
    if setup.tensor == 1 or not setup.messages:
        return []
    return [Message("all-reduce", "all-reduce", 2 * rows * setup.shape.hidden, setup.tensor)]


def _dense(setup: Setup, rows: float) -> list[Part]:
    s, inner, four = setup.shape, setup.shape.inner / setup.tensor, "dense" in setup.shape.four
    parts = _product("dense", rows, s.hidden, 2 * inner, four=four)
    return parts + _product("dense", rows, inner, s.hidden, four=four) + _all_reduce(setup, rows)


def _router(setup: Setup, rows: float) -> list[Part]:
    s = setup.shape
    products = 1 if rows <= 8 else 3  # an FP32 weight as three of BF16
    weight = 4 * s.experts * s.hidden
    flops = 2 * products * rows * s.experts * s.hidden
    logits = 4 * rows * s.experts
    return [
        Op("router", 1, weight + 2 * rows * s.hidden + logits, flops=flops),
        Op("router", 1, logits),
    ]


def distinct(setup: Setup, rows: float) -> float:
    """Experts that one rank reads in a layer, if routing is uniform."""
    s = setup.shape
    untouched = (1 - s.chosen / s.experts) ** (rows * setup.expert)
    return s.experts / setup.expert * (1 - untouched)


def sent_rows(rows: float, chosen: int, ranks: int) -> float:
    """Rows that a rank sends: each once to every other rank that holds one of its experts."""
    return rows * min(chosen, ranks * (1 - (1 - 1 / ranks) ** chosen)) * (ranks - 1) / ranks


def _experts(setup: Setup, rows: float) -> list[Part]:
    s, inner = setup.shape, setup.shape.expert_inner / setup.tensor
    shared = s.shared_inner / setup.tensor
    pairs, held = rows * s.chosen, s.experts / setup.expert
    values = distinct(setup, rows) * inner * s.hidden + shared * s.hidden  # of one of three
    four = "experts" in s.four
    unpacked = pairs / held > DECODED_PAIRS and not setup.native
    decoded = four and not unpacked and not setup.native
    weight = 0 if decoded else FOUR if four and setup.native else 2
    codes = FOUR if decoded else 0
    flops = 2 * s.hidden * (pairs * inner + rows * shared)
    rest = {"gathered": not setup.native, "fp8": setup.native}
    moved = 2 * pairs * (s.hidden + inner)
    parts: list[Part] = [
        Op("experts", 1 + (pairs > 64), 2 * weight * values + moved, 2 * codes * values, 2 * flops,
           **rest),
        Op("experts", 1, weight * values + moved, codes * values, flops, **rest),
    ]  # fmt: skip
    if four and unpacked:
        parts.insert(0, Op("unpack", 2, 3 * (FOUR + 2) * values))
    if rows > 1:
        parts.append(Op("sums", 1, 2 * s.hidden * (pairs + rows)))
    if setup.expert > 1 and setup.messages:
        size = 2 * s.hidden * sent_rows(rows, s.chosen, setup.expert)
        parts.insert(0, Message("dispatch", "all-to-all", size, setup.expert))
        parts.append(Message("combine", "all-to-all", size, setup.expert))
    return parts + _all_reduce(setup, rows)


def _norms(setup: Setup, rows: float) -> list[Part]:
    """Beam's sandwiches are kernels always; Flint's norms are parts of products of few rows."""
    kernels = 2 if setup.shape.sandwich or rows > 8 else int(rows > 1)
    return [Op("norms", kernels, 8 * kernels * rows * setup.shape.hidden)]


def forward(setup: Setup, load: Load) -> list[Part]:
    """All layers on one rank."""
    s, rows = setup.shape, load.tokens
    parts: list[Part] = [Op("inputs", 3, 4 * rows * s.hidden)]
    for window, sparse in zip(s.windows, s.sparse, strict=True):
        parts += _norms(setup, rows) + _attention(setup, load, window)
        parts += _router(setup, rows) + _experts(setup, rows) if sparse else _dense(setup, rows)
    return parts


def head(setup: Setup, rows: float) -> list[Part]:
    """FP32 logits of `rows`, and a token of each."""
    if rows == 0:
        return []
    s, share = setup.shape, setup.shape.vocab / setup.tensor
    parts = _product("head", rows, s.hidden, share, four="head" in s.four, out_bytes=4)
    if setup.tensor > 1 and setup.messages:
        parts.append(Message("all-gather", "all-gather", 4 * rows * s.vocab, setup.tensor))
    return [*parts, Op("sampling", 2, 4 * rows * s.vocab)]


def drafting(setup: Setup, load: Load) -> list[Part]:
    """A pass of the drafter: features of the new tokens, a block, its candidates."""
    drafter = BEAM_DRAFTER if setup.shape.sandwich else shape("flint-dflash2")
    own = replace(setup, shape=drafter)
    parts = _product("draft", load.tokens, TAPS[drafter.name] * drafter.hidden, drafter.hidden,
                     four=False)  # fmt: skip
    extra = Op("draft", 4 * len(drafter.windows) + 6)  # convolutions, sums, the selector
    return [*parts, *forward(own, load), extra, *head(setup, load.tokens - load.sequences)]


def seconds(setup: Setup, parts: list[Part], *, graph: bool = True) -> float:
    """Of all parts; a step without a graph is bound by the host that launches its kernels."""
    busy = sum(part.seconds(setup.gpu) for part in parts)
    launched = sum(part.kernels if isinstance(part, Op) else 1 for part in parts)
    return busy if graph else max(busy, launched * HOST_S)


def decode(setup: Setup, batch: float, context: int, *, drafts: int = 0) -> list[Part]:
    """A step of `batch` sequences in all; with drafts each verifies that many and drafts anew."""
    mine = ceil(batch / setup.expert)
    load = Load(mine, 1 + drafts, context, mine * (1 + drafts))
    parts = forward(setup, load) + head(setup, load.sampled)
    return parts + drafting(setup, load) if drafts else parts


def prefill_parts(setup: Setup, sequences: float, context: int, size: int = CHUNK) -> list[Part]:
    """The steps that take in prompts, until the last sequence has its first token."""
    mine = ceil(sequences / setup.expert)
    parts: list[Part] = []
    if context <= size:
        for first in range(0, mine, size // context):
            together = min(size // context, mine - first)
            parts += forward(setup, Load(together, context, 0, together)) + head(setup, together)
        return parts
    for at in range(0, context, size):
        load = Load(1, min(size, context - at), at, float(at + size >= context))
        parts += forward(setup, load) + head(setup, load.sampled)
    return parts * mine
