"""`bench spec`: a steady load, the same for every way to draft, and figures that add up."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from drafters import write_drafter

from limelight import cli
from limelight.bench import contestants, questions
from limelight.bench.acceptance import percentile, rates
from limelight.bench.closed_loop import ClosedLoop, watch
from limelight.bench.contestants import Entry, turns
from limelight.bench.questions import Asking, Questions
from limelight.bench.tasks import Tasks
from limelight.checkpoint import locate
from limelight.config import EngineConfig
from limelight.parallel.mesh import Mesh
from limelight.stats import EngineStats
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import Output, SamplingParams

TOLD = [0.9, 0.6, 0.3]


class ScriptedEngine:
    """Gives each request two tokens a step, and the last alone where they are odd."""

    drafting = None

    def __init__(self, failing=()):
        self.running: dict[str, int] = {}
        self.most_open = self.steps = 0
        self.failing = set(failing)

    @property
    def has_work(self):
        return bool(self.running)

    def stats(self):
        return EngineStats(steps=self.steps)

    def add(self, request):
        self.running[request.id] = request.max_tokens

    def abort(self, request_id):
        self.running.pop(request_id, None)

    def step(self):
        self.steps += 1
        self.most_open = max(self.most_open, len(self.running))
        return [self._output(request_id) for request_id in list(self.running)]

    def _output(self, request_id):
        count = min(2, self.running[request_id])
        self.running[request_id] -= count
        reason = "length" if self.running[request_id] == 0 else None
        if request_id in self.failing:
            reason = "error"
        if reason:
            del self.running[request_id]
        return Output(request_id=request_id, token_ids=[7] * count, finish_reason=reason)


def asking(clients, output_len=10):
    params = SamplingParams(temperature=0.0, max_tokens=output_len)
    made = Questions([[1, 2], [3], [4, 5, 6]], params, output_len, {})
    return made.requests(clients, 0)


def test_a_client_asks_again_as_soon_as_it_is_answered():
    engine = ScriptedEngine()
    loop = ClosedLoop(engine, asking(4), 4)
    for _ in range(30):
        loop.step()
        assert len(loop.open) == len(engine.running) == engine.most_open == 4
    # Four first answers of 1, 3, 6 and 8 tokens, then ten each.
    assert sorted(asked.tokens for asked in loop.done)[:5] == [1, 3, 6, 8, 10]
    assert all(asked.first <= asked.last for asked in loop.done)
    assert loop.tokens == sum(one.tokens for one in [*loop.done, *loop.open.values()])
    loop.close()
    assert not engine.has_work


def test_only_what_comes_after_every_first_answer_is_counted():
    engine = ScriptedEngine()
    window = watch(engine, asking(4), clients=4, count=6)
    assert len(window.done) >= 6
    assert window.before.steps == 4  # until the longest first answer of 8 tokens
    assert window.after.steps - window.before.steps == len(window.seconds)
    assert window.tokens == 8 * len(window.seconds)
    assert not engine.has_work


def test_a_request_that_fails_ends_the_benchmark():
    engine = ScriptedEngine(failing=["bench-5"])
    with pytest.raises(ValueError, match="ended by error"):
        watch(engine, asking(4), clients=4, count=20)
    assert not engine.has_work


def test_requests_are_the_same_for_every_way_and_differ_in_seed():
    first, again = ([next(made) for _ in range(9)] for made in (asking(4), asking(4)))
    assert [replace(one, arrival=0.0) for one in first] == [
        replace(one, arrival=0.0) for one in again
    ]
    assert len({one.seed for one in first}) == 9
    assert [one.max_tokens for one in first] == [1, 3, 6, 8, 10, 10, 10, 10, 10]


@pytest.fixture(scope="module")
def reader():
    folder = locate("flint-nano")
    template = ChatTemplate.load(folder, override=None)
    yield Tokenizer.load(folder), template
    template.close()


@pytest.mark.parametrize("length", [64, 1024], ids="L{}".format)
def test_tasks_are_code_to_go_on_with_and_words_to_sort(reader, length):
    tokenizer, template = reader
    rng = random.Random(3)
    prompts = {
        kind: [
            Tasks(kind, length=length, tokenizer=tokenizer, template=template).prompt(rng)
            for _ in range(3)
        ]
        for kind in ("code", "sort")
    }
    sources = Tasks("code", length=length, tokenizer=tokenizer, template=template).sources
    for ids in prompts["code"]:
        assert len(ids) == length
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert any(text in source for source in sources)
    for ids in prompts["sort"]:
        assert abs(len(ids) - length) <= max(4, length // questions.MARGIN)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert "Sort these words alphabetically: " in text
        assert text.endswith(template.render([{"role": "user", "content": ""}])[-8:])
    assert len({tuple(ids) for kind in prompts.values() for ids in kind}) == 6


def test_a_mixed_set_has_both_kinds(reader):
    tasks = Tasks("mixed", length=64, tokenizer=reader[0], template=None)
    rng = random.Random(0)
    texts = [reader[0].decode(tasks.prompt(rng), skip_special_tokens=False) for _ in range(20)]
    assert 4 < sum(text.startswith("Sort these words") for text in texts) < 16


def test_what_is_asked_follows_the_model():
    nothing = Asking(None, None, None, 0.0, 0)
    made = Questions.of(nothing, EngineConfig(model="flint-nano"), 2)
    assert (made.label["tasks"], made.label["context"], made.output_len) == ("mixed", 256, 128)
    assert not made.params.ignore_eos
    dummy = Questions.of(nothing, EngineConfig(model="flint-nano", load_format="dummy"), 2)
    assert dummy.label["tasks"] == "random" and dummy.params.ignore_eos
    assert {len(ids) for ids in dummy.prompts} == {256}


def test_shares_by_place_are_rates_that_acceptance_can_be_told():
    found = list(rates([80, 61, 41, 0], [100, 75, 50, 0]))
    assert found == [0.8, 0.8, 0.8, 0.0]
    assert list(rates([70, 35], [100, 100])) == [0.7, 0.35]


def test_a_percentile_is_one_of_the_values():
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    tiny.write_checkpoint(target, "flint")
    write_drafter(drafter)
    return str(target), str(drafter)


def speculative(drafter, **keys) -> str:
    return json.dumps({"model": drafter, "num_speculative_tokens": 3} | keys)


SMALL = ("--prompt-len", "20", "--output-len", "24", "--device", "cpu", "--dtype", "float32")


def bench(tmp_path: Path, target: str, *argv: str) -> list[dict]:
    file = tmp_path / "spec.json"
    assert cli.main(["bench", "spec", target, *SMALL, "--json", str(file), *argv]) == 0
    kept = json.loads(file.read_text())
    assert kept["bench"] == "spec"
    return kept["rows"]


def test_every_load_has_a_row_for_each_way(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    target, drafter = models
    picture = tmp_path / "spec.png"
    rows = bench(
        tmp_path, target, "--concurrency", "1", "3", "--rounds", "2", "--num-requests", "2",
        "--output-len", "8",
        "--speculative-config", speculative(drafter), "--plot", str(picture),
    )  # fmt: skip
    ways = ["none", "fixed", "adaptive"]
    assert [(row["batch"], row["drafts"]) for row in rows] == [
        (n, way) for n in (1, 3) for way in ways
    ]
    for row in rows:
        assert (row["model"], row["weights"], row["tasks"]) == (Path(target).name, "fp32", "random")
        assert (row["context"], row["output_len"], row["ignore_eos"]) == (20, 8, True)
        assert row["tokens_per_s"]["n"] == 2 and row["step_ms"]["n"] == row["steps"]
        assert row["answers"] >= 4 and row["tpot_ms"]["n"] == row["answers"]
        assert row["tpot_ms"]["p99"] >= row["tpot_ms"]["median"]
        if row["drafts"] == "none":
            assert row["tokens_per_step"] == row["batch"]
            assert "acceptance" not in row and "speedup" not in row
            continue
        assert row["acceptance"] == "real" and row["num_drafts"] == 3
        assert row["speedup"]["n"] == 2
        if row["drafts"] == "fixed":
            stood = sum(row["accepted_at"]) / row["verifications"]
            assert row["acceptance_length"] == pytest.approx(1 + stood, abs=1e-3)
        assert row["steps"] >= row["forward_ms"]["n"] >= row["drafting_steps"]
    shown = capsys.readouterr().out
    assert "adaptive" in shown and "tasks random" in shown
    assert picture.stat().st_size > 5000


def test_told_rates_are_what_comes_out_and_are_marked(models, tmp_path):
    target, drafter = models
    told = speculative(
        drafter, rejection_sample_method="synthetic", synthetic_acceptance_rates=TOLD
    )
    rows = bench(
        tmp_path, target, "--concurrency", "8", "--drafts", "fixed", "--num-requests", "60",
        "--speculative-config", told,
    )  # fmt: skip
    (row,) = rows
    assert row["acceptance"] == "synthetic" and row["ignore_eos"]
    for place, rate in enumerate(TOLD):
        error = 4 * math.sqrt(rate * (1 - rate) / row["verified_at"][place])
        assert row["rates"][place] == pytest.approx(rate, abs=error)
    again = speculative(
        drafter, rejection_sample_method="synthetic", synthetic_acceptance_rates=row["rates"]
    )
    assert EngineConfig(speculative_config=json.loads(again)).speculative is not None


def test_without_drafts_no_drafter_is_needed(models, tmp_path):
    rows = bench(tmp_path, models[0], "--concurrency", "2", "--drafts", "none")
    assert [row["drafts"] for row in rows] == ["none"]


def test_engines_that_do_not_fit_together_come_one_after_the_other(models, monkeypatch):
    config = EngineConfig(model=models[0], device="cpu", max_num_seqs=2)
    entries = [Entry(config, ["none"]), Entry(config, ["fixed"])]
    (together,) = turns(entries, Mesh.single())
    assert [entry.ways for entry in together] == [["none"], ["fixed"]]
    assert all(entry.config.kv_cache_memory_bytes for entry in together)
    plan_memory = contestants.plan_memory

    def large(config, found, mesh):
        plan = plan_memory(config, found, mesh)
        return replace(plan, workspace=plan.available // 2)

    monkeypatch.setattr(contestants, "plan_memory", large)
    assert turns(entries, Mesh.single()) == [[entries[0]], [entries[1]]]
    assert turns(entries[:1], Mesh.single()) == [[entries[0]]]


def test_engines_of_several_ranks_come_one_after_the_other(models):
    config = EngineConfig(model=models[0], device="cpu", max_num_seqs=2, tensor_parallel_size=2)
    entries = [Entry(config, ["none"]), Entry(config, ["fixed"])]
    assert turns(entries, Mesh.single()) == [[entries[0]], [entries[1]]]


@pytest.mark.slow
def test_all_ranks_take_part_in_every_way(tmp_path, models):
    told = speculative(models[1])
    rows = bench(tmp_path, models[0], "--speculative-config", told, "-tp", "2", "--device", "cpu")
    assert {(row["drafts"], row["ranks"]) for row in rows} == {
        ("none", 2), ("fixed", 2), ("adaptive", 2)
    }  # fmt: skip
    assert all(row["acceptance_length"] >= 1 for row in rows if row["drafts"] == "fixed")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--drafts", "fixed"), "--speculative-config with a drafter"),
        (("--concurrency", "0"), "--concurrency: expected a whole number above 0"),
        (("--rounds", "0"), "--rounds: expected a whole number above 0"),
        (("--temperature", "-1"), "temperature"),
        (("--drafts", "none", "--tasks", "sort"), "tokenizer"),
        (("--drafts", "none", "--output-len", "5000"), "do not fit the model's length"),
        (("--drafts", "all"), "invalid choice"),
        (("--drafts", "none", "-tp", "2", "--tensor-parallel-slice", "2"), "choose one"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_measured_is_refused_in_a_line(models, capsys, argv, says):
    assert cli.main(["bench", "spec", models[0], *SMALL, *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_synthetic_acceptance_has_no_temperature(models, capsys):
    told = speculative(
        models[1], rejection_sample_method="synthetic", synthetic_acceptance_rates=TOLD
    )
    argv = [*SMALL, "--speculative-config", told, "--temperature", "1"]
    assert cli.main(["bench", "spec", models[0], *argv]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_a_cache_that_is_too_small_for_the_clients_is_refused(models, capsys):
    argv = ["--drafts", "none", "--concurrency", "64", "--kv-cache-memory-bytes", "1000000"]
    assert cli.main(["bench", "spec", models[0], *SMALL, *argv]) == 2
    assert "lower --concurrency" in capsys.readouterr().err
