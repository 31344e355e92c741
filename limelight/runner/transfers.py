"""Between host and device: numbers, without waiting for what the device does, and all there is."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

# Bytes of a pinned piece.
PIECE = 2**27


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


def carry(source_X: torch.Tensor, into_X: torch.Tensor) -> None:
    """Copy bytes from a device to the host's pageable memory, or back; done when it returns.

    They go through pinned pieces, to and from which a device copies as fast as its link: one is
    on its way while the host's threads copy the other.
    """
    on_device = source_X.is_cuda or into_X.is_cuda
    pieces = [
        torch.empty(min(PIECE, len(source_X)), dtype=source_X.dtype, pin_memory=on_device)
        for _ in range(2)
    ]
    waiting: list[Callable[[], object]] = [lambda: None, lambda: None]
    for at, (from_X, to_X) in enumerate(
        zip(source_X.split(PIECE), into_X.split(PIECE), strict=True)
    ):
        # What this piece held before has arrived.
        waiting[at % 2]()
        piece_X = pieces[at % 2][: len(from_X)]
        if source_X.is_cuda:
            piece_X.copy_(from_X, non_blocking=True)
            waiting[at % 2] = partial(_arrive, _mark(), to_X, piece_X)
            waiting[1 - at % 2]()
            waiting[1 - at % 2] = lambda: None
        else:
            piece_X.copy_(from_X)
            to_X.copy_(piece_X, non_blocking=True)
            waiting[at % 2] = _mark().synchronize if on_device else lambda: None
    for wait in waiting:
        wait()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _arrive(event: torch.cuda.Event, to_X: torch.Tensor, piece_X: torch.Tensor) -> None:
    event.synchronize()
    to_X.copy_(piece_X)
