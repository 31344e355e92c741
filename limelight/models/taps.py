"""What a drafter reads of its target: the residual stream behind some of its layers."""

from collections.abc import Sequence

import torch

from limelight.ops.boundary import Summand, whole


class Taps:
    """Collects the stream after each of `layers` (counted from 0, in order) during one forward."""

    def __init__(self, layers: Sequence[int]):
        assert list(layers) == sorted(set(layers))
        self.layers = layers
        self.streams: list[torch.Tensor] = []

    def take(self, layer: int, h_TD: torch.Tensor, x_TD: Summand | None = None) -> None:
        """The stream behind `layer`, which is h, or h + x where x is still to be added."""
        if layer in self.layers:
            self.streams.append(h_TD if x_TD is None else h_TD + whole(x_TD))

    def joined(self) -> torch.Tensor:
        """One row for each token, [T, layers * D]."""
        assert len(self.streams) == len(self.layers), "one forward, of a model with these layers"
        return torch.cat(self.streams, dim=-1)
