"""Where experts lie: every one somewhere, hot ones in more places, and ranks evenly loaded."""

import json
import random

import pytest

from limelight.parallel.expert_placement import ExpertPlacement, balance, read_loads


def work(placement, load, layer=0):
    """What each rank gets to do, where copies share an expert's tokens."""
    slots = placement.of_layer(layer)
    copies = [slots.count(expert) for expert in range(placement.experts)]
    ranks = [placement.held(layer, rank) for rank in range(placement.ranks)]
    return [sum(load[e] / copies[e] for e in held) for held in ranks]


def test_without_loads_experts_lie_in_their_order_and_spare_slots_hold_the_first():
    even = ExpertPlacement.of(8, 2)
    assert even.held(3, 0) == [0, 1, 2, 3] and even.held(3, 1) == [4, 5, 6, 7]
    assert even.choices(3, 0) == [[slot] for slot in range(8)]
    assert ExpertPlacement.of(8, 3).of_layer(0) == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert ExpertPlacement.of(8, 2, spare=2).of_layer(0) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    with pytest.raises(ValueError, match="9 redundant experts are too many"):
        ExpertPlacement.of(8, 2, spare=9)


@pytest.mark.parametrize("seed", range(20))
def test_every_expert_is_somewhere_and_the_busiest_rank_has_less_to_do(seed):
    rng = random.Random(seed)
    experts, ranks = rng.choice([(8, 2), (16, 4), (12, 3), (64, 8)])
    load = [rng.paretovariate(0.8) for _ in range(experts)]
    rng.shuffle(load)
    in_order, spare = ExpertPlacement.of(experts, ranks), rng.choice([0, ranks, 2 * ranks])
    placed = ExpertPlacement.of(experts, ranks, spare=spare, loads={0: load})
    for rank in range(ranks):
        assert len(placed.held(0, rank)) == placed.slots
    assert set(placed.of_layer(0)) == set(range(experts))
    assert max(work(placed, load)) <= max(work(in_order, load)) + 1e-6 * sum(load)
    # Another layer has no record.
    assert set(placed.of_layer(1)) == set(range(experts))


def test_a_hot_expert_gets_copies_on_several_ranks():
    slots = balance([100.0, 1, 1, 1], 4, 2)
    assert sum(0 in slots[2 * rank : 2 * rank + 2] for rank in range(4)) == 4
    assert set(balance([0.0] * 8, 2, 4)) == set(range(8))


def test_a_rank_goes_to_its_own_copy_and_else_to_all_in_turn():
    placement = ExpertPlacement(3, 3, 2, {0: [0, 1, 0, 2, 2, 1]})
    assert placement.choices(0, 0) == [[0, 0], [1, 1], [3, 4]]
    assert placement.choices(0, 1) == [[2, 2], [5, 1], [3, 3]]


def test_records_are_summed_and_what_is_none_is_refused_by_name(tmp_path):
    for name, counts in (("a", [1, 2, 3]), ("b", [10, 0, 0])):
        (tmp_path / name).write_text(json.dumps({"layers": {"2": counts}}))
    files = [str(tmp_path / name) for name in "ab"]
    assert read_loads(files, experts=3) == {2: [11, 2, 3]}
    with pytest.raises(ValueError, match="a: layer 2 must have 4 counts"):
        read_loads(files, experts=4)
    (tmp_path / "c").write_text('{"layers": [1]}')
    for name in ("c", "missing"):
        with pytest.raises(ValueError, match=f"--expert-placement: .*{name}"):
            read_loads([str(tmp_path / name)], experts=3)
