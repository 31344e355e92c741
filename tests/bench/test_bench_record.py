import json

import pytest

from limelight.bench.record import record, save, show, spread


def test_a_spread_has_the_median_and_the_outer_tenths():
    assert spread([float(n) for n in range(1, 102)]) == {
        "median": 51.0,
        "p10": 11.0,
        "p90": 91.0,
        "n": 101,
    }
    assert spread([0.123456]) == {"median": 0.1235, "p10": 0.1235, "p90": 0.1235, "n": 1}


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])


def test_a_record_says_what_ran_where_and_how(tmp_path):
    rows = [{"model": "flint-nano", "batch": 3, "step_ms": spread([1.0, 2.0])}]
    save(str(tmp_path / "x.json"), record("decode", ["bench", "decode", "a b"], rows))
    kept = json.loads((tmp_path / "x.json").read_text())
    assert list(kept) == ["bench", "machine", "versions", "commit", "command", "rows"]
    assert kept["command"] == "limelight bench decode 'a b'"
    assert kept["rows"] == rows
    assert kept["machine"]["cores"] >= 1
    assert {"python", "limelight", "torch"} <= set(kept["versions"])


def test_a_table_shows_every_column_of_every_row(capsys):
    show("serve", [{"batch": 1, "ttft_ms": spread([1.5])}, {"batch": 2, "e2e_ms": spread([7.25])}])
    out = capsys.readouterr().out
    assert all(text in out for text in ("batch", "ttft_ms", "e2e_ms", "1.5", "7.25"))


def test_the_command_does_not_say_where_the_figures_went():
    argv = ["bench", "decode", "--json", "/tmp/a.json", "--batch", "1", "--plot=/tmp/b.png", "8"]
    assert record("decode", argv, [])["command"] == "limelight bench decode --batch 1 8"
