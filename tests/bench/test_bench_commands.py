import json
import os

import pytest
import tiny
from transformers import GenerationMixin

from limelight import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_checkpoint(folder, "flint")
    return str(folder)


def bench(tmp_path, *argv):
    """The rows of a run, in FP32 on the CPU."""
    file = tmp_path / "figures.json"
    flags = ["--json", str(file), "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["bench", *argv, *flags]) == 0
    kept = json.loads(file.read_text())
    assert kept["bench"] == argv[0]
    return kept["rows"]


def test_the_engine_and_transformers_decode_the_same_tokens(folder, tmp_path, capsys):
    rows = bench(
        tmp_path, "decode", folder, "--batch", "1", "3", "--context", "37",
        "--num-tokens", "5", "--compare", "transformers",
    )  # fmt: skip
    assert [(row["batch"], row["engine"]) for row in rows] == [
        (1, "limelight"),
        (1, "transformers"),
        (3, "limelight"),
        (3, "transformers"),
    ]
    assert all(row["same_tokens"] == 1 for row in rows)
    assert all(row["step_ms"]["n"] == 5 for row in rows)
    assert {row["weights"] for row in rows} == {"fp32"}
    assert "transformers" in capsys.readouterr().out


def test_the_peer_is_generate_itself_and_no_token_ends_an_answer(tmp_path, monkeypatch):
    tiny.write_checkpoint(tmp_path, "beam")
    ends = {"eos_token_id": list(range(tiny.VOCAB)), "pad_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    generate, calls = GenerationMixin.generate, []

    def counted(model, *args, **options):
        calls.append(options["do_sample"])
        return generate(model, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", counted)
    rows = bench(
        tmp_path, "decode", str(tmp_path), "--batch", "3", "--context", "90",
        "--num-tokens", "4", "--rounds", "2", "--compare", "transformers",
    )  # fmt: skip
    assert calls == [False, False]
    assert [row["step_ms"]["n"] for row in rows] == [8, 8]
    assert [row["same_tokens"] for row in rows] == [1, 1]


def test_prefills_have_a_row_for_each_batch_and_context(folder, tmp_path):
    argv = ["prefill", folder, "--batch", "1", "2", "--context", "17", "40", "--rounds", "2"]
    rows = bench(tmp_path, *argv)
    assert [(row["context"], row["batch"]) for row in rows] == [(17, 1), (17, 2), (40, 1), (40, 2)]
    assert all(row["ttft_ms"]["n"] == row["tokens_per_s"]["n"] == 2 for row in rows)


def test_dummy_weights_are_not_compared(folder, capsys):
    argv = ["bench", "decode", folder, "--compare", "transformers", "--load-format", "dummy"]
    assert cli.main(argv) == 2
    assert "real weights" in capsys.readouterr().err


def test_a_start_is_told_by_its_phases_which_add_up_to_it(folder, tmp_path):
    (row,) = bench(tmp_path, "startup", folder, "--context", "9", "--cold")
    seconds = {name: row[name]["median"] for name in row if name.endswith("_s")}
    whole = seconds.pop("startup_s")
    assert {"imports_s", "weights_s", "warm_up_s", "first_request_s", "other_s"} == set(seconds)
    assert sum(seconds.values()) == pytest.approx(whole, rel=0.01)
    assert row["cold"] and row["kernels_met"] == 0  # a CPU has none
    assert "TRITON_CACHE_DIR" not in os.environ
