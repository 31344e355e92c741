"""What a training leaves on disk: a folder to go on from, and in the end the drafter's."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from limelight.checkpoint import BUNDLED_DRAFTERS, BUNDLED_NAMES, read_json
from limelight.conversion import shards
from limelight.models.dflash2 import DFlash2

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Work:
    """The folder OUT.work beside the folder OUT to be made."""

    out: Path

    @property
    def folder(self) -> Path:
        return self.out.with_name(self.out.name + ".work")

    @property
    def answers(self) -> Path:
        return self.folder / "answers.jsonl"

    @property
    def state(self) -> Path:
        return self.folder / "training.safetensors"

    def check(self) -> None:
        """`ValueError` where the folder cannot be made."""
        if str(self.out) in (*BUNDLED_NAMES, *BUNDLED_DRAFTERS.values()):
            raise ValueError(f"{self.out} is the name of a bundled model; choose another name")
        if self.out.exists() or self.out.is_symlink():
            raise ValueError(f"{self.out} exists already; choose another name")
        parent = self.out.parent
        if not parent.is_dir():
            raise ValueError(f"{parent}: no such folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ValueError(f"{parent}: no folder can be made there")

    def open(self, choices: Json) -> None:
        """Begin, or go on: `ValueError` where what it was begun with differs from `choices`."""
        file = self.folder / "settings.json"
        if not file.exists():
            self.folder.mkdir(exist_ok=True)
            _replace(file, json.dumps(choices, indent=1) + "\n")
            return
        begun = read_json(file)
        for key in sorted(begun.keys() | choices.keys()):
            old, new = begun.get(key), choices.get(key)
            if old != new:
                raise ValueError(
                    f"{self.folder} was begun with {key} {old!r}, not {new!r}: "
                    "use the same again, or remove the folder"
                )

    def finish(self, drafter: DFlash2, config: Json) -> None:
        """Write the drafter in BF16; it is there whole or not at all."""
        made = self.folder / "drafter"
        shutil.rmtree(made, ignore_errors=True)
        save_drafter(drafter, config, made)
        made.rename(self.out)
        self.state.unlink(missing_ok=True)


def save_drafter(drafter: DFlash2, config: Json, folder: Path) -> None:
    """config.json, and the tensors under their published names."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, target in drafter.targets.items():
        assert isinstance(target.into, torch.Tensor)
        tensors[name] = target.into.detach().to("cpu", torch.bfloat16).contiguous().clone()
    shards.write(folder, [tensors], tensors.items())
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
