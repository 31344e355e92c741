"""What happens to queries and keys between projection and attention, and their way to the cache.

Each head of queries and keys is normalized on its kind's weight (FP32, rounded once); then one of
    rotation     x -> [x1 cos - x2 sin, x2 cos + x1 sin] on the halves of a head  (RoFormer, NeoX)
    SSMax        q -> q * (1 + p / 2048)^0.1, p the position counted from 1  (Scalable-Softmax)
    nothing      (NoPE)
A rotation in the type of the activations rounds its products and their sum, as Flint does; one in
FP32 is rounded once, as the product with SSMax is.
"""

from dataclasses import dataclass
from functools import cache as remember

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, op, pdl
from limelight.ops.norm import unit_rms
from limelight.ops.paging import LayerCache


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer on this rank: how many of queries and of keys, and the eps
    of their norms."""

    queries: int
    keys: int
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """[cos, cos] and [-sin, sin] of the angles of the tokens' positions: [T, 1, C].

    FP32, or the type of the activations in a model that rotates in it.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@remember
def _frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """theta^(-2i / head_dim), FP32; always the CPU's powers, as others may round otherwise."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return (1.0 / (theta ** (exponent / head_dim))).to(device)


def rotation_reference(
    positions_T: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype
) -> Rotation:
    """The angles p * theta^(-2i / head_dim) of each position, FP32; their sines in `dtype`."""
    inv_freq = _frequencies(head_dim, theta, positions_T.device)
    angles = (positions_T.float()[:, None] * inv_freq)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        cos=torch.cat((cos, cos), dim=-1).to(dtype), sin=torch.cat((-sin, sin), dim=-1).to(dtype)
    )


def ssmax_reference(positions_T: torch.Tensor) -> torch.Tensor:
    """(1 + (position + 1) / 2048)^0.1 of zero-based positions: FP32 [T]."""
    return torch.exp(0.1 * torch.log1p((positions_T.float() + 1.0) / 2048.0))


@remember
def _kinds(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """0 for each head of queries and 1 for each of keys."""
    with torch.inference_mode(False):
        return torch.tensor([0] * queries + [1] * keys, device=device)


def _rotate(x_TJC: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """The rotation of every head in `x_TJC`, in the wider type of the two."""
    # Rolling by half a head puts [x2, x1] under [-sin, sin].
    rolled_TJC = x_TJC.roll(x_TJC.shape[-1] // 2, dims=-1)
    return (x_TJC * turn.cos + rolled_TJC * turn.sin).to(x_TJC.dtype)


def split_heads(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    *,
    heads: Heads,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys ready for attention, and values, of rows [q | k | v | ...]; differentiable.

    `weight_2C` holds the weight of the queries' norm and of the keys'. Returns q [T, H, C] and
    k and v [T, K, C].
    """
    (tokens, width), size = qkv_TN.shape, weight_2C.shape[1]
    kinds, rows_TJC = heads.queries + heads.keys, qkv_TN.view(tokens, width // size, size)
    weight_JC = torch.embedding(weight_2C, _kinds(heads.queries, heads.keys, weight_2C.device))
    normed_TJC = unit_rms(rows_TJC.narrow(1, 0, kinds).float(), eps=heads.eps) * weight_JC
    qk_TJC = normed_TJC.to(qkv_TN.dtype)
    if turn is not None:
        qk_TJC = _rotate(qk_TJC, turn)
    q_THC, k_TKC = qk_TJC.split_with_sizes((heads.queries, heads.keys), 1)
    if ssmax_T is not None:
        q_THC = (q_THC.float() * ssmax_T[:, None, None]).to(q_THC.dtype)
    return q_THC, k_TKC, rows_TJC.narrow(1, kinds, heads.keys)


def prepare_reference(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    slots_T: torch.Tensor,
    *,
    heads: Heads,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries ready for attention, [T, H, C]; keys and values go into their slots of the cache.

    A row whose slot is -1 is padding: its key and value go nowhere.
    """
    q_THC, k_TKC, v_TKC = split_heads(qkv_TN, weight_2C, heads=heads, turn=turn, ssmax_T=ssmax_T)
    cache.write(slots_T, k_TKC, v_TKC)
    return q_THC


@triton.jit
def _rotation_kernel(
    positions, frequencies, cos, sin, T,
    C: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, C)
    frequency_C = tl.load(frequencies + c % (C // 2))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    position_T = tl.load(positions + t, mask=t < T, other=0)
    angle_TC = position_T.to(tl.float32)[:, None] * frequency_C
    at, real = t[:, None] * C + c, t[:, None] < T
    tl.store(cos + at, tl.cos(angle_TC).to(cos.dtype.element_ty), mask=real)
    sin_TC = tl.sin(angle_TC)
    sin_TC = tl.where(c < C // 2, -sin_TC, sin_TC)
    tl.store(sin + at, sin_TC.to(sin.dtype.element_ty), mask=real)


@triton.jit
def _ssmax_kernel(positions, scale, T, BLOCK_T: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    position_T = tl.load(positions + t, mask=t < T, other=0).to(tl.float32)
    scale_T = tl.exp(0.1 * tl.log(1.0 + (position_T + 1.0) / 2048.0))
    tl.store(scale + t, scale_T, mask=t < T)


@triton.jit
def row_of(at, ROWS: tl.constexpr, C: tl.constexpr, SWAP: tl.constexpr = False):
    """C numbers, or their swapped halves, once for each row.

    Each row loads them: a kernel would have to wait for one row's to hand them to the others.
    """
    c = tl.arange(0, C)
    if SWAP:
        c = (c + C // 2) % C
    return tl.load(at + tl.broadcast_to(c[None, :], (ROWS, C))).to(tl.float32)


@triton.jit
def prepared(
    x_RC, swapped_RC, weight_RC, swapped_weight_RC, cos_RC, sin_RC, ssmax_R, eps,
    C: tl.constexpr, TURN: tl.constexpr, ROUND: tl.constexpr, SSMAX: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """For kernels: norm and position of heads [R, C], whose halves are swapped in `swapped_RC`."""
    x_RC, swapped_RC = x_RC.to(tl.float32), swapped_RC.to(tl.float32)
    root_R1 = tl.rsqrt(tl.sum(x_RC * x_RC, axis=1) / C + eps)[:, None]
    y_RC = (x_RC * root_R1 * weight_RC).to(dtype).to(tl.float32)
    if TURN:
        swapped_RC = (swapped_RC * root_R1 * swapped_weight_RC).to(dtype).to(tl.float32)
        y_RC, turned_RC = y_RC * cos_RC, swapped_RC * sin_RC
        if ROUND:
            y_RC, turned_RC = y_RC.to(dtype).to(tl.float32), turned_RC.to(dtype).to(tl.float32)
        y_RC = (y_RC + turned_RC).to(dtype).to(tl.float32)
    if SSMAX:
        y_RC *= ssmax_R[:, None]
    return y_RC.to(dtype)


@triton.jit
def fp8_of(x, scale):
    """The bytes of x / scale in E4M3: to the nearest, halves to even; 448 if larger or a NaN.

    By arithmetic, as before Ada no GPU has an instruction for it.
    """
    y = tl.div_rn(x.to(tl.float32), scale)
    size = tl.minimum(tl.abs(y), 448.0)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121)
    # The last place of the sum with this power of two is that of E4M3, so the sum is rounded there.
    power = (exponent + 20) << 23
    total = (size + power.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (sign | (((exponent - 121) << 3) + total - power)).to(tl.uint8)


@triton.jit
def _prepare_kernel(
    qkv, weight, slots, cos, sin, ssmax, q, pairs, scales, qkv_stride, half_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, TURN: tl.constexpr,
    ROUND: tl.constexpr, SSMAX: tl.constexpr, BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one token a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.arange(0, C)
    swapped = (c + C // 2) % C
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    query, normed = (j < HEADS)[:, None], (j < HEADS + KV_HEADS)[:, None]
    kind = tl.where(query, 0, C)
    weight_JC = tl.load(weight + kind + c, mask=normed, other=0.0).to(tl.float32)
    swapped_weight_JC = tl.load(weight + kind + swapped, mask=normed, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    row = qkv + t * qkv_stride + j[:, None] * C
    held = (j < HEADS + 2 * KV_HEADS)[:, None]
    x_JC = tl.load(row + c, mask=held, other=0.0)
    swapped_JC = tl.load(row + swapped, mask=normed, other=0.0)
    cos_JC, sin_JC, scale_J = 1.0, 0.0, tl.full((BLOCK_J,), 1.0, tl.float32)
    if TURN:
        cos_JC, sin_JC = row_of(cos + t * C, BLOCK_J, C), row_of(sin + t * C, BLOCK_J, C)
    if SSMAX:
        scale_J = tl.where(j < HEADS, tl.load(ssmax + t), scale_J)
    y_JC = prepared(
        x_JC, swapped_JC, weight_JC, swapped_weight_JC, cos_JC, sin_JC, scale_J, eps,
        C, TURN, ROUND, SSMAX, q.dtype.element_ty,
    )  # fmt: skip
    tl.store(q + t * HEADS * C + j[:, None] * C + c, y_JC, mask=query)
    y_JC = tl.where(normed, y_JC, x_JC)
    if pairs.dtype.element_ty == tl.uint8:
        y_JC = fp8_of(y_JC, tl.load(scales + (j >= HEADS + KV_HEADS).to(tl.int32))[:, None])
    y_JC = y_JC.to(pairs.dtype.element_ty)
    kept = (j >= HEADS)[:, None] & held & (slot >= 0)
    at = (j - HEADS).to(tl.int64)[:, None] * half_stride + slot * C + c
    tl.store(pairs + at, y_JC, mask=kept)


# Heads and warps of a program, by the most tokens.
PREPARE = {16: (2, 1), 256: (4, 1), 2**31: (8, 2)}


def _launch_rotation(
    positions_T: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype
) -> Rotation:
    assert positions_T.is_contiguous() and head_dim & (head_dim - 1) == 0
    tokens = len(positions_T)
    cos, sin = (
        torch.empty(tokens, 1, head_dim, dtype=dtype, device=positions_T.device) for _ in range(2)
    )
    if tokens:
        _rotation_kernel[(cdiv(tokens, 4),)](
            positions_T, _frequencies(head_dim, theta, positions_T.device), cos, sin, tokens,
            C=head_dim, BLOCK_T=4, **pdl(positions_T),
        )  # fmt: skip
    return Rotation(cos=cos, sin=sin)


def _launch_ssmax(positions_T: torch.Tensor) -> torch.Tensor:
    assert positions_T.is_contiguous()
    scale_T = torch.empty(len(positions_T), dtype=torch.float32, device=positions_T.device)
    if len(positions_T):
        grid = (cdiv(len(positions_T), 128),)
        _ssmax_kernel[grid](
            positions_T, scale_T, len(positions_T), BLOCK_T=128, **pdl(positions_T)
        )  # fmt: skip
    return scale_T


def _launch_prepare(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    slots_T: torch.Tensor,
    *,
    heads: Heads,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
) -> torch.Tensor:
    (tokens, size), pairs_2KSC = qkv_TN.shape, cache.pairs_2KSC
    head_dim, held = weight_2C.shape[1], heads.queries + 2 * heads.keys
    assert head_dim & (head_dim - 1) == 0 and size >= held * head_dim
    assert qkv_TN.stride(1) == 1 and len(slots_T) == tokens
    check_preparation(weight_2C, cache, turn, ssmax_T, heads=heads, tokens=tokens)
    q_THC = torch.empty(tokens, heads.queries, head_dim, dtype=qkv_TN.dtype, device=qkv_TN.device)
    if tokens == 0:
        return q_THC
    block, warps = by_size(PREPARE, tokens)
    rounds = rounds_products(turn, qkv_TN)
    if cache.scales_2 is not None:
        pairs_2KSC = pairs_2KSC.view(torch.uint8)
    _prepare_kernel[(tokens, cdiv(held, block))](
        qkv_TN, weight_2C, slots_T, *angles(turn), ssmax_T, q_THC, pairs_2KSC, cache.scales_2,
        qkv_TN.stride(0), pairs_2KSC.stride(1), heads.eps,
        HEADS=heads.queries, KV_HEADS=heads.keys, C=head_dim,
        TURN=turn is not None, ROUND=rounds, SSMAX=ssmax_T is not None, BLOCK_J=block,
        num_warps=warps, enable_fp_fusion=not rounds, **pdl(qkv_TN),
    )  # fmt: skip
    return q_THC


def angles(turn: Rotation | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A rotation, or none, as the arguments of a kernel."""
    return (None, None) if turn is None else (turn.cos, turn.sin)


def rounds_products(turn: Rotation | None, x_TN: torch.Tensor) -> bool:
    """Whether the rotation of `x_TN` rounds its products.

    A kernel that does so needs `enable_fp_fusion=False`: else the compiler makes of a product and
    a sum that are rounded to BF16 one BF16 operation, which does not round the product.
    """
    return turn is not None and turn.cos.dtype == x_TN.dtype


def check_preparation(
    weight_2C: torch.Tensor,
    cache: LayerCache,
    turn: Rotation | None,
    ssmax_T: torch.Tensor | None,
    *,
    heads: Heads,
    tokens: int,
) -> None:
    """What a kernel that prepares heads takes for granted."""
    assert weight_2C.is_contiguous()
    cache.check()
    assert cache.pairs_2KSC.shape[:2] == (2, heads.keys)
    assert cache.pairs_2KSC.shape[3] == weight_2C.shape[1]
    for table in angles(turn):
        assert table is None or table.is_contiguous() and len(table) == tokens
    assert ssmax_T is None or ssmax_T.dtype == torch.float32 and len(ssmax_T) == tokens


rotation = op(reference=rotation_reference, kernel=_launch_rotation)
ssmax = op(reference=ssmax_reference, kernel=_launch_ssmax)
prepare = op(reference=prepare_reference, kernel=_launch_prepare)
