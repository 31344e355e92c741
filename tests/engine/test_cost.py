"""Times of steps rise with rows and context, and follow what is measured but not its outliers."""

import numpy as np
import pytest

from limelight.engine.cost import StepCost

POINTS, CONTEXTS = [1, 2, 4, 8, 16, 32, 64], [1000, 9000]


def table(**given) -> StepCost:
    ms = [[3 + 0.1 * rows + context / 9000 for rows in POINTS] for context in CONTEXTS]
    return StepCost(**{"points": POINTS, "contexts": CONTEXTS, "ms": ms, "graphs": 16} | given)


def test_graphs_make_steps_and_the_rest_lines():
    cost = table()
    at = cost.ms(np.array([1, 3, 4, 9, 16, 17, 32, 48, 64, 96]), 1000) - 1 / 9
    assert at.tolist() == pytest.approx([3.1, 3.4, 3.4, 4.6, 4.6, 6.2, 6.2, 7.8, 9.4, 12.6])
    assert float(table(graphs=0).ms(3, 1000)) == pytest.approx(3.3 + 1 / 9)
    assert float(table(graphs=64).ms(80, 1000)) == pytest.approx(11 + 1 / 9)


def test_context_lies_between_its_buckets_and_goes_on_behind_them():
    cost = table()
    at = [float(cost.ms(4, context)) for context in (0, 1000, 5000, 9000, 17_000)]
    one = 1 / 9
    assert at == pytest.approx([3.4 + one, 3.4 + one, 3.4 + 5 * one, 4.4, 4.4 + 8 * one])


def test_a_bad_measurement_at_the_start_is_evened_out():
    ms = [[3.0, 3.1, 9.0, 3.3, 3.4, 3.5, 3.6]]
    cost = StepCost(POINTS, [0], ms, graphs=64)
    times = cost.ms(np.arange(1, 65), 0)
    assert (np.diff(times) >= 0).all() and times[-1] < 4.6


@pytest.mark.parametrize("seed", range(5))
def test_curves_never_fall_whatever_is_measured(seed):
    rng = np.random.default_rng(seed)
    cost = table()
    for _ in range(200):
        cost.observe(int(rng.integers(1, 99)), int(rng.integers(0, 12_000)), rng.lognormal(1, 1))
    grid = np.stack([cost.ms(np.arange(1, 120), c) for c in range(0, 20_000, 500)])
    assert (np.diff(grid, axis=0) > -1e-9).all() and (np.diff(grid, axis=1) > -1e-9).all()


@pytest.mark.parametrize("rows", [3, 24, 70])
@pytest.mark.parametrize("factor", [0.6, 2.0])
def test_a_step_that_is_measured_again_and_again_is_believed(rows, factor):
    cost, rng = table(), np.random.default_rng(1)
    truth = float(cost.ms(rows, 4000)) * factor
    for _ in range(250):
        late = 10 if rng.random() < 0.03 else 1
        cost.observe(rows, 4000, truth * late * rng.lognormal(0, 0.02))
    assert float(cost.ms(rows, 4000)) == pytest.approx(truth, rel=0.04)


def test_steps_behind_the_grid_leave_right_times_alone():
    cost = table()
    for rows, context in [(96, 5000), (8, 40_000), (130, 27_000)] * 20:
        cost.observe(rows, context, float(table().ms(rows, context)))
    rows = np.arange(1, 130)
    assert cost.ms(rows, 30_000).tolist() == pytest.approx(table().ms(rows, 30_000).tolist())


def test_one_outlier_hardly_counts_and_nonsense_not_at_all():
    cost, rng = table(), np.random.default_rng(2)
    truth = float(cost.ms(8, 1000))
    for _ in range(100):
        cost.observe(8, 1000, truth * rng.lognormal(0, 0.01))
    before = float(cost.ms(8, 1000))
    for ms in (float("nan"), float("inf"), 0.0, -3.0):
        cost.observe(8, 1000, ms)
    assert float(cost.ms(8, 1000)) == before
    cost.observe(8, 1000, 50 * truth)
    assert float(cost.ms(8, 1000)) == pytest.approx(before, rel=0.01)


def test_what_was_not_measured_follows_in_part_and_what_was_stays():
    cost = table()
    for _ in range(60):
        cost.observe(16, 1000, float(table().ms(16, 1000)))
    known = float(cost.ms(16, 1000))
    for _ in range(60):
        cost.observe(2, 1000, 0.5 * float(table().ms(2, 1000)))
    assert float(cost.ms(16, 1000)) == pytest.approx(known, rel=0.02)
    assert float(cost.ms(4, 1000)) < 0.95 * float(table().ms(4, 1000))


@pytest.mark.parametrize("graphs", [0, 16, 64])
def test_one_number_of_rows_takes_what_it_takes_among_many(graphs):
    rng = np.random.default_rng(3)
    cost = table(graphs=graphs)
    for _ in range(100):
        cost.observe(int(rng.integers(1, 80)), int(rng.integers(0, 12_000)), rng.lognormal(1, 1))
    rows = np.arange(1, 100)
    for context in (0, 1000, 4321, 9000, 20_000):
        each = [cost.of_one(n, context) for n in rows.tolist()]
        assert each == pytest.approx(cost.ms(rows, context).tolist())


@pytest.mark.parametrize(
    "given",
    [{"points": [1, 2, 2, 8, 16, 32, 64]}, {"contexts": [9, 1]}, {"ms": [[1.0] * 7]},
     {"ms": [[1.0] * 6 + [float("nan")]] * 2}, {"ms": [[0.0] * 7] * 2}],
    ids=["rows", "contexts", "shape", "nan", "zero"],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match="table of step times"):
        table(**given)


def test_a_table_is_told_by_context_and_rows():
    cost = StepCost([1, 8], [0, 500], [[1.0, 2.5], [1.25, 3.0]], graphs=0)
    assert str(cost) == "  0 tokens before: 1 1, 8 2.5\n  500 tokens before: 1 1.25, 8 3"
