"""Checkpoint -> model, tensor by tensor, straight into place.

Headers are read and checked against the model first: nothing missing, nothing left over, each
shape and type as expected. Only then is memory taken. Every fault names its file and tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from limelight.checkpoint import read_json
from limelight.models.beam import Beam, BeamConfig
from limelight.models.flint import Flint, FlintConfig
from limelight.models.layers import Placement, Target, Targets
from limelight.progress import Progress

Model = Flint | Beam
MODELS: dict[str, tuple[type[Flint], type[FlintConfig]] | tuple[type[Beam], type[BeamConfig]]] = {
    "FlintForCausalLM": (Flint, FlintConfig),
    "BeamForCausalLM": (Beam, BeamConfig),
}
DTYPES = ("BF16", "F16", "F32")
INDEX = "model.safetensors.index.json"
FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)(\.weight)?")


def read_config(folder: Path) -> tuple[str, FlintConfig | BeamConfig]:
    """The architecture that config.json names, and its shape."""
    source = folder / "config.json"
    json = read_json(source)
    names = json.get("architectures")
    listed = names if isinstance(names, list) else []
    known = [name for name in listed if isinstance(name, str) and name in MODELS]
    if not known:
        raise ValueError(
            f"{source}: unknown architecture {names!r}; known are {', '.join(sorted(MODELS))}"
        )
    if json.get("quantization_config") is not None or (folder / "hf_quant_config.json").exists():
        raise ValueError(f"{source}: quantized checkpoints are not supported yet")
    return known[0], MODELS[known[0]][1].from_dict(json, source=str(source))


def build(architecture: str, config: FlintConfig | BeamConfig, place: Placement) -> Model:
    """The model with unset weights."""
    return MODELS[architecture][0](config, place)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a file, or a part of one: `shape` is the part's, `part` what to read of it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def narrowed(self, take: tuple[slice, ...]) -> tuple[slice, ...]:
        """What to read for the `take` of this part; a fused expert has one dimension in front."""
        leading = len(self.part) - len(take)
        inner = [
            slice((outer.start or 0) + (t.start or 0), (outer.start or 0) + (t.stop or size))
            for outer, t, size in zip(self.part[leading:], take, self.shape, strict=True)
        ]
        return (*self.part[:leading], *inner)


def find_tensors(folder: Path) -> list[Source]:
    """Every tensor in the folder's safetensors files, from their headers alone."""
    return [source for file in _files(folder) for source in _read_header(file)]


