"""A number for each weight, which tells whether two engines have the same values.

    sum over all elements of mix(index in the whole tensor, bits)   modulo 2^64

It depends neither on how a tensor lies in memory nor on how it is divided among ranks. Of a weight
in MXFP8 codes and scales have one each, by the names that checkpoints have for them.
"""

import math

import torch

from limelight.models.targets import Target, Targets, coded
from limelight.ops.weight import device_of
from limelight.parallel.collectives import all_gather
from limelight.parallel.mesh import Mesh

ELEMENTS_AT_ONCE = 2**22
# Odd, so that no bit is lost.
FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def checksums(targets: Targets, mesh: Mesh) -> dict[str, str]:
    """For each tensor 16 hexadecimal digits, on all ranks the same."""
    targets = targets | coded(targets)
    names = list(targets)
    pairs_T2 = torch.tensor([_part(targets[name]) for name in names])
    # NCCL takes tensors of the device alone.
    on = device_of(next(iter(targets.values())).into)
    gathered_T2R = all_gather(pairs_T2.to(on), mesh).cpu().tolist()
    sums = {}
    for name, row in zip(names, gathered_T2R, strict=True):
        # Ranks that hold the same part are one.
        parts = dict(zip(row[::2], row[1::2], strict=True))
        sums[name] = f"{sum(parts.values()) % 2**64:016x}"
    return sums


def _part(target: Target) -> tuple[int, int]:
    """Which part of the tensor this rank holds, and its sum."""
    place = 0
    for side in target.take:
        place = (place * 1_000_003 + side.start) % 2**61
    into = target.into
    if isinstance(into, torch.Tensor):
        return place, _signed(_sum(into, target.shape, target.take))
    total = 0
    for tensor in into.tensors:
        # Packed tensors are summed as they are stored, by their place in this rank's part.
        total += _sum(tensor, tensor.shape, tuple(slice(0, size) for size in tensor.shape))
    return place, _signed(total)


def _sum(x: torch.Tensor, shape: tuple[int, ...], take: tuple[slice, ...]) -> int:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    rows = max(1, ELEMENTS_AT_ONCE // max(1, x[:1].numel()))
    total = 0
    for at in range(0, len(x), rows):
        part = x[at : at + rows]
        index = torch.zeros((), dtype=torch.int64, device=x.device)
        for i, (size, side, stride) in enumerate(zip(part.shape, take, strides, strict=True)):
            first = side.start + (at if i == 0 else 0)
            along = (torch.arange(size, device=x.device) + first) * stride
            index = index.unsqueeze(-1) + along
        bits = part.contiguous().view(BITS[x.element_size()]).to(torch.int64)
        total += int(_mix(index, bits).sum().item())
    return total


def _mix(index: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """A hash of both in 64 bits; integers of torch wrap around."""
    first, second, third = FACTORS
    mixed = (index + 1) * first + bits * second
    mixed = (mixed ^ (mixed >> 29)) * third
    return mixed ^ (mixed >> 32)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
