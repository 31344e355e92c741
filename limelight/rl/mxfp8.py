"""MXFP8 on a trainer's side: transformers' Flint and Beam as an engine computes them with MXFP8.

    with fake_quantized(model):
        logits = model(tokens).logits

rounds weights and activations before each product to what MXFP8 holds, and lets gradients through
as if it did not (straight-through). The same modules are quantized as by `--quantization mxfp8`.
`coded` makes of a trainer's tensors the codes and scales that such an engine holds, to be sent in
their place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from limelight.ops.mxfp8 import BLOCK, NO_NUMBER, fake_quantize, quantize
from limelight.quant.declared import Declared
from limelight.quant.stored import FUSED, SCALE

EXPERTS = ("FlintExperts", "BeamExperts")
# What of the routed experts is held in one matrix.
FUSED_PROJECTIONS = {"gate_up_proj": "gate_proj", "down_proj": "down_proj"}
Hook = torch.utils.hooks.RemovableHandle


@contextmanager
def fake_quantized(model: nn.Module, *, ignore: Sequence[str] = ()) -> Iterator[None]:
    """Within, products of the model have operands that MXFP8 can hold; `ignore` as in
    `--quantization-config`. `ValueError` for a model that cannot be followed."""
    chosen = dict(_weights(model, Declared("MXFP8", tuple(ignore))))
    if not chosen:
        raise ValueError(f"{type(model).__name__} has nothing that is quantized")
    modules = dict(model.named_modules())
    hooks: list[Hook] = []
    try:
        for name, weights in chosen.items():
            hooks += _attach(modules[name], weights)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, weights in chosen.items():
            for attribute in (*weights, "_apply_gate"):
                modules[name].__dict__.pop(attribute, None)


def _weights(model: nn.Module, declared: Declared) -> Iterator[tuple[str, list[str]]]:
    """The modules that multiply by quantized weights, and these."""
    for name, module in model.named_modules():
        if type(module).__name__ in EXPERTS:
            # Flint's own loop has no place between its products.
            loops = module.config._experts_implementation in (None, "eager")
            if loops and type(module).__name__ == "FlintExperts":
                raise ValueError(f"{name}: load the model with experts_implementation='grouped_mm'")
            names = FUSED_PROJECTIONS.items()
            found = [own for own, one in names if declared.packing(f"{name}.{one}")]
        elif isinstance(module, nn.Linear):
            found = ["weight"] if declared.packing(name) else []
        else:
            continue
        if found:
            yield name, found


def _attach(module: nn.Module, weights: list[str]) -> list[Hook]:
    """Have a module see its input and its weights rounded."""

    def before(module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # What is in the module's own dictionary goes before its parameters.
        for name in weights:
            module.__dict__[name] = fake_quantize(module.get_parameter(name))
        first = given[0] if weights == ["down_proj"] else fake_quantize(given[0])
        return first, *given[1:]

    def after(module: nn.Module, *_: object) -> None:
        for name in weights:
            module.__dict__.pop(name, None)

    if "down_proj" in weights and type(module).__name__ in EXPERTS:
        gate = cast(Callable[[torch.Tensor], torch.Tensor], module._apply_gate)
        module.__dict__["_apply_gate"] = lambda gate_up: fake_quantize(gate(gate_up))
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def coded(
    tensors: Iterable[tuple[str, torch.Tensor]], *, ignore: Sequence[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model by name, with codes and scales in place of those that are quantized.

    Codes (float8_e4m3fn) keep the tensor's name, scales (uint8) have it with `_scale` behind.
    `ValueError` for a number that is not finite.
    """
    declared = Declared("MXFP8", tuple(ignore))
    for name, tensor in tensors:
        match = FUSED.fullmatch(name)
        alone = f"{match['experts']}.{FUSED_PROJECTIONS[match['kind']]}" if match else name
        projection = match is not None or name.endswith("_proj.weight")
        if not projection or declared.packing(alone) is None:
            yield name, tensor
            continue
        if tensor.shape[-1] % BLOCK:
            raise ValueError(f"{name}: rows of {tensor.shape[-1]} are not whole blocks of {BLOCK}")
        held = quantize(tensor.detach())
        if bool((held.scales == NO_NUMBER).any()):
            raise ValueError(f"{name} holds numbers that are not finite")
        yield name, held.codes
        yield name + SCALE, held.scales
