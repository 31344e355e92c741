"""Routing replay in a trainer: Flint and Beam of transformers with the experts of a rollout.

    with replay(model, ids):
        logits = model(tokens).logits

Only the choice is the rollout's. The weights of the chosen experts come from the trainer's own live
scores, so gradients reach the router:

    weight = s / sum of the chosen s      Flint
    weight = s / (sum + 1e-20)            Beam; its selection bias and groups have no say

where s is the sigmoid of the trainer's router at the recorded ids. `record` gathers what a model
chooses by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from limelight.ops.router import GROUPED_EPSILON

# What the routers of both families return: logits [T, E], weights [T, N] and ids [T, N].
RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EPSILON = {"FlintTopKRouter": 0.0, "BeamTopKRouter": GROUPED_EPSILON}


class Router(Protocol):
    """What is used of a router."""

    top_k: int
    num_experts: int
    norm_topk_prob: bool

    def register_forward_hook(self, hook: object) -> RemovableHandle: ...


def routers(model: nn.Module) -> dict[int, Router]:
    """The routers by the number of their layer; `ValueError` for a model of another family."""
    found = {
        int(name.split("layers.")[1].split(".")[0]): cast(Router, module)
        for name, module in model.named_modules()
        if type(module).__name__ in EPSILON
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no router of Flint or Beam to replay")
    return found


@contextmanager
def replay(model: nn.Module, ids_TLN: torch.Tensor) -> Iterator[None]:
    """Within, the model's tokens go to these experts: integers [T, L, N].

    T are all tokens of a forward in the order of the flattened batch, padding included; a token
    whose experts do not matter, such as the last of a sequence, may have any N distinct ids. L
    counts all layers, and what stands for dense ones is not looked at.
    """
    hooks = []
    try:
        for layer, router in routers(model).items():
            ids_TN = _checked(ids_TLN, layer, router)
            hooks.append(router.register_forward_hook(_forced(ids_TN)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _checked(ids_TLN: torch.Tensor, layer: int, router: Router) -> torch.Tensor:
    if ids_TLN.ndim != 3 or layer >= ids_TLN.shape[1] or ids_TLN.shape[2] != router.top_k:
        raise ValueError(
            f"ids of experts must be [tokens, layers, {router.top_k}] with a column for layer "
            f"{layer}; got {list(ids_TLN.shape)}"
        )
    ids_TN = ids_TLN[:, layer].long()
    sorted_TN = ids_TN.sort(dim=-1).values
    if len(ids_TN) and not 0 <= int(ids_TN.min()) <= int(ids_TN.max()) < router.num_experts:
        raise ValueError(f"layer {layer}: expert ids must be below {router.num_experts}")
    if bool((sorted_TN[:, 1:] == sorted_TN[:, :-1]).any()):
        raise ValueError(f"layer {layer}: the expert ids of a token must be distinct")
    return ids_TN


def _forced(ids_TN: torch.Tensor):
    """A hook of one router."""

    def force(router: Router, _: object, made: RouterOutput) -> RouterOutput:
        logits_TE = made[0]
        if len(ids_TN) != len(logits_TE):
            raise ValueError(
                f"{len(logits_TE)} tokens in this forward, and experts recorded of {len(ids_TN)}"
            )
        chosen_TN = ids_TN.to(logits_TE.device)
        weights_TN = logits_TE.sigmoid().gather(1, chosen_TN)
        if router.norm_topk_prob:
            total_T1 = weights_TN.sum(dim=-1, keepdim=True) + EPSILON[type(router).__name__]
            weights_TN = weights_TN / total_T1
        return logits_TE, weights_TN, chosen_TN

    return force


@contextmanager
def record(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Within, the ids that the model itself chooses: [T, N] of its last forward, by layer."""
    chosen: dict[int, torch.Tensor] = {}

    def keep(layer: int):
        def hook(router: Router, _: object, made: RouterOutput) -> None:
            chosen[layer] = made[2].detach()

        return hook

    hooks = [one.register_forward_hook(keep(layer)) for layer, one in routers(model).items()]
    try:
        yield chosen
    finally:
        for one in hooks:
            one.remove()
