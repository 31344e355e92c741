"""The shape of a model, read from config.json in any spelling that its family has used.

One reader for both families: it takes known keys, checks their type, and refuses what would change
the result and is not supported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limelight.checkpoint import read_json

Json = Mapping[str, object]


class ConfigReader:
    """Typed access to a config.json; each error names the key."""

    def __init__(self, json: Json, *, source: str):
        self.json, self.source = json, source

    def fault(self, key: str, message: str) -> ValueError:
        return ValueError(f"{self.source}: {key} {message}; found {self.json.get(key)!r}")

    def integer(self, key: str, default: int | None = None, *, high: int = 2**24) -> int:
        value = self.json.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.fault(key, f"must be an integer from 1 to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.json.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise self.fault(key, "must be a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.json.get(key) is None else self.number(key)

    def choices(self, key: str, allowed: tuple[str, ...], *, length: int) -> list[str] | None:
        """A list of `length` words out of `allowed`, or None where the key is absent."""
        value = self.json.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != length
            or any(item not in allowed for item in value)
        ):
            raise self.fault(key, f"must list {length} of {', '.join(allowed)}")
        return value

    def integers(self, key: str) -> list[int] | None:
        value = self.json.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) for item in value
        ):
            raise self.fault(key, "must be a list of integers")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.json.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fault(key, "must be true or false")
        return value

    def require(self, key: str, *expected: object) -> None:
        """Refuse a key that says something that would change the result."""
        if key in self.json and self.json[key] not in expected:
            raise self.fault(key, f"is only supported as {expected[0]!r}")

    def rope_theta(self, layer_type: str, *, default: float = 10_000.0) -> float:
        """From `rope_parameters` (flat or keyed by layer type), or an older top-level key."""
        parameters = self.json.get("rope_parameters") or self.json.get("rope_scaling") or {}
        if isinstance(parameters, dict) and layer_type in parameters:
            parameters = parameters[layer_type]
        if not isinstance(parameters, dict):
            raise self.fault("rope_parameters", "must be an object")
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind != "default":
            raise self.fault("rope_parameters", "is only supported with rope_type default")
        theta = parameters.get("rope_theta", self.json.get("rope_theta", default))
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < 1e30:
            raise self.fault("rope_parameters", "needs a rope_theta above 0")
        return float(theta)


LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What both families have. `windows[i]` is None for a layer with full attention; a window
    counts the current token. `sparse[i]` says which layers route to experts."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    num_experts: int
    experts_per_token: int
    expert_inner_size: int
    windows: list[int | None]
    sparse: list[bool]
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    dtype: str

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def read_common(
    reader: ConfigReader, *, layer_types: list[str], sparse: list[bool]
) -> dict[str, Any]:
    """The keys that both families spell alike, as arguments of a `ModelConfig`."""
    reader.require("hidden_act", "silu")
    reader.require("attention_bias", False, None)
    reader.require("tie_word_embeddings", False, None)
    reader.require("norm_topk_prob", True, None)
    heads, kv_heads = reader.integer("num_attention_heads"), reader.integer("num_key_value_heads")
    if heads % kv_heads:
        raise reader.fault("num_attention_heads", f"must be a multiple of {kv_heads} KV heads")
    window = reader.integer("sliding_window") if "sliding_attention" in layer_types else None
    experts = reader.integer("num_experts", high=4096) if any(sparse) else 1
    per_token = reader.integer("num_experts_per_tok") if any(sparse) else 1
    if per_token > experts:
        raise reader.fault("num_experts_per_tok", f"must be at most {experts}, the experts")
    hidden = reader.integer("hidden_size")
    head_dim = reader.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise reader.fault("head_dim", "must be even: rotation works on halves")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "inner_size": reader.integer("intermediate_size"),
        "num_experts": experts,
        "experts_per_token": per_token,
        "expert_inner_size": reader.integer("moe_intermediate_size") if any(sparse) else 1,
        "windows": [window if kind == "sliding_attention" else None for kind in layer_types],
        "sparse": sparse,
        "rope_theta": reader.rope_theta("sliding_attention"),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "max_positions": reader.integer("max_position_embeddings", high=2**31),
        "dtype": str(reader.json.get("dtype") or reader.json.get("torch_dtype") or "bfloat16"),
    }


def stop_tokens(weights: Path, config: Path, *, vocab_size: int) -> list[int]:
    """The end-of-sequence ids of generation_config.json, else of config.json."""
    beside = [weights] if weights.is_dir() else []
    files = [folder / "generation_config.json" for folder in (*beside, config)]
    for file in (*files, config / "config.json"):
        ids = read_json(file).get("eos_token_id") if file.exists() else None
        ids = [ids] if isinstance(ids, int) else ids
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(
            isinstance(item, int) and 0 <= item < vocab_size for item in ids
        ):
            raise ValueError(f"{file}: eos_token_id must be token ids below {vocab_size}: {ids!r}")
        return ids
    return []
