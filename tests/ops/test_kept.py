"""Keys that are kept side by side give what those in pages give, and are read again in time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from limelight.ops.attention import paged_attention
from limelight.ops.kept import COLUMNS_AHEAD, Kept
from limelight.ops.paging import LayerCache, PagedLayout
from limelight.ops.rope import Heads

SIZE, BLOCK, SLOTS, LONGEST = 8, 5, 4, 200
HEADS = Heads(queries=6, keys=2, eps=1e-6)


class Pages:
    """Sequences by slot whose tokens go through one layer twice: with what is kept, and without."""

    def __init__(self, window, *, dtype=torch.float32, sinks=True, room=10_000):
        self.kept = Kept(window=window, num_layers=1, room=room)
        self.window, self.dtype, blocks = window, dtype, LONGEST // BLOCK
        self.spare = list(np.random.default_rng(0).permutation(2 * SLOTS * blocks) + 1)
        self.tables = np.zeros((SLOTS, blocks), dtype=np.int32)
        pairs = torch.zeros(2, 2, (len(self.spare) + 1) * BLOCK, SIZE, dtype=dtype)
        self.caches = [LayerCache(pairs.clone()), LayerCache(pairs.clone())]
        self.sinks = torch.randn(6) if sinks else None
        self.lengths = [0] * SLOTS
        for slot in range(SLOTS):
            self.move(slot)

    def move(self, slot):
        """Give a slot other blocks."""
        blocks = self.tables.shape[1]
        self.tables[slot], self.spare = self.spare[:blocks], self.spare[blocks:]

    def step(self, counts, *, seen=True):
        """So many tokens of each slot named, `seen` by what is kept; the largest difference."""
        starts = {slot: self.lengths[slot] for slot in counts}
        slots = [
            self.tables[slot, at // BLOCK] * BLOCK + at % BLOCK
            for slot, count in counts.items()
            for at in range(starts[slot], starts[slot] + count)
        ]
        for slot, count in counts.items():
            self.lengths[slot] += count
        layout = PagedLayout(
            tables_SN=torch.from_numpy(self.tables),
            rows_B=torch.tensor(list(counts), dtype=torch.int32),
            seq_lens_B=torch.tensor([self.lengths[slot] for slot in counts], dtype=torch.int32),
            starts_B=torch.tensor([0, *np.cumsum(list(counts.values()))], dtype=torch.int32),
            slots_T=torch.tensor(slots), block_size=BLOCK, window=self.window,
            few=0, max_query=max(counts.values()), max_len=LONGEST,
        )  # fmt: skip
        qkv_TN = torch.randn(len(slots), 10 * SIZE).to(self.dtype)
        first, second = (
            paged_attention.reference(
                qkv_TN, torch.ones(2, SIZE, dtype=self.dtype), cache, where,
                heads=HEADS, scale=0.3, sinks_H=self.sinks,
            ).float()
            for cache, where in zip(
                self.caches, (replace(layout, kept=self.kept if seen else None), layout),
                strict=True,
            )
        )  # fmt: skip
        assert first.dtype == second.dtype and torch.isfinite(first).all()
        assert torch.equal(*(cache.pairs_2KSC for cache in self.caches))
        return (first - second).abs().max().item()


@pytest.mark.parametrize("window", [None, 1, 7, 17, 300], ids="W{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kept_keys_give_what_those_in_pages_give(window, dtype):
    pages, near = Pages(window, dtype=dtype), 1e-5 if dtype == torch.float32 else 0.02
    assert pages.step({0: 33, 1: 4, 3: 50}) < near
    assert pages.step({3: 1, 0: 1, 1: 1}) == 0.0
    assert not pages.kept.layers
    readings = []
    for index in range(COLUMNS_AHEAD + 20):
        assert pages.step({3: 1, 0: 1, 1: 1}) < near
        (layer,) = pages.kept.layers.values()
        if not readings or layer is not readings[-1][1]:
            readings.append((index, layer))
    # All is read once more when the columns are used up, which those of a narrow window never are.
    narrow = window is not None and window < 50
    assert [index for index, _ in readings] == ([0] if narrow else [0, COLUMNS_AHEAD + 1])


@pytest.mark.parametrize("window", [None, 7], ids="W{}".format)
def test_other_sequences_and_other_blocks_are_read_anew(window):
    pages = Pages(window)
    pages.step({0: 12, 1: 3, 2: 9})

    def is_kept(counts):
        assert pages.step(counts) < 1e-5
        return bool(pages.kept.layers)

    assert [is_kept({0: 1, 1: 1}) for _ in range(3)] == [False, True, True]
    assert [is_kept({1: 1, 0: 1}) for _ in range(3)] == [False, True, True]
    assert [is_kept({1: 1, 0: 1, 2: 1}) for _ in range(3)] == [False, True, True]
    assert [is_kept({1: 1, 2: 1}) for _ in range(3)] == [False, True, True]
    # Another sequence in the slot, as long as the next step of the one before would be.
    pages.move(1)
    for cache in pages.caches:
        cache.pairs_2KSC[:, :, pages.tables[1, 0] * BLOCK] = 3.0
    assert [is_kept({1: 1, 2: 1}) for _ in range(3)] == [False, True, True]
    # Positions that were computed again meanwhile.
    pages.lengths[1] -= 1
    assert [is_kept({1: 1, 2: 1}) for _ in range(3)] == [False, True, True]


def test_a_prompt_between_two_steps_ends_what_is_kept():
    pages = Pages(None)
    for counts, kept in [
        ({0: 12, 1: 3}, False), ({0: 1, 1: 1}, False), ({0: 1, 1: 1}, True),
        ({0: 1, 1: 1, 2: 6}, False), ({0: 1, 1: 1, 2: 1}, False), ({0: 1, 1: 1, 2: 1}, True),
    ]:  # fmt: skip
        assert pages.step(counts) < 1e-5
        assert bool(pages.kept.layers) == kept


@pytest.mark.parametrize("counts", [{0: 1, 1: 1}, {0: 3, 1: 1}, {1: 2}, {2: 4}], ids=str)
def test_steps_that_it_does_not_see_as_those_with_drafts_are_noticed(counts):
    pages = Pages(7)
    pages.step({0: 9, 1: 12, 2: 3})
    for _ in range(3):
        assert pages.step({0: 1, 1: 1}) < 1e-5
    assert pages.kept.layers
    pages.step(counts, seen=False)
    for _ in range(3):
        assert pages.step({0: 1, 1: 1}) < 1e-5


def test_a_step_that_failed_in_the_middle_is_not_gone_on_from():
    pages = Pages(None)
    for count in (12, 1, 1):
        pages.step({0: count})
    kept, layers = pages.kept, pages.kept.layers
    assert layers
    kept.num_layers = 2  # as if another layer had not come to its turn
    assert pages.step({0: 1}) < 1e-5
    assert kept.layers is not layers


def test_no_more_is_kept_than_there_is_room_for():
    pages = Pages(None, room=3 * (21 + 1 + COLUMNS_AHEAD))
    pages.step({0: 19, 1: 19, 2: 19})
    kept = []
    for _ in range(3):
        assert pages.step({0: 1, 1: 1, 2: 1}) < 1e-5
        kept.append(bool(pages.kept.layers))
    assert kept == [False, True, False]


def test_behind_a_wide_window_short_sequences_take_little():
    pages = Pages(10_000)
    pages.step({0: 9, 1: 9})
    for _ in range(2):
        assert pages.step({0: 1, 1: 1}) < 1e-5
    (layer,) = pages.kept.layers.values()
    assert layer.v_ZLC.shape[1] == 1 + 11 + COLUMNS_AHEAD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layers_without_sinks_keep_keys_in_fp32_alone(dtype):
    pages = Pages(7, sinks=False, dtype=dtype)
    pages.step({0: 12, 2: 3})
    differences = [pages.step({0: 1, 2: 1}) for _ in range(12)]
    assert bool(pages.kept.layers) == (dtype == torch.float32)
    assert max(differences) < (1e-5 if pages.kept.layers else 1e-30)
