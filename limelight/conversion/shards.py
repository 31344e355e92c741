"""Safetensors files written tensor by tensor, so that memory holds one tensor and not a file."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from limelight.quant.safetensor_files import INDEX

SHARD_BYTES = 5 * 10**9
# What a checkpoint has beside its weights that goes along unchanged, and what does not.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
REWRITTEN = ("config.json", "hf_quant_config.json", INDEX)
NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
# Tensors that are to be written, on the meta device, by their names.
Outlines = dict[str, torch.Tensor]


def copy_rest(folder: Path, into: Path) -> None:
    """Tokenizer, template and the like of a checkpoint."""
    for pattern in COPIED:
        for file in folder.glob(pattern):
            if file.name not in REWRITTEN:
                shutil.copyfile(file, into / file.name)


def split(groups: list[Outlines], *, most: int) -> list[Outlines]:
    """The groups in files of at most `most` bytes, unless one group alone has more."""
    files: list[Outlines] = []
    left = 0
    for group in groups:
        size = sum(outline.nbytes for outline in group.values())
        if not files or size > left:
            files.append({})
            left = most
        files[-1] |= group
        left -= size
    return files


def write(folder: Path, files: list[Outlines], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the files and, of several, their index; `tensors` come file by file, in any order."""
    pending = iter(tensors)
    places: dict[str, str] = {}
    for i, outlines in enumerate(files, 1):
        several = f"model-{i:05}-of-{len(files):05}.safetensors"
        path = folder / (several if len(files) > 1 else "model.safetensors")
        _write_file(path, outlines, pending)
        places |= dict.fromkeys(outlines, path.name)
    assert next(pending, None) is None, "every tensor has its place"
    if len(files) > 1:
        total = sum(outline.nbytes for outlines in files for outline in outlines.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _write_file(path: Path, outlines: Outlines, tensors: Iterator[tuple[str, torch.Tensor]]):
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # The widest types first, so that each tensor is aligned to its type.
    for name, outline in sorted(outlines.items(), key=lambda item: -item[1].itemsize):
        offsets[name] = end
        header[name] = {
            "dtype": NAMES[outline.dtype],
            "shape": outline.shape,
            "data_offsets": (end, end := end + outline.nbytes),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = dict(outlines)
        while left:
            name, tensor = next(tensors)
            outline = left.pop(name)
            assert (tensor.dtype, tensor.shape) == (outline.dtype, outline.shape), name
            file.seek(8 + len(text) + offsets[name])
            file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
        file.truncate(8 + len(text) + end)
