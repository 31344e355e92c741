"""Layer groups: how layers are cut, how much is needed, and which beginning can be reused."""

import random

import pytest

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, GroupSpec, plan_groups
from limelight.types import Request, SamplingParams, Sequence

FLINT = [None if i < 2 or i % 4 == 1 or i == 48 else 513 for i in range(49)]
BEAM = [None if (i + 1) % 6 == 0 or i == 51 else 512 for i in range(52)]
FULL, SLIDING = GroupSpec(None, (0,)), GroupSpec(9, (1,))
SHAPES = {
    "full": [FULL],
    "sliding": [SLIDING],
    "both": [FULL, SLIDING],
    "two windows": [FULL, SLIDING, GroupSpec(3, (2,)), GroupSpec(None, (3,))],
    "window of one": [FULL, GroupSpec(1, (1,))],
}


def make(specs, num_blocks=300, block_size=4, **options):
    return CacheGroups(specs, BlockPool(num_blocks, block_size=block_size), **options)


def sequence(token_ids, *, id="r", salt="", **params):
    request = Request(
        id=id,
        prompt_token_ids=list(token_ids),
        params=SamplingParams(**params),
        max_tokens=1000,
        seed=0,
        cache_salt=salt,
    )
    return Sequence(request)


def compute(groups, sequence, *, chunk=7):
    """Take what is cached and compute the rest; how much was cached."""
    hit = groups.match(sequence)
    groups.take(sequence, hit)
    extend(groups, sequence, chunk=chunk)
    return hit.num_tokens


def extend(groups, sequence, *, chunk=1):
    while sequence.num_computed < sequence.num_tokens:
        end = min(sequence.num_computed + chunk, sequence.num_tokens)
        groups.grow(sequence, end)
        groups.advance(sequence, end)


def test_flint_and_beam_are_cut_into_few_groups_of_equal_size():
    flint, beam = plan_groups(FLINT), plan_groups(BEAM)
    assert [(g.window, len(g.layers)) for g in flint] == [(None, 7)] * 2 + [(513, 7)] * 5
    assert [(g.window, len(g.layers)) for g in beam] == [(None, 9)] + [(512, 9)] * 4 + [(512, 7)]


@pytest.mark.parametrize("seed", range(40))
def test_groups_hold_every_layer_once_and_leave_few_rows_idle(seed):
    rng = random.Random(seed)
    windows = [rng.choice([None, 17, 17, 17, 5][: rng.randint(1, 5)]) for _ in range(1 + seed)]
    groups = plan_groups(windows)
    assert sorted(layer for g in groups for layer in g.layers) == list(range(len(windows)))
    assert all(windows[layer] == g.window for g in groups for layer in g.layers)
    idle = len(groups) * max(len(g.layers) for g in groups) - len(windows)
    assert 0 <= idle <= 0.05 * len(windows)


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 100], ids="chunk{}".format)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_for_length_is_exactly_what_one_sequence_needs(shape, chunk):
    for length in range(1, 60):
        # Chunks need not start on a block, so every first chunk is tried.
        most = 0
        for first in range(1, min(chunk, length) + 1):
            groups = make(SHAPES[shape], prefix_caching=False)
            one = sequence(range(length))
            groups.take(one, groups.match(one))
            end = first
            while one.num_computed < length:
                groups.grow(one, end)
                most = max(most, groups.pool.num_blocks - groups.pool.num_free)
                groups.advance(one, end)
                end = min(end + chunk, length)
        needed = make(SHAPES[shape]).blocks_for_length(length, chunk)
        assert most <= needed
        if length >= 40:
            assert most == needed


def test_the_plan_counts_windows_and_names_what_fits():
    groups = make([FULL, SLIDING], num_blocks=100)
    assert groups.blocks_for_length(160, 1) == 40 + 3
    assert groups.blocks_for_length(160, 16) == 40 + 7
    assert groups.sequences_of_length(160, 16) == 2
    assert groups.sequences_of_length(1600, 16) == 0
    assert groups.longest_sequence(10_000) == 97 * 4
    assert groups.longest_sequence(50) == 50
    assert groups.blocks_for_length(97 * 4, 1) == 100


