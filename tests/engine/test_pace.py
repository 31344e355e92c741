"""What a step takes the host is all of its time but that in which it waits."""

import pytest

from limelight.engine.cost import HostCost
from limelight.engine.pace import HostTime, Pace, octave_of
from limelight.steps import Admission, Grant, StepKind, StepPlan, StepResult, StepTimes


def plan(*, drafts: bool, sequences: int = 4, timed: bool = True, offered: int = 0) -> StepPlan:
    grants = [Grant(slot, 9, 1 + offered, [], True, offered) for slot in range(sequences)]
    return StepPlan(grants=grants, drafts=drafts, timed=timed)


class Steps:
    """Steps one after the other, each of which takes 5 ms from its decision to the next."""

    def __init__(self, overlaps: bool):
        self.now, self.overlaps = 0.0, overlaps
        self.pace = Pace(lambda: self.now)

    def make(self, plan: StepPlan, result: StepResult | None) -> HostTime | None:
        """What is known of the step before once `plan` comes."""
        host = self.pace.end(plan, overlaps=self.overlaps)
        self.now += 1.0  # a decision is no part of any step
        self.pace.begin(plan, fresh=True)
        if result is not None:
            self.pace.heard(result, overlaps=self.overlaps)
        self.now += 0.005
        return host


def test_waiting_for_the_step_before_is_no_work_of_the_host():
    steps, waited = Steps(overlaps=True), StepResult([], waited_ms=2.0)
    drafted = plan(drafts=True)
    assert steps.make(drafted, waited) is None and steps.make(drafted, waited) is None
    host = steps.make(drafted, waited)
    assert host == HostTime(True, 4, pytest.approx(3.0), True)


def test_without_overlap_all_that_is_not_the_devices_is_the_hosts():
    times = StepTimes(StepKind.PLAIN, 4.5, 4, 40)
    steps, told, plain = Steps(overlaps=False), StepResult([], times=times), plan(drafts=False)
    steps.make(plain, told)
    steps.make(plain, told)
    assert steps.make(plain, told) == HostTime(False, 4, pytest.approx(0.5), False)


@pytest.mark.parametrize(
    "other",
    [
        plan(drafts=True, timed=False),
        plan(drafts=False, offered=3),
        plan(drafts=False),
        plan(drafts=True, offered=0, sequences=0),
    ],
    ids=["not timed", "last drafts", "none", "empty"],
)
def test_a_step_behind_one_of_another_kind_is_not_looked_at(other):
    steps, waited, drafted = Steps(overlaps=True), StepResult([]), plan(drafts=True)
    each = [steps.make(one, waited) for one in (drafted, other, drafted, drafted)]
    assert each == [None] * 4


def test_a_step_before_new_sequences_may_have_been_followed_by_nothing():
    steps, waited, drafted = Steps(overlaps=True), StepResult([]), plan(drafts=True)
    steps.make(drafted, waited)
    steps.make(drafted, waited)
    admissions = [Admission(slot, None, []) for slot in range(4)]
    new = StepPlan(admissions=admissions, grants=drafted.grants, drafts=True, timed=True)
    assert steps.make(new, waited) is None


def test_powers_of_two_are_in_the_middle_of_what_counts_as_about_as_many():
    assert [octave_of(n) for n in (1, 2, 31, 32, 33, 255, 256)] == [0, 1, 5, 5, 5, 8, 8]
    assert octave_of(191) < octave_of(192) == octave_of(383) < octave_of(384)


def test_what_was_never_seen_takes_the_host_as_little_as_it_can():
    host = HostCost()
    assert host.plain_ms(32) == host.drafted_ms(32) == 0
    host.observe([HostTime(True, 32, ms, True) for ms in (1.2, 1.0, 30.0)])
    assert host.plain_ms(32) == 0 and host.drafted_ms(32) == pytest.approx(1.2)
    host.observe([HostTime(False, 32, 0.6, True)])
    host.observe([HostTime(True, 256, 6.0, True)])
    # As much less than with drafts as among 32.
    assert host.plain_ms(256) == pytest.approx(3.0, rel=0.02)
    assert host.drafted_ms(4) >= host.plain_ms(4) > 0


def test_what_is_not_seen_for_long_is_doubted():
    host = HostCost()
    host.observe([HostTime(False, 8, 2.0, True)])
    for _ in range(100):
        host.observe([HostTime(True, 8, 2.1, True)])
    assert 1.3 < host.plain_ms(8) < 1.6 and host.drafted_ms(8) == pytest.approx(2.1)
