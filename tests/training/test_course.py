"""The commands `limelight draft train` and `eval`, on a tiny target that knows no text."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_checkpoint

from limelight import cli
from limelight.training import course as course_module
from limelight.training.trainer import Trainer

VOCAB, LAYERS = 24, 3
SHAPE = ("--layers", "1", "--window", "16", "--rank", "8", "--top-k", "8", "--conv-group", "12",
         "--mask-token", "23", "--num-speculative-tokens", "4")  # fmt: skip
LENGTH = ("--steps", "6", "--save-every", "3", "--max-tokens", "12", "--tokens", "300",
          "--anchors", "24", "--temperature", "0", "1")  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    changes = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "mlp_only_layers": [0]}
    write_checkpoint(folder, "flint", seed=4, eos_token_id=None, **changes)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = random.Random(3)
    lines = [
        {"prompt": rng.choices(range(VOCAB), k=6), "task": rng.choice("ab"), "held_out": i < 6}
        for i in range(40)
    ]
    path = tmp_path_factory.mktemp("data") / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def argv(target, data, out, *more):
    return ["draft", "train", str(target), "--device", "cpu", "--data", str(data),
            "--out", str(out), *SHAPE, *LENGTH, *more]  # fmt: skip


@pytest.fixture(scope="module")
def trained(target, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "drafter"
    assert cli.main(argv(target, data, out, "--json", str(out.parent / "report.json"))) == 0
    return out


def complaint(capsys, *argv):
    assert cli.main(list(argv)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_training_writes_a_drafter_and_tells_what_it_gets_accepted(target, data, trained):
    config = json.loads((trained / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"] and config["block_size"] == 5
    assert config["num_key_value_heads"] == 2 and config["head_dim"] == 16
    tensors = load_file(trained / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(tensors) == 6 + 15 and all(x.isfinite().all() for x in tensors.values())
    report = json.loads((trained.parent / "report.json").read_text())
    tasks = {row["task"]: row for row in report["rows"]}
    assert set(tasks) <= {"a", "b", "all"} and tasks["all"]["documents"] == 6
    assert 1.0 <= tasks["all"]["length"] <= 5.0 and len(tasks["all"]["accepted"]) == 4
    assert sorted(one.name for one in trained.with_name("drafter.work").iterdir()) == [
        "answers.jsonl",
        "settings.json",
    ]


def test_eval_tells_the_same_of_the_folder(target, data, trained, tmp_path):
    report = tmp_path / "report.json"
    command = ["draft", "eval", str(target), str(trained), "--device", "cpu"]
    limits = ["--max-tokens", "12", "--json", str(report)]
    assert cli.main([*command, "--data", str(data), *limits]) == 0
    told = json.loads((trained.parent / "report.json").read_text())["rows"]
    assert {(row["model"], row["drafter"]) for row in told} == {(str(target), str(trained))}
    assert json.loads(report.read_text())["rows"] == told
    answers = trained.with_name("drafter.work") / "answers.jsonl"
    assert cli.main([*command, "--data", str(answers), *limits]) == 0
    assert json.loads(report.read_text())["rows"] == told


class Killed(BaseException):
    pass


@pytest.mark.parametrize("features", ["keep", "compute"])
def test_a_killed_training_goes_on_to_the_same_weights(
    target, data, trained, tmp_path, monkeypatch, features
):
    out, advance = tmp_path / "drafter", Trainer.advance

    def dying(trainer):
        if trainer.step == 5:
            raise Killed
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", dying)
    with pytest.raises(Killed):
        cli.main(argv(target, data, out, "--features", features))
    monkeypatch.undo()
    assert not out.exists()
    # As if it had been killed while it wrote the answers, too.
    answers = out.with_name("drafter.work") / "answers.jsonl"
    answers.write_bytes(answers.read_bytes()[:-40])
    steps = []
    monkeypatch.setattr(Trainer, "advance", lambda one: steps.append(one.step) or advance(one))
    assert cli.main(argv(target, data, out, "--features", features)) == 0
    assert steps == [3, 4, 5]
    assert (
        load_file(out / "model.safetensors").keys()
        == load_file(trained / "model.safetensors").keys()
    )
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, load_file(trained / "model.safetensors")[name]), name


def test_a_training_that_is_begun_keeps_its_settings(target, data, trained, tmp_path, capsys):
    out = tmp_path / "drafter"
    shutil.copytree(trained.with_name("drafter.work"), out.with_name("drafter.work"))
    words = complaint(capsys, *argv(target, data, out, "--rate", "0.5"))
    assert "was begun with rate 0.001, not 0.5" in words
    other = tmp_path / "other.jsonl"
    lines = data.read_text().splitlines()
    other.write_text("\n".join([json.dumps({"prompt": [1]}), *lines[1:]]) + "\n")
    assert "answers to another data file" in complaint(capsys, *argv(target, other, out))


def test_pieces_of_a_step_add_up_to_the_whole(target, data, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("limelight.training.trainer.PIECE_BYTES", 1)
    out = tmp_path / "drafter"
    assert cli.main(argv(target, data, out)) == 0
    for name, tensor in load_file(out / "model.safetensors").items():
        whole = load_file(trained / "model.safetensors")[name]
        torch.testing.assert_close(tensor, whole, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--data", "nothing.jsonl"), "nothing.jsonl: No such file"),
        (("--taps", "0", "7"), "target_layer_ids names layer 7"),
        (("--taps", "2", "1"), "must list layers from 0 on"),
        (("--heads", "3"), "must be a multiple of 2 KV heads"),
        (("--window", "3"), "sliding_window must be 5 or more"),
        (("--mask-token", "24"), "must be a token id below vocab_size, 24"),
        (("--conv-group", "7"), "must divide hidden_size, 48"),
        (("--rate", "0"), "rate must be above 0"),
        (("--steps", "0"), "steps must be at least 1"),
        (("--temperature", "-1"), "temperature"),
        (("--layers", "two"), "--layers"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    target, data, tmp_path, capsys, more, words
):
    assert words in complaint(capsys, *argv(target, data, tmp_path / "drafter", *more))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(target, data, tmp_path, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    for out, words in (
        ("there", "exists already"), ("no/where", "no such folder"),
        ("flint-nano-dflash2", "bundled"),
    ):  # fmt: skip
        where = out if out.startswith("flint") else tmp_path / out
        assert words in complaint(capsys, *argv(target, data, where))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "no folder can be made" in complaint(capsys, *argv(target, data, tmp_path / "new"))
    assert "--data FILE and --out" in complaint(capsys, "draft", "train", str(target))
    assert "--data FILE" in complaint(capsys, "draft", "eval", str(target))


def test_too_little_to_learn_from_is_refused(target, data, tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:12]))
    assert "144 tokens in all to learn from" in complaint(
        capsys, *argv(target, few, tmp_path / "drafter")
    )
    assert "give --mask-token" in complaint(
        capsys, "draft", "train", str(target), "--data", str(data), "--out", str(tmp_path / "x")
    )


def test_a_loss_that_is_no_number_ends_the_training(target, data, tmp_path, capsys, monkeypatch):
    begun = course_module.initialize

    def broken(drafter, generator):
        begun(drafter, generator)
        drafter.fc.data.fill_(float("nan"))

    monkeypatch.setattr(course_module, "initialize", broken)
    words = complaint(capsys, *argv(target, data, tmp_path / "drafter"))
    assert "the loss is no number at step 3: try a lower --rate" in words
