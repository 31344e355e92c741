"""Flint's NVFP4 checkpoints as GGUF: all headers are checked first, then tensors are repacked.

64 neighbours of a row are a block of 36 bytes: four scales, E4M3 without a sign, then four times
8 bytes of codes, whose low halves are values 0 to 7 and whose high halves are values 8 to 15. The
FP32 scale of a tensor is a tensor beside it, with a value for each expert of a stack.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from limelight.ops.fp4 import BLOCK, FP4
from limelight.ops.fp4_codes import mixed
from limelight.ops.weight import Weight
from limelight.quant.gguf_header import Header, read_header
from limelight.quant.stored import Stored

PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<kind>\w+)")
TOP = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "attn_sinks": "self_attn.softmax_offset",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "ffn_gate_inp": "mlp.gate.weight",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp": "mlp.shared_expert.down_proj.weight",
    "ffn_gate_exps": "mlp.experts.gate_proj.weight",
    "ffn_up_exps": "mlp.experts.up_proj.weight",
    "ffn_down_exps": "mlp.experts.down_proj.weight",
}
ARCHITECTURE = "flint"
# Which tensors take FP4 activations: a mark each, beside a list of their names.
A4_MARKS, A4_NAMES = "general.tensor_extra.prec_a4", "general.tensor_extra.name"

GROUP, GROUP_BYTES = 64, 36
# A type's number in the file: its name, and how many values take how many bytes.
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 40: ("NVFP4", GROUP, GROUP_BYTES)}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What is read and repacked at once: on a CPU it should stay in the cache.
PIECE = {"cpu": 2**20, "cuda": 64 * 2**20}


def files_of(path: Path) -> list[Path]:
    """The parts of the checkpoint that `path`, a file or the folder of one, stands for."""
    if path.is_dir():
        first = {_whole_name(file): file for file in sorted(path.glob("*.gguf"), reverse=True)}
        if not first:
            raise ValueError(f"{path}: no .gguf file")
        if len(first) > 1:
            names = ", ".join(sorted(file.name for file in first.values()))
            raise ValueError(f"{path}: several checkpoints, {names}; give the file of one")
        path = next(iter(first.values()))
    match = PART.fullmatch(path.name)
    if match is None:
        files = [path]
    else:
        part, count = int(match["part"]), int(match["count"])
        if not 1 <= part <= count:
            raise ValueError(f"{path}: there is no part {part} of {count}")
        files = [
            path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf")
            for i in range(1, count + 1)
        ]
    for file in files:
        if not file.exists():
            others = f"; it is one of {len(files)} parts" if len(files) > 1 else ""
            raise ValueError(f"{file}: no such file{others}")
    return files


def _whole_name(file: Path) -> str:
    """The same for all parts of a checkpoint."""
    match = PART.fullmatch(file.name)
    return file.name if match is None else f"{match['stem']}-of-{match['count']}.gguf"


def find_tensors(files: list[Path]) -> list[Stored]:
    """Every tensor in these parts of a checkpoint, from their headers alone.

    A tensor that Flint does not have comes under its own name; scales come with their tensors.
    """
    headers = [read_header(file, kept=(A4_MARKS, A4_NAMES)) for file in files]
    for header in headers:
        _check_metadata(header)
    _check_parts(headers)
    tensors = [tensor for header in headers for tensor in _tensors(header)]
    return [_stored(tensor, scale) for tensor, scale in _pair(tensors)]


def _target(name: str) -> str:
    plain = name.removesuffix(".weight")
    match = LAYER.fullmatch(plain)
    if match and match["kind"] in IN_LAYER:
        return f"model.layers.{match['layer']}.{IN_LAYER[match['kind']]}"
    return TOP.get(plain, name)


def _check_metadata(header: Header) -> None:
    name = header.metadata.get("general.architecture", ARCHITECTURE)
    if name != ARCHITECTURE:
        raise ValueError(
            f"{header.file}: general.architecture is {name!r}; expected {ARCHITECTURE!r}"
        )
    value, names = header.metadata.get(A4_MARKS), header.metadata.get(A4_NAMES)
    marks = value if isinstance(value, list) else [value]
    marked = [i for i, mark in enumerate(marks) if mark]
    if not marked:
        return
    named = names if isinstance(names, list) and len(names) == len(marks) else marks
    tensor = named[marked[0]]
    raise ValueError(
        f"{header.file}: {tensor if isinstance(tensor, str) else 'a tensor'} is marked for FP4 "
        f"activations by {A4_MARKS}; only weights may be NVFP4"
    )


def _check_parts(headers: list[Header]) -> None:
    for header in headers:
        # Merged checkpoints say that they have no parts.
        parts = header.metadata.get("split.count") or 1
        if parts != len(headers):
            raise ValueError(
                f"{header.file}: one of {parts} parts by its split.count; found {len(headers)}"
            )
    found = sum(len(header.entries) for header in headers)
    for header in headers:
        expected = header.metadata.get("split.tensors.count", found)
        if expected != found:
            raise ValueError(
                f"{header.file}: split.tensors.count is {expected}; found {found} tensors"
            )


@dataclass(frozen=True, slots=True)
class Tensor:
    """One whose type is known and whose bytes are all in the file, from `at` on."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def stack(self) -> tuple[int, int]:
        """How many matrices, of how many rows; a vector is a row."""
        experts, rows, _ = (1, 1, 1, *self.shape)[-3:]
        return experts, rows


