"""What attention kernels share: how keys and values are found, read, absorbed, and the end.

An FP8 cache is read as pairs of channels: they are transposed on their way to a matrix unit as any
numbers of 16 bits are, which bytes cannot be, and become there two matrices, of the even and of
the odd channels. Scales multiply the scores and the sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops.activation import gated
from limelight.ops.fp4 import ASSEMBLY
from limelight.ops.paging import LayerCache, PagedLayout
from limelight.ops.rope import fp8_of

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a hidden key: so low that its weight is zero, and finite.
HIDDEN = tl.constexpr(-1.0e30)


@triton.jit
def locate(
    table, at, end, SIZE: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The slots of KEYS positions from `at`, a `block_start`; what is not before `end` means
    nothing."""
    key_L = tl.arange(0, KEYS)
    real_L = key_L < end - at
    # Spelled so that the compiler sees which of a thread's keys share a block.
    if KEYS % SIZE == 0:
        table += at // SIZE
    else:
        key_L += at
    return tl.load(table + key_L // SIZE, mask=real_L, other=0) * SIZE + key_L % SIZE


@triton.jit
def block_start(at, SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Where a tile that begins at `at` or before it is made of whole blocks, if tiles can be."""
    return at // SIZE * SIZE if KEYS % SIZE == 0 else at


@triton.jit
def fetch(
    pairs, slot_L, kv, at, first, end, half_stride,
    KV_HEADS: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Keys [C, KEYS] and values of the positions from `at` on; C is half as many pairs in FP8.

    Not `ALL`: zeros before `first` and from `end` on.
    """
    # A stride of 64 bits comes with slots that need them.
    first_L1 = slot_L.to(half_stride.dtype)[:, None] * C
    key_LC = pairs + kv * half_stride + (first_L1 + tl.arange(0, C))
    key_L = at + tl.arange(0, KEYS)
    real_L1 = None if ALL else ((key_L >= first) & (key_L < end))[:, None]
    zero = None if ALL else 0.0
    k_LC = tl.load(key_LC, mask=real_L1, other=zero)
    v_LC = tl.load(key_LC + half_stride.to(tl.int64) * KV_HEADS, mask=real_L1, other=zero)
    return tl.trans(k_LC), v_LC


@triton.jit
def _from_fp8(high, dtype: tl.constexpr):
    """E4M3 in the high byte of each int16."""
    # As FP16 it is 2^8 times too small.
    bits = (high & -0x8000) | ((high >> 1) & 0x3F80)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)


@triton.jit
def channels_of(pair, dtype: tl.constexpr):
    """The even and the odd channels of pairs in FP8."""
    if dtype == tl.bfloat16 and ASSEMBLY:
        # As BF16, two at once, they are 2^120 times too small.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s, z;
            mov.b32 s, 0x7B807B80; mov.b32 z, 0x80008000;
            shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 4;
            and.b32 b, b, 0x07F007F0; or.b32 b, b, a; fma.rn.bf16x2 $0, b, s, z;
            and.b32 a, $2, 0x80008000; shr.b32 b, $2, 4;
            and.b32 b, b, 0x07F007F0; or.b32 b, b, a; fma.rn.bf16x2 $1, b, s, z;
            }
            """,
            "=r,=r,r",
            [pair],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return _from_fp8(pair << 8, dtype), _from_fp8(pair, dtype)


@triton.jit
def halved(x_RC):
    """The even and the odd channels."""
    return tl.split(tl.reshape(x_RC, (x_RC.shape[0], x_RC.shape[1] // 2, 2)))


@triton.jit
def joined(a_RC, v_scale, FP8: tl.constexpr):
    """The sums of all channels, scaled."""
    if FP8:
        both = tl.join(a_RC[0], a_RC[1])
        a_RC = tl.reshape(both, (both.shape[0], both.shape[1] * 2)) * v_scale
    return a_RC


@triton.jit
def empty_sums(ROWS: tl.constexpr, C: tl.constexpr, FP8: tl.constexpr):
    """What `absorb` adds to."""
    zeros = tl.zeros((ROWS, C // 2 if FP8 else C), tl.float32)
    return (zeros, zeros) if FP8 else zeros


@triton.jit
def absorb(
    q_RC, k_CL, v_LC, at, end, position_R, m_R, l_R, a_RC, scale,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """m, l and a after the keys from `at` on, of which the queries see some or `ALL`.

    `scale` is for exp2, and positive: the highest score is the highest product. `FP8`: q and a are
    two, of the even and the odd channels.
    """
    dtype: tl.constexpr = q_RC[0].dtype if FP8 else q_RC.dtype
    if FP8:
        even_CL, odd_CL = channels_of(k_CL, dtype)
        s_RL = tl.dot(q_RC[0], even_CL, input_precision="ieee")
        s_RL = tl.dot(q_RC[1], odd_CL, s_RL, input_precision="ieee")
    else:
        s_RL = tl.dot(q_RC, k_CL.to(dtype), input_precision="ieee")
    if not ALL:
        key_L = at + tl.arange(0, KEYS)
        seen_RL = (key_L < end)[None, :] & (key_L[None, :] <= position_R[:, None])
        if WINDOW is not None:
            seen_RL = seen_RL & (key_L[None, :] > position_R[:, None] - WINDOW)
        s_RL = tl.where(seen_RL, s_RL, HIDDEN)
    new_R = tl.maximum(m_R, tl.max(s_RL, axis=1) * scale)
    p_RL = tl.exp2(s_RL * scale - new_R[:, None])
    shrink_R = tl.exp2(m_R - new_R)
    l_R = l_R * shrink_R + tl.sum(p_RL, axis=1)
    p_RL = p_RL.to(dtype)
    if FP8:
        even_LC, odd_LC = channels_of(v_LC, dtype)
        even_RC = tl.dot(p_RL, even_LC, a_RC[0] * shrink_R[:, None], input_precision="ieee")
        odd_RC = tl.dot(p_RL, odd_LC, a_RC[1] * shrink_R[:, None], input_precision="ieee")
        a_RC = (even_RC, odd_RC)
    else:
        v_LC = v_LC.to(dtype)
        a_RC = tl.dot(p_RL, v_LC, a_RC * shrink_R[:, None], input_precision="ieee")
    return new_R, l_R, a_RC


@triton.jit
def end_with(
    out, a_RC, l_R, t_R1, head, real_R1, gate, bias, gate_stride,
    HEADS: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Write the sums over all keys, divided and gated, as the result."""
    at_RC = head[:, None] * C + tl.arange(0, C)
    out_RC = (a_RC / tl.where(l_R > 0.0, l_R, 1.0)[:, None]).to(out.dtype.element_ty)
    if GATE:
        gate_RC = tl.load(gate + t_R1 * gate_stride + at_RC, mask=real_R1, other=0.0)
        out_RC = gated(out_RC, gate_RC, tl.load(bias + head).to(tl.float32)[:, None])
    tl.store(out + t_R1 * HEADS * C + at_RC, out_RC, mask=real_R1)


