"""The paged and the packed form agree with the equation written out in float64."""

import math

import numpy as np
import pytest
import torch

from limelight.ops.attention import attend_cached, attend_packed
from limelight.ops.paging import (
    FEW_QUERIES,
    FP8,
    KEYS_AT_ONCE,
    MASKS_KEPT,
    SCORES_AT_ONCE,
    LayerCache,
    PagedLayout,
)


def by_the_equation(q, k, v, *, window, sinks, scale):
    """One sequence, key by key: q [L, H, C], k and v [L, K, C], float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for i in range(len(q)):
        first = 0 if window is None else max(0, i - window + 1)
        for h in range(q.shape[1]):
            scores = [float(q[i, h] @ k[j, h // group]) * scale for j in range(first, i + 1)]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[h])))
            for j, weight in enumerate(weights):
                out[i, h] += weight / total * v[first + j, h // group]
    return out


def sequence(length, heads=6, kv_heads=2, size=8):
    return tuple(
        torch.randn(length, n, size, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("sinks", [None, torch.randn(6)], ids=["no-sinks", "sinks"])
def test_packed_sequences_attend_to_themselves_alone(window, sinks):
    lengths = [1, 13, 30]
    parts = [sequence(n) for n in lengths]
    q, k, v = (torch.cat(column).float() for column in zip(*parts, strict=True))
    out = attend_packed(q, k, v, lengths, window=window, sinks_H=sinks, scale=0.3)
    expected = torch.cat(
        [by_the_equation(*part, window=window, sinks=sinks, scale=0.3) for part in parts]
    )
    assert (out - expected).abs().max() < 1e-5


def layout_of(table, seq_lens, query_lens, slots, *, block_size, window):
    """The layout of sequences b = 0, 1, ... whose blocks are in row b of the table."""
    few = next((b for b, n in enumerate(query_lens) if n > FEW_QUERIES), len(query_lens))
    return PagedLayout(
        tables_SN=torch.from_numpy(table),
        rows_B=torch.arange(len(query_lens), dtype=torch.int32),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
        starts_B=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        slots_T=torch.from_numpy(slots),
        block_size=block_size,
        window=window,
        few=few,
        max_query=max(query_lens),
        max_len=max(seq_lens),
    )


class Pages:
    """A cache of poisoned pages in random order, for one layer and several sequences."""

    def __init__(self, sequences, *, block_size, window, seed=0, scales_2=None):
        self.sequences, self.size, self.window = sequences, block_size, window
        per = [-(-len(k) // block_size) for _, k, _ in sequences]
        order = np.random.default_rng(seed).permutation(sum(per)) + 1
        self.table = np.zeros((len(sequences), max(per)), dtype=np.int32)
        for b, count in enumerate(per):
            self.table[b, :count], order = order[:count], order[count:]
        slots = (sum(per) + 1) * block_size
        pairs = torch.full((2, 2, slots, 8), float("nan"))
        pairs[:, :, 0] = 0.0
        self.cache = LayerCache(pairs if scales_2 is None else pairs.to(FP8), scales_2)

    def attend(self, starts, ends, **options):
        """Run one step that computes [starts[b], ends[b]) of each sequence."""
        spans = [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
        slots = np.concatenate(
            [
                self.table[b, span // self.size].astype(np.int64) * self.size + span % self.size
                for b, span in enumerate(spans)
            ]
        )
        q, k, v = (
            torch.cat([part[span] for part, span in zip(column, spans, strict=True)]).float()
            for column in zip(*self.sequences, strict=True)
        )
        layout = layout_of(
            self.table, ends, [len(span) for span in spans], slots,
            block_size=self.size, window=self.window,
        )  # fmt: skip
        self.cache.write(layout.slots_T, k, v)
        return attend_cached(q, self.cache, layout, **options).split(list(map(len, spans)))


@pytest.mark.parametrize("window", [None, 1, 7, 17, 300])
@pytest.mark.parametrize("sinks", [None, torch.randn(6)], ids=["no-sinks", "sinks"])
def test_chunks_and_single_tokens_over_pages_give_what_the_whole_gives(window, sinks):
    lengths = [60, 37, 1, 45]
    parts = [sequence(n) for n in lengths]
    pages = Pages(parts, block_size=5, window=window)
    expected = [by_the_equation(*part, window=window, sinks=sinks, scale=0.3) for part in parts]
    # A prompt piece, one token each (neighbours and apart), and the rest, in ragged steps.
    steps = [(0, 0, 0, 0), (40, 20, 1, 1), (41, 21, 1, 2), (60, 22, 1, 45), (60, 37, 1, 45)]
    for starts, ends in zip(steps, steps[1:], strict=False):
        outs = pages.attend(starts, ends, sinks_H=sinks, scale=0.3)
        for out, want, a, b in zip(outs, expected, starts, ends, strict=True):
            assert out.shape[0] == b - a
            if b > a:
                assert (out - want[a:b]).abs().max() < 1e-5


def fp8_by_hand(x, scale):
    """The nearest number of FP8 to each x / scale, times the scale; of two the even one."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()
    size = (x.double() / scale).abs().clamp(max=500)
    distance = (size[..., None] - numbers).abs()
    odd = torch.arange(0x7F) % 2 * 1e-12
    return numbers[(distance + odd).argmin(dim=-1)].copysign(x) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_cache_holds_the_nearest_numbers_and_the_largest_for_what_is_beyond(dtype):
    values = [0.0, -0.0, 1.0, 1.0625, 1.1875, 2**-10, 3 * 2**-10, 447.0, 449.0, 1e30, -1e30]
    tokens = torch.tensor([values + [v / 3 for v in values]]).T[:, :, None].expand(-1, 2, 8)
    k_TKC, v_TKC = tokens.to(dtype), -tokens.to(dtype)
    cache = LayerCache(torch.zeros(2, 2, 40, 8).to(FP8), torch.tensor([1.0, 0.125]))
    slots = torch.arange(1, len(tokens) + 1)
    slots[3] = -1
    cache.write(slots, k_TKC, v_TKC)
    keys, values = (x[:, 0].transpose(0, 1) for x in cache.read(slots.clamp(min=0)[None]))
    written = slots >= 0
    assert torch.equal(keys[written].double(), fp8_by_hand(k_TKC[written].float(), 1.0))
    assert torch.equal(values[written].double(), fp8_by_hand(v_TKC[written].float(), 0.125))
    assert (keys[~written] == 0).all() and (cache.pairs_2KSC.float()[:, :, 0] == 0).all()