def _tensors(header: Header) -> Iterator[Tensor]:
    ends = {header.data: "the header"}
    for entry in header.entries:
        if entry.type not in TYPES:
            raise ValueError(
                f"{header.file}: {entry.name}: type {_type_name(entry.type)}; "
                f"expected one of {', '.join(name for name, *_ in TYPES.values())}"
            )
        dtype, group, group_bytes = TYPES[entry.type]
        shape, width = entry.dims[::-1], (*entry.dims, 1)[0]
        if len(shape) > 3 or 0 in shape:
            raise ValueError(
                f"{header.file}: {entry.name}: shape {list(shape)}; expected at most 3 dimensions "
                "and none of them 0"
            )
        if width % group:
            raise ValueError(
                f"{header.file}: {entry.name}: shape {list(shape)}; the rows of {dtype} must be "
                f"multiples of {group} long"
            )
        row_bytes = width // group * group_bytes
        at = header.data + entry.offset
        ends[at + prod(shape[:-1]) * row_bytes] = entry.name
        yield Tensor(header.file, entry.name, dtype, shape, at, row_bytes)
    end = max(ends)
    padded = header.data - (header.data - end) // header.alignment * header.alignment
    # What fills up the end may be left out by who writes a file, but not cut in two.
    if header.size < end or end < header.size < padded:
        raise ValueError(
            f"{header.file}: not a whole GGUF file: {ends[end]} ends at byte {end}, filled up to "
            f"{padded}, and the file at {header.size}"
        )


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(number, f"number {number}")


