"""The blocks of a drafter's pass, and what it stores, against the references."""

from dataclasses import fields

import pytest
import torch
from ahead import Case, meta

from limelight.ops.passes import Drafted, LaidBlocks, lay_blocks, store
from limelight.ops.rows import Slots

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE, LIMIT = 16, 250

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def integer(*shape, dtype=torch.int32):
        return meta(*shape, dtype=dtype)

    def lay(batch, rows, groups):
        slots = Slots(
            integer(257), integer(257, dtype=torch.int64), integer(257, 7, dtype=torch.int64),
            integer(groups, 257, 512), SIZE,
        )  # fmt: skip
        return lay_blocks.kernel(integer(batch), slots, rows=rows, longest=8192)

    def drafted(count, drafts, candidates):
        shape = (count, drafts, candidates)
        return Drafted(
            integer(*shape[:2], dtype=torch.int64), integer(*shape, dtype=torch.int64),
            meta(*shape, dtype=torch.float32), meta(*shape[:2], dtype=torch.float32),
        )  # fmt: skip

    return [
        Case("block", lambda: lay(1, 8, 2), decode=True),
        Case("blocks", lambda: lay(128, 8, 3), decode=True),
        Case("long blocks", lambda: lay(9, 16, 1)),
        Case("store", lambda: store.kernel(integer(9), drafted(9, 7, 16), drafted(257, 7, 16))),
    ]


def some_rows(batch, count, padding, generator):
    """Slots in any order, and padding."""
    rows_B = torch.randperm(count, generator=generator)[:batch].int()
    rows_B[batch - padding :] = count
    return rows_B


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("shape", [(1, 2, 1), (5, 8, 2), (70, 4, 3), (9, 16, 1)], ids=str)
def test_blocks_lie_where_they_do_in_the_reference(shape, padding, device):
    """Some of them end at the longest length, and some begin there."""
    (batch, rows, groups), count = shape, shape[0] + 5
    padding = min(padding, batch - 1)
    generator = torch.Generator().manual_seed(batch)

    def integer(least, most, *size, dtype=torch.int32):
        return torch.randint(least, most, size, generator=generator, dtype=dtype).to(device)

    lengths_S = integer(0, LIMIT, count + 1)
    lengths_S[1::3] = LIMIT - integer(1, rows + 1, len(lengths_S[1::3]))
    width = -(-LIMIT // SIZE)
    slots = Slots(
        lengths_S, integer(0, 97, count + 1, dtype=torch.int64),
        integer(0, 97, count + 1, rows - 1, dtype=torch.int64),
        integer(0, 9999, groups, count + 1, width), SIZE,
    )  # fmt: skip
    rows_B = some_rows(batch, count, padding, generator).to(device)
    options = {"rows": rows, "longest": LIMIT}
    mine, theirs = (
        form(rows_B, slots, **options) for form in (lay_blocks.kernel, lay_blocks.reference)
    )
    assert padding == 0 or (theirs.slots_GT == -1).any()
    for item in fields(LaidBlocks):
        one, other = getattr(mine, item.name), getattr(theirs, item.name)
        assert one.dtype == other.dtype and torch.equal(one, other), item.name


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 16), (5, 15, 5)], ids=str)
def test_what_was_drafted_waits_in_its_slots(shape, padding, device):
    batch, drafts, candidates = shape
    generator = torch.Generator().manual_seed(drafts)

    def drafted(count):
        ids = torch.randint(0, 150_000, (count, drafts, candidates + 1), generator=generator)
        scores = torch.randn(count, drafts, candidates + 1, generator=generator)
        parts = (ids[..., 0], ids[..., 1:], scores[..., 1:], scores[..., 0])
        return Drafted(*(x.contiguous().to(device) for x in parts))

    padding = min(padding, batch - 1)
    rows_B = some_rows(batch, batch + 4, padding, generator).to(device)
    new, old = drafted(batch), drafted(batch + 5)
    forms = []
    for form in (store.kernel, store.reference):
        into = Drafted(*(x.clone() for x in old.arguments))
        form(rows_B, new, into)
        forms.append(into)
    for mine, theirs, before in zip(*(x.arguments for x in (*forms, old)), strict=True):
        assert torch.equal(mine, theirs) and not torch.equal(mine, before)
