"""Batches through the attention kernels, against the equation in FP64."""

from dataclasses import replace

import numpy as np
import torch
from near import assert_near

from limelight.ops import rope
from limelight.ops.activation import output_gate
from limelight.ops.attention import gate_of, paged_attention
from limelight.ops.paging import FEW_QUERIES, FP8, LayerCache, PagedLayout
from limelight.ops.rope import Heads

EPS, SCALE = 1e-6, 0.3
# Query heads, KV heads, head size.
SHAPES = {"Flint": (6, 2, 16), "Beam": (6, 1, 32)}
SHAPES_FP8 = {"Flint": (6, 2, 32), "Beam": (6, 1, 64)}
REAL = {"Flint": (32, 4, 128), "Beam": (6, 1, 128)}


def layout_of(batch, *, block_size, window, device):
    """Sequences in scattered blocks, and the slots of all tokens of each."""
    lengths = [past + new for past, new in batch]
    counts = [new for _, new in batch]
    per = [-(-length // block_size) for length in lengths]
    order = np.random.default_rng(0).permutation(sum(per)) + 1
    rows = np.random.default_rng(1).permutation(len(batch))
    table = np.full((len(batch), max(max(per), 1)), 2**30, dtype=np.int32)
    slots = []
    for row, count, length in zip(rows, per, lengths, strict=True):
        table[row, :count], order = order[:count], order[count:]
        at = np.arange(length)
        slots.append(table[row, at // block_size].astype(np.int64) * block_size + at % block_size)
    new = [
        s[len(s) - n :] if len(s) else np.full(n, -1) for s, n in zip(slots, counts, strict=True)
    ]
    few = next((b for b, n in enumerate(counts) if n > FEW_QUERIES), len(batch))

    def on_device(values, dtype=np.int32):
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device)

    layout = PagedLayout(
        tables_SN=on_device(table), rows_B=on_device(rows), seq_lens_B=on_device(lengths),
        starts_B=on_device([0, *np.cumsum(counts)]),
        slots_T=on_device(np.concatenate(new), np.int64), block_size=block_size, window=window,
        few=few, max_query=max(counts), max_len=max(lengths),
    )  # fmt: skip
    return layout, [on_device(s, np.int64) for s in slots], counts


def by_the_equation(q_QHC, k_LKC, v_LKC, *, window, sinks_H):
    """In FP64, of the last Q of L tokens."""
    group = q_QHC.shape[1] // k_LKC.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q_QHC, k_LKC, v_LKC))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * SCALE
    key = torch.arange(len(k_LKC), device=q.device)
    query = key[len(key) - len(q_QHC) :, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    scores.masked_fill_(hidden, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return (weights @ v.repeat_interleave(group, 0)).transpose(0, 1)


def cache_of(slots, kv_heads, size, dtype, device, *, fp8):
    """A cache that holds NaN. Scales of FP8 are such that some values are beyond its reach."""
    most = 1 + max((int(s.max()) for s in slots if len(s)), default=0)
    room = (most // 16 + 2) * 16
    pairs = torch.full((2, kv_heads, room, size), float("nan"), device=device)
    scales_2 = torch.tensor([0.013, 0.004], device=device) if fp8 else None
    return LayerCache(pairs.to(FP8 if fp8 else dtype), scales_2)


def check(batch, shape, place, *, window, family, block_size=16, fp8=False, **known):
    (device, dtype), (heads, kv_heads, size) = place, shape
    torch.manual_seed(0)
    layout, slots, counts = layout_of(batch, block_size=block_size, window=window, device=device)
    layout = replace(layout, **known)
    tokens, gates = sum(counts), heads if family == "Beam" else 0
    qkv_TN = torch.randn(tokens, (heads + 2 * kv_heads + gates) * size, device=device).to(dtype)
    weight_2C = (1 + 0.2 * torch.randn(2, size, device=device)).to(dtype)
    positions = torch.randint(5000, (tokens,), device=device)
    options = {"heads": Heads(heads, kv_heads, EPS)}
    if window is not None:
        kind = dtype if family == "Flint" else torch.float32
        options["turn"] = rope.rotation.reference(positions, head_dim=size, theta=1e4, dtype=kind)
    elif family == "Beam":
        options["ssmax_T"] = rope.ssmax.reference(positions)
    sinks_H = torch.randn(heads, device=device) if family == "Flint" else None
    bias_H = torch.randn(heads, device=device).to(dtype) if gates else None

    cache = cache_of(slots, kv_heads, size, dtype, device, fp8=fp8)
    firsts = [0 if window is None else max(0, past - window + 1) for past, _ in batch]
    for slots_L, part, first in zip(slots, batch, firsts, strict=True):
        if sum(part):
            old = torch.randn(2, part[0] - first, kv_heads, size, device=device).to(dtype)
            cache.write(slots_L[first : part[0]], *old)
    q_THC, k_TKC, v_TKC = rope.split_heads(qkv_TN, weight_2C, **options)
    right = LayerCache(cache.pairs_2KSC.clone(), cache.scales_2)
    right.write(layout.slots_T, k_TKC, v_TKC)
    out_THC = paged_attention.kernel(
        qkv_TN, weight_2C, cache, layout,
        scale=SCALE, sinks_H=sinks_H, gate_bias_H=bias_H, **options,
    )  # fmt: skip
    assert out_THC.dtype == dtype
    check_written(cache, right, dtype)
    expected = torch.zeros(out_THC.shape, dtype=torch.float64, device=device)
    # A number of FP8 that is rounded to another is far from it: those count that the kernel wrote.
    source = cache if fp8 else right
    new = [slice(end - count, end) for count, end in zip(counts, np.cumsum(counts), strict=True)]
    for slots_L, part, first, rows in zip(slots, batch, firsts, new, strict=True):
        if sum(part):
            k_LKC, v_LKC = (x[:, 0].transpose(0, 1) for x in source.read(slots_L[None, first:]))
            expected[rows] = by_the_equation(
                q_THC[rows], k_LKC, v_LKC, window=window, sinks_H=sinks_H
            )
    if bias_H is not None:
        gate_THC = gate_of(qkv_TN, out_THC)
        expected = output_gate(expected, gate_THC.double(), bias_H.double())
    assert_near(out_THC, expected, dtype=dtype)


def check_written(cache, right, dtype):
    """Both hold the same, but for what the preparation of keys rounds in another way."""
    mine, theirs = cache.pairs_2KSC.float(), right.pairs_2KSC.float()
    assert torch.equal(mine.isnan(), theirs.isnan())
    mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
    if cache.scales_2 is None:
        assert_near(mine, theirs, dtype=dtype)
        return
    assert torch.equal(mine[1], theirs[1])
    assert (mine[0] == theirs[0]).float().mean() > 0.99
    assert ((mine[0] - theirs[0]).abs() <= theirs[0].abs() / 8 + 2**-9).all()
