"""Checkpoints and places that quantize refuses, and what is left where it cannot finish."""

import errno
import json
import shutil

import pytest
import torch
from quantized import run, stored
from safetensors.torch import save_file

from limelight.conversion import job


def changed(folder, change):
    """The checkpoint with its tensors changed."""
    weights = stored(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors")


def poison(weights):
    weights["model.layers.3.mlp.experts.2.up_proj.weight"][1, 2] = torch.nan


NORM, QUERY = "model.layers.4.self_attn.q_norm.weight", "model.layers.4.self_attn.q_proj.weight"
FAULTS = {
    "missing": (lambda w: w.pop(NORM), f"{NORM} is missing"),
    "left over": (lambda w: w.update(extra=torch.ones(2)), "extra is not part of the model"),
    "of another shape": (lambda w: w.update({NORM: torch.ones(3)}), f"{NORM}: shape .3.; expected"),
    "of integers": (lambda w: w.update({QUERY: torch.ones(4, 4).int()}), f"{QUERY}: type I32"),
    "not finite": (poison, "experts.2.up_proj.weight: holds values that are not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_is_refused_by_name_if_it_is(made, tmp_path, fault):
    change, message = FAULTS[fault]
    source = shutil.copytree(made["wide"], tmp_path / "source")
    changed(source, change)
    for into, format in (("a.gguf", "gguf-nvfp4"), ("a", "modelopt-nvfp4")):
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / into, format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_cut_file_is_refused(made, tmp_path):
    source = shutil.copytree(made["wide"], tmp_path / "source")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
        run(source, tmp_path / "a", format="modelopt-nvfp4")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no .safetensors file"):
        run(source, tmp_path / "a", format="modelopt-nvfp4")


def test_what_cannot_be_is_refused_before_anything_is_written(made, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there.gguf").write_text("")
    cases = [
        ("flint", "there", "modelopt-nvfp4", "exists already"),
        ("flint", "there.gguf", "gguf-nvfp4", "exists already"),
        ("flint", "a.bin", "gguf-nvfp4", "writes a file NAME.gguf"),
        ("flint", "a.gguf", "modelopt-nvfp4", "writes a folder"),
        ("flint", "no/such/a", "modelopt-nvfp4", "no such folder"),
        ("beam", "a.gguf", "gguf-nvfp4", "no Beam architecture"),
        (
            "odd",
            "a",
            "modelopt-nvfp4",
            "down_proj.weight: rows of 24; NVFP4 needs a multiple of 16",
        ),
    ]
    for source, into, format, message in cases:
        with pytest.raises(ValueError, match=message):
            run(made[source], tmp_path / into, format=format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "there.gguf"]


def test_a_quantized_checkpoint_is_refused(made, tmp_path):
    run(made["flint"], tmp_path / "a", format="modelopt-nvfp4")
    with pytest.raises(ValueError, match="quantized already"):
        run(tmp_path / "a", tmp_path / "b", format="modelopt-nvfp4")
    shutil.copyfile(made["flint"] / "config.json", tmp_path / "a" / "config.json")
    (tmp_path / "a" / "hf_quant_config.json").unlink()
    with pytest.raises(
        ValueError, match=r"_proj.weight: type NVFP4; expected one of F32, F16, BF16"
    ):
        run(tmp_path / "a", tmp_path / "b", format="modelopt-nvfp4")
    run(made["wide"], tmp_path / "a.gguf", format="gguf-nvfp4")
    with pytest.raises(ValueError, match=r"a.gguf is a file; give a folder"):
        run(tmp_path / "a.gguf", tmp_path / "b", format="modelopt-nvfp4")


def test_another_architecture_is_refused(made, tmp_path):
    source = shutil.copytree(made["flint"], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}))
    with pytest.raises(ValueError, match="Other"):
        run(source, tmp_path / "a", format="modelopt-nvfp4")


def test_too_little_space_is_told_before_it_begins(made, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"to be written, but only 1,000 are free"):
        run(made["wide"], tmp_path / "a.gguf", format="gguf-nvfp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("into", ["a.gguf", "a"])
def test_nothing_is_left_of_what_could_not_be_finished(made, tmp_path, monkeypatch, error, into):
    done = []

    def fail(*args):
        done.append(args)
        if len(done) > 20:
            raise error
        return original(*args)

    original = job.quantize_matrix
    monkeypatch.setattr(job, "quantize_matrix", fail)
    format = "gguf-nvfp4" if into.endswith(".gguf") else "modelopt-nvfp4"
    with pytest.raises(type(error)) as caught:
        run(made["wide"], tmp_path / into, format=format)
    if isinstance(error, OSError):
        assert f"{into} could not be written and was removed: " in str(caught.value)
        assert "No space left" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_is_not_disturbed(made, tmp_path):
    (tmp_path / "a.partial").mkdir()
    with pytest.raises(ValueError, match=r"a.partial is left of a run"):
        run(made["flint"], tmp_path / "a", format="modelopt-nvfp4")
    assert (tmp_path / "a.partial").exists()
