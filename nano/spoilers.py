"""Faults that leave a drafter's text right and cost acceptance: each must show in a measurement."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from limelight.models.dflash2 import Attention, DFlash2
from limelight.models.loader import Model


@contextmanager
def shifted_taps(drafter: DFlash2, target: Model) -> Iterator[None]:
    """Each feature is that of the next layer, or of the one before where there is no next."""
    plain = drafter.config
    step = 1 if plain.taps[-1] + 1 < target.config.num_layers else -1
    drafter.config = replace(plain, taps=[layer + step for layer in plain.taps])
    try:
        yield
    finally:
        drafter.config = plain


@contextmanager
def causal_mask(drafter: DFlash2, target: Model) -> Iterator[None]:
    """No row sees a later one of its block."""
    layers = [module for module in drafter.modules() if isinstance(module, Attention)]
    plain = [layer.causal for layer in layers]
    for layer in layers:
        layer.causal = True
    try:
        yield
    finally:
        for layer, causal in zip(layers, plain, strict=True):
            layer.causal = causal


@contextmanager
def no_hidden_norm(drafter: DFlash2, target: Model) -> Iterator[None]:
    """Features enter the layers as `fc` leaves them."""
    plain = drafter.context_norm
    drafter.context_norm = nn.Identity()  # type: ignore[assignment]
    try:
        yield
    finally:
        drafter.context_norm = plain


SPOILERS = {
    "taps one layer off": shifted_taps,
    "causal mask": causal_mask,
    "no hidden_norm": no_hidden_norm,
}
