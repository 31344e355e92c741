"""LoRA adapters of the tiny checkpoints: by PEFT, with what its model makes of them, or by hand."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import COMMON, write_checkpoint

from limelight.checkpoint import locate
from limelight.models.adapters import AdapterRoom
from limelight.models.layers import Placement
from limelight.models.loader import build, read_config
from limelight.parallel.mesh import Mesh

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYERS = 3  # of which the last has experts, in both families
SIZE, INNER, EXPERTS = COMMON["hidden_size"], COMMON["moe_intermediate_size"], 8


@dataclass
class Oracle:
    """A checkpoint, PEFT's model of it, and the folders of its adapters."""

    folder: Path
    model: torch.nn.Module
    adapters: dict[str, Path]

    def logprobs(self, token_ids: list[int], name: str | None) -> torch.Tensor:
        """FP32 [tokens, vocabulary] by an adapter, or by none."""
        with torch.no_grad():
            if name is None:
                with self.model.disable_adapter():
                    logits = self.model(torch.tensor([token_ids])).logits[0]
            else:
                self.model.set_adapter(name)
                logits = self.model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def write_by_peft(
    folder: Path, family: str, configs: dict[str, dict], *, scale: float = 0.3, **changes: object
) -> Oracle:
    """A checkpoint in `folder`/base, and adapters of these configs with random values beside it."""
    peft = pytest.importorskip("peft")
    base = write_checkpoint(folder / "base", family, **({"num_hidden_layers": 4} | changes))
    model = None
    for name, given in configs.items():
        config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "lora_dropout": 0.0} | given))
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(len(configs))
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            if "lora_" in path:
                tensor.normal_(0, scale, generator=generator)
    model.save_pretrained(folder)
    return Oracle(folder / "base", model.eval(), {name: folder / name for name in configs})


def write_adapter(
    folder: Path, shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], *, seed: int = 0,
    scale: float = 0.5, **config: object,
) -> Path:  # fmt: skip
    """An adapter with random A and B of these shapes, by path below the layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{path}.lora_{side}.weight": scale
        * torch.randn(shape, generator=generator)
        for path, pair in shapes.items()
        for side, shape in zip("AB", pair, strict=True)
    }
    write_files(folder, tensors, **config)
    return folder


def write_files(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    """An adapter's two files."""
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")


def attention(rank: int = 4) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes of an adapter of all queries and outputs."""
    heads = COMMON["num_attention_heads"] * COMMON["head_dim"]
    shapes = {f"{i}.self_attn.q_proj": ((rank, SIZE), (heads, rank)) for i in range(LAYERS)}
    shapes |= {f"{i}.self_attn.o_proj": ((rank, heads), (SIZE, rank)) for i in range(LAYERS)}
    return shapes


def write_whole(folder: Path, model: str, *, seed: int, rank: int = 8, scale: float = 0.05) -> Path:
    """An adapter of all that can be adapted in a model; the experts as PEFT writes them."""
    room = AdapterRoom(slots=1, max_rank=rank, dtype=torch.float32)
    place = Placement(
        Mesh.single(), torch.float32, torch.device("cpu"), outline=True, adapters=room
    )
    build(*read_config(locate(model)), place)
    shapes = {}
    for path, site in room.sites.items():
        name = path.removeprefix("model.layers.")
        experts, _, kind = name.rpartition(".")
        if site.experts is None:
            shapes[name] = (rank, site.inputs), (site.outputs, rank)
        elif kind == "gate_proj":
            flat = rank * site.experts
            shapes[f"{experts}.base_layer"] = (flat, site.inputs), (2 * site.outputs, flat)
        elif kind == "down_proj":
            flat = rank * site.experts
            shapes[experts] = (flat, site.inputs), (site.outputs, flat)
    return write_adapter(
        folder, shapes, seed=seed, scale=scale, r=rank, lora_alpha=2 * rank,
        target_parameters=PARAMETERS, peft_version="0.21.2",
    )  # fmt: skip
