"""Between host and device, without waiting for what the device does."""

from collections.abc import Sequence

import torch


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers on the device, there for whatever is launched from now on."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # Memory that is not pinned is copied once the device has done all that was asked of it.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def on_its_way(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the host, there once what was launched before it has run."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
