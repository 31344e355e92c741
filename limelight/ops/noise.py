"""Random numbers by hash: each follows from a seed, a position and what it is for.

    x = seed * A + (position + 1) * B + stream * C  (mod 2^64), then SplitMix64 twice

So a number depends on no slot, step or batch, and no two uses of one position share theirs: a
draft, its acceptance and the token drawn in its place are independent.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, op, pdl

# What a number is for. A position is drafted again by every pass that starts before it, so the
# draft in row j of a pass has a stream of its own: DRAFT + j.
PLAIN, ACCEPT, RESIDUAL, DRAFT = range(4)
# How easy a pass is, and draft j in it (EASE + j), where acceptance is synthetic.
PASS, EASE = 63, 64
BITS = 64


def _signed(constant: int) -> int:
    """The int64 with the lowest bits; products of int64 wrap as those of uint64 do."""
    constant %= 1 << BITS
    return constant - (1 << BITS) if constant >> (BITS - 1) else constant


SEED, POSITION, STREAM = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
# SplitMix64's (Steele, Lea and Flood, 2014), whose step is SEED.
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _shifted(x_X: torch.Tensor, bits: int) -> torch.Tensor:
    """Without the sign's copies, which an int64 shifts in."""
    return (x_X >> bits) & ((1 << (BITS - bits)) - 1)


def uniform(
    seed_X: torch.Tensor, position_X: torch.Tensor, *, stream: int | torch.Tensor
) -> torch.Tensor:
    """Numbers of [0, 1), FP64, for int64 seeds, positions and streams that broadcast.

    Those of PLAIN are the ones that tokens are drawn with where nothing is drafted.
    """
    x_X = seed_X * _signed(SEED) + (position_X + 1) * _signed(POSITION)
    x_X = x_X + (_signed(stream * STREAM) if isinstance(stream, int) else stream * _signed(STREAM))
    for _ in range(2):
        x_X = x_X + _signed(SEED)
        x_X = (x_X ^ _shifted(x_X, 30)) * _signed(FIRST)
        x_X = (x_X ^ _shifted(x_X, 27)) * _signed(SECOND)
        x_X = x_X ^ _shifted(x_X, 31)
    return _shifted(x_X, 11).double() / (1 << 53)


def draft_uniform_reference(
    seed_B: torch.Tensor, position_B: torch.Tensor, *, drafts: int
) -> torch.Tensor:
    """The numbers of a pass over places `position_B` + 0, 1, ...: FP32 [B, N] of [0, 1]."""
    place_N = torch.arange(drafts, device=seed_B.device)
    positions_BN = position_B[:, None] + place_N
    return uniform(seed_B[:, None], positions_BN, stream=DRAFT + place_N).float()


_SEED, _POSITION, _STREAM = (tl.constexpr(x) for x in (SEED, POSITION, STREAM))
_FIRST, _SECOND = tl.constexpr(FIRST), tl.constexpr(SECOND)
_DRAFT = tl.constexpr(DRAFT)


@triton.jit
def number_of(seed, position, stream):
    """For kernels: `uniform` of int64 seeds and positions, FP64 and the same to the bit."""
    x = seed.to(tl.uint64) * _SEED + (position.to(tl.int64) + 1).to(tl.uint64) * _POSITION
    x += stream.to(tl.uint64) * _STREAM
    for _ in tl.static_range(2):
        x += _SEED
        x = (x ^ (x >> 30)) * _FIRST
        x = (x ^ (x >> 27)) * _SECOND
        x = x ^ (x >> 31)
    return (x >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _draft_uniform_kernel(
    seeds, positions, numbers, size, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, j = i // N, i % N
    seed = tl.load(seeds + b, mask=i < size, other=0)
    position = tl.load(positions + b, mask=i < size, other=0).to(tl.int64) + j
    tl.store(numbers + i, number_of(seed, position, j + _DRAFT).to(tl.float32), mask=i < size)


def _launch_draft_uniform(
    seed_B: torch.Tensor, position_B: torch.Tensor, *, drafts: int
) -> torch.Tensor:
    assert seed_B.dtype == torch.int64 and position_B.shape == seed_B.shape
    assert seed_B.is_contiguous() and position_B.is_contiguous()
    numbers_BN = torch.empty(len(seed_B), drafts, dtype=torch.float32, device=seed_B.device)
    if size := numbers_BN.numel():
        _draft_uniform_kernel[(cdiv(size, 128),)](
            seed_B, position_B, numbers_BN, size, N=drafts, BLOCK=128, **pdl(seed_B)
        )
    return numbers_BN


draft_uniform = op(reference=draft_uniform_reference, kernel=_launch_draft_uniform)


# Where the host chooses, a step asks twice for each of its numbers.
@lru_cache(maxsize=1024)
def plain_uniform(seed: int, position: int) -> float:
    """One number of PLAIN, on the host."""
    mask = (1 << BITS) - 1
    x = (seed * SEED + (position + 1) * POSITION) & mask
    for _ in range(2):
        x = (x + SEED) & mask
        x = ((x ^ (x >> 30)) * FIRST) & mask
        x = ((x ^ (x >> 27)) * SECOND) & mask
        x ^= x >> 31
    return (x >> 11) / (1 << 53)
