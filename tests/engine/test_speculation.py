"""Drafting pays or is left alone, whatever the load, and what decides knows nothing of a draft."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from machine import (
    Clock,
    Machine,
    Traffic,
    make,
    rate_of_adaptive,
    rate_of_fixed,
    rate_of_none,
)

from limelight.engine.cost import StepCost
from limelight.engine.drafting import Drafting
from limelight.engine.speculation import Load, Speculation
from limelight.ops.trim import log_odds, packed_starts, split, survival
from limelight.steps import Grant, StepKind, StepPlan

MACHINES = {
    "flat": Machine(lambda rows, context: 8 + 0.002 * rows, lambda n: 0.5 + 0.002 * n),
    "steep": Machine(
        lambda rows, context: 4 + 0.05 * rows + 2e-6 * context, lambda n: 0.4 + 0.01 * n
    ),
    "experts": Machine(
        lambda rows, context: 3 + 6 * (1 - math.exp(-rows / 60)) + 0.015 * rows + 2e-6 * context,
        lambda n: 0.5 + 0.01 * n,
    ),
    "slow drafter": Machine(
        lambda rows, context: 4 + 0.05 * rows + 2e-6 * context, lambda n: 4 + 0.02 * n
    ),
    # As an H200 with a model of four bits: to lay out rows and to judge them takes time, too.
    "dear drafts": Machine(
        lambda rows, context: 1.9 + 0.6 * math.log2(rows) + 0.02 * rows + 1e-7 * context,
        lambda n: 0.4 + 0.03 * n,
        plain=0.7,
    ),
}


def rates(machine: Machine, batch: int, level: float, **table) -> tuple[float, float, float]:
    """Of adaptive drafting, over those of fixed and of none; and none over fixed."""
    first, steps = (80, 200) if batch > 2 else (100, 350)
    traffic = Traffic.made(steps=steps, batch=batch, level=level, seed=batch)
    adaptive = rate_of_adaptive(machine, traffic, make(machine, batch, **table), first)
    fixed = rate_of_fixed(machine, traffic, first)
    none = rate_of_none(machine, batch)
    return adaptive / fixed, adaptive / none, none / fixed


BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("batch", BATCHES, ids="B{}".format)
def test_no_load_is_served_slower_than_with_all_drafts_or_none(batch):
    over_fixed, over_none, _ = rates(MACHINES["steep"], batch, 1.0)
    assert min(over_fixed, over_none) > 0.98
    if 8 <= batch <= 64:
        assert min(over_fixed, over_none) > 1.15


@pytest.mark.parametrize("level", [-1.5, 0.0, 1.5], ids="level{}".format)
@pytest.mark.parametrize("batch", [1, 8, 64], ids="B{}".format)
def test_drafts_are_weighed_against_steps_that_never_had_any(batch, level):
    over_fixed, over_none, _ = rates(MACHINES["dear drafts"], batch, level)
    assert min(over_fixed, over_none) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("level", [-1.5, 0.5, 1.0, 2.5], ids="level{}".format)
@pytest.mark.parametrize("batch", BATCHES, ids="B{}".format)
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_good_and_bad_cost_nothing_on_any_machine(machine, batch, level):
    over_fixed, over_none, _ = rates(MACHINES[machine], batch, level)
    assert min(over_fixed, over_none) > 0.98


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_bad_drafts_of_a_slow_drafter_are_left_alone_and_good_ones_found_again(seed):
    machine, batch = MACHINES["slow drafter"], 32
    speculation = make(machine, batch)
    bad, good = (
        Traffic.made(steps=300, batch=batch, level=level, seed=seed) for level in (-3.0, 3.0)
    )
    rate_of_adaptive(machine, bad, speculation, 0)
    assert speculation.resting
    assert rate_of_adaptive(machine, good, speculation, 200) > 0.98 * rate_of_fixed(
        machine, good, 200
    )
    assert not speculation.resting


@pytest.mark.parametrize(
    ("name", "level", "batch"),
    [("slow drafter", -1.0, 2), ("dear drafts", 0.0, 8), ("steep", -1.5, 128)],
)
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_plain_steps_that_were_timed_too_dear_at_the_start_are_looked_at(
    name, level, batch, factor
):
    machine, steps = MACHINES[name], 450
    speculation = make(machine, batch)
    plain = speculation.costs.steps[StepKind.PLAIN]
    wrong = StepCost(plain.points_P, plain.contexts_C, plain.times_CP * factor, graphs=plain.graphs)
    speculation.costs = replace(
        speculation.costs, steps={**speculation.costs.steps, StepKind.PLAIN: wrong}
    )
    traffic = Traffic.made(steps=steps, batch=batch, level=level, seed=batch)
    rate = rate_of_adaptive(machine, traffic, speculation, 330)
    assert speculation.resting and rate > 0.98 * rate_of_none(machine, batch)


@pytest.mark.parametrize("level", [-6.0, -1.0, 0.0, 1.5], ids="level{}".format)
@pytest.mark.parametrize("host", [(0.4, 1.2), (1.0, 1.2), (1.0, 4.0)], ids="host{}".format)
@pytest.mark.parametrize("batch", [1, 32], ids="B{}".format)
def test_where_the_host_takes_the_time_drafts_cost_what_they_cost_the_host(batch, host, level):
    """The device alone would verify all drafts of the better ones, or a few."""
    machine = Machine(lambda rows, context: 0.25 + 0.002 * rows, lambda n: 0.07, host=host)
    over_fixed, over_none, _ = rates(machine, batch, level)
    assert min(over_fixed, over_none) > 0.98


@pytest.mark.parametrize("batch", [2, 64], ids="B{}".format)
def test_a_table_that_was_measured_wrongly_is_put_right_while_serving(batch):
    """Rows seem nearly free at first, as of a model whose experts were not spread by dummy text."""
    machine = MACHINES["steep"]
    traffic = Traffic.made(steps=450, batch=batch, level=0.0, seed=7)
    speculation = make(machine, batch, wrong=lambda rows: 1 / (1 + rows / 60))
    rate = rate_of_adaptive(machine, traffic, speculation, 250)
    assert rate > 0.98 * max(rate_of_fixed(machine, traffic, 250), rate_of_none(machine, batch))


@pytest.mark.parametrize("batch", [1, 32], ids="B{}".format)
@pytest.mark.parametrize("level", [-3.0, 2.0], ids=["resting", "working"])
def test_to_decide_takes_a_small_share_of_the_time_of_short_steps(batch, level):
    """A decision takes twice as long as a step."""
    machine = Machine(lambda rows, context: 0.2 + 0.001 * rows, lambda n: 0.05)
    clock = Clock(0.0005)
    speculation = make(machine, batch, clock=clock)
    first, later = (
        Traffic.made(steps=steps, batch=batch, level=level, seed=3) for steps in (100, 800)
    )
    rate_of_adaptive(machine, first, speculation, 0)
    before = clock.now
    rate_of_adaptive(machine, later, speculation, 0)
    assert speculation.resting == (level < 0)
    deciding_ms = 1e3 * (clock.now - before) / 2  # one look of two is at the end of a decision
    step_ms = machine.ms(batch, 0) if level < 0 else machine.ms(8 * batch, 0) + 0.05
    assert 0 < deciding_ms < 0.015 * 800 * step_ms


def told(speculation: Speculation, odds: np.ndarray, *, singly: bool) -> Speculation:
    """Tell of the passes and drafts of some steps, [steps, B, N], at once or by sequence."""
    slots = list(range(odds.shape[1]))
    parts = [[slot] for slot in slots] if singly else [slots]
    for odds_BN in odds:
        accepted = (odds_BN > 0).cumprod(axis=1).sum(axis=1).tolist()
        for part in parts:
            speculation.drafted(part, odds_BN[part])
            speculation.settled(odds_BN[part], [7] * len(part), [accepted[b] for b in part])
    return speculation


def test_what_is_told_at_once_and_what_is_told_singly_lead_to_the_same_decisions():
    odds = np.random.default_rng(5).normal(0.5, 2.0, (12, 5, 7))
    one, other = (told(make(MACHINES["steep"], 8), odds, singly=singly) for singly in (False, True))
    loads = [Load([0, 1, 2, 3, 4], [7] * 5, 5, 9000), Load([1, 4, 6], [7, 2, 7], 300, 900)]
    for load in loads:
        assert one.choose(load) == other.choose(load)
    assert one.acceptance.slope == pytest.approx(other.acceptance.slope) != 0.5
    assert one.acceptance.intercepts_N == pytest.approx(other.acceptance.intercepts_N)
    assert one.average_N == pytest.approx(other.average_N)
    assert one.stats().predicted == pytest.approx(other.stats().predicted)


def test_a_pass_before_its_slot_was_taken_by_another_is_not_the_others():
    one, other = make(MACHINES["steep"], 4), make(MACHINES["steep"], 4)
    odds_BN = np.array([[3.0] * 7, [-2.0] * 7])
    one.drafted([0, 1], -odds_BN)
    one.forget(0)
    one.drafted([0, 1], odds_BN)
    one.learn()
    assert one.passes_S.tolist() == [1, 2, 0, 0]
    other.drafted([0], odds_BN[:1])
    other.learn()
    assert (one._recent([0]) == other._recent([0]))[0].all()


def warmed(machine: Machine, batch: int, level: float, **made) -> Speculation:
    """Something that knows the drafter."""
    speculation = make(machine, batch, **made)
    rate_of_adaptive(machine, Traffic.made(steps=200, batch=batch, level=level), speculation, 0)
    return speculation


def test_a_decision_holds_in_proportion_while_sequences_come_and_go():
    clock = Clock()
    speculation = warmed(MACHINES["steep"], 16, 1.0, clock=clock)
    loads = [Load(list(range(n)), [7] * n, n, 2000 * n) for n in (15, 13, 16, 12, 15)]
    speculation.due = 0
    whole = speculation.choose(loads[0])
    now = clock.now
    assert 0 < whole.budget < 105 and whole.drafts
    held = [speculation.choose(load) for load in loads[1:4]]
    assert [one.budget for one in held] == [whole.budget * n // 15 for n in (13, 16, 12)]
    assert clock.now == now


def test_a_prompt_beside_it_does_not_wake_a_resting_drafter():
    """Drafts seem cheap beside a prompt, but are verified behind it."""
    speculation = warmed(MACHINES["slow drafter"], 8, -3.0)
    assert speculation.resting
    slots = list(range(8))
    for rows in (2000, 700, 8, 4000):
        assert not speculation.choose(Load(slots, [0] * 8, rows, 16_000)).drafts


def test_while_a_drafter_rests_hardly_a_step_is_asked_about():
    speculation = warmed(MACHINES["slow drafter"], 8, -3.0, clock=Clock(0.001))
    asked = 0
    for _ in range(400):
        if not speculation.goes_on_resting():
            asked += 1
            assert speculation.choose(Load(list(range(8)), [0] * 8, 8, 16_000)).budget == 0
    assert 0 < asked < 40


def test_who_has_read_a_prompt_in_pieces_is_decided_about_once_it_decodes():
    """Of eight sequences the drafter was better left alone, which says nothing of one."""
    speculation = warmed(MACHINES["slow drafter"], 8, -3.0)
    drafting = Drafting(speculation)
    speculation.due = speculation.step + 1000
    assert not drafting.decide(
        StepPlan(grants=[Grant(n, 64, 1, [], True) for n in range(8)])
    ).drafts
    for start in (0, 64, 128):
        drafting.decide(StepPlan(grants=[Grant(0, start, 64, [], False)]))
    drafting.decide(StepPlan(grants=[Grant(0, 192, 64, [], True)]))
    assert speculation.sequences == 0 and (0, 7) in speculation.held


def test_flat_costs_verify_all_and_steep_ones_none():
    for machine, budget in (("flat", 28), ("slow drafter", 0)):
        speculation = make(MACHINES[machine], 64)
        speculation.acceptance.intercepts_N[:] = 1.0 if budget else -6.0
        for _ in range(70):
            speculation.drafted([0, 1, 2, 3], np.full((4, 7), 3.0 if budget else -3.0))
        assert speculation.choose(Load([0, 1, 2, 3], [7] * 4, 4, 8000)).budget == budget


def test_a_budget_keeps_to_what_is_offered_and_to_the_rows_there_are():
    speculation = make(MACHINES["flat"], 8)
    assert speculation.choose(Load([], [], 512, 900)).budget == 0
    assert speculation.choose(Load([0, 5, 7], [2, 0, 7], 515, 900)).budget == 9
    speculation.max_rows = 8
    assert speculation.choose(Load([0, 5, 7], [2, 0, 7], 3, 900)).budget == 5


def test_who_takes_a_slot_inherits_nothing():
    first, second = make(MACHINES["steep"], 4), make(MACHINES["steep"], 4)
    for speculation in (first, second):
        speculation.drafted([1, 2], np.full((2, 7), 2.0))
    first.drafted([0], np.full((1, 7), -9.0))
    for speculation in (first, second):
        speculation.learn()
    second.average_N = first.average_N = np.full(7, 0.5)
    first.forget(0)
    first.learn()
    load = Load([0, 1], [7, 7], 2, 4000)
    assert (first._recent(load.slots) == second._recent(load.slots)).all()


@pytest.mark.parametrize("seed", range(20))
def test_whether_a_draft_is_kept_depends_on_no_later_confidence_of_its_own(seed):
    """Neither on that of the drafts behind it, which is where the draft itself would show."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_drafts, candidates = 5, 6, 4
    temperature_B = torch.rand(batch, generator=generator) + 0.3
    scores_BNK = torch.randn(batch, num_drafts, candidates, generator=generator) * 4
    if seed % 2:
        scores_BNK = scores_BNK.round() * 30  # ties and certainties
    drafts_B = torch.randint(0, num_drafts + 1, (batch,), generator=generator)
    budget = int(torch.randint(0, int(drafts_B.sum()) + 3, (1,), generator=generator))
    weights = torch.tensor(0.7), torch.randn(num_drafts, generator=generator)

    def kept(scores_BNK: torch.Tensor) -> torch.Tensor:
        return split(survival(log_odds(scores_BNK, temperature_B), *weights), drafts_B, budget)

    before_B = kept(scores_BNK)
    assert int(before_B.sum()) == min(budget, int(drafts_B.sum()))
    assert (before_B <= drafts_B).all()
    for b in range(batch):
        for n in range(num_drafts):
            other_BNK = scores_BNK.clone()
            # Draft n decides about the scores that follow it, n + 1 and on.
            noise = torch.randn(num_drafts - n - 1, candidates, generator=generator)
            other_BNK[b, n + 1 :] = noise * 9
            assert (kept(other_BNK)[b] > n) == (before_B[b] > n)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_numbers_lose_their_place_and_disturb_no_one(bad):
    scores_BNK = torch.tensor([2.0, 0.0, -1.0]).repeat(3, 4, 1)
    scores_BNK[1] = bad
    odds_BN = log_odds(scores_BNK, torch.tensor([1.0, 1.0, 0.0]))
    assert (odds_BN[1] == -40).all() and torch.isfinite(odds_BN).all()
    expected = -math.log(math.exp(-2) + math.exp(-3))
    assert odds_BN[0].tolist() == pytest.approx([expected] * 4)
    survival_BN = survival(odds_BN, torch.tensor(0.5), torch.zeros(4))
    assert split(survival_BN, torch.full((3,), 4), 8).tolist() == [4, 0, 4]


def test_rows_are_packed_without_gaps():
    assert packed_starts(torch.tensor([3, 0, 1, 8])).tolist() == [0, 3, 3, 4, 12]


def test_counts_tell_what_was_offered_verified_and_accepted():
    speculation = make(MACHINES["flat"], 4, num_drafts=3)
    speculation.drafted([0, 2], np.zeros((2, 3)))
    speculation.choose(Load([0, 2], [3, 2], 2, 100))
    speculation.settled(np.zeros((2, 3)), [3, 1], [2, 0])
    speculation.settled(np.zeros((2, 3)), [0, 1], [0, 1])
    speculation.learn()
    stats = speculation.stats()
    assert (stats.steps, stats.drafted, stats.offered) == (3, 6, 5)
    assert (stats.verified, stats.accepted) == (5, 3)
    assert (stats.verified_at, stats.accepted_at) == ([3, 1, 1], [2, 1, 0])
    p = 1 / (1 + math.exp(0.2))
    assert stats.predicted == pytest.approx(3 * p + p**2 + p**3)
    assert (stats.budget, stats.rows, stats.drafting) == (5, 2, True)
