"""The shape of a DFlash 2 drafter, read from config.json in each of its spellings.

Published drafters keep the transformer's keys at the top and those of drafting in `dflash_config`,
a few in either place. The speculators format keeps drafting at the top and the transformer in
`transformer_layer_config`, and counts a tap by the layers that have run.
"""

from dataclasses import dataclass

from limelight.models.config import LAYER_TYPES, ConfigReader, Json, ModelConfig

BEAM, QWEN = "DFlash2BeamDraftModel", "DFlash2DraftModel"
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Each turns the drafter into another network.
VARIANTS = ("attention_sink_bias", "attention_value_scale", "sample_from_anchor")
MOST_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config:
    """`windows[i]` and `causal[i]`: which keys layer i sees, None for all before the block's end.

    `taps` are the target's layers, counted from 0, whose outputs the drafter reads; a block has an
    anchor and `block_size` - 1 masks.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    windows: list[int | None]
    causal: list[bool]
    rope_theta: float
    rms_norm_eps: float
    taps: list[int]
    target_layers: int | None
    target_hidden_size: int
    block_size: int
    mask_token_id: int
    candidates: int
    rank: int
    conv_taps: int
    conv_group: int
    logit_softcap: float | None
    logit_scale: float
    embedding_scale: float
    source: str

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @classmethod
    def from_dict(cls, json: Json, *, source: str = "config.json") -> "DFlash2Config":
        keys = _Keys.of(json, source)
        network, drafting = keys.network, keys.drafting
        for reader in (network, drafting):
            _refuse_variants(reader)
        vocab = network.integer("vocab_size")
        hidden = network.integer("hidden_size")
        heads, kv_heads, head_dim = _heads(network, hidden)
        layers, block = network.integer("num_hidden_layers", high=1024), _block_size(keys)
        windows = _windows(keys, layers, block)
        if keys.top.json.get("draft_vocab_size") not in (None, vocab):
            raise keys.top.fault("draft_vocab_size", f"must be vocab_size, {vocab}")
        conv_taps, conv_group = _convolution(drafting, hidden, block)
        return cls(
            vocab_size=vocab, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=head_dim, inner_size=network.integer("intermediate_size"),
            windows=windows, causal=_causal(keys, windows),
            rope_theta=network.rope_theta("sliding_attention", default=1e6),
            rms_norm_eps=network.number("rms_norm_eps", 1e-6),
            taps=_taps(keys), target_layers=_optional_integer(keys.top, "num_target_layers"),
            target_hidden_size=keys.top.integer("target_hidden_size", hidden),
            block_size=block, mask_token_id=_mask_token(keys, vocab),
            candidates=_half(drafting, "selector_top_k", "selector_rank", high=vocab),
            rank=_half(drafting, "selector_rank", "selector_top_k"),
            conv_taps=conv_taps, conv_group=conv_group,
            logit_softcap=_softcap(keys),
            logit_scale=drafting.number("output_multiplier", 1.0),
            embedding_scale=drafting.number("input_embedding_scale", 1.0),
            source=source,
        )  # fmt: skip

    def check_target(self, target: ModelConfig) -> None:
        """Refuse a target that this drafter was not made for, or whose cache cannot hold it."""
        facts = (
            ("vocab_size", self.vocab_size, target.vocab_size),
            # Embeddings and LM head are the target's.
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("num_target_layers", self.target_layers or target.num_layers, target.num_layers),
            # Keys and values lie in the blocks of the target's.
            ("num_key_value_heads", self.num_kv_heads, target.num_kv_heads),
            ("head_dim", self.head_dim, target.head_dim),
        )
        for key, ours, theirs in facts:
            if ours != theirs:
                raise ValueError(f"{self.source}: {key} is {ours}; the target model has {theirs}")
        if self.taps[-1] >= target.num_layers:
            raise ValueError(
                f"{self.source}: target_layer_ids names layer {self.taps[-1]}; the target model "
                f"has layers 0 to {target.num_layers - 1}"
            )


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where keys stand: at the top, those of the transformer, and those of drafting."""

    top: ConfigReader
    network: ConfigReader
    drafting: ConfigReader
    speculators: bool

    @classmethod
    def of(cls, json: Json, source: str) -> "_Keys":
        top = ConfigReader(json, source=source)
        speculators = json.get("speculators_model_type") is not None
        if speculators:
            top.require("speculators_model_type", "dflash2")
        else:
            names = json.get("architectures")
            if not isinstance(names, list) or not {BEAM, QWEN} & {str(name) for name in names}:
                raise top.fault("architectures", f"must name {BEAM} or {QWEN}")
        key = "transformer_layer_config" if speculators else "dflash_config"
        inner = json.get(key)
        if not isinstance(inner, dict):
            raise top.fault(key, "must be an object")
        nested = ConfigReader(inner, source=f"{source}: {key}")
        return cls(top, *((nested, top) if speculators else (top, nested)), speculators)

    @property
    def is_beam(self) -> bool:
        names = self.top.json.get("architectures")
        return not self.speculators and isinstance(names, list) and BEAM in names

    def either(self, key: str) -> ConfigReader:
        """Where a key stands that may stand with drafting or at the top; both must agree."""
        values = [reader.json.get(key) for reader in (self.drafting, self.top)]
        if None not in values and values[0] != values[1]:
            raise self.top.fault(key, f"must be what {self.drafting.source} says, {values[0]}")
        return self.top if values[0] is None else self.drafting


