"""A checkpoint with other weights than a bundled model's, and its tensors as a trainer has them."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BUNDLED = Path(__file__).parents[1] / "limelight" / "nano"


def perturbed(folder: Path, model: str = "flint-nano", *, seed: int = 1) -> Path:
    """A copy of a bundled model in which every tensor is a little different."""
    shutil.copytree(BUNDLED / model, folder)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = (tensor.float() * (1 + 0.2 * noise)).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
