"""Checkpoint -> model, tensor by tensor, straight into place.

Headers are read and checked against the model first: nothing missing, nothing left over, each
shape and type as expected. Only then is memory taken. Every fault names its file and tensor.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from limelight.checkpoint import HUB_WEIGHTS, read_json
from limelight.models.beam import Beam, BeamConfig
from limelight.models.dummy import Dummy
from limelight.models.flint import Flint, FlintConfig
from limelight.models.layers import Placement
from limelight.models.targets import Target, Targets, coded
from limelight.ops.fp4 import FP4, VALUES
from limelight.ops.mxfp8 import MXFP8, quantize_into
from limelight.ops.weight import device_of
from limelight.progress import Progress
from limelight.quant import gguf, safetensor_files
from limelight.quant.declared import PLAIN, Declared, read_declared
from limelight.quant.stored import CODES, DTYPES, SCALE, SCALES, Packing, Stored

Model = Flint | Beam
MODELS: dict[str, tuple[type[Flint], type[FlintConfig]] | tuple[type[Beam], type[BeamConfig]]] = {
    "FlintForCausalLM": (Flint, FlintConfig),
    "BeamForCausalLM": (Beam, BeamConfig),
}
CACHE_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.([kv])_proj\.\2_scale")
ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj\.weight(?:_scale)?)")


HEAD = "lm_head.weight"
# Of codes and scales of MXFP8, by the type in which they are held.
TYPES = {torch.float8_e4m3fn: (CODES,), torch.uint8: SCALES}


# The name of a target, and which of its experts, if they came one by one.
Place = tuple[str, int | None]


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
    read_declared(folder)
    return known[0], MODELS[known[0]][1].from_dict(json, source=str(source))


def build(architecture: str, config: FlintConfig | BeamConfig, place: Placement) -> Model:
    """The model with unset weights, and `adapters` as the place has them."""
    place = replace(place, targets={})
    model = MODELS[architecture][0](config, place)  # type: ignore[arg-type]
    # Python finds weights and layers here at once; torch's own search is 5 % of a step on a CPU.
    for module in model.modules():
        vars(module).update(module.named_parameters(recurse=False))
        vars(module).update(module.named_children())
    return model


@dataclass(frozen=True, slots=True)
class Filling:
    """A stored tensor and the target that it fills, or the one expert of it that it is."""

    stored: Stored
    target: Target


def find_tensors(path: Path) -> list[Stored]:
    """Every tensor of a checkpoint: a folder of safetensors files, or a .gguf, or its folder."""
    if path.is_file() or any(path.glob("*.gguf")):
        if path.is_dir() and any(path.glob("*.safetensors")):
            raise ValueError(f"{path}: both .gguf and .safetensors; name the .gguf, or remove one")
        return gguf.find_tensors(gguf.files_of(path))
    return safetensor_files.find_tensors(path)


def has_weights(path: Path) -> bool:
    """Whether `path` is a file of weights or a folder that has one."""
    return path.is_file() or any(any(path.glob(kind)) for kind in HUB_WEIGHTS)


def packing_of(
    stored: Iterable[Stored] | None, declared: Declared
) -> Callable[[str], Packing | None]:
    """How tensors are to be held, by the model's names: as the checkpoint has them, or where all
    are plain, or there is none, as `declared`."""
    if stored is None:
        return declared.packing
    firsts: dict[str, Stored] = {}
    for one in stored:
        if _is_scale(one):
            continue
        name, expert = _stacked(one.target)
        first = firsts.setdefault(name, one)
        if _packed(one) != _packed(first):
            alike = "experts must be of one kind" if expert is not None else "there can be but one"
            raise ValueError(f"{one}: type {one.dtype}, but {first} is {first.dtype}; {alike}")
    found = {name: kind for name, one in firsts.items() if (kind := _packed(one)) is not None}
    if found.get(HEAD) == "MXFP8":
        raise ValueError(f"{firsts[HEAD]}: the LM head cannot be MXFP8")
    if declared.format == "MXFP8":
        for name, one in firsts.items():
            if found.get(name) == "NVFP4" or one.file.suffix == ".gguf":
                raise ValueError(f"{one}: NVFP4 and GGUF cannot become MXFP8")
    if declared.format == "NVFP4" and not found:
        raise ValueError("the weights are declared as NVFP4, but none of them is")
    return found.get if found else declared.packing


def _packed(one: Stored) -> Packing | None:
    """How a tensor is packed in its file."""
    if one.dtype == CODES:
        return "MXFP8"
    if one.dtype not in DTYPES:
        raise ValueError(f"{one}: type {one.dtype}; expected one of {', '.join(DTYPES)}, {CODES}")
    return "NVFP4" if one.dtype == "NVFP4" else None


def _is_scale(one: Stored) -> bool:
    """Whether these are scales of MXFP8: of others of that name the type is a fault."""
    if not one.target.endswith(f".weight{SCALE}"):
        return False
    if one.dtype not in SCALES:
        raise ValueError(
            f"{one}: type {one.dtype}; the scales of MXFP8, of which FP8 weights must be, are "
            f"{' or '.join(SCALES)}"
        )
    return True


def cache_scales(stored: Iterable[Stored], layers: int) -> torch.Tensor:
    """FP32 [layers, 2]: what keys and values in an FP8 cache are divided by; 1 if not stated."""
    scales_L2 = torch.ones(layers, 2)
    for one in stored:
        match = CACHE_SCALE.fullmatch(one.target)
        if match is None:
            continue
        if math.prod(one.shape) != 1 or one.dtype != "F32" or int(match[1]) >= layers:
            raise ValueError(f"{one}: {one.dtype} {list(one.shape)}; a layer's scale is one FP32")
        value = scales_L2[int(match[1]), "kv".index(match[2])]
        one.copy(value.view(one.shape), tuple(slice(0, size) for size in one.shape))
        if not 0 < value < math.inf:
            raise ValueError(f"{one}: {value.item()}; a scale is a number above 0")
    return scales_L2


def _stacked(name: str) -> Place:
    """The name of all experts of a kind, and which of them this is; or the name as it is."""
    match = ONE_EXPERT.fullmatch(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, None)


def match_tensors(
    stored: Iterable[Stored], targets: Targets, renames: dict[str, str], *, folder: Path
) -> list[Filling]:
    """What fills each target; `ValueError` names the first tensors that do not fit."""
    found = place_tensors(stored, targets, renames)
    if missing := list(_missing(targets | coded(targets), found.keys())):
        raise ValueError(f"{folder}: {_some(missing)} missing in the checkpoint")
    return [filling for fillings in found.values() for filling in fillings]


def place_tensors(
    stored: Iterable[Stored], targets: Targets, renames: dict[str, str]
) -> dict[Place, list[Filling]]:
    """What each of some tensors fills, nothing if it is an expert that other ranks hold;
    `ValueError` names the first ones that do not fit. Scales of MXFP8 have a place of their own,
    with nothing that fills it where they are made of the weight."""
    codes_and_scales = coded(targets)
    found: dict[Place, list[Filling]] = {}
    sources: dict[Place, Stored] = {}
    leftover = []
    for one in stored:
        if CACHE_SCALE.fullmatch(one.target):
            continue
        name, expert = _stacked(one.target)
        for old, new in renames.items():
            name = name.replace(old, new)
        is_coded = one.dtype == CODES or name.endswith(f".weight{SCALE}")
        target = (codes_and_scales if is_coded else targets).get(name)
        if target is None and is_coded and (base := name.removesuffix(SCALE)) in targets:
            raise ValueError(f"{one}: type {one.dtype}, but {base} is not held as MXFP8")
        if target is None or expert is not None and expert >= target.shape[0]:
            leftover.append(str(one))
            continue
        _check(one, target if expert is None else replace(target, shape=target.shape[1:]))
        fillings = [Filling(one, part) for part in _parts(target, expert)]
        places = {name: fillings}
        if isinstance(target.into, MXFP8):
            places[name + SCALE] = []
        for place, filled in places.items():
            if (place, expert) in found:
                raise ValueError(f"{one} stands for {place}, and so does {sources[place, expert]}")
            sources[place, expert], found[place, expert] = one, filled
    if leftover:
        raise ValueError(f"{_some(leftover)} not part of the model")
    return found


def _parts(target: Target, expert: int | None) -> list[Target]:
    """What a tensor fills: of all experts, or of this one where each is a tensor of its own."""
    if target.experts is None and expert is None:
        return [target]
    held = target.experts
    if expert is not None:
        shape, take = target.shape[1:], target.take[1:]
        slots = [expert] if held is None else [i for i, one in enumerate(held) if one == expert]
        return [replace(target, into=target.into[i], shape=shape, take=take) for i in slots]
    assert held is not None
    return [
        replace(
            target, into=target.into[slot : slot + 1], take=(slice(one, one + 1), *target.take[1:])
        )
        for slot, one in enumerate(held)
    ]


def _check(one: Stored, target: Target) -> None:
    into = target.into
    types = TYPES.get(into.dtype, DTYPES) if isinstance(into, torch.Tensor) else DTYPES
    if one.dtype not in types:
        raise ValueError(f"{one}: type {one.dtype}; expected one of {', '.join(types)}")
    if one.shape != target.shape:
        raise ValueError(f"{one}: shape {list(one.shape)}; expected {list(target.shape)}")
    if (one.dtype == "NVFP4") != isinstance(into, FP4):
        raise ValueError(f"{one}: type {one.dtype}; this tensor cannot be held so")


def _missing(targets: Targets, found: Iterable[Place]) -> Iterable[str]:
    """Names of what nothing fills; of experts that come one by one, of each."""
    whole = {name for name, expert in found if expert is None}
    single: dict[str, set[int]] = {}
    for name, expert in found:
        if expert is not None:
            single.setdefault(name, set()).add(expert)
    for name, target in targets.items():
        if name in single:
            front, projection = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
            lost = set(range(target.shape[0])) - single[name]
            if name in whole:
                raise ValueError(f"{name} is there as one tensor and by experts")
            yield from (f"{front}.{expert}.{projection}" for expert in sorted(lost))
        elif name not in whole:
            yield name


def _some(names: list[str]) -> str:
    head = ", ".join(names[:3])
    return (
        f"{head} is"
        if len(names) == 1
        else f"{head} and {len(names) - 3} more are"
        if len(names) > 3
        else f"{head} are"
    )


def load_weights(fillings: list[Filling], progress: Progress):
    """Copy each tensor, or this rank's part of it, into the model."""
    total = sum(filling.target.into.nbytes for filling in fillings)
    with progress.phase("loading weights", total, unit="bytes") as advance, torch.no_grad():
        for filling in sorted(fillings, key=lambda filling: filling.stored.file):
            filling.stored.copy(filling.target.into, filling.target.take)
            advance(filling.target.into.nbytes)


