"""From a config to room for LoRA adapters, and to those that an engine starts with."""

import torch

from limelight.config import EngineConfig
from limelight.engine.adapters import AdapterReader, Adapters
from limelight.engine.memory import WeightKind
from limelight.models.adapters import AdapterRoom

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def make_room(config: EngineConfig, dtype: torch.dtype) -> AdapterRoom | None:
    """What a model of this type is built with; None where no adapters are to be served."""
    if not config.enable_lora:
        return None
    own = dtype if config.lora_dtype == "auto" else DTYPES[config.lora_dtype]
    return AdapterRoom(config.max_loras, config.max_lora_rank, own, config.merge_lora_experts)


def adapter_kinds(room: AdapterRoom | None) -> list[WeightKind]:
    """What the slots take beside a model that was built with them."""
    if room is None:
        return []
    kind = str(room.dtype).removeprefix("torch.")
    return [WeightKind("adapters", room.nbytes // room.dtype.itemsize, room.nbytes, kind)]


def start_adapters(config: EngineConfig, reader: AdapterReader) -> Adapters | None:
    """Those of the config, read; `ValueError` names one that cannot be."""
    if not config.enable_lora:
        return None
    adapters = Adapters(
        reader, max_loras=config.max_loras, max_cpu_loras=config.max_cpu_loras or config.max_loras,
        merges=config.merge_lora_experts,
    )  # fmt: skip
    for adapter in config.adapters:
        try:
            adapters.load(adapter)
        except ValueError as error:
            raise ValueError(f"adapter {adapter.lora_name}: {error}") from error
    return adapters
