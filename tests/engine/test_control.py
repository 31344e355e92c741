"""Orders to an engine between its steps: what becomes of what runs, and what comes after."""

import pytest
from ordered import OVERLAP, PROMPTS

from limelight.orders import (
    AbortRequests,
    Asked,
    ClearWeights,
    FinishUpdate,
    InitTransfer,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartUpdate,
    UpdateWeights,
    WakeUp,
)

INTERRUPTIONS = {
    "two pauses": [Pause("keep"), Pause("keep", False), Resume()],
    "reset of what runs": [Pause("keep"), ResetPrefixCache(True), Resume()],
    "sleep 1": [Sleep(1, "keep"), WakeUp()],
    "sleep that keeps the cache": [
        Sleep(1, "keep", keeps_cache=True), WakeUp(["weights"]), WakeUp(["kv_cache"])
    ],
}  # fmt: skip
MORE = {
    "reset": [ResetPrefixCache()],
    "sleep 0": [Sleep(0, "keep"), WakeUp()],
    "sleep of the cache alone": [Sleep(1, "keep", ["kv_cache"]), WakeUp(["kv_cache"])],
}


@OVERLAP
@pytest.mark.parametrize(
    "orders",
    [
        *INTERRUPTIONS.values(),
        *(pytest.param(one, marks=pytest.mark.slow) for one in MORE.values()),
    ],
    ids=[*INTERRUPTIONS, *MORE],
)
def test_what_is_kept_goes_on_as_if_nothing_had_been(ordered, orders, overlap):
    one = ordered(max_num_batched_tokens=16)
    one.engine.overlap = overlap
    expected = one.ask(*PROMPTS)
    for after in (1, 11):
        answers = one.add(*PROMPTS)
        one.steps(after)
        for i, order in enumerate(orders):
            assert one.order(order).refused is None
            if i < len(orders) - 1:
                assert not one.engine.has_work and not one.control.state.updating
        one.steps()
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize("name", [
    "reset of what runs", "sleep that keeps the cache",
    pytest.param("two pauses", marks=pytest.mark.slow),
    pytest.param("sleep 1", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_is_kept_has_the_experts_of_all_its_tokens(ordered, name):
    one = ordered(max_num_batched_tokens=16, enable_return_routed_experts=True)

    def rows(answers):
        one.steps()
        return [answer.last.routed_experts for answer in answers]

    expected = rows(one.add(*PROMPTS))
    assert [made.shape[0] for made in expected] == [len(ids) + 20 - 1 for ids in PROMPTS]
    answers = one.add(*PROMPTS)
    one.steps(11)
    for order in INTERRUPTIONS[name]:
        one.order(order)
    assert rows(answers) == expected


def test_a_pause_that_aborts_tells_all_that_there_was(ordered):
    one = ordered()
    expected = one.ask(*PROMPTS)
    answers = one.add(*PROMPTS)
    one.steps(6)
    assert one.order(Pause()).refused is None
    for answer, want in zip(answers, expected, strict=True):
        assert answer.last.finish_reason == "abort" and 0 < len(answer.token_ids) < 20
        assert answer.token_ids == want[: len(answer.token_ids)]
    [late] = one.add([5])
    assert late.last.finish_reason == "abort" and late.token_ids == []
    one.order(Resume())
    assert one.ask(*PROMPTS) == expected


def test_a_pause_that_waits_is_answered_when_nothing_runs(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(3)
    assert one.order(Pause("wait")) is None
    assert one.control.state.refusal is not None
    [late] = one.add([5])
    assert late.last.finish_reason == "abort"
    [reply] = one.steps()
    assert reply.refused is None and all(len(answer.token_ids) == 20 for answer in answers)
    # Also if nothing runs, or it waits already.
    assert one.order(Pause("wait")) is not None
    one.order(Resume())
    assert one.ask([5])[0]


def test_a_resume_ends_the_waiting_for_a_pause(ordered):
    one = ordered()
    [answer] = one.add([5])
    one.steps(2)
    assert one.order(Pause("wait")) is None
    one._take(one.control.take(Asked(99, Resume())))
    replies = {reply.id: reply for reply in one.control.replies()}
    assert "resumed" in replies[1 - 1].refused and replies[99].refused is None
    one.steps()
    assert len(answer.token_ids) == 20


def test_a_pause_may_become_another_one(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(3)
    one.order(Pause("keep"))
    assert one.order(Pause("wait")) is None
    assert len(one.steps()) == 1
    assert all(len(answer.token_ids) == 20 for answer in answers)
    one.order(Resume())
    answers = one.add(*PROMPTS)
    one.steps(3)
    one.order(Pause("keep"))
    one.order(Pause("abort"))
    assert all(answer.last.finish_reason == "abort" for answer in answers)


def test_only_the_requests_of_these_ids_are_aborted(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(2)
    name = next(iter(one.answers))
    assert one.order(AbortRequests([name, "unknown"])).result == {"aborted": 1}
    assert one.order(AbortRequests(["unknown"])).result == {"aborted": 0}
    one.steps()
    assert [answer.last.finish_reason for answer in answers] == ["abort", "length", "length"]
    one.add(*PROMPTS)
    assert one.order(AbortRequests()).result == {"aborted": 3}


@pytest.mark.parametrize(
    "order",
    [
        Sleep(3), Sleep(1, tags=["all"]), WakeUp(["all"]), StartUpdate(), UpdateWeights({}),
        FinishUpdate(), InitTransfer({}), InitTransfer({"master_address": "x", "master_port": 1}),
        InitTransfer({"nccl_unique_id_b64": "eA==", "rank_offset": 1, "world_size": 2}),
    ],
    ids=repr,
)  # fmt: skip
def test_an_order_that_cannot_be_is_refused_and_changes_nothing(ordered, order):
    one = ordered()
    before = one.control.state
    assert one.order(order).refused
    assert one.control.state == before and one.ask([5])[0]


def test_a_pause_that_waits_answers_only_when_its_requests_have_ended(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(3)
    assert one.order(Pause("wait")) is None
    for order in (StartUpdate(), ClearWeights()):
        assert "end first" in one.order(order).refused
    assert one.control.state.draining
    assert len(one.steps()) == 1 and all(len(answer.token_ids) == 20 for answer in answers)


@pytest.mark.parametrize("order", [Pause("keep"), Sleep(0, "keep"), Sleep(1, "keep")], ids=repr)
def test_what_freezes_requests_ends_the_waiting_for_them(ordered, order):
    one = ordered()
    [answer] = one.add([5])
    one.steps(2)
    assert one.order(Sleep(1, "wait")) is None
    one._take(one.control.take(Asked(99, order)))
    replies = {reply.id: reply for reply in one.control.replies()}
    assert "mode=keep" in replies[0].refused and replies[99].refused is None
    assert not one.engine.has_work and not one.control.state.draining
    one.order(WakeUp())
    one.order(Resume())
    one.steps()
    assert len(answer.token_ids) == 20
