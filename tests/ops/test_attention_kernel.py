"""The attention kernels, from projection to output, against the equation in FP64."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops import batch_invariance, decode, far, prefill, rope
from limelight.ops.activation import output_gate
from limelight.ops.attention import gate_of, paged_attention
from limelight.ops.paging import FEW_QUERIES, FP8, LayerCache, PagedLayout, Prompt
from limelight.ops.rope import Heads, Rotation

EPS, SCALE = 1e-6, 0.3
pytestmark = pytest.mark.usefixtures("poisoned")
places = pytest.mark.parametrize("place", PLACES)


PADDING = (-1, 1)
# Each sequence: tokens in the cache, tokens of this step; their sum is 0: rows of no sequence.
BATCHES = {
    "one token": [(0, 1)],
    "decode": [(200, 1), (63, 1), PADDING, (64, 1), PADDING],
    "drafts": [(150, 4), (0, 3), (63, 1)],
    "16 queries": [(90, 16)],
    "prompts": [(30, 40), (0, 17), (60, 33)],
    "both": [(130, 1), (5, 2), (50, 30)],
}
# In no order, each kind of padding among them: none knows which have few queries but the device.
MIXED = {
    "in any order": [(50, 30), (130, 1), (-20, 20), (5, 2), (0, 3), (0, 17), PADDING],
    "few alone": [(70, 1), (3, 2), *[(0, 0)] * 3],
    "many alone": [(0, 19), *[(0, 0)] * 3, (60, 33), (-9, 9)],
}
# Query heads, KV heads, head size.
SHAPES = {"Flint": (6, 2, 16), "Beam": (6, 1, 32)}
SHAPES_FP8 = {"Flint": (6, 2, 32), "Beam": (6, 1, 64)}
REAL = {"Flint": (32, 4, 128), "Beam": (6, 1, 128)}
REAL_BATCHES = {
    "decode 1": [(100_000, 1)],
    "decode 8": [(1000 + 17 * b, 1) for b in range(8)],
    "decode 130": [(7 * b, 1) for b in range(130)],
    "one long": [(50_000, 1)] + [(30, 1)] * 31,
    "drafts": [(2000, 8), (511, 8), (70, 3)],
    "prefill": [(0, 700), (512, 1025)],
    "both": [(3000, 1), (0, 1), (1000, 600)],
}
REAL_MIXED = [(1000, 600), (3000, 1), (0, 7), *[(0, 0)] * 120, (0, 300), (-400, 400)]


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


@pytest.fixture
def small_tiles(monkeypatch):
    """Short sequences then have several parts and several tiles in a part, few of them a place."""
    for table in ("FULL", "FULL_FP8", "WINDOW"):
        monkeypatch.setattr(decode, table, {2**31: decode.Tile(32, 3, 1, apart=True)})
    for table in ("FULL", "FULL_FP8", "WINDOW", "WINDOW_FP8"):
        monkeypatch.setattr(prefill, table, {2**31: prefill.Tile(32, 16, 4, 3)})
    monkeypatch.setattr(prefill, "BLOCK_B", 2)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "fp16-cpu"])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("window", [None, 37], ids="window-{}".format)
@pytest.mark.parametrize("name", BATCHES)
def test_every_query_sees_its_keys(name, window, family, place, small_tiles):
    check(BATCHES[name], SHAPES[family], place, window=window, family=family)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "fp16-cpu"])
@pytest.mark.parametrize("family", SHAPES_FP8)
@pytest.mark.parametrize("window", [None, 37], ids="window-{}".format)
@pytest.mark.parametrize("name", BATCHES)
def test_every_query_sees_its_keys_in_fp8(name, window, family, place, small_tiles):
    check(BATCHES[name], SHAPES_FP8[family], place, window=window, family=family, fp8=True)


@places
@pytest.mark.parametrize("family, window", [("Flint", 37), ("Beam", None)])
@pytest.mark.parametrize(
    "name, mixed",
    [("in any order", 3), ("few alone", 3), ("many alone", 1)]
    + [pytest.param("in any order", most, marks=pytest.mark.slow) for most in (1, 16)],
)
def test_the_device_tells_who_has_few_queries(name, mixed, window, family, place, small_tiles):
    check(MIXED[name], SHAPES[family], place, window=window, family=family, mixed=mixed)


def prompts_of(batch):
    """All that the host may know."""
    starts = np.cumsum([0, *(new for _, new in batch)])
    return tuple(Prompt(b, int(starts[b]), new, past) for b, (past, new) in enumerate(batch))


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "fp16-cpu"])
@pytest.mark.parametrize(
    "past, block_size, family",
    [(0, 16, "Flint"), (31, 16, "Beam"), (64, 8, "Flint"), (130, 16, "Beam"), (130, 5, "Flint")],
)
def test_whole_pieces_of_a_prompts_keys_are_seen_first(
    past, block_size, family, place, monkeypatch
):
    """The rest, of keys and of queries, goes on from there; so does no other sequence. Blocks of
    which no piece is made leave all to the kernel."""
    monkeypatch.setattr(far, "PIECE", 32)
    monkeypatch.setattr(far, "QUERIES", 16)
    monkeypatch.setattr(far, "LEAST_PAIRS", 1)
    monkeypatch.setattr(prefill, "FULL", {2**31: prefill.Tile(32, 16, 4, 3)})
    batch = [(40, 1), (20, 18), (past, 37)]
    prompts = prompts_of(batch)[1:]
    check(
        batch, SHAPES[family], place,
        window=None, family=family, block_size=block_size, prompts=prompts,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("family", REAL)
@pytest.mark.parametrize("batch", [[(0, 4500)], [(100, 1), (8192, 1024)], [(16_400, 2100)]])
def test_pieces_of_real_sizes(batch, family):
    place, prompts = ("cuda", torch.bfloat16), prompts_of(batch)[-1:]
    check(batch, REAL[family], place, window=None, family=family, prompts=prompts)


@places
@pytest.mark.parametrize("block_size, window", [(1, 1), (3, 32), (5, 33)])
def test_windows_and_blocks_of_odd_sizes(block_size, window, place, small_tiles):
    batch, shape = BATCHES["both"], (2, 2, 16)
    check(batch, shape, place, window=window, family="Flint", block_size=block_size)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "fp16-cpu"])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("window", [None, 37], ids="window-{}".format)
@pytest.mark.parametrize("name", ["decode", "drafts", "both"])
@pytest.mark.parametrize("splits, fp8", [(1, False), (3, False), (3, True)])
def test_new_tokens_end_the_last_part(splits, fp8, name, window, family, place, monkeypatch):
    for table in ("FULL", "FULL_FP8", "WINDOW"):
        monkeypatch.setattr(decode, table, {2**31: decode.Tile(32, splits, 1)})
    shape = (SHAPES_FP8 if fp8 else SHAPES)[family]
    check(BATCHES[name], shape, place, window=window, family=family, fp8=fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["as activations", "fp8"])
@pytest.mark.parametrize("name", ["decode", "both"])
def test_the_tiles_of_serving_give_the_same(name, fp8):
    place = ("cpu", torch.float16)
    check(BATCHES[name], (2, 1, 32), place, window=None, family="Flint", fp8=fp8)


@places
@pytest.mark.parametrize("batch", [[(0, 1)] * 8, [(0, 8)], [(16, 24)]], ids=str)
def test_a_token_that_sees_itself_alone_gets_its_own_value(batch, place):
    """Every number of FP8, to the bit."""
    device, dtype = place
    layout, slots, counts = layout_of(batch, block_size=16, window=1, device=device)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype).nan_to_num(0.0)
    values_TC = 0.25 * numbers.view(8, 32).repeat(3, 1)[: sum(counts)].to(device)
    pairs = cache_of(slots, 1, 32, dtype, device, fp8=True).pairs_2KSC
    cache = LayerCache(pairs, torch.tensor([1.0, 0.25], device=device))
    qk_TN = torch.randn(sum(counts), 64, device=device).to(dtype)
    out_THC = paged_attention.kernel(
        torch.cat((qk_TN, values_TC), dim=1), torch.ones(2, 32, device=device).to(dtype),
        cache, layout, heads=Heads(1, 1, EPS), scale=SCALE,
    )  # fmt: skip
    assert torch.equal(out_THC[:, 0], values_TC)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", REAL)
@pytest.mark.parametrize("name", REAL_BATCHES)
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "window"])
def test_real_sizes(windowed, name, family, fp8):
    window = {"Flint": 513, "Beam": 512}[family] if windowed else None
    place = ("cuda", torch.bfloat16)
    check(REAL_BATCHES[name], REAL[family], place, window=window, family=family, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("family", REAL)
@pytest.mark.parametrize("mixed", [1, 8])
@pytest.mark.parametrize("window", [None, 512], ids="window-{}".format)
def test_real_sizes_in_any_order(window, mixed, family):
    place = ("cuda", torch.bfloat16)
    check(REAL_MIXED, REAL[family], place, window=window, family=family, mixed=mixed)


def compile_cases() -> list[Case]:
    def attend(family, tokens, few, window, max_query=1, fp8=False, **known):
        heads, kv_heads, size = REAL[family]
        beam = family == "Beam"
        row = (heads * (2 if beam else 1) + 2 * kv_heads) * size
        kind = torch.float32 if beam else torch.bfloat16
        turn = Rotation(*(meta(tokens, 1, size, dtype=kind) for _ in range(2)))
        rows_B, starts_B = (meta(n, dtype=torch.int32) for n in (max(few, 1), max(few, 1) + 1))
        layout = PagedLayout(
            tables_SN=meta(256, 16_384, dtype=torch.int32), rows_B=rows_B, seq_lens_B=rows_B,
            starts_B=starts_B, slots_T=meta(tokens, dtype=torch.int64), block_size=16,
            window=window, few=few, max_query=max_query, max_len=262_144, **known,
        )  # fmt: skip
        pairs = meta(2, kv_heads, 4096, size, dtype=FP8 if fp8 else torch.bfloat16)
        cache = LayerCache(pairs, meta(2, dtype=torch.float32) if fp8 else None)
        paged_attention.kernel(
            meta(tokens, row), meta(2, size), cache, layout,
            heads=Heads(heads, kv_heads, EPS), scale=SCALE, turn=turn if window else None,
            ssmax_T=meta(tokens, dtype=torch.float32) if beam and not window else None,
            sinks_H=None if beam else meta(heads, dtype=torch.float32),
            gate_bias_H=meta(heads) if beam else None,
        )  # fmt: skip

    cases = []
    for family, window in (("Flint", 513), ("Beam", 512)):
        for name, (tokens, few), few_queries in (
            ("decode 1", (1, 1), True),
            ("decode 32", (32, 32), True),
            ("decode 128", (128, 128), True),
            ("8 drafts", (9, 1), True),
            ("prefill", (4096, 0), False),
            ("mixed", (1024, 129), False),
            ("far", (4096, 0), False),
        ):
            most = 9 if name == "8 drafts" else 1 if few_queries else tokens
            known = {
                "mixed": {"mixed": 8},
                "far": {"prompts": (Prompt(0, 0, 4096, 3 * far.PIECE + 5),)},
            }.get(name, {})
            for seen, fp8 in itertools.product((None, window), (False, True)):
                args = (family, tokens, few, seen, most, fp8)
                call = lambda a=args, k=known: attend(*a, **k)  # noqa: E731
                kind = ("full" if seen is None else "window") + (" FP8" if fp8 else "")
                cases.append(Case(f"{family} {kind} {name}", call, decode=few_queries))
    return cases


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 513], ids="window-{}".format)
@pytest.mark.parametrize("name", ["decode 8", "both"])
def test_a_cache_may_hold_more_numbers_than_an_int32_counts(name, window):
    heads, kv_heads, size = REAL["Flint"]
    layout, slots, counts = layout_of(
        REAL_BATCHES[name], block_size=16, window=window, device="cuda"
    )
    cache = cache_of(slots, kv_heads, size, torch.bfloat16, "cuda", fp8=False)
    cache.pairs_2KSC.normal_()
    blocks = 2**31 // (kv_heads * size * 16) + 3
    far_2KSC = torch.zeros(
        2, kv_heads, blocks * 16 + cache.pairs_2KSC.shape[2], size,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    far_2KSC[:, :, blocks * 16 :] = cache.pairs_2KSC
    far = replace(layout, tables_SN=layout.tables_SN + blocks, slots_T=layout.slots_T + blocks * 16)
    qkv_TN = torch.randn(sum(counts), (heads + 2 * kv_heads) * size, device="cuda").bfloat16()
    weight_2C = torch.ones(2, size, device="cuda", dtype=torch.bfloat16)
    found = [
        paged_attention.kernel(
            qkv_TN, weight_2C, LayerCache(pairs_2KSC), where,
            scale=SCALE, heads=Heads(heads, kv_heads, EPS),
        )
        for pairs_2KSC, where in ((cache.pairs_2KSC, layout), (far_2KSC, far))
    ]  # fmt: skip
    assert torch.equal(*found)
    assert torch.equal(far_2KSC[:, :, blocks * 16 :], cache.pairs_2KSC)


@pytest.mark.parametrize(("family", "window"), [("Flint", 9), ("Beam", None)])
@places
def test_where_batches_must_not_matter_a_query_is_the_same_in_every_chunk(
    place, family, window, monkeypatch
):
    """All tokens at once, and a few at a time, beside others: the same bits."""
    device, dtype = place
    heads, kv_heads, size = SHAPES[family] if device == "cuda" else (2, 1, 16)
    tokens, chunks = (130, (1, 3, 19, 130)) if device == "cuda" else (24, (7, 24))
    if device != "cuda":
        for table in ("FULL", "WINDOW"):
            monkeypatch.setattr(prefill, table, {2**31: prefill.Tile(32, 16, 4, 3)})
    torch.manual_seed(1)
    gates = heads if family == "Beam" else 0
    qkv_TN = torch.randn(tokens, (heads + 2 * kv_heads + gates) * size, device=device).to(dtype)
    weight_2C = (1 + 0.2 * torch.randn(2, size, device=device)).to(dtype)
    sinks_H = torch.randn(heads, device=device) if family == "Flint" else None
    bias_H = torch.randn(heads, device=device).to(dtype) if gates else None
    results = []
    for chunk in chunks:
        cache = cache_of([torch.arange(40 * 16)], kv_heads, size, dtype, device, fp8=False)
        rows = []
        for first in range(0, tokens, chunk):
            new = min(chunk, tokens - first)
            # Before it in the batch, one of another length.
            layout, _, _ = layout_of(
                [(first, new), (5, 2)], block_size=16, window=window, device=device
            )
            layout = replace(
                layout,
                tables_SN=torch.stack([torch.arange(1, 20)] * 2).int().to(device),
                rows_B=torch.tensor([0, 1], device=device).int(),
                slots_T=torch.tensor([*range(16 + first, 16 + first + new), -1, -1], device=device),
            )
            part_TN = torch.cat([qkv_TN[first : first + new], qkv_TN[:2]])
            with batch_invariance(True):
                out_THC = paged_attention.kernel(
                    part_TN, weight_2C, cache, layout, heads=Heads(heads, kv_heads, EPS),
                    scale=SCALE, sinks_H=sinks_H, gate_bias_H=bias_H,
                )  # fmt: skip
            rows.append(out_THC[:new])
        results.append(torch.cat(rows))
    for other in results[1:]:
        assert torch.equal(other, results[0])
