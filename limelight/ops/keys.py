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
from limelight.ops.fp4_codes import ASSEMBLY
from limelight.ops.paging import LayerCache, PagedLayout
from limelight.ops.rope import fp8_of

LOG2E = tl.constexpr(1.4426950408889634)
# The score of a hidden key: so low that its weight is zero, and finite.
HIDDEN = tl.constexpr(-1.0e30)
# Up to so many heads of one query are the columns of the matrix units: see `absorb_few`. For more
# Triton 3.6 takes Hopper's `wgmma`, whose sums were wrong here.
FEW_HEADS = 8


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
def empty_sums(ROWS: tl.constexpr, C: tl.constexpr, FP8: tl.constexpr, FEW: tl.constexpr = False):
    """What `absorb` adds to, or `absorb_few`."""
    WIDTH: tl.constexpr = C // 2 if FP8 else C
    zeros = tl.zeros((WIDTH, ROWS) if FEW else (ROWS, WIDTH), tl.float32)
    return (zeros, zeros) if FP8 else zeros


@triton.jit
def turned(x_RC, FP8: tl.constexpr, FEW: tl.constexpr):
    """`FEW`: rows as columns, or back, of both halves in `FP8`."""
    if FEW:
        x_RC = (tl.trans(x_RC[0]), tl.trans(x_RC[1])) if FP8 else tl.trans(x_RC)
    return x_RC


@triton.jit
def empty_totals(l_R, KEYS: tl.constexpr, FEW: tl.constexpr):
    """What `absorb_few` goes on from as l: nothing, by keys; not `FEW`: what there is."""
    return tl.zeros((KEYS, l_R.shape[0]), tl.float32) if FEW else l_R


@triton.jit
def totals(l_R, l_LR, before_R, m_R, FEW: tl.constexpr):
    """l after that, of which l_R belongs to the maximum `before_R`."""
    return l_R * tl.exp2(before_R - m_R) + tl.sum(l_LR, axis=0) if FEW else l_LR


