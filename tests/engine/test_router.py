"""Requests go where their beginning is known, unless too much is to be done there."""

import random
from contextlib import ExitStack

import pytest

from limelight.engine.router import MOST_PIECES, OPEN, PIECE, Router
from limelight.types import Request, SamplingParams


def prompt(seed: int, length: int = 4 * PIECE) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def asked(ids: list[int], **fields) -> Request:
    return Request(
        id="r", prompt_token_ids=ids, params=SamplingParams(), max_tokens=5, seed=0, **fields
    )


def engine_of(router: Router, ids: list[int], engines=(0, 1, 2), **fields) -> int:
    """Who gets a request that ends at once."""
    with router.errand(asked(ids, **fields), engines) as errand:
        return errand.engine


def test_requests_that_are_open_go_to_an_engine_each():
    router = Router()
    with ExitStack() as stack:
        errands = [
            stack.enter_context(router.errand(asked(prompt(i)), (0, 1, 2))) for i in range(6)
        ]
        assert sorted(errand.engine for errand in errands) == [0, 0, 1, 1, 2, 2]
    assert [router.work[i] for i in range(3)] == [0, 0, 0]


def test_a_beginning_that_is_known_is_followed_turn_by_turn():
    router = Router()
    with router.errand(asked(prompt(9)), (0, 1, 2)):
        first = engine_of(router, prompt(1))
    assert first == 1
    turns = prompt(1)
    for i in range(5):
        turns = turns + prompt(100 + i, 70)
        assert engine_of(router, turns) == first
    assert engine_of(router, turns, cache_salt="another user") == 0
    assert engine_of(router, turns, adapter_id=3) == 0
    assert engine_of(router, [7, *turns]) == 0


def test_a_short_prompt_elsewhere_takes_no_long_beginning_away():
    router = Router()
    long = prompt(1, 100 * PIECE)
    assert engine_of(router, long) == 0
    assert engine_of(router, long[: PIECE + 10], (1, 2)) == 1
    assert engine_of(router, [*long, 5]) == 0
    assert engine_of(router, [*long[:PIECE], 7], (1, 2)) == 1


def test_work_weighs_more_than_a_beginning_once_there_is_enough():
    router = Router()
    ids = prompt(3, 4 * PIECE)
    assert engine_of(router, ids, (0, 1)) == 0
    with ExitStack() as stack:
        engines = [stack.enter_context(router.errand(asked(ids), (0, 1))).engine for _ in range(12)]
    # 4 pieces of 64 tokens are as much as 4 open requests.
    assert engines[:4] == [0] * 4 and set(engines[4:]) == {0, 1}


def test_what_is_left_to_compute_counts_until_the_first_word():
    router = Router()
    with router.errand(asked(prompt(1, 1000)), (0,)) as errand:
        assert router.work[0] == 1000 + OPEN
        router.answered(errand)
        assert router.work[0] == OPEN
    assert router.work[0] == 0


def test_a_session_stays_where_it_is_and_moves_only_if_its_engine_goes():
    router = Router()
    names = [f"session {i}" for i in range(400)]
    before = {name: engine_of(router, [1], range(4), session=name) for name in names}
    assert all(list(before.values()).count(i) > 60 for i in range(4))
    after = {name: engine_of(router, [2, 3], (0, 1, 3), session=name) for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != 2)
    assert {after[name] for name in names if before[name] == 2} == {0, 1, 3}


def test_an_engine_that_is_forgotten_knows_nothing():
    router = Router()
    with router.errand(asked(prompt(9)), (0, 1)):
        assert engine_of(router, prompt(1), (0, 1)) == 1
    router.beginnings.forget(1)
    assert engine_of(router, prompt(1), (0, 1)) == 0


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, 10_000])
def test_prompts_of_any_length_find_an_engine(length):
    assert engine_of(Router(), prompt(0, length), (0,)) == 0


def test_what_is_known_stays_bounded(monkeypatch):
    monkeypatch.setattr("limelight.engine.router.MOST_PIECES", 100)
    router = Router()
    for i in range(60):
        engine_of(router, prompt(i), (0, 1))
    assert len(router.beginnings.owners) == 100 < MOST_PIECES
