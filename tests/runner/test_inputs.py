"""What a step's rows and block tables hold, by the plain meaning of each."""

import random

import numpy as np
import pytest
import torch

from limelight.runner.inputs import BlockTables, StepInputs, StepTensors, fill_rows
from limelight.steps import Grant

BLOCK, SLOTS, BLOCKS = 4, 5, 6
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tables_of(rng, device="cpu"):
    tables = BlockTables(groups=2, slots=SLOTS, max_blocks=BLOCKS, device=torch.device(device))
    whole = [
        (slot, [(0, [rng.randrange(1, 2**29) for _ in range(BLOCKS)]) for _ in range(2)])
        for slot in range(SLOTS)
    ]
    tables.update(whole)
    return tables


def filled(tables, grants, size):
    inputs = StepInputs(StepTensors, size, groups=2, device=torch.device("cpu"))
    to = inputs.stage(size).arrays
    for array in to.values():
        array.fill(77)
    tokens = sum(grant.num_tokens for grant in grants)
    sampling = [grant for grant in grants if grant.samples]
    fill_rows(to, tables, grants, sampling, np.arange(tokens) + 1000, block_size=BLOCK)
    return to


@pytest.mark.parametrize("seed", range(5))
def test_each_row_has_its_token_position_and_slots(seed):
    rng = random.Random(seed)
    tables = tables_of(rng)
    grants = []
    for slot in rng.sample(range(SLOTS), 3):
        start = rng.randrange(BLOCK * BLOCKS - 1)
        count = rng.randint(1, BLOCK * BLOCKS - start)
        grants.append(Grant(slot, start, count, [], rng.random() < 0.5))
    tokens = sum(grant.num_tokens for grant in grants)
    to = filled(tables, grants, (tokens + 3, 4, 3))
    row = 0
    for b, grant in enumerate(grants):
        assert to["starts_B"][b] == row and to["rows_B"][b] == grant.slot
        assert to["seq_lens_B"][b] == grant.start + grant.num_tokens
        for position in range(grant.start, grant.start + grant.num_tokens):
            assert to["tokens_T"][row] == 1000 + row and to["positions_T"][row] == position
            for g in range(2):
                block = int(tables.host[g, grant.slot, position // BLOCK])
                assert to["slots_GT"][g, row] == block * BLOCK + position % BLOCK
            row += 1
    # Padding writes nowhere and belongs to no one.
    assert (to["slots_GT"][:, tokens:] == -1).all() and (to["positions_T"][tokens:] == 0).all()
    assert to["rows_B"][3] == tables.nobody and to["seq_lens_B"][3] == 0
    assert to["starts_B"].tolist()[3:] == [tokens, tokens + 3]
    ends = to["starts_B"][1:4] - 1
    wanted = [int(end) for end, grant in zip(ends, grants, strict=True) if grant.samples]
    assert to["samples_R"][: len(wanted)].tolist() == wanted


def test_a_step_of_no_one_is_padding_alone():
    to = filled(tables_of(random.Random(0)), [], (8, 2, 2))
    assert (to["slots_GT"] == -1).all() and (to["seq_lens_B"] == 0).all()


def test_positions_behind_a_table_are_refused():
    tables = tables_of(random.Random(0))
    grants = [Grant(0, BLOCK * BLOCKS - 1, 2, [], True)]
    with pytest.raises(AssertionError):
        filled(tables, grants, (2, 1, 1))


@pytest.mark.parametrize("device", PLACES)
def test_the_device_has_the_tables_of_the_host(device):
    rng = random.Random(1)
    tables = tables_of(rng, device)
    for _ in range(20):
        slot, first = rng.randrange(SLOTS), rng.randrange(BLOCKS)
        changes = [
            (first, [rng.randrange(1, 100) for _ in range(rng.randint(0, BLOCKS - first))])
            for _ in range(2)
        ]
        before = tables.host.copy()
        tables.update([(slot, changes)])
        for g, (at, blocks) in enumerate(changes):
            before[g, slot, at : at + len(blocks)] = blocks
        assert np.array_equal(tables.host, before)
        assert torch.equal(tables.tensor.cpu(), torch.from_numpy(before))
