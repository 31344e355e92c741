"""LoRA adapters of the tiny checkpoints, written by PEFT, and what transformers makes of them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import prompts, request, run, start, write_checkpoint

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass
class Oracle:
    """A checkpoint, PEFT's model of it, and the folders of its adapters."""

    folder: Path
    model: torch.nn.Module
    adapters: dict[str, Path]

    def logprobs(self, prompt: list[int], name: str | None) -> torch.Tensor:
        """FP32 [tokens, vocabulary] by an adapter, or by none."""
        with torch.no_grad():
            if name is None:
                with self.model.disable_adapter():
                    logits = self.model(torch.tensor([prompt])).logits[0]
            else:
                self.model.set_adapter(name)
                logits = self.model(torch.tensor([prompt])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def write_adapters(
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
    names = {name: folder if name == "default" else folder / name for name in configs}
    return Oracle(folder / "base", model.eval(), names)
