"""Which drafts are kept, where rows stand and what a step leaves, against the references."""

import inspect
import itertools
from dataclasses import dataclass, fields, replace

import pytest
import torch
from ahead import Case, meta

from limelight.ops.passes import _blocks_kernel
from limelight.ops.rows import Asked, Rows, Slots, _rows_kernel, lay_rows, stand
from limelight.ops.trim import MOST_ODDS, keep
from limelight.ops.verify import NOTHING, Verified

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Sequences, drafts, groups of layers.
SHAPES = [(1, 1, 1), (7, 7, 2), (70, 3, 3), (33, 15, 1)]
HUGE, SIZE, LIMIT = 2**30, 16, 250

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def integer(*shape, dtype=torch.int32):
        return meta(*shape, dtype=dtype)

    def number(*shape):
        return meta(*shape, dtype=torch.float32)

    def slots(drafts, groups):
        wide = torch.int64
        return Slots(
            integer(257), integer(257, dtype=wide), integer(257, drafts, dtype=wide),
            integer(groups, 257, 512), SIZE,
        )  # fmt: skip

    def asked(batch):
        each = [integer(batch) for _ in range(4)]
        return Asked(*each[:2], integer(batch, dtype=torch.int64), *each[2:])

    def lay(rows, batch, picks, drafts=7, groups=2):
        tokens = integer(rows, dtype=torch.int64)
        return lay_rows.kernel(tokens, asked(batch), slots(drafts, groups), picks=picks)

    def keeping(batch, drafts):
        return keep.kernel(
            number(257, drafts), integer(batch), integer(batch), number(1 + drafts), integer(1)
        )

    def stands(batch, drafts):
        wide = torch.int64
        verified = Verified(
            integer(batch, dtype=wide), integer(batch, drafts + 1, dtype=wide), number(batch)
        )
        return stand.kernel(
            integer(257), integer(257, dtype=wide), integer(batch), integer(batch), verified
        )

    return [
        Case("rows of one", lambda: lay(1, 1, None), decode=True),
        Case("rows", lambda: lay(1024, 272, None), decode=True),
        Case("some rows picked", lambda: lay(513, 9, 63, drafts=15, groups=3)),
        Case("keep", lambda: keeping(1, 7), decode=True),
        Case("keep of many", lambda: keeping(272, 15), decode=True),
        Case("stand", lambda: stands(272, 7), decode=True),
    ]


