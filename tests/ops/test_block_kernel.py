"""The kernels of a drafter's blocks against the equations, in the interpreter and on a GPU."""

import itertools

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops import decode, rope
from limelight.ops.block import (
    BlockLayout,
    block_attention,
    conv_add_rmsnorm,
    dynamic_conv,
)
from limelight.ops.paging import FP8, LayerCache, PagedLayout
from limelight.ops.rope import Heads, Rotation

EPS, SCALE = 1e-6, 0.3
pytestmark = pytest.mark.usefixtures("poisoned")
places = pytest.mark.parametrize("place", PLACES)
cheap_places = pytest.mark.parametrize("place", [p for p in PLACES if p.id != "fp16-cpu"])

# The tokens before each block; None is padding.
CONTEXTS = [64, 0, None, 99, 1, None]
REAL = (40, 8, 128)


def layout_of(contexts, rows, *, window, causal, device, limit=2**30, block_size=16) -> BlockLayout:
    """Blocks behind contexts in scattered pages, and no longer than a limit."""
    count, longest = len(contexts), max(c or 0 for c in contexts) + rows
    width = -(-longest // block_size)
    order = 1 + torch.randperm(count * width, generator=torch.Generator().manual_seed(0))
    tables_SN = order.to(torch.int32).view(count, width)
    at_BQ = torch.tensor([c or 0 for c in contexts])[:, None] + torch.arange(rows)
    there_B1 = torch.tensor([c is not None for c in contexts])[:, None]
    inside_BQ = (at_BQ < limit) & there_B1
    positions_BQ = at_BQ.clamp(max=limit - 1)
    rows_B = torch.arange(count).flip(0)
    blocks_BQ = tables_SN[rows_B[:, None], positions_BQ // block_size].long()
    slots_BQ = blocks_BQ * block_size + positions_BQ % block_size
    ends_B = torch.where(there_B1[:, 0], (at_BQ[:, -1] + 1).clamp(max=limit), 0)
    layout = PagedLayout(
        tables_SN=tables_SN.to(device), rows_B=rows_B.int().to(device),
        seq_lens_B=ends_B.int().to(device),
        # Blocks are as long as each other, wherever a step's sequences start.
        starts_B=torch.zeros(count + 1, dtype=torch.int32, device=device),
        slots_T=slots_BQ.where(inside_BQ, -1).flatten().to(device), block_size=block_size,
        window=window, few=count, max_query=16, max_len=longest,
    )  # fmt: skip
    return BlockLayout(positions_BQ.flatten().to(device), rows, layout, causal)


def cache_of(blocks: BlockLayout, contexts, kv_heads, size, dtype, *, fp8) -> LayerCache:
    """Context in its slots, zeros in the first, and NaN elsewhere."""
    layout, device = blocks.layout, blocks.positions_T.device
    slots = (int(layout.tables_SN.max()) + 1) * layout.block_size
    pairs = torch.full((2, kv_heads, slots, size), float("nan"), device=device)
    pairs[:, :, 0] = 0
    scales_2 = torch.tensor([0.013, 0.009], device=device) if fp8 else None
    cache = LayerCache(pairs.to(FP8 if fp8 else dtype), scales_2)
    for row, context in zip(layout.rows_B.tolist(), contexts, strict=True):
        at = torch.arange(context or 0, device=device)
        where = layout.tables_SN[row, at // layout.block_size].long() * layout.block_size
        new = torch.randn(2, len(at), kv_heads, size, device=device).to(dtype)
        cache.write(where + at % layout.block_size, *new)
    return cache


def by_the_equation(q_THC, cache, blocks):
    """In FP64; zero where nothing is seen."""
    slots_BL, bias_BQL = blocks.keys
    k_KBLC, v_KBLC = (x.double().nan_to_num() for x in cache.read(slots_BL))
    group = q_THC.shape[1] // len(k_KBLC)
    q_BQKGC = q_THC.double().unflatten(0, bias_BQL.shape[:2]).unflatten(2, (-1, group))
    scores = torch.einsum("bqkgc,kblc->bqkgl", q_BQKGC, k_KBLC) * SCALE
    weights = (scores + bias_BQL[:, :, None, None].double()).softmax(dim=-1).nan_to_num()
    return torch.einsum("bqkgl,kblc->bqkgc", weights, v_KBLC).flatten(0, 1).flatten(1, 2)


def check(contexts, shape, place, *, rows, window, causal=False, fp8=False, fp32=True, **settings):
    (device, dtype), (heads, kv_heads, size) = place, shape
    torch.manual_seed(0)
    blocks = layout_of(contexts, rows, window=window, causal=causal, device=device, **settings)
    cache = cache_of(blocks, contexts, kv_heads, size, dtype, fp8=fp8)
    tokens = len(blocks.positions_T)
    qkv_TN = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device).to(dtype)
    weight_2C = (1 + 0.2 * torch.randn(2, size, device=device)).to(dtype)
    turn = rope.rotation.reference(
        blocks.positions_T, head_dim=size, theta=1e4, dtype=torch.float32 if fp32 else dtype
    )
    options = {"heads": Heads(heads, kv_heads, EPS), "turn": turn}
    right = LayerCache(cache.pairs_2KSC.clone(), cache.scales_2)
    q_THC = rope.prepare.reference(qkv_TN, weight_2C, right, blocks.layout.slots_T, **options)
    out_THC = block_attention.kernel(qkv_TN, weight_2C, cache, blocks, scale=SCALE, **options)
    assert out_THC.dtype == dtype
    # Head by head: a cache of real size fills a GPU.
    for pair in zip(cache.pairs_2KSC.flatten(0, 1), right.pairs_2KSC.flatten(0, 1), strict=True):
        mine, theirs = (x_SC.float() for x_SC in pair)
        assert torch.equal(mine.isnan(), theirs.isnan())
        if not fp8:
            assert_near(mine.nan_to_num(), theirs.nan_to_num(), dtype=dtype)
    # A number of FP8 that is rounded to another is far from it: those count that were written.
    expected = by_the_equation(q_THC, cache if fp8 else right, blocks)
    assert_near(out_THC, expected, dtype=dtype)


@pytest.mark.parametrize("window", [32, None])
def test_a_window_reads_as_many_keys_behind_any_context(window):
    """Counted: a drafter with windows costs no more behind a long context."""
    counts = {
        len(layout_of([context], 8, window=window, causal=False, device="cpu").keys[0][0])
        for context in (1024, 16_384, 131_072)
    }
    assert counts == {31 + 8} if window else len(counts) == 3


@pytest.fixture(params=["parts", "apart", "whole"])
def small_tiles(request, monkeypatch):
    """Short contexts then have several parts, with the block for itself or not, or but one."""
    splits, apart = {"parts": (4, False), "apart": (3, True), "whole": (1, False)}[request.param]
    for table in ("FULL", "FULL_FP8", "WINDOW"):
        monkeypatch.setattr(decode, table, {2**31: decode.Tile(32, splits, 1, apart=apart)})


@cheap_places
@pytest.mark.parametrize("causal", [False, True], ids=["all rows", "causal"])
@pytest.mark.parametrize(
    "window",
    [37, pytest.param(16, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)],
    ids="window-{}".format,
)
def test_every_row_sees_context_and_block(window, causal, place, small_tiles):
    check(CONTEXTS, (6, 2, 16), place, rows=8, window=window, causal=causal)


@cheap_places
@pytest.mark.parametrize("rows, window", [(1, 5), (3, 8), (15, 15), (16, 64)])
def test_blocks_of_other_sizes(rows, window, place):
    check(CONTEXTS, (4, 2, 32), place, rows=rows, window=window, block_size=5)


@places
@pytest.mark.parametrize("fp32", [True, False], ids=["fp32 angles", "rounded angles"])
def test_the_tiles_of_serving_give_the_same(fp32, place):
    check(CONTEXTS, (5, 1, 32), place, rows=8, window=64, fp32=fp32)


@cheap_places
def test_rows_behind_the_longest_length_count_as_the_last_and_write_nothing(place, small_tiles):
    check([64, 60, 70, 66, None], (4, 2, 16), place, rows=8, window=37, limit=71)


@cheap_places
def test_an_fp8_cache_holds_context_and_block(place):
    check(CONTEXTS, (4, 2, 32), place, rows=8, window=37, fp8=True)


# Channels, a group of them, taps, rows of a block.
CONVOLUTIONS = [(48, 12, 3, 4), (200, 8, 2, 8), (64, 64, 1, 3), (96, 16, 5, 2)]


def convolution(size, group, taps, rows, place, *, blocks=3):
    """Two streams of rows that lie apart, and the kernel's parts, in the type of the place."""
    device, dtype = place
    torch.manual_seed(size)
    tokens = rows * blocks
    wide = torch.randn(2, tokens, size + 16, device=device).to(dtype)
    base_PD = torch.randn(taps, size, device=device).to(dtype)
    changes = torch.randn(tokens, 2 * taps * (size // group), device=device).to(dtype)
    change_TPG = changes.unflatten(1, (2, taps, -1))[:, 1]
    return *wide[:, :, :size], base_PD, change_TPG


@places
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_convolutions_run_along_their_blocks_and_round_as_the_reference(shape, place):
    _, x_TD, base_PD, change_TPG = convolution(*shape, place)
    y_TD = dynamic_conv.kernel(x_TD, base_PD, change_TPG, rows=shape[3])
    assert torch.equal(y_TD, dynamic_conv.reference(x_TD, base_PD, change_TPG, rows=shape[3]))


@places
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_what_a_sublayer_adds_is_normed_for_the_next(shape, place):
    h_TD, x_TD, base_PD, change_TPG = convolution(*shape, place)
    weight_D = (1 + 0.2 * torch.randn(shape[0], device=place[0])).to(place[1])
    arguments, options = (h_TD, x_TD, base_PD, change_TPG), {"rows": shape[3], "eps": EPS}
    mine = conv_add_rmsnorm.kernel(*arguments, weight_D, **options)
    theirs = conv_add_rmsnorm.reference(*arguments, weight_D, **options)
    assert torch.equal(mine[0], theirs[0])
    assert_near(mine[1], theirs[1], dtype=place[1])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 512])
def test_convolutions_of_real_sizes(tokens):
    shape, place = (5120, 16, 2, 8), ("cuda", torch.bfloat16)
    parts = convolution(*shape, place, blocks=tokens // 8)
    weight_D = torch.randn(5120, device="cuda").bfloat16()
    assert torch.equal(
        dynamic_conv.kernel(*parts[1:], rows=8), dynamic_conv.reference(*parts[1:], rows=8)
    )
    mine = conv_add_rmsnorm.kernel(*parts, weight_D, rows=8, eps=EPS)
    theirs = conv_add_rmsnorm.reference(*parts, weight_D, rows=8, eps=EPS)
    assert torch.equal(mine[0], theirs[0])
    assert_near(mine[1], theirs[1], dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("window", [4096, 512, None], ids="window-{}".format)
@pytest.mark.parametrize("batch", [1, 8, 70], ids="B{}".format)
def test_real_sizes(batch, window, fp8):
    contexts = [6000 + 13 * b if b % 3 else 300 * b for b in range(batch)]
    check(contexts, REAL, ("cuda", torch.bfloat16), rows=8, window=window, fp8=fp8, fp32=False)


def compile_cases() -> list[Case]:
    def attend(batch, window, fp8):
        heads, kv_heads, size = REAL
        tokens = 8 * batch
        rows_B, starts_B = (meta(n, dtype=torch.int32) for n in (batch, batch + 1))
        layout = PagedLayout(
            tables_SN=meta(256, 16_384, dtype=torch.int32), rows_B=rows_B, seq_lens_B=rows_B,
            starts_B=starts_B, slots_T=meta(tokens, dtype=torch.int64), block_size=16,
            window=window, few=batch, max_query=8, max_len=262_144,
        )  # fmt: skip
        pairs = meta(2, kv_heads, 4096, size, dtype=FP8 if fp8 else torch.bfloat16)
        cache = LayerCache(pairs, meta(2, dtype=torch.float32) if fp8 else None)
        blocks = BlockLayout(meta(tokens, dtype=torch.int64), 8, layout, False)
        block_attention.kernel(
            meta(tokens, (heads + 2 * kv_heads) * size), meta(2, size), cache, blocks,
            heads=Heads(heads, kv_heads, EPS), scale=SCALE,
            turn=Rotation(meta(tokens, 1, size), meta(tokens, 1, size)),
        )  # fmt: skip

    def convolve(tokens, size, add):
        changes = meta(tokens, 2, 2, size // 16)[:, 1]
        x, base = meta(tokens, size), meta(2, size)
        if add:
            conv_add_rmsnorm.kernel(x, x, base, changes, meta(size), rows=8, eps=EPS)
        else:
            dynamic_conv.kernel(x, base, changes, rows=8)

    convolutions = [
        Case(f"convolution, {size} channels", lambda a=(8, size, add): convolve(*a), decode=True)
        for size, add in itertools.product((192, 5120), (False, True))
    ]
    return convolutions + [
        Case(
            f"attention of {batch} blocks, window {window}" + (", FP8" if fp8 else ""),
            lambda a=(batch, window, fp8): attend(*a),
            decode=True,
        )
        for (batch, window), fp8 in itertools.product([(1, 4096), (8, 4096), (64, 64)], [0, 1])
    ]