def _pair(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each tensor with its scale, which NVFP4 needs and others may not have."""
    weights: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for tensor in tensors:
        name = tensor.name.removesuffix(".scale")
        among = weights if name == tensor.name else scales
        key = name.removesuffix(".weight")
        if key in among:
            raise ValueError(f"{tensor} is there twice, also as {among[key]}")
        among[key] = tensor
    for key, tensor in weights.items():
        scale = scales.pop(key, None)
        if tensor.dtype == "NVFP4":
            _check_scale(tensor, scale)
        elif scale is not None:
            raise ValueError(f"{scale}: {tensor.name} is {tensor.dtype}, which has no scale")
        yield tensor, scale
    for scale in scales.values():
        raise ValueError(f"{scale}: there is no tensor for this scale")


def _stored(tensor: Tensor, scale: Tensor | None) -> Stored:
    copy = partial(_copy_floats, tensor) if scale is None else partial(_copy_nvfp4, tensor, scale)
    target = _target(tensor.name)
    return Stored(tensor.file, tensor.name, target, tensor.dtype, tensor.shape, copy)


def _check_scale(tensor: Tensor, scale: Tensor | None) -> None:
    if len(tensor.shape) < 2:
        raise ValueError(f"{tensor}: shape {list(tensor.shape)}; NVFP4 needs rows and columns")
    if scale is None:
        plain = tensor.name.removesuffix(".weight")
        raise ValueError(f"{tensor}: NVFP4, but its scale, {plain}.scale, is missing")
    experts, _ = tensor.stack
    if scale.dtype != "F32" or scale.shape not in ((experts,), () if experts == 1 else None):
        raise ValueError(
            f"{scale}: {scale.dtype} {list(scale.shape)}; expected F32 [{experts}] for "
            f"{tensor.name} {list(tensor.shape)}"
        )


def _read(
    tensor: Tensor, take: tuple[slice, ...], device: torch.device
) -> Iterator[tuple[tuple[slice, slice], torch.Tensor]]:
    """The rows of a part, whole, piece by piece: their place in [E, N], and bytes [e, n, X]."""
    experts, rows, _ = (slice(0, 1), slice(0, 1), *take)[-3:]
    _, height = tensor.stack
    most = max(1, PIECE[device.type] // tensor.row_bytes)
    tall = max(1, min(most, rows.stop - rows.start))
    deep = max(1, most // max(1, rows.stop - rows.start))
    with open(tensor.file, "rb", buffering=0) as opened:
        for e in range(experts.start, experts.stop, deep):
            for n in range(rows.start, rows.stop, tall):
                count, length = min(deep, experts.stop - e), min(tall, rows.stop - n)
                piece = torch.empty(
                    (count, length, tensor.row_bytes),
                    dtype=torch.uint8,
                    pin_memory=device.type == "cuda",
                )
                for i, matrix in enumerate(piece.numpy()):
                    opened.seek(tensor.at + ((e + i) * height + n) * tensor.row_bytes)
                    if opened.readinto(matrix) != matrix.nbytes:
                        raise ValueError(f"{tensor}: the file ended while it was read")
                at_e, at_n = e - experts.start, n - rows.start
                yield (slice(at_e, at_e + count), slice(at_n, at_n + length)), piece.to(device)


def _stacked(into: torch.Tensor, take: tuple[slice, ...]) -> torch.Tensor:
    """`into`, which takes a part of one to three dimensions, as one of a stack of matrices."""
    return into[(None,) * (3 - len(take))]


def _sizes(take: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in take)


def _copy_floats(tensor: Tensor, into: Weight, take: tuple[slice, ...]) -> None:
    assert isinstance(into, torch.Tensor) and tuple(into.shape) == _sizes(take)
    columns = take[-1] if take else slice(0, 1)
    for place, piece in _read(tensor, take, into.device):
        _stacked(into, take)[place] = piece.view(FLOATS[tensor.dtype])[..., columns]


def _copy_nvfp4(tensor: Tensor, scale: Tensor, into: Weight, take: tuple[slice, ...]) -> None:
    assert isinstance(into, FP4) and into.shape == _sizes(take)
    left, right = take[-1].start, take[-1].stop
    assert left % BLOCK == right % BLOCK == 0
    codes, scales, rows = (_stacked(whole, take) for whole in into.tensors)
    experts = take[0] if len(take) == 3 else slice(0, 1)
    rows.copy_(_scales(scale)[experts, None])
    groups = slice(left // GROUP, -(-right // GROUP))
    left, right = left - groups.start * GROUP, right - groups.start * GROUP
    for place, piece in _read(tensor, take, into.codes.device):
        held = piece.unflatten(-1, (-1, GROUP_BYTES))[..., groups, :]
        scale_bits = held[..., : GROUP // BLOCK]
        if bool((scale_bits == 0xFF).any()):
            raise ValueError(f"{tensor}: a block has the scale 0xFF, which is no number")
        codes[place] = mixed(_codes(held)[..., left // 2 : right // 2])
        scales.view(torch.uint8)[place] = _unsigned(scale_bits)[..., left // BLOCK : right // BLOCK]


def _scales(scale: Tensor) -> torch.Tensor:
    """The values of a scale tensor, FP32 [E]."""
    values = torch.empty(scale.shape or (1,), dtype=torch.float32)
    _copy_floats(scale, values, (slice(0, len(values)),))
    if not bool(values.isfinite().all()):
        raise ValueError(f"{scale}: not all of its values are finite")
    return values


def _unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Scales [..., B, 4] as E4M3 of [..., 4 B]: no sign, and zero for what would be no number."""
    size = (bits & 0x7F).flatten(-2)
    return size.masked_fill_(size == 0x7F, 0)


def _codes(groups: torch.Tensor) -> torch.Tensor:
    """The codes of blocks [..., B, 36] as bytes [..., 32 B], an even column in the low half."""
    # A view as longer words needs a copy also where the codes are contiguous: they begin at 4.
    eight = groups[..., GROUP // BLOCK :].clone(memory_format=torch.contiguous_format)
    eight = eight.view(torch.int64)
    packed = _even_halves(eight >> 4).bitwise_left_shift_(32).bitwise_or_(_even_halves(eight))
    return packed.view(torch.uint8).flatten(-2)


def _even_halves(word: torch.Tensor) -> torch.Tensor:
    """The low half of each of eight bytes, next to each other in the low four."""
    word = word & 0x0F0F0F0F0F0F0F0F
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        word |= word >> shift
        word &= mask
    return word
