"""A checkpoint as a folder of safetensors in ModelOpt's NVFP4: a matrix is codes and two scales."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from limelight import __version__
from limelight.checkpoint import read_json
from limelight.conversion import shards
from limelight.conversion.job import Job
from limelight.conversion.sources import Source, Sources
from limelight.models.flint import Flint
from limelight.models.loader import Model
from limelight.ops.fp4 import BLOCK

# Engines join these matrices: under one global scale any engine can, and nothing is lost by it.
JOINED = re.compile(r"\.([qkv]|gate|up)_proj\.")


def check(model: Model) -> None:
    """`ValueError` for a model that this format cannot hold."""
    for name, target in model.targets.items():
        if _chosen(model, name) and target.shape[-1] % BLOCK:
            raise ValueError(
                f"{name}: rows of {target.shape[-1]}; NVFP4 needs a multiple of {BLOCK}"
            )


def _chosen(model: Model, name: str) -> bool:
    """Whether a tensor becomes NVFP4, as it is in the published checkpoints."""
    return name.endswith("_proj.weight") and (isinstance(model, Flint) or ".experts." in name)


def plan(model: Model, sources: Sources) -> tuple[int, Callable[[Job, Path], None]]:
    """About how many bytes the folder takes, and what writes it."""
    groups: dict[str, list[Source]] = {}
    for source in chain.from_iterable(sources.values()):
        joined = JOINED.sub(".joined.", source.name)
        groups.setdefault(joined if _chosen(model, source.name) else source.name, []).append(source)
    outlines = [
        {name: outline for source in group for name, outline in _outlines(model, source)}
        for group in groups.values()
    ]
    files = shards.split(outlines, most=shards.SHARD_BYTES)
    size = sum(outline.nbytes for file in files for outline in file.values())
    return size + 2**26, partial(_write, model, list(groups.values()), files)


def _outlines(model: Model, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """What is written of a tensor, on the meta device."""
    name, (*rows, columns) = source.name, source.shape
    empty = partial(torch.empty, device="meta")
    if not _chosen(model, name):
        yield name, empty(source.shape, dtype=source.dtype)
        return
    yield name, empty(*rows, columns // 2, dtype=torch.uint8)
    yield f"{name}_scale", empty(*rows, columns // BLOCK, dtype=torch.float8_e4m3fn)
    yield f"{name}_scale_2", empty((), dtype=torch.float32)


def _write(
    model: Model, groups: list[list[Source]], files: list[shards.Outlines], job: Job, path: Path
) -> None:
    path.mkdir()
    shards.copy_rest(job.folder, path)
    _write_configs(model, job.folder, path)
    shards.write(path, files, _tensors(model, groups, job))


def _tensors(
    model: Model, groups: list[list[Source]], job: Job
) -> Iterator[tuple[str, torch.Tensor]]:
    for group in groups:
        if not _chosen(model, group[0].name):
            yield from ((source.name, job.kept(source, source.dtype)) for source in group)
            continue
        for source, result in zip(group, job.quantized(group), strict=True):
            yield source.name, result.codes
            yield f"{source.name}_scale", result.scales
            yield f"{source.name}_scale_2", result.scale


def _write_configs(model: Model, source: Path, path: Path):
    """config.json and hf_quant_config.json: engines look into one or the other."""
    algorithm, ignored = "W4A16_NVFP4", _ignored(model)
    producer = {"name": "limelight", "version": __version__}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": BLOCK,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ignored,
        "producer": producer,
    }
    older = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": ignored,
        },
    }
    whole = read_json(source / "config.json") | {"quantization_config": quantization}
    for name, content in {"config.json": whole, "hf_quant_config.json": older}.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _ignored(model: Model) -> list[str]:
    """Modules that stay as they are; a layer's as a whole, as engines join some of them."""
    ignored = ["lm_head", "model.embed_tokens"]
    sparse = model.config.sparse
    if any(sparse):
        ignored.append("model.layers.*.mlp.gate")
    if not isinstance(model, Flint):
        ignored.append("model.layers.*.self_attn*")
        ignored += [f"model.layers.{i}.mlp*" for i, routed in enumerate(sparse) if not routed]
    return ignored
