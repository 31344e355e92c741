"""vLLM's client side of weight transfer without a GPU: over gloo instead of NCCL.

The trainers of TRL 1.16 and SkyRL 0.4 meet a server and send it weights by two functions of the
vLLM package, which need CUDA. Here are two that do not. Which tensors are sent, in which order and
how they are packed stays the trainer's and vLLM's own. On GPUs none of this is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    pack_tensors,
)

from limelight.rl.gloo import GlooGroup, host_store

SECONDS = 300.0


class Endpoint:
    """In the place of vLLM's `PyNcclCommunicator`: rank 0 of the group."""

    def __init__(self, info: object):
        told = info if isinstance(info, dict) else vars(info)
        host, port, size = (told[key] for key in ("master_address", "master_port", "world_size"))
        store = host_store(host, port, world_size=size, seconds=SECONDS)
        self.gloo = GlooGroup(store, rank=0, world_size=size, seconds=SECONDS)
        # What trainers let go of at the end.
        self.group = SimpleNamespace(store=store, socket=None)


def broadcast(
    iterator: Iterator[tuple[str, torch.Tensor]], group: Endpoint, src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES, num_buffers: int = 1,
) -> None:  # fmt: skip
    """Send tensors, cut by vLLM's own function.

    Each is copied as it comes: behind the last one TRL takes adapters out of the weights again,
    before vLLM has read what lies in its last piece.
    """

    def copied(item: tuple[str, torch.Tensor]) -> torch.Tensor:
        return post_iter_func(item).clone()

    while chunk := pack_tensors(iterator, copied, buffer_size_bytes):
        group.gloo.broadcast(chunk.packed_tensor)


@contextmanager
def over_gloo(module: ModuleType) -> Iterator[None]:
    """Within the block, a module that has imported vLLM's two functions finds these instead."""
    with (
        patch.object(module, "open_trainer_endpoint", Endpoint),
        patch.object(module, "packed_nccl_broadcast_producer", broadcast),
    ):
        yield