@dataclass
class Step:
    """Sequences in slots in any order, some at the longest length, some new, and padding."""

    asked: Asked
    slots: Slots
    tokens_T: torch.Tensor
    offered_B: torch.Tensor
    odds_SN: torch.Tensor

    @classmethod
    def random(cls, shape, device, *, seed, rows=None, padding=0, prompts=False):
        """With room for `rows` rows; without, for all and a few more."""
        (batch, drafts, groups), count = shape, shape[0] + 5
        generator = torch.Generator().manual_seed(seed)

        def integer(least, most, *size, dtype=torch.int32):
            return torch.randint(least, most, size, generator=generator, dtype=dtype)

        width = -(-LIMIT // SIZE)
        lengths_S = integer(0, LIMIT, count + 1)
        lengths_S[::4] = LIMIT - integer(1, 4, len(lengths_S[::4]))
        rows_B = torch.randperm(count, generator=generator)[:batch].int()
        rows_B[batch - padding :] = count
        real_B = rows_B < count
        bases_B = torch.where(real_B & prompts, integer(1, 40, batch), 1).int()
        offered_B = torch.where(real_B, integer(0, drafts + 1, batch), 0).int()
        firsts_B = torch.where(real_B, integer(-1, 2, batch) * integer(1, 100, batch), 0).int()
        firsts_B = firsts_B.clamp(min=-1)
        kept_B = torch.minimum(integer(0, drafts + 1, batch), offered_B).long()
        total = int((bases_B + kept_B).sum())
        tokens_T = torch.full((total + 3 if rows is None else rows,), -1)
        given_T = integer(0, 97, len(tokens_T), dtype=torch.int64)
        tokens_T = given_T.where(integer(0, 3, len(tokens_T)) == 0, tokens_T)
        slots = Slots(
            lengths_S.to(device), integer(-1, 97, count + 1, dtype=torch.int64).to(device),
            integer(-1, 97, count + 1, drafts, dtype=torch.int64).to(device),
            integer(0, 9999, groups, count + 1, width).to(device), SIZE,
        )  # fmt: skip
        samples_B = integer(0, 2, batch)
        each = (rows_B, bases_B, kept_B, firsts_B, samples_B)
        odds_SN = 4 * torch.randn(count + 1, drafts, generator=generator)
        return cls(
            Asked(*(x.to(device) for x in each)), slots, tokens_T.to(device),
            offered_B.to(device), odds_SN.to(device),
        )  # fmt: skip


def assert_same(mine: Rows, theirs: Rows) -> None:
    for item in fields(Rows):
        one, other = getattr(mine, item.name), getattr(theirs, item.name)
        assert (one is None) == (other is None), item.name
        if one is not None:
            assert one.dtype == other.dtype and torch.equal(one, other), item.name


@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("prompts", [False, True], ids=["decoding", "with prompts"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_lie_where_they_do_in_the_reference(shape, prompts, padding, device):
    padding = min(padding, shape[0] - 1)
    step = Step.random(shape, device, seed=padding, padding=padding, prompts=prompts)
    arguments = (step.tokens_T, step.asked, step.slots)
    theirs = lay_rows.reference(*arguments, picks=None)
    assert padding == 0 or (theirs.slots_GT == -1).any()
    assert_same(lay_rows.kernel(*arguments, picks=None), theirs)
    picks = int((step.asked.samples_B * (1 + step.asked.kept_B)).sum())
    for count in {picks, picks + 70} - {0}:
        theirs = lay_rows.reference(*arguments, picks=count)
        assert_same(lay_rows.kernel(*arguments, picks=count), theirs)


def test_every_mix_of_drafts_lies_in_a_graph_as_it_does_without(device):
    """Three sequences with 0 to 7 drafts each; what a graph has beyond them goes nowhere."""
    rows, padding = 32, 2
    step = Step.random((3, 7, 2), device, seed=0)
    asked, nobody = step.asked, torch.full((padding,), step.slots.nobody, device=device)
    zeros = torch.zeros(padding, dtype=torch.int32, device=device)
    ones_B = torch.ones_like(asked.bases_B)
    for drafts in itertools.product(range(8), repeat=3):
        kept_B = torch.tensor(drafts, device=device)
        used = 3 + sum(drafts)
        free_T = torch.full((rows,), -1, device=device)
        alone = lay_rows(
            free_T[:used], replace(asked, kept_B=kept_B, bases_B=ones_B), step.slots, picks=None
        )
        padded = Asked(
            torch.cat((asked.rows_B, nobody.int())), torch.cat((ones_B, zeros + 1)),
            torch.cat((kept_B, zeros.long())), torch.cat((asked.firsts_B, zeros)),
            torch.cat((asked.samples_B, zeros)),
        )  # fmt: skip
        graph = lay_rows(free_T, padded, step.slots, picks=None)
        assert torch.equal(graph.tokens_T[:used], alone.tokens_T)
        assert torch.equal(graph.positions_T[:used], alone.positions_T)
        assert torch.equal(graph.slots_GT[:, :used], alone.slots_GT)
        assert (graph.slots_GT[:, used:] == -1).all() and (graph.seq_lens_B[3:] == 0).all()
        assert torch.equal(graph.starts_B[:4], alone.starts_B)
        assert torch.equal(graph.seq_lens_B[:3], alone.seq_lens_B)


@pytest.mark.parametrize("kernel", [_rows_kernel, _blocks_kernel])
def test_no_kernel_begins_before_a_layout_is_whole(kernel, device):
    """Attention reads it before it waits, and the one in front of it may have begun early too."""
    source = inspect.getsource(kernel.fn)
    assert "gdc_wait" in source and "gdc_launch_dependents" not in source


@pytest.mark.parametrize("rows", [1, 63, 100])
def test_padding_without_room_has_no_rows(rows, device):
    step = Step.random((70, 3, 2), device, seed=rows, rows=rows, padding=50)
    arguments = (step.tokens_T, step.asked, step.slots)
    theirs = lay_rows.reference(*arguments, picks=None)
    assert int(theirs.starts_B[-1]) == min(rows, int(theirs.starts_B[-1]))
    assert_same(lay_rows.kernel(*arguments, picks=None), theirs)


@pytest.mark.parametrize("budget", [0, 1, 20, HUGE])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 7, 1), (3, 15, 1), (131, 1, 1)], ids=str)
def test_the_likeliest_drafts_are_kept(shape, budget, device):
    step = Step.random(shape, device, seed=budget % 97, padding=shape[0] // 4)
    numbers = torch.linspace(0.2, -0.9, shape[1])
    trim_M = torch.cat([torch.tensor([0.7]), numbers]).to(device)
    budget_1 = torch.tensor([budget], dtype=torch.int32, device=device)
    offered = (step.offered_B, step.offered_B * 0, step.offered_B * 0 + shape[1])
    for offered_B in offered[: 3 if budget == 20 and shape[0] < 100 else 1]:
        arguments = (step.odds_SN, step.asked.rows_B, offered_B, trim_M, budget_1)
        theirs = keep.reference(*arguments)
        assert int(theirs.sum()) == min(budget, int(offered_B.sum()))
        mine = keep.kernel(*arguments)
        assert mine.dtype == torch.int64 and torch.equal(mine, theirs)


@pytest.mark.parametrize("odds", [-MOST_ODDS, 0.0, MOST_ODDS, float("nan"), float("inf")])
def test_of_equals_the_earlier_in_their_sequence_are_kept(odds, device):
    """Also where all drafts are certain, or none is likely at all."""
    odds_SN = torch.full((12, 3), odds, device=device)
    odds_SN[::5, 2] = -1.0
    offered_B = torch.arange(11, dtype=torch.int32, device=device) % 4
    rows_B = torch.arange(11, dtype=torch.int32, device=device).flip(0).contiguous()
    trim_M = torch.tensor([3.0, *[0.0] * 3], device=device)
    for budget in (1, 7, 12):
        budget_1 = torch.tensor([budget], dtype=torch.int32, device=device)
        arguments = (odds_SN, rows_B, offered_B, trim_M, budget_1)
        theirs = keep.reference(*arguments)
        assert int(theirs.sum()) == min(budget, int(offered_B.sum()))
        assert torch.equal(keep.kernel(*arguments), theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_leaves_lengths_and_last_tokens(shape, device):
    batch, drafts, _ = shape
    step = Step.random(shape, device, seed=batch)
    rows = lay_rows.reference(step.tokens_T, step.asked, step.slots, picks=None)
    accepted_B = step.asked.kept_B
    tokens_BQ = torch.arange(batch * (drafts + 1), device=device).view(batch, drafts + 1)
    tokens_BQ = torch.where((step.asked.samples_B == 1)[:, None], tokens_BQ, NOTHING)
    verified = Verified(accepted_B, tokens_BQ, torch.zeros(batch, device=device))
    left = []
    for one in (stand.kernel, stand.reference):
        slots = (step.slots.lengths_S.clone(), step.slots.last_tokens_S.clone())
        one(*slots, step.asked.rows_B, rows.next_B, verified)
        left.append(slots)
    assert not torch.equal(left[1][0], step.slots.lengths_S)
    for mine, theirs in zip(*left, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("padding", [2, 9])
def test_padding_leaves_nothing_in_others_slots(padding, device):
    step = Step.random((30, 3, 1), device, seed=padding, padding=padding)
    rows = lay_rows.reference(step.tokens_T, step.asked, step.slots, picks=None)
    tokens_BQ = torch.arange(120, device=device).view(30, 4)
    verified = Verified(step.asked.kept_B, tokens_BQ, torch.zeros(30, device=device))
    left = []
    for one in (stand.kernel, stand.reference):
        slots = (step.slots.lengths_S.clone(), step.slots.last_tokens_S.clone())
        one(*slots, step.asked.rows_B, rows.next_B, verified)
        left.append(slots)
    for mine, theirs in zip(*left, strict=True):
        assert torch.equal(mine[:-1], theirs[:-1])
