"""A checkpoint as a folder of safetensors in MXFP8: codes and scales, as compressed-tensors names
them and trainers send them."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from limelight.checkpoint import read_json
from limelight.conversion import shards
from limelight.conversion.job import Job
from limelight.conversion.sources import Source, Sources
from limelight.models.loader import Model
from limelight.ops.mxfp8 import BLOCK, CODES
from limelight.quant.declared import FLOAT_8, GROUP
from limelight.quant.stored import SCALE


def check(model: Model) -> None:
    """`ValueError` for a model that this format cannot hold."""
    for name, target in model.targets.items():
        if _chosen(name) and target.shape[-1] % BLOCK:
            raise ValueError(
                f"{name}: rows of {target.shape[-1]}; MXFP8 needs a multiple of {BLOCK}"
            )


def _chosen(name: str) -> bool:
    """Whether a tensor becomes MXFP8: the same ones as by --quantization mxfp8."""
    return name.endswith("_proj.weight")


def plan(model: Model, sources: Sources) -> tuple[int, Callable[[Job, Path], None]]:
    """About how many bytes the folder takes, and what writes it."""
    each = list(chain.from_iterable(sources.values()))
    files = shards.split([dict(_outlines(source)) for source in each], most=shards.SHARD_BYTES)
    size = sum(outline.nbytes for file in files for outline in file.values())
    return size + 2**26, partial(_write, each, files)


def _outlines(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """What is written of a tensor, on the meta device."""
    name, (*rows, columns) = source.name, source.shape
    empty = partial(torch.empty, device="meta")
    if not _chosen(name):
        yield name, empty(source.shape, dtype=source.dtype)
        return
    yield name, empty(source.shape, dtype=CODES)
    yield name + SCALE, empty(*rows, columns // BLOCK, dtype=torch.uint8)


def _write(sources: list[Source], files: list[shards.Outlines], job: Job, path: Path) -> None:
    path.mkdir()
    shards.copy_rest(job.folder, path)
    arguments = [GROUP | {"dynamic": dynamic} for dynamic in (False, True)]
    group = dict(zip(("weights", "input_activations"), arguments, strict=True))
    quantization = {
        "quant_method": "compressed-tensors",
        "format": FLOAT_8,
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head", "re:.*mlp.gate"],
    }
    whole = read_json(job.folder / "config.json") | {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    shards.write(path, files, _tensors(sources, job))


def _tensors(sources: list[Source], job: Job) -> Iterator[tuple[str, torch.Tensor]]:
    for source in sources:
        if not _chosen(source.name):
            yield source.name, job.kept(source, source.dtype)
            continue
        held = job.mxfp8(source)
        yield source.name, held.codes
        yield source.name + SCALE, held.scales
