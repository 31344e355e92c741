"""Of all that steps tell, the newest is learned from, and of like steps the middle one."""

import numpy as np

from limelight.engine.observed import MOST_AT_ONCE, MOST_TIMES, Labels, Observed, Pass
from limelight.steps import StepKind, StepTimes


def passes(count: int, slots: list[int]) -> list[Pass]:
    return [Pass(slots, np.full((len(slots), 3), float(i))) for i in range(count)]


def test_passes_of_the_same_sequences_are_joined_in_their_order():
    told = Observed(passes=[*passes(2, [4, 1]), 1, *passes(3, [4, 1]), *passes(1, [4])])
    first, forgotten, second, third = told.newest_passes()
    assert forgotten == 1
    assert [one.slots for one in (first, second, third)] == [[4, 1], [4, 1], [4]]
    assert [one.odds_BN.shape for one in (first, second, third)] == [
        (2, 2, 3),
        (3, 2, 3),
        (1, 1, 3),
    ]
    assert second.odds_BN[:, 1, 0].tolist() == [0, 1, 2]


def test_old_passes_are_left_out_but_not_that_a_slot_was_forgotten():
    slots = list(range(100))
    told = Observed(passes=[*passes(5, slots), 7, *passes(4, slots)])
    forgotten, kept = told.newest_passes()
    assert forgotten == 7 and kept.odds_BN[:, 0, 0].tolist() == [1, 2, 3]
    assert MOST_AT_ONCE <= kept.odds_BN[..., 0].size < MOST_AT_ONCE + 100


def test_the_newest_labels_are_one():
    told = Observed(
        labels=[
            Labels(np.full((100, 3), float(i), dtype=np.float32), [3] * 100, [i % 3] * 100)
            for i in range(6)
        ]
    )
    odds_BN, verified, accepted = told.newest_labels()
    assert odds_BN.dtype == np.float64 and len(odds_BN) == len(verified) == len(accepted) == 300
    assert odds_BN[::100, 0].tolist() == [3, 4, 5] and accepted[::100] == [0, 1, 2]


def test_of_like_steps_the_middle_time_counts_and_of_many_kinds_the_most_frequent():
    def step(ms: float, rows: int) -> StepTimes:
        return StepTimes(StepKind.PLAIN, ms, rows, 100)

    told = Observed(times=[step(ms, 4) for ms in (1.0, 90.0, 1.2, 1.1, 0.2)])
    assert [one.verify_ms for one in told.middle_times()] == [1.1]
    told.times += [step(2.0, rows) for rows in (5, 5, 6, 6, 7, 8)]
    assert [one.rows for one in told.middle_times()] == [4, 5, 6] and MOST_TIMES == 3
