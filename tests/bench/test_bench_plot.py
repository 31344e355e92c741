"""The picture of a benchmark has a line for each series."""

import pytest

from limelight.bench.plot import _series, draw


def row(batch, context, ms):
    figure = {"median": ms, "p10": ms, "p90": ms, "n": 3}
    return {"model": "flint", "batch": batch, "context": context, "step_ms": figure}


ROWS = [row(batch, context, 1.0 + batch) for context in (128, 4096) for batch in (1, 8, 32)]


def test_series_are_told_by_the_labels_that_differ():
    series = _series(ROWS, "batch")
    assert {name: len(points) for name, points in series.items()} == {
        "context 128": 3,
        "context 4096": 3,
    }


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written_also_with_floors(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"steps.{suffix}"
    draw(str(path), "decode", [one | {"floor_ms": one["step_ms"]} for one in ROWS])
    assert path.stat().st_size > 5000


def test_ops_without_a_gpu_are_refused(capsys):
    from limelight import cli

    assert cli.main(["bench", "ops", "flint-nano", "--device", "cpu"]) == 2
    assert "GPU" in capsys.readouterr().err