@triton.jit
def stored(x_EC, scale, dtype: tl.constexpr):
    """Keys or values as the cache holds them: in `dtype`, or as pairs of channels in FP8."""
    if dtype == tl.int16:
        even, odd = halved(fp8_of(x_EC, scale))
        x_EC = even.to(tl.int16) | (odd.to(tl.int16) << 8)
    return x_EC.to(dtype)


@dataclass(frozen=True, slots=True)
class End:
    """What attention ends with: sinks in the denominator, and a gate with its bias; FP32 inside."""

    sinks_H: torch.Tensor | None
    gate_THC: torch.Tensor | None
    gate_bias_H: torch.Tensor | None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        return self.sinks_H, self.gate_THC, self.gate_bias_H

    @property
    def gate_stride(self) -> int:
        return 0 if self.gate_THC is None else self.gate_THC.stride(0)

    @property
    def options(self) -> dict[str, bool]:
        return {"SINKS": self.sinks_H is not None, "GATE": self.gate_THC is not None}


def kernel_view(cache: LayerCache) -> torch.Tensor:
    """Keys and values as the kernels that read them take them: of FP8 two channels at once."""
    pairs = cache.pairs_2KSC
    return pairs if cache.scales_2 is None else pairs.view(torch.int16)


def check_paging(
    q_TN: torch.Tensor, cache: LayerCache, layout: PagedLayout, out_THC: torch.Tensor
) -> None:
    """What a kernel that reads the cache takes for granted."""
    head_dim = out_THC.shape[2]
    cache.check()
    assert cache.pairs_2KSC.shape[3] == head_dim
    assert out_THC.shape[1] % cache.pairs_2KSC.shape[1] == 0
    assert head_dim & (head_dim - 1) == 0
    # A product has at least 16 channels, and one of FP8 half of them.
    assert head_dim >= (16 if cache.scales_2 is None else 32)
    assert q_TN.stride(1) == 1 and len(q_TN) == len(out_THC) and out_THC.is_contiguous()
    tables = (layout.tables_SN, layout.rows_B, layout.seq_lens_B, layout.starts_B)
    assert all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in tables)
    assert layout.slots_T.dtype == torch.int64 and layout.slots_T.is_contiguous()
    assert len(layout.starts_B) == len(layout.seq_lens_B) + 1 == len(layout.rows_B) + 1
