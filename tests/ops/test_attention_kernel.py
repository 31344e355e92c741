"""The attention kernels, from projection to output, against the equation in FP64."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from ahead import Case, meta
from attended import EPS, REAL, SCALE, SHAPES, SHAPES_FP8, cache_of, check, layout_of
from near import PLACES

from limelight.ops import batch_invariance, decode, far, prefill
from limelight.ops.attention import paged_attention
from limelight.ops.paging import FP8, LayerCache, PagedLayout, Prompt
from limelight.ops.rope import Heads, Rotation

pytestmark = pytest.mark.usefixtures("poisoned")
places = pytest.mark.parametrize("place", PLACES)
PADDING = (-1, 1)
# Each sequence: tokens in the cache, tokens of this step; their sum is 0: rows of no sequence.
BATCHES = {
    "one token": [(0, 1)],
    "decode": [(200, 1), (63, 1), PADDING, (64, 1), PADDING],
    "drafts": [(150, 4), (0, 3), (63, 1)],
    "16 queries": [(90, 16)],
    "prompts": [(30, 20), (0, 17), (40, 33)],
    "both": [(130, 1), (5, 2), (50, 18)],
}
# In no order, each kind of padding among them: none knows which have few queries but the device.
MIXED = {
    "in any order": [(50, 18), (130, 1), (-20, 20), (5, 2), (0, 3), (0, 17), PADDING],
    "few alone": [(70, 1), (3, 2), *[(0, 0)] * 3],
    "many alone": [(0, 19), *[(0, 0)] * 3, (60, 33), (-9, 9)],
}
REAL_BATCHES = {
    "decode 1": [(100_000, 1)],
    "decode 8": [(1000 + 17 * b, 1) for b in range(8)],
    "decode 130": [(7 * b, 1) for b in range(130)],
    "one long": [(50_000, 1)] + [(30, 1)] * 31,
    "drafts": [(2000, 8), (511, 8), (70, 3)],
    "two drafts": [(1000 + 17 * b, 2) for b in range(32)],
    "four drafts": [(1000, 4), (20, 4), (600, 3), (511, 1), (70, 4)],
    "prefill": [(0, 700), (512, 1025)],
    "both": [(3000, 1), (0, 1), (1000, 600)],
}
REAL_MIXED = [(1000, 600), (3000, 1), (0, 7), *[(0, 0)] * 120, (0, 300), (-400, 400)]


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
