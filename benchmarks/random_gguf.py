"""A Flint of random NVFP4 weights, written as fast as the disk takes it:

    python benchmarks/random_gguf.py benchmarks/configs/flint-nvfp4 flint.gguf

Bytes come from pools that are made once, each tensor's from where the one before it stopped.
"""

import argparse
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from limelight.models.layers import Placement
from limelight.models.loader import build, read_config
from limelight.parallel.mesh import Mesh
from limelight.quant.gguf import IN_LAYER, TOP

ALIGN, BLOCK_BYTES = 32, 36  # a block has four scales and 64 codes
# Primes: rows of no two tensors or experts begin at the same place of a pool.
NUM_BLOCKS, NUM_NUMBERS = 3_700_001, 8_000_009
SCALES = np.arange(0x34, 0x3D, dtype=np.uint8)  # 0.75 to 1.5
CODES = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
AT_ONCE = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the file: its kind, shape in bytes, and how its values are spread."""

    name: str
    kind: Type
    shape: tuple[int, ...]
    mean: float
    std: float
    experts: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)


class Pool:
    """Bytes to take from, round and round."""

    def __init__(self, values: np.ndarray):
        self.data = memoryview(values.reshape(-1).view(np.uint8))
        self.at = 0

    def write(self, file: BinaryIO, nbytes: int) -> None:
        while nbytes:
            some = self.data[self.at : self.at + min(nbytes, AT_ONCE)]
            file.write(some)
            nbytes -= len(some)
            self.at = (self.at + len(some)) % len(self.data)


def planned(folder: Path) -> Iterator[Planned]:
    """All tensors of the model that `folder` describes."""
    architecture, config = read_config(folder)
    if architecture != "FlintForCausalLM":
        raise SystemExit(f"{architecture}: GGUF holds Flint only")
    place = Placement(Mesh.single(), torch.bfloat16, torch.device("cpu"), outline=True)
    names = {name: there for there, name in (TOP | IN_LAYER).items()}
    for name, target in build(architecture, config, place).targets.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        there = f"blk.{match[1]}.{names[match[2]]}" if match else names[name]
        *rows, columns = target.shape
        kind, width = Type.F32, columns * 4
        if name.endswith(("_proj.weight", "lm_head.weight")) and columns % 64 == 0:
            kind, width = Type.NVFP4, columns // 64 * BLOCK_BYTES
        elif name.endswith(("_proj.weight", "lm_head.weight", "embed_tokens.weight")):
            kind, width = Type.BF16, columns * 2
        experts = target.shape[0] if len(target.shape) == 3 else 1
        # A norm of exact ones would not show if it were left out.
        std = target.dummy.std or 0.05
        yield Planned(there, kind, (*rows, width), target.dummy.mean, std, experts)


def write_header(path: Path, tensors: list[Planned]) -> None:
    writer = GGUFWriter(path, "flint")
    byte, fp32 = np.dtype(np.uint8), np.dtype(np.float32)
    for tensor in tensors:
        name, size = tensor.name, tensor.nbytes
        writer.add_tensor_info(f"{name}.weight", tensor.shape, byte, size, tensor.kind)
        if tensor.kind == Type.NVFP4:
            writer.add_tensor_info(f"{name}.scale", (tensor.experts,), fp32, 4 * tensor.experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write_tensors(path: Path, tensors: list[Planned], seed: int) -> None:
    random = np.random.default_rng(seed)
    held = np.frombuffer(bytearray(random.bytes(NUM_BLOCKS * BLOCK_BYTES)), np.uint8)
    held = held.reshape(NUM_BLOCKS, BLOCK_BYTES)
    held[:, :4] = SCALES[held[:, :4] % len(SCALES)]
    blocks, normal = Pool(held), random.standard_normal(NUM_NUMBERS, dtype=np.float32)
    sizes = torch.from_numpy(SCALES).view(torch.float8_e4m3fn).float().numpy()
    step = float(np.sqrt((CODES**2).mean() * (sizes**2).mean()))
    with path.open("ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGN))
            if tensor.kind == Type.NVFP4:
                blocks.write(file, tensor.nbytes)
                file.write(bytes(-file.tell() % ALIGN))
                # Experts differ, so that one taken for another shows.
                spread = np.linspace(0.9, 1.1, tensor.experts) if tensor.experts > 1 else np.ones(1)
                file.write((tensor.std / step * spread).astype(np.float32).tobytes())
                continue
            count = tensor.nbytes // (2 if tensor.kind == Type.BF16 else 4)
            values = torch.from_numpy(normal).mul(tensor.std).add_(tensor.mean)
            if tensor.kind == Type.BF16:
                values = values.bfloat16().view(torch.int16)
            Pool(values.numpy()).write(file, count * values.element_size())
        file.write(bytes(-file.tell() % ALIGN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="folder with config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tensors = list(planned(args.config))
    total = sum(tensor.nbytes for tensor in tensors)
    if shutil.disk_usage(args.out.parent.resolve()).free < total + 2**26:
        raise SystemExit(f"{args.out}: {total / 1e9:.1f} GB do not fit there")
    write_header(args.out, tensors)
    write_tensors(args.out, tensors, args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.3f} GB, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
