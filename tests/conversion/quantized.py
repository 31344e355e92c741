"""Checkpoints through the command's function, and what they then hold."""

import gguf
import torch
from safetensors.torch import load_file

from limelight import quantize
from limelight.ops.fp4 import unpack_reference
from limelight.ops.fp4_codes import mixed
from limelight.progress import Progress


def run(source, into, *, format):
    return quantize.quantize(
        str(source), str(into), format=format, device="cpu", progress=Progress(quiet=True)
    )


def to_gguf(source, into):
    rows = run(source, into, format="gguf-nvfp4")
    return rows, {tensor.name: tensor for tensor in gguf.GGUFReader(into).tensors}


def to_modelopt(source, into):
    rows = run(source, into, format="modelopt-nvfp4")
    return rows, stored(into)


def stored(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def values(tensors, name):
    """The values of a ModelOpt matrix, as its three tensors say."""
    held = unpack_reference(mixed(tensors[name]), tensors[f"{name}_scale"], dtype=torch.float32)
    return held * tensors[f"{name}_scale_2"]


def relative(held, weight):
    return float((held - weight).norm() / weight.norm())
