"""Constraints and budgets with drafts: no token that a grammar forbids, whatever is drafted."""

import random

import pytest
from drafted import inject, write_drafter_for
from test_constraints import Small, check
from tiny import run

VOCABULARY = 4096


class Drafted(Small):
    """The same engine with a random drafter, whose drafts the tests say."""

    def __init__(self, drafter):
        super().__init__(speculative_config={"model": str(drafter)})


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return write_drafter_for("flint-nano", tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def plain():
    one = Small(speculative_config={"num_speculative_tokens": 0})
    yield one
    one.engine.close()


@pytest.fixture(scope="module")
def drafted(drafter):
    one = Drafted(drafter)
    yield one
    one.engine.close()


def ask_all(small: Small, first: int) -> list:
    """Four that are held to a form, two of which reason first, and four that are free."""
    small.count = first
    # Of drawn tokens roundings decide one in some ten thousand: most are the best.
    asked = [
        small.ask(f"Item {i}: {'on and ' * i}", seed=i, waits=i > 1, temperature=0.8 * (i == 0))[0]
        for i in range(4)
    ]
    params = {"form": None, "max_tokens": 30}
    return asked + [small.ask(seed=i, temperature=0.8 * (i == 0), **params)[0] for i in range(4)]


@pytest.mark.parametrize(
    "overlap, right", [(False, 1.0), (True, 0.5)], ids=["plain, right1.0", "overlapped, right0.5"]
)
def test_no_draft_gets_past_a_grammar_and_the_texts_are_those_without_drafts(
    plain, drafted, overlap, right
):
    expected = run(plain.engine, ask_all(plain, 100))
    asked = ask_all(drafted, 100)
    texts = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    rng = random.Random(3)

    def drafts(request_id, made):
        # Beyond the end of the answer and beside the truth there is anything.
        known = texts[request_id][made : made + 7]
        known += [rng.randrange(VOCABULARY) for _ in range(7 - len(known))]
        return [t if rng.random() < right else rng.randrange(VOCABULARY) for t in known]

    inject(drafted.engine, drafts)
    drafted.engine.overlap = overlap
    before = drafted.engine.stats()
    given_up = drafted.ask("Never mind.", max_tokens=100)[0]
    texts[given_up.id] = []
    drafted.engine.add(given_up)
    for _ in range(4):
        drafted.engine.step()
    aborted = drafted.engine.abort(given_up.id)
    answers = run(drafted.engine, asked)
    drafted.engine.overlap = False
    assert aborted is not None
    after = drafted.engine.stats()
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    for answer in answers[:2]:
        check(drafted.text(answer))
    if right:
        assert after.speculation.accepted > before.speculation.accepted


@pytest.mark.parametrize("budget", [0, 3, 40])
def test_a_budget_of_thoughts_is_kept_in_the_middle_of_drafts(plain, drafted, budget):
    never = {"logit_bias": {plain.end[0]: -100.0}, "temperature": 0.0}

    def asked(small):
        small.count = 500
        return [small.ask(waits=True, budget=budget, seed=i, **never)[0] for i in range(4)]

    expected = run(plain.engine, asked(plain))
    ours = asked(drafted)
    texts = {one.id: answer.token_ids for one, answer in zip(ours, expected, strict=True)}
    inject(drafted.engine, lambda request_id, made: texts[request_id][made : made + 7])
    answers = run(drafted.engine, ours)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    for answer in answers:
        assert answer.token_ids.index(drafted.end[0]) == budget