def _refuse_variants(reader: ConfigReader) -> None:
    for key in VARIANTS:
        reader.require(key, None, False)
    reader.require("hidden_act", "silu", None)
    reader.require("attention_bias", False, None)
    reader.require("is_neox_style", True, None)
    reader.require("partial_rotary_factor", 1.0, None)
    reader.require("quantization_config", None)


def _heads(network: ConfigReader, hidden: int) -> tuple[int, int, int]:
    """How many of queries, how many of keys and values, and their size."""
    heads, kv_heads = (network.integer(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if heads % kv_heads:
        raise network.fault("num_attention_heads", f"must be a multiple of {kv_heads} KV heads")
    head_dim = network.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise network.fault("head_dim", "must be even: rotation works on halves")
    return heads, kv_heads, head_dim


def _optional_integer(reader: ConfigReader, key: str) -> int | None:
    return None if reader.json.get(key) is None else reader.integer(key)


def _block_size(keys: _Keys) -> int:
    reader = keys.either("block_size")
    block = reader.integer("block_size", high=MOST_BLOCK)
    if block < 2:
        raise reader.fault("block_size", "must be 2 or more: an anchor and what it drafts")
    return block


def _windows(keys: _Keys, layers: int, block: int) -> list[int | None]:
    network, drafting = keys.network, keys.drafting
    older = _optional_integer(drafting, "swa_window_size")
    window = _optional_integer(network, "sliding_window") or older
    slides = drafting.flag("use_swa", network.flag("use_sliding_window", window is not None))
    kinds = network.choices("layer_types", LAYER_TYPES, length=layers) or [
        LAYER_TYPES[slides] for _ in range(layers)
    ]
    if keys.is_beam and "full_attention" in kinds:
        raise network.fault("layer_types", "must be sliding_attention in every layer")
    if "sliding_attention" not in kinds:
        return [None] * layers
    if window is None or window < block:
        raise network.fault("sliding_window", f"must be {block} or more, the size of a block")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _causal(keys: _Keys, windows: list[int | None]) -> list[bool]:
    """Whether a row sees no later one of its block; by the oldest rule, in layers with a window."""
    if keys.speculators:
        causal = not keys.top.flag("sliding_window_non_causal", True)
        return [causal and window is not None for window in windows]
    for reader, key in ((keys.top, "is_causal"), (keys.drafting, "causal")):
        if reader.json.get(key) is not None:
            return [reader.flag(key, False)] * len(windows)
    return [window is not None for window in windows]


def _taps(keys: _Keys) -> list[int]:
    key = "aux_hidden_state_layer_ids" if keys.speculators else "target_layer_ids"
    first = 1 if keys.speculators else 0
    listed = keys.drafting.integers(key)
    if not listed or listed[0] < first or sorted(set(listed)) != listed:
        raise keys.drafting.fault(key, f"must list layers from {first} on, each once, in order")
    return [layer - first for layer in listed]


def _mask_token(keys: _Keys, vocab: int) -> int:
    reader = keys.drafting
    if reader.json.get(MASK_KEYS[0]) is None:
        reader = keys.top
    key = next((key for key in MASK_KEYS if reader.json.get(key) is not None), MASK_KEYS[0])
    value = reader.json.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise reader.fault(key, f"must be a token id below vocab_size, {vocab}")
    return value


def _half(reader: ConfigReader, key: str, other: str, *, high: int = 2**16) -> int:
    """A key that only means something together with another."""
    if reader.json.get(key) is None:
        alone = reader.json.get(other) is not None
        reason = f"must come with {other}" if alone else "is missing: DFlash without 2 is not known"
        raise reader.fault(key, reason)
    return reader.integer(key, high=high)


def _convolution(reader: ConfigReader, hidden: int, block: int) -> tuple[int, int]:
    taps = _half(reader, "conv_kernel_size", "conv_group_size", high=block)
    group = _half(reader, "conv_group_size", "conv_kernel_size")
    if hidden % group:
        raise reader.fault("conv_group_size", f"must divide hidden_size, {hidden}")
    return taps, group


def _softcap(keys: _Keys) -> float | None:
    """0 and null mean none."""
    key = "final_logit_softcapping"
    readers = (keys.drafting, keys.network)
    if keys.is_beam and all(key not in reader.json for reader in readers):
        raise keys.drafting.fault(key, "is missing, and the logits of Beam have a cap")
    for reader in readers:
        if reader.json.get(key):
            return reader.number(key)
    return None