@triton.jit
def _seen(scores, key, end, position, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores of keys by queries, either way round, `HIDDEN` where a query does not see a key."""
    ahead = key - position
    seen = tl.broadcast_to(key < end, scores.shape)
    if CAUSAL:
        seen = seen & (ahead <= 0)
    if WINDOW is not None:
        seen = seen & (ahead > -WINDOW)
        if not CAUSAL:
            seen = seen & (ahead < WINDOW)
    return tl.where(seen, scores, HIDDEN)


@triton.jit
def absorb(
    q_RC, k_CL, v_LC, at, end, position_R, m_R, l_R, a_RC, scale,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr, FP8: tl.constexpr,
    CAUSAL: tl.constexpr = True,
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
        s_RL = _seen(s_RL, key_L[None, :], end, position_R[:, None], WINDOW, CAUSAL)
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
def fetch_either(
    pairs, slot_L, kv, at, first, end, half_stride,
    KV_HEADS: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """As `fetch`; `FEW`: keys [KEYS, C] and values [C, KEYS], as `absorb_few` takes them."""
    if FEW:
        # A stride of 64 bits comes with slots that need them.
        first_L, c = slot_L.to(half_stride.dtype) * C, tl.arange(0, C)
        keys = pairs + kv * half_stride
        key_L = at + tl.arange(0, KEYS)
        real_L = (key_L >= first) & (key_L < end)
        k_LC = tl.load(keys + (first_L[:, None] + c[None, :]), mask=real_L[:, None], other=0.0)
        values = keys + half_stride.to(tl.int64) * KV_HEADS
        v_CL = tl.load(values + (first_L[None, :] + c[:, None]), mask=real_L[None, :], other=0.0)
        both = k_LC, v_CL
    else:
        both = fetch(pairs, slot_L, kv, at, first, end, half_stride, KV_HEADS, C, KEYS, False)
    return both


@triton.jit
def absorb_few(
    q_CR, k_LC, v_CL, at, end, position_R, m_R, l_LR, a_CR, scale,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, FP8: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """As `absorb`: keys and channels are the rows of the matrix units, which take no fewer than 16,
    and rows of queries their columns, of which 8 are enough. l [KEYS, R] is still to be summed,
    for which warps have to wait for each other."""
    dtype: tl.constexpr = q_CR[0].dtype if FP8 else q_CR.dtype
    if FP8:
        even_LC, odd_LC = channels_of(k_LC, dtype)
        s_LR = tl.dot(even_LC, q_CR[0], input_precision="ieee")
        s_LR = tl.dot(odd_LC, q_CR[1], s_LR, input_precision="ieee")
    else:
        s_LR = tl.dot(k_LC.to(dtype), q_CR, input_precision="ieee")
    key_L = at + tl.arange(0, KEYS)
    s_LR = _seen(s_LR, key_L[:, None], end, position_R[None, :], WINDOW, CAUSAL)
    new_R = tl.maximum(m_R, tl.max(s_LR, axis=0) * scale)
    p_LR = tl.exp2(s_LR * scale - new_R[None, :])
    shrink_R = tl.exp2(m_R - new_R)
    l_LR = l_LR * shrink_R[None, :] + p_LR
    p_LR = p_LR.to(dtype)
    if FP8:
        even_CL, odd_CL = channels_of(v_CL, dtype)
        even_CR = tl.dot(even_CL, p_LR, a_CR[0] * shrink_R[None, :], input_precision="ieee")
        odd_CR = tl.dot(odd_CL, p_LR, a_CR[1] * shrink_R[None, :], input_precision="ieee")
        a_CR = (even_CR, odd_CR)
    else:
        a_CR = tl.dot(v_CL.to(dtype), p_LR, a_CR * shrink_R[None, :], input_precision="ieee")
    return new_R, l_LR, a_CR


@triton.jit
def absorb_either(
    q, k, v, at, end, position_R, m_R, total, a, scale,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, FP8: tl.constexpr, CAUSAL: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """By `absorb_few` or, some of them hidden, by `absorb`."""
    if FEW:
        sums = absorb_few(
            q, k, v, at, end, position_R, m_R, total, a, scale, WINDOW, KEYS, FP8, CAUSAL
        )
    else:
        sums = absorb(
            q, k, v, at, end, position_R, m_R, total, a, scale, WINDOW, KEYS, False, FP8, CAUSAL
        )
    return sums


@triton.jit
def absorb_own(q_CR, k_1C, v_1C, m_R, l_R, a_CR, scale, FP8: tl.constexpr):
    """As `absorb`, for rows of one query and its own key, without the matrix units."""
    dtype: tl.constexpr = q_CR[0].dtype if FP8 else q_CR.dtype
    if FP8:
        even_1C, odd_1C = channels_of(k_1C, dtype)
        s_R = _product(q_CR[0], even_1C) + _product(q_CR[1], odd_1C)
    else:
        s_R = _product(q_CR, k_1C.to(dtype))
    new_R = tl.maximum(m_R, s_R * scale)
    p_R, shrink_R = tl.exp2(s_R * scale - new_R), tl.exp2(m_R - new_R)
    l_R = l_R * shrink_R + p_R
    p_1R = p_R.to(dtype).to(tl.float32)[None, :]
    if FP8:
        even_1C, odd_1C = channels_of(v_1C, dtype)
        even_CR = a_CR[0] * shrink_R[None, :] + tl.trans(even_1C).to(tl.float32) * p_1R
        odd_CR = a_CR[1] * shrink_R[None, :] + tl.trans(odd_1C).to(tl.float32) * p_1R
        a_CR = (even_CR, odd_CR)
    else:
        a_CR = a_CR * shrink_R[None, :] + tl.trans(v_1C.to(dtype)).to(tl.float32) * p_1R
    return new_R, l_R, a_CR


@triton.jit
def _product(q_CR, k_1C):
    return tl.sum(q_CR.to(tl.float32) * tl.trans(k_1C).to(tl.float32), axis=0)


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
