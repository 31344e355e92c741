"""GGUF checkpoints for tests, and what a reader makes of them."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from limelight.ops.fp4 import FP4, unpack_reference
from limelight.quant.gguf import find_tensors
from limelight.quant.stored import Stored

Tensors = dict[str, tuple[np.ndarray, Type | None]]


def blocks(*shape: int, seed: int = 0, scales: tuple[int, ...] = tuple(range(0x7F))) -> np.ndarray:
    """Random NVFP4 of this shape of values, with these scale bytes, as the file has it."""
    random = np.random.default_rng(seed)
    held = random.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), dtype=np.uint8)
    held[..., :4] = random.choice(np.array(scales, np.uint8), held[..., :4].shape)
    return held.reshape(*shape[:-1], -1)


def nvfp4(*shape: int, **options) -> tuple[np.ndarray, Type]:
    return blocks(*shape, **options), Type.NVFP4


def floats(*shape: int, seed: int = 1) -> tuple[np.ndarray, None]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32), None


def scale(*values: float) -> tuple[np.ndarray, None]:
    return np.array(values, np.float32), None


def write(file: Path, tensors: Tensors, *, arch: str = "flint", keys=(), **options) -> Path:
    """A GGUF file with these tensors, and `keys` as (method, name, value) of the writer."""
    writer = GGUFWriter(file, arch, **options)
    for method, key, value in keys:
        getattr(writer, f"add_{method}")(key, value)
    for name, (values, raw) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def good() -> Tensors:
    return {
        "output_norm.weight": floats(48),
        "blk.3.attn_q.weight": nvfp4(5, 128),
        "blk.3.attn_q.scale": scale(0.75),
    }


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def empty_fp4(shape: tuple[int, ...]) -> FP4:
    *rows, width = shape
    return FP4(
        torch.full((*rows, width // 2), 0xAA, dtype=torch.uint8),
        torch.full((*rows, width // 16), 7.0).to(torch.float8_e4m3fn),
        torch.full(rows, float("nan")),
    )


def decoded(held: FP4) -> torch.Tensor:
    """As the op decodes it, once it has what kernels take for granted."""
    held.check()
    assert bool((held.scales.view(torch.uint8) < 0x7F).all())
    return unpack_reference(held.codes, held.scales, dtype=torch.float32) * held.rows[..., None]


def read(stored, take: tuple[slice, ...], device: str = "cpu") -> FP4:
    into = empty_fp4(tuple(part.stop - part.start for part in take))
    into = FP4(*(tensor.to(device) for tensor in into.tensors))
    stored.copy(into, take)
    return FP4(*(tensor.cpu() for tensor in into.tensors))


def one(file: Path, name: str) -> Stored:
    (stored,) = (stored for stored in find_tensors([file]) if stored.name == name)
    return stored
