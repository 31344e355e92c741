"""A drafter's checkpoint -> its model, beside the target whose embedding and LM head it shares.

Some checkpoints hold copies of what the target has; a copy that differs is of another target.
"""

from dataclasses import replace
from pathlib import Path

import torch

from limelight.checkpoint import read_json
from limelight.models.dflash2 import DFlash2, Ends
from limelight.models.dflash2_config import DFlash2Config
from limelight.models.layers import Placement
from limelight.models.loader import Model, fill_dummy, find_tensors, load_weights, match_tensors
from limelight.models.targets import Target
from limelight.ops.fp4 import FP4, unpack_reference
from limelight.ops.weight import Weight
from limelight.progress import Progress
from limelight.quant.stored import Stored

MASK_FILE = "mask_embedding.pt"
# The target's tensor that each is a copy of.
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "verifier_lm_head.weight": "lm_head.weight",
    "verifier_norm.weight": "model.norm.weight",
}
# How far a copy may be from NVFP4, as a share of it; rounding alone makes about 0.1.
MOST_ROUNDING = 0.25
COPIED = ("F32", "F16", "BF16")
ROWS_AT_ONCE = 4096


def read_drafter_config(folder: Path) -> DFlash2Config:
    source = folder / "config.json"
    return DFlash2Config.from_dict(read_json(source), source=str(source))


def load_drafter(
    folder: Path,
    place: Placement,
    target: Model,
    *,
    dummy_seed: int | None = None,
    progress: Progress,
) -> DFlash2:
    """The drafter in `folder` for `target`, or one of random weights where `dummy_seed` is given.

    `place` has the target's mesh and device.
    """
    config = read_drafter_config(folder)
    config.check_target(target.config)
    if place.dtype == torch.float16:
        raise ValueError(f"{folder}: a drafter overflows in float16; use bfloat16 or float32")
    ends = Ends(target.embed, target.head)

    def build(outline: bool) -> DFlash2:
        return DFlash2(config, replace(place, targets={}, prefix="", outline=outline), ends)

    if dummy_seed is not None:
        model = build(outline=False)
        fill_dummy(model.targets, seed=dummy_seed, progress=progress)
        return model.eval()
    stored = _own_tensors(find_tensors(folder), target)
    # Shapes alone: a fault in the checkpoint is found before any memory is taken.
    match_tensors(stored, build(outline=True).targets, {}, folder=folder)
    model = build(outline=False)
    load_weights(match_tensors(stored, model.targets, {}, folder=folder), progress)
    if (folder / MASK_FILE).exists():
        model.mask_D = _read_mask(folder / MASK_FILE, config).to(place.device, place.dtype)
    return model.eval()


def _own_tensors(stored: list[Stored], target: Model) -> list[Stored]:
    """Those of the drafter itself, by their bare names."""
    own = []
    for one in stored:
        name = one.target.removeprefix("model.")
        if name in COPIES:
            _check_copy(one, target.targets[COPIES[name]])
        elif name in ("t2d", "d2t"):
            _check_whole_vocabulary(one, name, target.config.vocab_size)
        else:
            own.append(replace(one, target=name))
    return own


def _check_copy(one: Stored, target: Target) -> None:
    if one.shape != target.shape or one.dtype not in COPIED:
        raise ValueError(
            f"{one}: {one.dtype} {list(one.shape)}; expected {list(target.shape)} of one of "
            f"{', '.join(COPIED)}, as the target model has it"
        )
    first, *rest = target.take
    packed, distance, size = isinstance(target.into, FP4), 0.0, 0.0
    for at in range(0, len(target.into), ROWS_AT_ONCE):
        held = _values(target.into[at : at + ROWS_AT_ONCE])
        copy = torch.empty_like(held)
        start = first.start + at
        one.copy(copy, (slice(start, start + len(held)), *rest))
        distance += (copy.double() - held.double()).square().sum().item()
        size += held.double().square().sum().item()
    if not distance <= (MOST_ROUNDING**2 * size if packed else 0.0):
        raise ValueError(f"{one} is not what the target model has: the drafter is of another")


def _values(weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    assert isinstance(weight, FP4)
    units = unpack_reference(weight.codes, weight.scales, dtype=torch.float32)
    return units * weight.rows[..., None]


def _check_whole_vocabulary(one: Stored, name: str, vocab: int) -> None:
    """Maps between the vocabularies of drafter and target must say that they are the same."""
    values = torch.zeros(one.shape, dtype=torch.bool if name == "t2d" else torch.int64)
    one.copy(values, tuple(slice(0, size) for size in one.shape))
    same = bool((values == (name == "t2d")).all())
    if one.shape != (vocab,) or not same:
        raise ValueError(f"{one}: drafter and target must have the same vocabulary of {vocab}")


def _read_mask(file: Path, config: DFlash2Config) -> torch.Tensor:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what is wrong with the file
        raise ValueError(f"{file}: cannot be read as plain tensors: {error}") from error
    if not isinstance(found, dict) or found.get("mask_token_id") != config.mask_token_id:
        raise ValueError(f"{file}: must hold embedding, and mask_token_id {config.mask_token_id}")
    embedding = found.get("embedding")
    size = config.hidden_size
    if not isinstance(embedding, torch.Tensor) or embedding.numel() != size:
        raise ValueError(f"{file}: embedding must be a tensor of {size} numbers")
    return embedding.flatten()