def _files(folder: Path) -> list[Path]:
    """The checkpoint's files: those of its index, or its only one."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ValueError(f"{folder / INDEX}: weight_map must map names to files beside it")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.exists():
                raise ValueError(f"{file}: no such file, but {INDEX} names it")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(
            path.name for path in folder.glob("*.[bp][it]*") if path.suffix in (".bin", ".pt")
        )
        reason = f"; {pickles[0]} is a pickle, which may run code and is refused" if pickles else ""
        raise ValueError(f"{folder}: no .safetensors file{reason}")
    if len(files) > 1:
        raise ValueError(f"{folder}: {len(files)} .safetensors files but no {INDEX}")
    return files


def _read_header(file: Path) -> Iterator[Source]:
    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                piece = tensors.get_slice(name)
                shape = tuple(piece.get_shape())
                everything = tuple(slice(0, size) for size in shape)
                yield Source(file, name, piece.get_dtype(), shape, everything)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from error


def _unfuse(source: Source, targets: Targets) -> Iterator[tuple[str, Source]]:
    """The tensors that a fused expert tensor holds, by the names they have one by one.

    One that holds more or other experts than the model has comes whole, as a tensor left over.
    """
    match = FUSED.fullmatch(source.name)
    names = ["gate_proj", "up_proj"] if match and match["kind"] == "gate_up_proj" else ["down_proj"]
    if (
        match is None
        or len(source.shape) != 3
        or source.shape[1] % len(names)
        or f"{match['experts']}.{source.shape[0] - 1}.down_proj.weight" not in targets
    ):
        yield source.name, source
        return
    count, rows, columns = source.shape
    size = rows // len(names)
    for e in range(count):
        for i, name in enumerate(names):
            part = (slice(e, e + 1), slice(i * size, (i + 1) * size), slice(0, columns))
            one = Source(source.file, source.name, source.dtype, (size, columns), part)
            yield f"{match['experts']}.{e}.{name}.weight", one


def match_tensors(
    sources: list[Source], targets: Targets, renames: dict[str, str], *, folder: Path
) -> dict[str, Source]:
    """The source of each target, by name; `ValueError` names the first tensors that do not fit."""
    found: dict[str, Source] = {}
    for whole_source in sources:
        for name, source in _unfuse(whole_source, targets):
            for old, new in renames.items():
                name = name.replace(old, new)
            if name in found:
                raise ValueError(f"{source} stands for {name}, and so does {found[name]}")
            found[name] = source
    if missing := [name for name in targets if name not in found]:
        raise ValueError(f"{folder}: {_some(missing)} missing in the checkpoint")
    if leftover := [str(source) for name, source in found.items() if name not in targets]:
        raise ValueError(f"{_some(leftover)} not part of the model")
    for name, target in targets.items():
        source = found[name]
        if source.dtype not in DTYPES:
            raise ValueError(f"{source}: type {source.dtype}; expected one of {', '.join(DTYPES)}")
        if source.shape != target.shape:
            raise ValueError(f"{source}: shape {list(source.shape)}; expected {list(target.shape)}")
    return found


def _some(names: list[str]) -> str:
    head = ", ".join(names[:3])
    return (
        f"{head} is"
        if len(names) == 1
        else f"{head} and {len(names) - 3} more are"
        if len(names) > 3
        else f"{head} are"
    )


def load_weights(model: Model, sources: dict[str, Source], progress: Progress):
    """Copy each tensor, or this rank's part of it, into the model."""
    targets = model.targets()
    by_file: dict[Path, list[str]] = {}
    for name, source in sources.items():
        by_file.setdefault(source.file, []).append(name)
    total = sum(target.into.nbytes for target in targets.values())
    with progress.phase("loading weights", total, unit="bytes") as advance, torch.no_grad():
        for file, names in sorted(by_file.items()):
            with safe_open(file, "pt") as tensors:
                for name in names:
                    target, source = targets[name], sources[name]
                    piece = tensors.get_slice(source.name)[source.narrowed(target.take)]
                    target.into.copy_(piece.view(target.into.shape))
                    advance(target.into.nbytes)


def fill_dummy(model: Model, *, seed: int, progress: Progress):
    """Random weights with realistic statistics, made on the device, a fresh seed a tensor."""
    targets = model.targets()
    total = sum(target.into.nbytes for target in targets.values())
    with progress.phase("making weights", total, unit="bytes") as advance, torch.no_grad():
        for i, target in enumerate(targets.values()):
            # A CPU generator looks at 32 bits of its seed.
            _fill(target, seed=(seed * 0x9E3779B1 + i) % 2**32)
            advance(target.into.nbytes)


def _fill(target: Target, *, seed: int):
    generator = torch.Generator(device=target.into.device).manual_seed(seed)
    target.into.normal_(target.dummy.mean, target.dummy.std, generator=generator)


def load_model(
    folder: Path,
    place: Placement,
    *,
    config_folder: Path | None = None,
    dummy_seed: int | None = None,
    progress: Progress,
) -> Model:
    """The model in `folder` with its weights, or random ones where `dummy_seed` is given."""
    architecture, config = read_config(config_folder or folder)
    if dummy_seed is not None:
        model = build(architecture, config, place)
        fill_dummy(model, seed=dummy_seed, progress=progress)
        return model.eval()
    # Shapes alone: a fault in the checkpoint is found before any memory is taken.
    outline = build(architecture, config, replace(place, outline=True))
    sources = match_tensors(find_tensors(folder), outline.targets(), outline.renames, folder=folder)
    model = build(architecture, config, place)
    load_weights(model, sources, progress)
    return model.eval()