@pytest.mark.parametrize("window", [None, 7], ids="window-{}".format)
@pytest.mark.parametrize("sinks", [None, torch.randn(6)], ids=["no-sinks", "sinks"])
def test_an_fp8_cache_is_attended_as_the_keys_and_values_that_it_holds(window, sinks):
    lengths, scales = [70, 21], (0.01, 0.003)
    parts = [sequence(n) for n in lengths]
    pages = Pages(parts, block_size=5, window=window, scales_2=torch.tensor(scales))
    rounded = [
        (q, *(fp8_by_hand(x.float(), scale) for x, scale in zip(kv, scales, strict=True)))
        for q, *kv in parts
    ]
    expected = [by_the_equation(*part, window=window, sinks=sinks, scale=0.3) for part in rounded]
    for starts, ends in [((0, 0), (40, 20)), ((40, 20), (41, 21)), ((41, 21), (70, 21))]:
        outs = pages.attend(starts, ends, sinks_H=sinks, scale=0.3)
        for out, want, a, b in zip(outs, expected, starts, ends, strict=True):
            assert a == b or (out - want[a:b]).abs().max() < 1e-5


def test_a_window_hides_the_token_just_outside_it():
    window, length = 9, 40
    q, k, v = sequence(length)
    for distance, seen in ((window - 1, True), (window, False)):
        changed = k.clone()
        changed[length - 1 - distance] += 3.0
        outs = [
            attend_packed(
                q.float(), keys.float(), v.float(), [length], window=window, sinks_H=None, scale=0.3
            )[-1]
            for keys in (k, changed)
        ]
        assert torch.equal(*outs) != seen


