"""Engines that agree on each step: nobody goes alone, nobody waits for ever."""

import select
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from limelight.engine import peers as module
from limelight.engine.lockstep import JoinedRunner
from limelight.engine.peers import Circle, Load, Peers
from limelight.engine.pipes import Facts
from limelight.steps import Grant, StepPlan, StepResult, Together, Trim
from limelight.types import DeviceLost

FACTS = Facts({"torch": "2.13"}, b"model", 7)


@pytest.fixture
def three(tmp_path):
    found = [Peers(Circle(rank, 3, str(tmp_path))) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        hellos = list(threads.map(lambda one: one.meet(FACTS, 100 + one.circle.rank), found))
    assert [[hello.rank for hello in each] for each in hellos] == [[1, 2], [0, 2], [0, 1]]
    assert hellos[1][0].port == 100 and hellos[1][0].facts == FACTS
    yield found
    for one in found:
        one.close()


def all_agree(peers, loads):
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda one, load: one.agree(load), peers, loads))


def readable(peers) -> bool:
    return bool(select.select([peers.waker], [], [], 2.0)[0])


def test_everyone_hears_what_everyone_will_do_step_by_step(three):
    for step in range(5):
        loads = [Load(step + rank, graph=rank == 1) for rank in range(3)]
        assert all_agree(three, loads) == [loads] * 3
    assert not any(one.called for one in three)


def test_an_idle_engine_is_woken_by_the_first_that_has_work(three):
    assert not select.select([one.waker for one in three], [], [], 0.05)[0]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(three[2].agree, Load(4))
        for idle in three[:2]:
            assert readable(idle) and idle.called
            idle.drain()
        with ThreadPoolExecutor(2) as others:
            list(others.map(lambda one: one.agree(Load(0)), three[:2]))
        assert waiting.result(5) == [Load(0), Load(0), Load(4)]


def test_the_end_of_one_ends_the_wait_of_all(three):
    told: list[str] = []
    three[0].on_loss = told.append
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(one.agree, Load(1)) for one in three[:2]]
        time.sleep(0.05)
        three[2].close()
        for one in waiting:
            with pytest.raises(DeviceLost, match="engine 2, which shares the experts, has ended"):
                one.result(5)
    assert told == [three[0].lost]
    with pytest.raises(DeviceLost, match="engine 2"):
        three[0].agree(Load(1))


def test_an_engine_that_is_silent_counts_as_lost(three, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_OF_SILENCE", 0.2)
    monkeypatch.setattr(Peers, "_beat", lambda self: None)
    for one in three:
        one.ready()
    began = time.monotonic()
    with pytest.raises(DeviceLost, match="no sign of life"):
        three[0].agree(Load(1))
    assert time.monotonic() - began < 5


class Scripted:
    """A runner whose graphs hold up to 8 rows, and what it was asked to do."""

    def __init__(self, can_replay=True):
        self.plans, self.can = [], can_replay

    def can_replay(self, plan):
        return self.can

    def graph_size(self, rows, *, decodes):
        return (8 if rows <= 8 else None) if decodes else (64 if rows <= 64 else None)

    def launch(self, plan):
        self.plans.append(plan)
        if plan.num_rows == 13:
            raise RuntimeError("out of memory")


def step(peers, runners, rows):
    plans = [StepPlan(grants=[Grant(i, 0, 1, [], True) for i in range(n)]) for n in rows]
    plans = [StepPlan(grants=[Grant(0, 0, 13, [], True)]) if n == 13 else plan
             for n, plan in zip(rows, plans, strict=True)]  # fmt: skip
    joined = [JoinedRunner(r, r.launch, p) for r, p in zip(runners, peers, strict=True)]
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda one, plan: one.launch(plan), joined, plans))


def test_all_make_a_step_of_the_same_form_if_any_has_work(three):
    runners = [Scripted() for _ in range(3)]
    idle = step(three, runners, [0, 0, 0])
    assert [one.result() for one in idle] == [StepResult([])] * 3 and not runners[0].plans
    step(three, runners, [0, 3, 1])
    runners[1].can = False
    step(three, runners, [0, 3, 1])
    step(three, runners, [2, 0, 9])
    for runner in runners:
        runner.can = True
    step(three, runners, [2, 14, 0])
    expected = [
        Together([0, 3, 1], 8, True),
        Together([0, 3, 1], None, True),
        Together([2, 0, 9], None, True),
        Together([2, 14, 0], None, True),
    ]
    for runner in runners:
        assert [plan.together for plan in runner.plans] == expected


def test_a_step_that_fails_in_one_engine_is_the_end_of_it(three):
    runners = [Scripted() for _ in range(3)]
    with pytest.raises(DeviceLost, match="out of memory"):
        step(three, runners, [13, 1, 0])


def test_rows_leave_out_drafts_that_are_not_verified():
    plan = StepPlan(grants=[Grant(0, 4, 6, [], True, 5), Grant(1, 0, 30, [], False)])
    assert plan.num_rows == 36
    assert replace(plan, trim=Trim(2, 1.0, [0.0])).num_rows == 33
