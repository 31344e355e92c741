"""From a trained model to the files of a checkpoint, under published names."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from limelight.models.targets import Targets
from nano.chat import Family

# By hand, in the family's folder; the tokenizer and the weights are made.
WRITTEN = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
EXACT = ("mlp.gate.weight", "e_score_correction_bias", "softmax_offset")


def copy_written_files(family: Family, folder: Path) -> None:
    """Put the files that training does not make into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        if folder.resolve() != family.folder.resolve():
            shutil.copy(family.folder / name, folder / name)


def _by_expert(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor; of all experts, each one's."""
    front, between, projection = name.partition(".experts.")
    if not between:
        yield name, value
        return
    for e, part in enumerate(value):
        yield f"{front}.experts.{e}.{projection}", part


def save_weights(targets: Targets, folder: Path) -> None:
    """model.safetensors: BF16, but FP32 for routers, their biases and sinks."""
    tensors = {}
    for name, target in targets.items():
        assert isinstance(target.into, torch.Tensor)
        dtype = torch.float32 if name.endswith(EXACT) else torch.bfloat16
        value = target.into.detach().to("cpu", dtype)
        for one, part in _by_expert(name, value):
            tensors[one] = part.contiguous().clone()
    # A checkpoint that is read while it is written must be whole.
    unfinished = folder / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")