def fill_dummy(targets: Targets, *, seed: int, progress: Progress):
    """Random weights with realistic statistics, made on the device, a fresh seed a tensor."""
    total = sum(target.into.nbytes for target in targets.values())
    with progress.phase("making weights", total, unit="bytes") as advance, torch.no_grad():
        for i, target in enumerate(targets.values()):
            # A CPU generator looks at 32 bits of its seed.
            _fill(target, seed=(seed * 0x9E3779B1 + i) % 2**32)
            advance(target.into.nbytes)


def _fill(target: Target, *, seed: int):
    into, dummy = target.into, target.dummy
    device = device_of(into)
    generator = torch.Generator(device=device).manual_seed(seed)
    if isinstance(into, FP4):
        _fill_packed(into, dummy, generator)
    elif isinstance(into, MXFP8):
        # One matrix at a time in FP32.
        for one in map(into.__getitem__, range(len(into))) if len(into.shape) == 3 else (into,):
            values = torch.empty(one.shape, device=device)
            quantize_into(one, values.normal_(dummy.mean, dummy.std, generator=generator))
    else:
        into.normal_(dummy.mean, dummy.std, generator=generator)


def _fill_packed(into: FP4, dummy: Dummy, generator: torch.Generator) -> None:
    """Uniform codes, and block scales of 0.75 to 1.5."""
    into.codes.random_(0, 256, generator=generator)
    into.scales.view(torch.uint8).random_(0x34, 0x3C + 1, generator=generator)
    codes = torch.tensor(VALUES).square().mean()
    bits = torch.arange(0x34, 0x3C + 1, dtype=torch.uint8)
    scales = bits.view(torch.float8_e4m3fn).float().square().mean()
    into.rows.fill_(dummy.std / (codes * scales).sqrt().item())


