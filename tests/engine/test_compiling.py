"""Kernels are compiled before a start needs them, and a start goes on where they are not."""

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from limelight.config import EngineConfig
from limelight.engine import compiling
from limelight.engine.compiling import Word, follow, mark_of
from limelight.engine.rehearsal import Rehearsal, rehearse
from limelight.engine.startup import plan_memory, resolve
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def rehearsed(role, folder, cache, *names):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, HERE / "rehearsed.py", role, folder, *names],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_a_rehearsal_had_compiled_is_in_the_cache_for_the_start(flint, tmp_path):
    names = ("_rotation_kernel", "_down_kernel")  # the latter calls functions with constants
    ahead, start = (rehearsed(role, flint, tmp_path, *names) for role in ("ahead", "start"))
    assert ahead["fault"] is None and start["fault"] is None
    # Layers that are alike launch the same.
    assert set(ahead["launches"]) == set(start["launches"]) and len(start["launches"]) > 50
    assert start["chosen"] == ahead["chosen"] >= 2 and start["here"] == []


@pytest.mark.parametrize("model", ["flint-nano-nvfp4", "beam-nano-nvfp4"])
def test_a_start_of_four_bit_weights_is_rehearsed_to_its_end(model, tmp_path):
    told = rehearsed("ahead", model, tmp_path)
    assert told["fault"] is None
    assert any(launch.startswith("_pieces_kernel") for launch in told["launches"]), "the last one"


def words(*given):
    return io.BytesIO(b"".join(msgspec.json.encode(word) + b"\n" for word in given))


class Shares(Progress):
    """Collects how much of each phase is done."""

    def __init__(self):
        self.told = []
        super().__init__(lambda phase, share: self.told.append((phase, share)), quiet=True)


def test_the_progress_of_compilers_is_shown_and_a_mark_is_left_once_all_is_there(tmp_path):
    progress, mark = Shares(), tmp_path / "mark"
    follow(words(Word(total=2), Word(done=1), Word(done=1)), progress, mark)
    shares = [share for phase, share in progress.told if phase == "compiling kernels"]
    assert shares == [0.0, 0.5, 1.0, 1.0]
    assert mark.exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "the process for them has ended"),
        ([Word(total=2), Word(done=1)], "1 of 2 were left"),
        ([Word(total=2, fault="no such layer"), Word(done=1), Word(done=1)], "no such layer"),
        ([Word(total=2), Word(done=1), Word(fault="_split: too large")], "_split: too large"),
    ],
    ids=["dead", "killed", "rehearsal", "compiler"],
)
def test_a_start_goes_on_with_a_warning_where_not_all_is_compiled(given, why, tmp_path, caplog):
    follow(words(*given), Progress(quiet=True), tmp_path / "mark")
    assert why in caplog.text and "when they are met" in caplog.text
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def asked(flint, monkeypatch, tmp_path):
    """The arguments of `compiling` for a GPU, whose process is a program `says`."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = EngineConfig(model=str(flint), device="cpu")
    found = resolve(config)
    plan = plan_memory(config, found)

    def prepare(says):
        monkeypatch.setattr(compiling, "PROGRAM", (sys.executable, "-c", says))
        on_gpu = replace(found, device=torch.device("cuda"))
        return compiling.compiling(config, on_gpu, plan, Mesh())

    return prepare


def test_a_second_start_of_the_same_kind_has_nothing_to_compile(asked, tmp_path):
    first, second = Shares(), Shares()
    with asked(
        "import sys; sys.stdin.read(); print('{\"total\":1}'); print('{\"done\":1}')"
    ) as wait:
        wait(first)
    assert first.told and len(list(tmp_path.glob("limelight-*"))) == 1
    with asked("raise SystemExit(3)") as wait:
        wait(second)
    assert not second.told


def test_a_process_that_ends_at_once_is_told_and_no_fault(asked, caplog):
    with asked("raise SystemExit(3)") as wait:
        time.sleep(0.3)
        wait(Progress(quiet=True))
    assert "has ended" in caplog.text


def test_a_start_that_fails_meanwhile_leaves_no_compilers_behind(asked, tmp_path):
    says = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(OSError, match="no weights"), asked(says):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise OSError("no weights")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_starts_that_differ_in_what_kernels_depend_on_have_marks_of_their_own(flint):
    def mark(num_blocks=64, capability=90, identity=b"flint", model=str(flint), **config):
        config = EngineConfig(model=model, **config)
        return mark_of(Rehearsal(config, num_blocks, capability, 2**35), identity)

    marks = [
        mark(), mark(num_blocks=65), mark(capability=100), mark(max_num_seqs=3),
        mark(identity=b"beam"), mark(speculative_config={"model": "here"}),
    ]  # fmt: skip
    assert len(set(marks)) == len(marks)
    # Where files lie makes no difference.
    assert mark(model="flint-nano") == marks[0]
    assert mark(speculative_config={"model": "there"}) == marks[-1]


def test_a_rehearsal_that_fails_tells_why(tmp_path):
    launches, fault = rehearse(Rehearsal(EngineConfig(model=str(tmp_path)), 64, 90, 2**35))
    assert launches == [] and fault.startswith("ValueError") and str(tmp_path) in fault


@pytest.mark.parametrize(
    ("quota", "free", "count"),
    [("max 100000", 2**36, 6), ("250000 100000", 2**36, 3), ("max 100000", 2**31, 2), (None, 1, 1)],
)
def test_as_many_compile_at_once_as_cores_and_memory_allow(
    quota, free, count, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr(compiling, "device_memory", lambda device: (free, free))
    monkeypatch.setattr(compiling, "CGROUP", tmp_path)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert compiling.processes() == count


@pytest.mark.gpu
def test_a_cold_start_compiles_nothing_but_what_was_compiled_ahead(tmp_path):
    file = tmp_path / "startup.json"
    subprocess.run(
        [sys.executable, "-m", "limelight", "bench", "startup", "flint-nano", "--cold",
         "--kv-cache-memory-bytes", "268435456", "--json", file], check=True,
    )  # fmt: skip
    (row,) = json.loads(file.read_text())["rows"]
    assert row["kernels_met"] == 0 and row["compiling_s"]["median"] > 0
