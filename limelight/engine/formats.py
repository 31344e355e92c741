"""What of a model is to be quantized, and what then is: by name, for the log and for trainers."""

import logging
import re
from pathlib import Path

import torch

from limelight.config import EngineConfig
from limelight.engine.memory import format_of
from limelight.models.targets import Targets
from limelight.quant.declared import PLAIN, Declared, asked_for, read_declared

logger = logging.getLogger(__name__)


def declared_for(config: EngineConfig, folder: Path, *, has_weights: bool) -> Declared:
    """How weights are to be quantized that are plain where they lie, or that lie nowhere."""
    asked = asked_for(config.quantization, config.quantization_config, config.hf_overrides)
    if config.quantization == "modelopt_mxfp8":
        asked = read_declared(folder)
        if asked.format != "MXFP8":
            raise ValueError(f"{folder} does not declare itself as MXFP8; leave --quantization out")
    if asked is None and not has_weights:
        asked = read_declared(folder)
    return asked or PLAIN


def told_formats(targets: Targets) -> dict[str, list[str]] | None:
    """The modules in each format, logged by the kinds of layers; None if nothing is quantized.

    Routed experts are one module, and what has no module of its own has its own name.
    """
    formats: dict[str, list[str]] = {}
    for name, target in targets.items():
        formats.setdefault(format_of(target.into), []).append(name.removesuffix(".weight"))
    if all(isinstance(target.into, torch.Tensor) for target in targets.values()):
        return None
    for form, names in formats.items():
        kinds: dict[str, int] = {}
        for name in names:
            kind = re.sub(r"\.\d+\.", ".*.", name)
            kinds[kind] = kinds.get(kind, 0) + 1
        told = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        logger.info("held as %s: %s", form, told)
    return formats