def load_model(
    path: Path,
    place: Placement,
    *,
    config_folder: Path | None = None,
    stored: list[Stored] | None = None,
    declared: Declared | None = None,
    dummy_seed: int | None = None,
    progress: Progress,
) -> Model:
    """The model at `path` with its weights, or random ones where `dummy_seed` is given.

    `stored` is what `find_tensors` found there, if it has been asked already; `declared` how
    weights are to be held that are plain there.
    """
    folder = config_folder or path
    architecture, config = read_config(folder)
    if dummy_seed is not None:
        if stored is None and declared is None:
            declared = read_declared(folder)
        packing = packing_of(stored, declared or PLAIN)
        model = build(architecture, config, replace(place, packing=packing))
        fill_dummy(model.targets, seed=dummy_seed, progress=progress)
        return model.eval()
    stored = find_tensors(path) if stored is None else stored
    place = replace(place, packing=packing_of(stored, declared or PLAIN))
    # Shapes alone: a fault in the checkpoint is found before any memory is taken.
    outline = build(architecture, config, replace(place, outline=True))
    match_tensors(stored, outline.targets, outline.renames, folder=path)
    model = build(architecture, config, place)
    load_weights(match_tensors(stored, model.targets, model.renames, folder=path), progress)
    return model.eval()
