"""adapter_config.json as PEFT writes it: ranks and factors, and what of it cannot be served."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import regex  # type: ignore[import-untyped]

from limelight.checkpoint import read_json

# Of what may stand there, nothing else changes what an adapter does to a finished model.
HARMLESS = frozenset(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying
    eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern
    layers_to_transform loftq_config lora_alpha lora_dropout lora_ga_config megatron_config
    megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules target_parameters task_type use_rslora
    """.split()
)
# Beginnings of A and B for which PEFT takes their product out of the base model.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
SECONDS_OF_A_PATTERN = 1.0


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`rank` and `alpha`, but for the modules that a pattern names; which parameters are adapted.

    `version` is PEFT's where it is told.
    """

    source: Path
    rank: int
    alpha: float
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False
    parameters: tuple[str, ...] = ()
    version: tuple[int, ...] | None = None

    def rank_of(self, path: str) -> int:
        """The rank of a module or parameter."""
        return self._of(self.rank_pattern, path, self.rank)

    def scale_of(self, path: str) -> float:
        """What B A is multiplied by there."""
        rank, alpha = self.rank_of(path), self._of(self.alpha_pattern, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def adapts(self, path: str) -> bool:
        """Whether `target_parameters` names this parameter."""
        return any(path == name or path.endswith(f".{name}") for name in self.parameters)

    def _of(self, pattern: dict[str, int] | dict[str, float], path: str, default):
        """The value of the first key that fits the end of the path."""
        for key, value in pattern.items():
            try:
                found = regex.fullmatch(rf"(?:.*\.)?(?:{key})", path, timeout=SECONDS_OF_A_PATTERN)
            except (regex.error, TimeoutError) as error:
                raise ValueError(f"{self.source}: the pattern {key!r:.80}: {error}") from error
            if found:
                return value
        return default


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The config of the adapter in a folder; `ValueError` says what of it cannot be served."""
    source = folder / "adapter_config.json"
    json = read_json(source)

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{source}: {text}")

    if json.get("peft_type") != "LORA":
        refuse(f"peft_type must be LORA, got {json.get('peft_type')!r:.50}")
    if json.get("bias", "none") != "none":
        refuse(f"bias {json['bias']!r:.50} is not supported: train with bias none")
    for name in ("modules_to_save", "fan_in_fan_out"):
        if json.get(name):
            refuse(f"{name} is not supported")
    start = json.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        refuse(f"init_lora_weights {start!r:.50} changes the base model; convert it to plain LoRA")
    for name, value in json.items():
        if name not in HARMLESS and value not in (None, False, 0, "", [], {}):
            refuse(f"{name} is not supported")
    rank, alpha = json.get("r"), json.get("lora_alpha")
    if not _is_rank(rank) or not _is_number(alpha):
        refuse(f"r and lora_alpha must be positive numbers, got {rank!r:.50} and {alpha!r:.50}")
    patterns = [json.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    for pattern, fits in zip(patterns, (_is_rank, _is_number), strict=True):
        if not isinstance(pattern, dict) or not all(map(fits, pattern.values())):
            refuse("rank_pattern and alpha_pattern must map patterns to positive numbers")
    parameters = json.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        refuse("target_parameters must be a list of names")
    return AdapterConfig(
        source, rank, alpha,  # type: ignore[arg-type]
        rank_pattern=patterns[0], alpha_pattern=patterns[1],  # type: ignore[arg-type]
        rank_stabilized=bool(json.get("use_rslora")),
        parameters=tuple(parameters), version=_version(json.get("peft_version")),
    )  # fmt: skip


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _version(text: object) -> tuple[int, ...] | None:
    found = regex.match(r"\d{1,4}(\.\d{1,4}){1,2}", text) if isinstance(text, str) else None
    return tuple(map(int, found[0].split("."))) if found else None
