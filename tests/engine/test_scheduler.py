"""Who computes what and in which blocks, on a machine that remembers what every block holds."""

import random

import pytest
from world import FULL, SLIDING, World, ahead, numbers

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, GroupSpec
from limelight.types import Request, SamplingParams, Sequence

SHAPES = {
    "full": [FULL],
    "sliding": [SLIDING],
    "both": [FULL, SLIDING],
    "more": [FULL, SLIDING, GroupSpec(9, (2,)), GroupSpec(None, (3,))],
    "window of one": [FULL, GroupSpec(1, (1,))],
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_drafts", [0, 1, 7], ids="drafts{}".format)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_order_of_events_lets_a_sequence_see_keys_that_are_not_its_own(shape, num_drafts, seed):
    rng = random.Random(seed)
    specs, size = SHAPES[shape], rng.choice([1, 3, 4, 8])
    groups = CacheGroups(specs, BlockPool(1, block_size=size), ahead=ahead(num_drafts), longest=60)
    least = groups.blocks_for_length(60, 1)
    world = World(
        specs,
        int(least * rng.choice([1, 1.3, 2, 4])),
        block_size=size,
        seed=seed,
        late=rng.random() < 0.5,
        groups={"prefix_caching": rng.random() < 0.85},
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([1, 5, 16, 40]),
        max_model_len=60,
        num_drafts=num_drafts,
        policy=rng.choice(["fcfs", "priority"]),
        longest_chunk=rng.choice([0, 0, 2, 9]),
    )
    for event in range(150):
        if rng.random() < 0.3 and len(world.live) < 12:
            shared = [rng.randrange(3)] * rng.choice([0, 7, 20, 33])
            world.add(
                shared + [rng.randrange(2) for _ in range(rng.randint(1, 12))],
                id=str(event),
                max_tokens=rng.randint(1, 15),
                priority=rng.randrange(3),
                arrival=event // 3,
                prompt_logprobs=rng.choice([None, None, None, 1]),
                ignore_eos=rng.random() < 0.5,
            )
        elif rng.random() < 0.06 and world.live:
            world.abort(rng.choice(list(world.live)))
        elif rng.random() < 0.05:
            world.renew(preempt=rng.random() < 0.5)
        elif world.scheduler.has_work:
            world.step()
    world.run()
    stats = world.scheduler.stats()
    assert stats["prefix_hits"] <= stats["prefix_queries"]
    assert stats["waiting_tokens"] == stats["running"] == stats["waiting"] == 0


def test_three_hundred_rounds_of_prompts_with_shared_heads_in_a_small_pool():
    rng = random.Random(3)
    heads = [numbers(rng.randint(100, 400), seed=i) for i in range(10)]
    prompts = [
        heads[i // 2] + numbers(rng.randint(100, 600 - len(heads[i // 2])), seed=100 + i)
        for i in range(20)
    ]
    specs = [GroupSpec(None, (0, 1, 5)), GroupSpec(17, (2, 3, 4, 6))]
    world = World(specs, 64, block_size=16, max_num_batched_tokens=512, max_model_len=640)
    for round in range(300):
        world.add(rng.choice(prompts), id=str(round))
        if round % 5 == 4:
            sequence = world.live[str(round)]
            while str(round) in world.live and len(sequence.output_token_ids) < 3:
                world.step()
            if str(round) in world.live:
                world.abort(str(round))
        while len(world.live) >= 4:
            world.step()
    world.run()
    assert world.scheduler.stats()["prefix_hits"] > 0


def grants(plan):
    return [(grant.slot, grant.start, grant.num_tokens) for grant in plan.grants]


def test_prompts_are_cut_and_every_running_sequence_keeps_decoding():
    world = World([FULL, SLIDING], 100, max_num_batched_tokens=10)
    world.add(numbers(4, seed=1), id="a", arrival=2)
    assert grants(world.step()) == [(0, 0, 4)]
    world.add(numbers(25, seed=2), id="b", arrival=1)
    assert grants(world.step()) == [(0, 4, 1), (1, 0, 9)]
    # b goes first in order, and yet leaves a its token.
    assert grants(world.step()) == [(1, 9, 9), (0, 5, 1)]
    assert grants(world.step()) == [(1, 18, 7), (0, 6, 1)]
    world.run()


def test_a_short_prompt_gets_on_beside_a_long_one_whose_chunks_have_a_limit():
    world = World([FULL, SLIDING], 100, max_num_batched_tokens=16, longest_chunk=6)
    world.add(numbers(25, seed=1), id="a", arrival=1)
    world.add(numbers(8, seed=2), id="b", arrival=2)
    world.add(numbers(3, seed=3), id="c", arrival=3)
    assert grants(world.step()) == [(0, 0, 6), (1, 0, 6), (2, 0, 3)]
    assert grants(world.step()) == [(0, 6, 6), (1, 6, 2), (2, 3, 1)]
    world.run()
    assert set(world.done) == {"a", "b", "c"}


def test_a_new_slot_gets_all_live_entries_and_later_only_new_ones():
    world = World([FULL, SLIDING], 100)
    world.add(numbers(32, seed=1), id="a", max_tokens=1)
    assert [first for first, _ in world.step().grants[0].tables] == [0, 0]
    world.add(numbers(32, seed=1) + [1, 2, 3], id="b")
    full, sliding = world.step().grants[0].tables
    # 32 positions come from the cache; at position 32 the window of 9 begins in block 6.
    assert full[0] == 0 and len(full[1]) == 9
    assert sliding[0] == 6 and len(sliding[1]) == 3
    assert world.step().grants[0].tables == []
    assert [(first, len(new)) for first, new in world.step().grants[0].tables] == [(9, 1), (9, 1)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_is_first_in_order_is_admitted_first(policy):
    world = World([FULL], 100, max_num_seqs=1, policy=policy)
    for id, priority, arrival in [("a", 1, 3), ("b", 2, 1), ("c", 1, 2), ("d", 1, 2)]:
        world.add(numbers(5, seed=arrival), id=id, priority=priority, arrival=arrival)
    world.run()
    assert "".join(world.done) == {"fcfs": "bcda", "priority": "cdab"}[policy]


@pytest.mark.parametrize("order", ["by arrival", "by priority", "as they were added"])
def test_the_last_in_order_is_preempted_and_keeps_its_place(order):
    policy = "priority" if order == "by priority" else "fcfs"
    world = World([FULL], 12, max_model_len=40, policy=policy)
    for i, id in enumerate("abcd"):
        arrival = i if order == "by arrival" else 0
        world.add(numbers(12, seed=i), id=id, max_tokens=20, priority=-i, arrival=arrival)
    ids = "dcba" if order == "by priority" else "abcd"
    admitted = [a.request.id for a in world.step().admissions]
    assert admitted == list(ids[:3])
    while world.scheduler.has_work:
        admitted += [a.request.id for a in world.step().admissions]
    world.close()
    assert world.done[ids[0]].num_preemptions == 0 < world.scheduler.stats()["preemptions"]
    # Those that were preempted come back before the one that has waited all the time.
    assert admitted.count(ids[2]) > 1
    assert admitted.index(ids[3]) > max(i for i, id in enumerate(admitted) if id == ids[2])


def test_who_found_too_few_blocks_is_let_in_as_soon_as_there_are_enough():
    world = World([FULL], 28)
    world.add(numbers(40, seed=1), id="long", max_tokens=6)
    world.add(numbers(13, seed=2), id="short", max_tokens=3)
    world.add(numbers(58, seed=3), id="next", max_tokens=2)
    while "short" in world.live:
        world.step()
        assert len(world.scheduler.running) < 3
    assert "long" in world.live
    assert [a.request.id for a in world.step().admissions] == ["next"]
    world.run()
    assert world.scheduler.stats()["preemptions"] == 0


def test_an_admission_after_preemption_brings_the_tokens_made_so_far():
    world = World([FULL], 10, max_model_len=40, max_num_seqs=2)
    first, second = (world.add(numbers(9, seed=i), id=str(i), max_tokens=25) for i in (4, 5))
    world.run()
    again = [a for plan in world.plans for a in plan.admissions if a.output_token_ids]
    assert {a.request.id for a in again} == {"5"} and first.num_preemptions == 0
    assert again[0].output_token_ids == second.output_token_ids[: len(again[0].output_token_ids)]


def test_the_least_pool_serves_every_length_and_one_block_less_is_refused_by_number():
    specs = [FULL, SLIDING]
    least = CacheGroups(specs, BlockPool(1, block_size=4)).blocks_for_length(100, 1)
    world = World(specs, least, max_num_batched_tokens=64)
    for i in range(6):
        world.add(numbers(60 + i, seed=i), max_tokens=35, id=str(i))
    world.run()
    with pytest.raises(ValueError, match=f"{least - 1} blocks.*needs {least}: .* to 96"):
        World(specs, least - 1)


@pytest.mark.parametrize("length", [34, 340], ids="L{}".format)
def test_as_many_sequences_as_announced_run_at_once_without_preemption(length):
    specs = [FULL, GroupSpec(17, (1,)), GroupSpec(17, (2,))]

    def preemptions(surplus):
        world = World(
            specs,
            400,
            block_size=16,
            max_num_seqs=99,
            max_model_len=340,
            max_num_batched_tokens=200,
        )
        count = int(world.groups.sequences_of_length(length, 200) * surplus)
        for i in range(count):
            world.add(numbers(10, seed=i), max_tokens=length - 10, id=str(i))
        world.run()
        assert max(len(plan.grants) for plan in world.plans) == count > 4
        return world.scheduler.stats()["preemptions"]

    assert preemptions(1) == 0
    assert preemptions(1.3) > 0


def test_equal_prompts_at_once_are_computed_once():
    world = World([FULL, SLIDING], 400, max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(8):
        world.add(numbers(90, seed=1), id=str(i), max_tokens=1)
    world.add(numbers(9, seed=2), id="other", max_tokens=1)
    world.run()
    # 90 once, the two behind the last full block for each other one, and the other prompt.
    assert world.machine.computed == 90 + 7 * 2 + 9
    assert "other" in [a.request.id for a in world.plans[1].admissions]
    assert world.scheduler.stats()["prefix_hits"] == 7 * 88


def test_a_second_turn_finds_the_first_while_others_come_and_go():
    world = World([FULL, SLIDING], 150, max_num_seqs=3, max_model_len=300)
    talk = numbers(60, seed=0)
    for turn in range(4):
        for i in range(3):
            world.add(numbers(20, seed=10 * turn + i + 1), id=f"{turn}-{i}")
        one = world.add(talk, id=f"turn {turn}", max_tokens=20)
        world.run()
        assert one.num_cached >= (len(talk) - 9) // 4 * 4 * (turn > 0)
        computed = one.num_tokens - 1
        talk = one.token_ids + numbers(8, seed=99 + turn)
        check = world.add(talk, id=f"again {turn}", max_tokens=1)
        world.run()
        assert check.num_cached == computed // 4 * 4


def test_a_salt_separates_and_prompt_logprobs_compute_every_position():
    world = World([FULL, SLIDING], 100)
    prompt = numbers(41, seed=1)
    cached = []
    for salt, logprobs in [("a", None), ("b", None), ("a", None), ("a", 0), ("", None)]:
        sequence = world.add(prompt, salt=salt, max_tokens=1, prompt_logprobs=logprobs)
        world.run()
        cached.append(sequence.num_cached)
    assert cached == [0, 0, 40, 0, 0]
    stats = world.scheduler.stats()
    assert (stats["prefix_queries"], stats["prefix_hits"]) == (4 * 41, 40)


def test_the_prefix_figures_and_num_cached_count_the_first_admission_only():
    world = World([FULL], 10, max_model_len=40, max_num_seqs=2)
    sequences = [world.add(numbers(9, seed=i), id=str(i), max_tokens=25) for i in (4, 5)]
    world.run()
    assert sequences[1].num_preemptions > 0
    assert world.scheduler.stats()["prefix_queries"] == 18
    assert [sequence.num_cached for sequence in sequences] == [0, 0]


def test_a_late_settle_grants_nothing_behind_the_last_token():
    world = World([FULL], 100, late=True)
    world.add([7, 7, 7], max_tokens=3)
    while world.scheduler.has_work:
        world.step()
    assert [plan.num_tokens for plan in world.plans] == [3, 1, 1, 0]


def test_a_failed_step_leaves_nothing_behind():
    world = World([FULL, SLIDING], 100)
    sequences = [world.add(numbers(40, seed=1), id="a"), world.add(numbers(9, seed=2), id="b")]
    world.scheduler.schedule()
    for sequence in list(world.scheduler.running.values()):
        world.abort(sequence.request.id)
    assert world.groups.pool.num_free == 100
    again = world.add(numbers(40, seed=1), id="again")
    world.run()
    assert again.num_cached == 0 and len(sequences) == 2


def test_slots_are_used_again_from_the_lowest():
    world = World([FULL], 100, max_num_seqs=3)
    for i in range(3):
        world.add(numbers(5, seed=i), id=str(i))
    world.step()
    world.abort("1")
    world.add(numbers(6, seed=8), id="8")
    assert [a.slot for a in world.step().admissions] == [1]


def test_aborting_someone_unknown_is_none():
    assert World([FULL], 100).scheduler.abort("nobody") is None


def test_a_request_that_cannot_fit_or_is_already_here_is_refused():
    world = World([FULL], 100)
    world.add([1], id="here")
    for prompt, id, message in [
        ([], "x", "0 prompt tokens"),
        ([1] * 93, "x", "93 prompt tokens and asks for 8; .* 100"),
        ([1], "here", "already being served"),
    ]:
        request = Request(
            id=id, prompt_token_ids=prompt, params=SamplingParams(), max_tokens=8, seed=0
        )
        with pytest.raises(ValueError, match=message):
            world.scheduler.add(Sequence(request))
    world.run()