def test_a_large_sink_takes_all_and_a_low_one_nothing():
    q, k, v = (part.float() for part in sequence(20))
    plain = attend_packed(q, k, v, [20], window=None, sinks_H=None, scale=0.3)
    for value, expected in ((-1e30, plain), (80.0, torch.zeros_like(plain))):
        sinks = torch.full((6,), value)
        out = attend_packed(q, k, v, [20], window=None, sinks_H=sinks, scale=0.3)
        assert (out - expected).abs().max() < 1e-6


def test_attention_is_differentiable_to_its_sinks():
    parts = [part.float().requires_grad_() for part in sequence(11)]
    sinks = torch.randn(6, requires_grad=True)
    attend_packed(*parts, [4, 7], window=3, sinks_H=sinks, scale=0.3).square().sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in (*parts, sinks))


def test_padding_gives_zero_and_writes_nothing():
    pages = Pages([sequence(9)], block_size=4, window=None)
    table = np.concatenate((pages.table, pages.table))
    slots = pages.table[0, 8 // 4].astype(np.int64) * 4 + np.array([8 % 4])
    layout = layout_of(
        table, [9, 0], [1, 1], np.append(slots, -1), block_size=4, window=None
    )  # fmt: skip
    pages.attend([0], [8], sinks_H=None, scale=0.3)
    before = pages.cache.pairs_2KSC.clone()
    q, k, v = (torch.randn(2, n, 8) for n in (6, 2, 2))
    pages.cache.write(layout.slots_T, k, v)
    changed = (pages.cache.pairs_2KSC != before) & ~pages.cache.pairs_2KSC.isnan()
    assert changed.any(dim=(0, 1, 3)).nonzero().tolist() == [slots.tolist()]
    for sinks in (None, torch.randn(6)):
        out = attend_cached(q, pages.cache, layout, sinks_H=sinks, scale=0.3)
        assert out[0].isfinite().all() and (out[1] == 0).all()


def segments_of(seq_lens, query_lens, *, window=None):
    blocks = -(-max(seq_lens) // 16)
    table = np.ones((len(seq_lens), blocks), dtype=np.int32)
    slots = np.zeros(sum(query_lens), dtype=np.int64)
    layout = layout_of(table, seq_lens, query_lens, slots, block_size=16, window=window)
    return list(layout.on_host)


def test_one_long_sequence_does_not_pad_its_short_neighbours():
    lengths = [30] * 15 + [16_000] + [20] * 16
    padded = sum(part.slots_BL.numel() for part in segments_of(lengths, [1] * 32))
    assert padded < 2 * sum(lengths)
    assert len(segments_of([700, 30, 650, 500], [1] * 4)) == 1
    assert len(segments_of([16_000, 30, 15_000], [1] * 3, window=64)) == 1


def test_the_reference_reads_a_bounded_number_of_keys_at_once():
    for part in segments_of([40_000] * 5, [1] * 5):
        assert part.slots_BL.numel() <= KEYS_AT_ONCE
    parts = segments_of([9000, 9000], [1, 8999])
    assert sum(part.bias_BQL.shape[1] for part in parts) == 9000
    assert all(part.bias_BQL.numel() <= SCORES_AT_ONCE + 256 for part in parts)


def test_masks_are_kept_from_layer_to_layer_within_a_bound():
    table = np.ones((2, 600), dtype=np.int32)
    slots = np.zeros(9000, dtype=np.int64)
    layout = layout_of(table, [9000, 9000], [1, 8999], slots, block_size=16, window=None)
    parts, again = list(layout.on_host), list(layout.on_host)
    same = [a is b for a, b in zip(parts, again, strict=True)]
    assert same[0] and not all(same)
    assert (
        sum(p.bias_BQL.numel() for p, kept in zip(parts, same, strict=True) if kept) <= MASKS_KEPT
    )


def test_drafts_of_neighbours_are_attended_together():
    parts = segments_of([50, 60, 70, 70], [4, 4, 4, 1])
    assert [tuple(part.bias_BQL.shape[:2]) for part in parts] == [(3, 4), (1, 1)]
