"""Reasoning is followed by its marks, and its budget is exact."""

import random

import pytest

from limelight.runner.thoughts import Thoughts
from limelight.types import Reasoning

THINK, END, CALL, WORD, OTHER = 1, 2, 3, 7, 8


def thoughts(prompt=(), **given) -> Thoughts:
    settings = {"starts": [[THINK]], "ends": [[END]], "is_open": True, "forced_end": [END]} | given
    return Thoughts(Reasoning(**settings), list(prompt))


def answer(one: Thoughts, wanted: list[int]) -> list[int]:
    """What is made of what a model wants: forced tokens come in between."""
    made: list[int] = []
    for token in wanted:
        while (forced := one.forced) is not None:
            one.feed(forced)
            made.append(forced)
        one.feed(token)
        made.append(token)
    return made


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_exactly_the_budget_is_thought_and_then_the_end_comes(budget):
    assert answer(thoughts(budget=budget), [WORD] * 9) == [WORD] * budget + [END] + [WORD] * (
        9 - budget
    )


@pytest.mark.parametrize("budget", [None, 9])
def test_nothing_is_forced_within_the_budget(budget):
    wanted = [WORD, WORD, END, *[OTHER] * 20]
    assert answer(thoughts(budget=budget), wanted) == wanted


def test_tokens_of_the_prompt_count():
    assert answer(thoughts([THINK, WORD, WORD], budget=3, num_tokens=2), [WORD] * 3) == [
        WORD, END, WORD, WORD,
    ]  # fmt: skip


def test_nothing_is_forced_where_the_prompt_has_closed_reasoning():
    assert answer(thoughts([THINK, END], budget=0, is_open=False), [WORD] * 5) == [WORD] * 5


def test_a_later_start_begins_a_new_count():
    wanted = [WORD, END, OTHER, THINK, WORD, WORD, WORD]
    made = answer(thoughts(budget=2), wanted)
    assert made == [WORD, END, OTHER, THINK, WORD, WORD, END, WORD]


def test_a_call_ends_reasoning_and_is_never_cut_by_the_budget():
    one = thoughts(budget=3, ends_kept=[[CALL]])
    assert one.feed(WORD) == [] and one.feed(CALL) == [CALL]
    assert answer(one, [WORD] * 9) == [WORD] * 9


def test_an_end_of_several_tokens_goes_on_from_what_already_stands_there():
    end = [4, 5, 4, 6]
    one = thoughts(budget=3, ends=[end], forced_end=end)
    assert answer(one, [WORD, 4, 5, OTHER]) == [WORD, 4, 5, 4, 6, OTHER]
    one = thoughts([4], budget=1, ends=[end], forced_end=end, num_tokens=1)
    assert one.forced == 5
    # What stood there before the reasoning is no part of its end.
    assert thoughts([4, THINK], budget=0, ends=[end], forced_end=end).forced == 4


def test_a_sentence_may_come_before_the_forced_end():
    one = thoughts(budget=1, forced_end=[OTHER, OTHER, END])
    assert answer(one, [WORD, WORD, THINK, OTHER, WORD]) == [
        WORD, OTHER, OTHER, END, WORD, THINK, OTHER, OTHER, END, WORD,
    ]  # fmt: skip


def test_marks_of_several_tokens_are_found_across_prompt_and_answer():
    one = thoughts([9, 4], starts=[[4, 5]], ends=[[6, 6]], is_open=False)
    assert one.feed(5) == [5] and one.is_open
    assert one.feed(6) == one.feed(6) == [] and not one.is_open
    assert one.feed(6) == [6] and not one.is_open


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_thinks_beyond_its_budget(seed):
    rng = random.Random(seed)
    budget, end = rng.randrange(6), rng.choice([[END], [4, 5], [4, 4, 5], [4, 5, 4, 6]])
    one = thoughts(budget=budget, ends=[end], ends_kept=[[CALL]], forced_end=end)
    made = answer(one, [rng.choice([THINK, CALL, *end, WORD]) for _ in range(200)])
    checked, count = thoughts(ends=[end], ends_kept=[[CALL]], forced_end=end), 0
    for token in made:
        checked.feed(token)
        count = count + 1 if checked.is_open and token != THINK else 0
        assert count <= budget + len(end)