def longest_hit(groups, one):
    """The definition, tried from the longest beginning down."""
    size = groups.block_size
    for end in range((one.num_tokens - 1) // size, 0, -1):
        if all(
            groups.pool.find((g, groups.block_hash(one, index))) is not None
            for g, spec in enumerate(groups.specs)
            for index in range(end)
            if spec.window is None or (index + 1) * size - 1 >= end * size - spec.window + 1
        ):
            return end * size
    return 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hit_is_the_longest_beginning_on_which_all_groups_agree(shape, seed):
    rng = random.Random(seed)
    groups = make(SHAPES[shape], num_blocks=rng.randint(60, 120))
    live, hits = [], 0
    for step in range(120):
        head = [rng.randrange(3)] * rng.choice([3, 8, 17, 20])
        one = sequence(head + [rng.randrange(2) for _ in range(rng.randint(1, 20))], id=str(step))
        hit = groups.match(one)
        assert hit.num_tokens == longest_hit(groups, one) <= hit.num_shared < one.num_tokens
        hits += hit.num_tokens
        if groups.blocks_needed(one, hit, 7) <= groups.pool.num_free:
            live.append(one)
            assert compute(groups, one, chunk=rng.randint(1, 7)) == hit.num_tokens
        else:
            groups.release(live.pop(rng.randrange(len(live))))
        groups.check(live)
        if live and rng.random() < 0.5:
            groups.release(live.pop(rng.randrange(len(live))))
        groups.check(live)
    for one in live:
        groups.release(one)
    groups.check([])
    assert groups.pool.num_free == groups.pool.num_blocks and hits > 0


def lose(groups, one, *keys):
    """Let the blocks with these (group, index) of a finished sequence be reused, and no others."""
    lost = [groups.pool.find((g, one.block_hashes[index])) for g, index in keys]
    kept = [b for b in range(1, groups.pool.num_blocks + 1) if groups.pool.key(b) and b not in lost]
    for block in kept:
        groups.pool.share(block)
    groups.pool.allocate(groups.pool.num_free)
    groups.pool.release(kept)


@pytest.mark.parametrize(
    "group, index, cached",
    [(1, 7, 28), (1, 6, 24), (1, 5, 32), (1, 0, 32), (0, 7, 28), (0, 5, 20), (0, 0, 0)],
)
def test_a_hit_needs_the_keys_that_its_next_query_sees_and_no_others(group, index, cached):
    # At position 32 a window of 9 sees 24..32, so blocks 6 and 7; at 28 it sees 5 and 6.
    groups = make([FULL, SLIDING], num_blocks=50)
    one = sequence(range(33), id="a")
    compute(groups, one)
    groups.release(one)
    assert groups.match(sequence(range(33))).num_tokens == 32
    lose(groups, one, (group, index))
    assert groups.match(sequence(range(33))).num_tokens == cached


def test_the_window_edge_decides_how_many_blocks_a_hit_needs():
    # Position 16 sees [16 - window + 1, 16]: key 7 in block 1 with a window of 10, not with 9.
    for window, first in [(9, 2), (10, 1), (13, 1), (14, 0), (17, 0), (1, 4)]:
        groups = make([FULL, GroupSpec(window, (1,))])
        compute(groups, sequence(range(17), id="a"), chunk=100)
        table = groups.match(sequence(range(17), id="b")).tables[1]
        assert [block is None for block in table] == [index < first for index in range(4)]


def test_the_last_token_is_always_computed():
    groups = make([FULL, SLIDING])
    for length, cached in [(16, 12), (17, 16), (4, 0), (5, 4)]:
        compute(groups, sequence(range(length)))
        assert groups.match(sequence(range(length))).num_tokens == cached


def test_blocks_behind_the_window_come_back_while_the_sequence_runs():
    groups = make([FULL, SLIDING], num_blocks=30)
    one = sequence(range(16))
    compute(groups, one, chunk=16)
    for token in range(16, 60):
        one.output_token_ids.append(token)
        extend(groups, one)
        groups.check([one])
        live = [block for block in one.block_tables[1] if block is not None]
        assert len(live) <= 3 and len(one.block_tables[0]) == -(-one.num_computed // 4)


@pytest.mark.parametrize("specs", [[FULL, SLIDING], plan_groups(FLINT)], ids=["small", "flint"])
def test_the_second_turn_reuses_all_of_the_first(specs):
    groups = make(specs, num_blocks=3000, block_size=16)
    one = sequence(range(1500), id="turn 1")
    compute(groups, one, chunk=512)
    for token in range(700):
        one.output_token_ids.append(token)
        extend(groups, one)
    groups.release(one)
    two = sequence([*range(1500), *range(700), 5, 6, 7], id="turn 2")
    assert compute(groups, two, chunk=512) == 2200 // 16 * 16
    groups.check([two])


def test_salts_share_nothing_and_switching_it_off_reuses_nothing():
    groups = make([FULL, SLIDING])
    assert compute(groups, sequence(range(40), salt="a")) == 0
    assert compute(groups, sequence(range(40), salt="b")) == 0
    assert compute(groups, sequence(range(40), salt="a")) == 36
    plain = make([FULL, SLIDING], prefix_caching=False)
    assert compute(plain, sequence(range(40))) == compute(plain, sequence(range(40))) == 0
    assert plain.pool.key(1) is None


def test_prompt_logprobs_read_no_prefix_but_leave_one():
    groups = make([FULL, SLIDING])
    assert compute(groups, sequence(range(40), prompt_logprobs=0)) == 0
    assert compute(groups, sequence(range(40), prompt_logprobs=0)) == 0
    assert compute(groups, sequence(range(40))) == 36


def test_what_a_retracted_sequence_computed_is_not_found_again_and_what_it_took_is():
    groups = make([FULL, SLIDING])
    head = sequence(range(40), id="head")
    compute(groups, head)
    groups.release(head)
    failed = sequence(range(103), id="failed")
    failed.num_cached = compute(groups, failed)
    # A position whose token was not known yet when it was computed: it is not published yet.
    groups.grow(failed, 104)
    groups.advance(failed, 104)
    failed.output_token_ids.append(103)
    reader = sequence(range(90), id="reader")
    assert (failed.num_cached, compute(groups, reader)) == (40, 88)
    groups.retract(failed)
    groups.release(failed)
    groups.check([reader])
    groups.release(reader)
    groups.check([])
    assert compute(groups, sequence(range(103))) == 40
    assert groups.match(sequence(range(105))).num_tokens == 100


def test_the_tail_of_a_finished_sequence_is_reused_before_its_head():
    groups = make([FULL], num_blocks=10)
    one = sequence(range(41), id="a")
    groups.take(one, groups.match(one))
    groups.grow(one, 40)
    groups.advance(one, 40)
    groups.release(one)
    for taken in range(10):
        assert groups.match(sequence(range(41))).num_tokens == 4 * (10 - taken)
        groups.pool.allocate(1)


def test_what_a_window_left_in_the_middle_of_a_prompt_is_reused_before_a_conversation():
    groups = make([FULL, SLIDING], num_blocks=100)
    talk = sequence(range(41), id="talk")
    compute(groups, talk)
    groups.release(talk)
    # 50 blocks a group; the windows that it passes are enough for itself.
    long = sequence(range(1000, 1200), id="long")
    compute(groups, long)
    groups.check([long])
    assert groups.match(sequence([*range(41), 1])).num_tokens == 40


def test_the_end_of_the_prompt_is_found_again_although_the_answer_left_it_behind():
    groups = make([FULL, SLIDING], num_blocks=70)
    one = sequence(range(80), id="one")
    compute(groups, one)
    for token in range(100):
        one.output_token_ids.append(token)
        extend(groups, one)
    groups.release(one)
    # The next turn leaves the reasoning out, and the line that opened it.
    assert groups.match(sequence([*range(77), *range(500, 520)])).num_tokens == 76


def test_a_head_shared_once_is_kept_under_pressure():
    groups = make([FULL, SLIDING], num_blocks=150)
    hits = []
    for user in range(6):
        one = sequence([*range(100), *range(1000 * user + 1000, 1000 * user + 1060)], id=str(user))
        hits.append(compute(groups, one))
        groups.release(one)
        other = sequence(range(-200 * user - 200, -200 * user), id="other")
        compute(groups, other)
        groups.release(other)
    assert hits[2:] == [100] * 4
