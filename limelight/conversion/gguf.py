"""A Flint checkpoint as one GGUF file in NVFP4."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from limelight.conversion.job import Job
from limelight.conversion.shards import NAMES
from limelight.conversion.sources import Source, Sources
from limelight.models.flint import Flint, FlintConfig
from limelight.models.loader import Model
from limelight.quant.gguf import ARCHITECTURE, IN_LAYER, TOP
from limelight.quant.nvfp4 import GGUF_BLOCK, GGUF_BYTES, gguf_blocks

if TYPE_CHECKING:
    from gguf import GGUFWriter

GGUF_NAMES = {name: there for there, name in (TOP | IN_LAYER).items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in GGUF: its name less `.weight`, its type, None for NVFP4, and its bytes' shape."""

    name: str
    sources: list[Source]
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def _entry(name: str, shape: tuple[int, ...], sources: list[Source]) -> Entry:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    there = f"blk.{match[1]}.{GGUF_NAMES[match[2]]}" if match else GGUF_NAMES[name]
    *rows, columns = shape
    if name.endswith(("_proj.weight", "lm_head.weight")) and columns % GGUF_BLOCK == 0:
        return Entry(there, sources, None, (*rows, columns // GGUF_BLOCK * GGUF_BYTES))
    dtype = torch.float32
    if name.endswith(("_proj.weight", "lm_head.weight", "embed_tokens.weight")):
        dtype = reduce(torch.promote_types, (source.dtype for source in sources))
    return Entry(there, sources, dtype, (*rows, columns * dtype.itemsize))


def check(model: Model) -> None:
    """`ValueError` for a model that this format cannot hold."""
    if not isinstance(model, Flint):
        raise ValueError("GGUF has no Beam architecture; choose --format modelopt-nvfp4")


def plan(model: Model, sources: Sources) -> tuple[int, Callable[[Job, Path], None]]:
    """About how many bytes the file takes, and what writes it."""
    assert isinstance(model, Flint)
    entries = [_entry(name, model.targets[name].shape, each) for name, each in sources.items()]
    size = sum(math.prod(entry.shape) for entry in entries)
    return size + 2**20, partial(_write, model.config, entries)


def _write(config: FlintConfig, entries: list[Entry], job: Job, path: Path) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    _add_keys(writer, config)
    byte, fp32 = np.dtype(np.uint8), np.dtype(np.float32)
    for entry in entries:
        form = GGMLQuantizationType[NAMES[entry.dtype] if entry.dtype else "NVFP4"]
        size, count = math.prod(entry.shape), len(entry.sources)
        writer.add_tensor_info(f"{entry.name}.weight", entry.shape, byte, size, form)
        if entry.dtype is None:
            writer.add_tensor_info(f"{entry.name}.scale", (count,), fp32, 4 * count)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            values = np.empty((len(entry.sources), *entry.shape[-2:]), byte)
            scales = np.empty(len(values), fp32)
            for e, source in enumerate(entry.sources):
                if entry.dtype is None:
                    [result] = job.quantized([source])
                    values[e] = gguf_blocks(result.codes, result.scales).cpu().numpy()
                    scales[e] = result.scale.item()
                else:
                    values[e] = job.kept(source, entry.dtype).view(torch.uint8).numpy()
            writer.write_tensor_data(values)
            if entry.dtype is None:
                writer.write_tensor_data(scales)
    finally:
        writer.close()


def _add_keys(writer: "GGUFWriter", config: FlintConfig):
    """What the file says of the model; the engines that read it take config.json as well."""
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    writer.add_type("model")
    writer.add_file_type(LlamaFileType.MOSTLY_NVFP4)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.inner_size)
    writer.add_leading_dense_block_count(config.sparse.index(True) if any(config.sparse) else 0)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_expert_feed_forward_length(config.expert_inner_size)
    writer.add_expert_shared_feed_forward_length(config.shared_inner_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if windows := [window for window in config.windows if window is not None]:
        writer.add_sliding_window(windows[0])
        writer.add_sliding_window_pattern([window is not None for window in config.windows])
