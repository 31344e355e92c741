"""The tensors of a folder of safetensors files, from their headers alone.

NVFP4 in two spellings, ModelOpt's and that of compressed-tensors (whose global scale divides):

    P.weight         P.weight_scale   P.weight_scale_2        uint8 [N, K/2], e4m3 [N, K/16], FP32
    P.weight_packed  P.weight_scale   P.weight_global_scale

The scales of four-bit activations that may lie beside them are not used: activations stay as they
are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from limelight.checkpoint import read_json
from limelight.ops.fp4 import BLOCK, FP4
from limelight.ops.fp4_codes import mixed
from limelight.ops.weight import Weight
from limelight.quant.stored import Stored, as_stored

INDEX = "model.safetensors.index.json"
# The codes, and the global scale; whether that divides.
SPELLINGS = (
    (".weight", ".weight_scale_2", False),
    (".weight_packed", ".weight_global_scale", True),
)
UNUSED = (".input_scale", ".input_global_scale")
# Bits of an e4m3 scale from here on are NaN or negative.
FIRST_INVALID_SCALE = 0x7F


def files_of(folder: Path) -> list[Path]:
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


@dataclass
class Shard:
    """One file, opened once; `shapes` has the type and shape of each of its tensors."""

    file: Path
    shapes: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self):
        try:
            for name in self.tensors.keys():  # noqa: SIM118
                piece = self.tensors.get_slice(name)
                self.shapes[name] = piece.get_dtype(), tuple(piece.get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file}: not a whole safetensors file: {error}") from error

    @cached_property
    def tensors(self) -> Any:
        return safe_open(self.file, "pt")

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        try:
            return self.tensors.get_slice(name)[part] if part else self.tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file}: {name}: cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor as it lies in its file."""

    shard: Shard
    name: str

    @property
    def file(self) -> Path:
        return self.shard.file

    @property
    def dtype(self) -> str:
        return self.shard.shapes[self.name][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shard.shapes[self.name][1]

    def read(self, part: tuple[slice, ...] = ()) -> torch.Tensor:
        return self.shard.read(self.name, part)

    def __str__(self) -> str:
        return f"{self.shard.file}: {self.name}"

    def expect(self, dtype: str, shape: tuple[int, ...]) -> None:
        if (self.dtype, self.shape) != (dtype, shape):
            raise ValueError(
                f"{self}: {self.dtype} {list(self.shape)}; expected {dtype} {list(shape)}"
            )


def find_tensors(folder: Path) -> list[Stored]:
    """Every tensor of the model in the folder's files; `ValueError` names what cannot be read."""
    raws: dict[str, Raw] = {}
    for shard in map(Shard, files_of(folder)):
        for name in shard.shapes:
            raw = Raw(shard, name)
            if name in raws:
                raise ValueError(f"{raw} is in {raws[name].shard.file} too")
            raws[name] = raw
    packed = list(_take_packed(raws))
    plain = [stored for raw in raws.values() for stored in as_stored(raw)]
    return packed + plain


def _take_packed(raws: dict[str, Raw]) -> Iterator[Stored]:
    """The NVFP4 tensors, taken out of `raws` with all that belongs to them."""
    for codes_end, global_end, divides in SPELLINGS:
        for name in [name for name in raws if name.endswith(codes_end)]:
            stem = name.removesuffix(codes_end)
            if raws[name].dtype != "U8" and codes_end == ".weight":
                continue
            codes = raws.pop(name)
            scales, whole = (
                raws.pop(f"{stem}.weight_scale", None),
                raws.pop(stem + global_end, None),
            )
            for end, found in ((".weight_scale", scales), (global_end, whole)):
                if found is None:
                    raise ValueError(f"{codes} is NVFP4, but {stem}{end} is missing")
            assert scales is not None and whole is not None
            for end in UNUSED:
                raws.pop(stem + end, None)
            yield _packed(stem, codes, scales, whole, divides=divides)


def _packed(stem: str, codes: Raw, scales: Raw, whole: Raw, *, divides: bool) -> Stored:
    if codes.dtype != "U8" or len(codes.shape) != 2:
        raise ValueError(
            f"{codes}: {codes.dtype} {list(codes.shape)}; NVFP4 codes are U8 [N, K / 2]"
        )
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if columns % BLOCK:
        raise ValueError(f"{codes}: {columns} columns are not whole blocks of {BLOCK}")
    scales.expect("F8_E4M3", (rows, columns // BLOCK))
    whole.expect("F32", whole.shape if whole.shape in ((), (1,)) else ())

    def copy(into: Weight, take: tuple[slice, ...]) -> None:
        assert isinstance(into, FP4)
        down, across = take
        for tensor, raw, each in ((into.codes, codes, 2), (into.scales, scales, BLOCK)):
            piece = raw.read((down, slice(across.start // each, across.stop // each)))
            if raw is scales and bool((piece.view(torch.uint8) >= FIRST_INVALID_SCALE).any()):
                raise ValueError(f"{scales}: a block's scale is not a number or negative")
            tensor.copy_(piece if raw is scales else mixed(piece.to(tensor.device)))
        value = whole.read().item()
        scale = (1 / value if value else math.inf) if divides else value
        if not 0 <= scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"{whole}: {value}; that is no scale for weights")
        into.rows.fill_(scale)

    file, target = codes.shard.file, f"{stem}.weight"
    return Stored(file, codes.name, target, "NVFP4", (rows, columns), copy)
