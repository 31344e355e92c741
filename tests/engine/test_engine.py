"""The loop settles what a scripted runner gives: ends, errors and aborts, one request at a time."""

import time
from dataclasses import replace

import pytest

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, plan_groups
from limelight.engine.engine import Engine
from limelight.engine.scheduler import Scheduler
from limelight.steps import Sampled, StepResult
from limelight.types import Constraint, DeviceLost, Request, SamplingParams, TokenLogprobs

EOS = 9
WHOLE, REFUSED = "whole", "refused"


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"], autouse=True)
def overlap(request, monkeypatch):
    """Every test of this file holds for the plain loop and for the overlapped one."""
    defaults = (Engine.__init__.__kwdefaults__ or {}) | {"overlap": request.param}
    monkeypatch.setattr(Engine.__init__, "__kwdefaults__", defaults)


class Scripted:
    """A step that has run; its error comes with the result."""

    def __init__(self, sampled, error):
        self.sampled, self.error = sampled, error

    def result(self):
        if self.error is not None:
            raise self.error
        return StepResult(self.sampled)


class ScriptedRunner:
    """Gives each request the tokens of its script; a text in a script is an error."""

    def __init__(self, scripts):
        self.scripts, self.slots, self.made = scripts, {}, {}

    def launch(self, plan):
        for admission in plan.admissions:
            self.slots[admission.slot] = admission.request
            self.made[admission.request.id] = len(admission.output_token_ids)
        try:
            return Scripted([self.answer(grant) for grant in plan.grants], None)
        except Exception as error:
            return Scripted([], error)

    def answer(self, grant):
        request = self.slots[grant.slot]
        following = request.prompt_token_ids[grant.start + 1 :][: grant.num_tokens]
        reports = [TokenLogprobs(token, -1.0, 1, []) for token in following]
        prompt_logprobs = reports if request.params.prompt_logprobs is not None else None
        if not grant.samples:
            return Sampled(grant.slot, [], prompt_logprobs=prompt_logprobs)
        script = self.scripts[request.id]
        # An overlapped step may compute one token more than the script has.
        token = script[min(self.made[request.id], len(script) - 1)]
        self.made[request.id] += 1
        if isinstance(token, Exception):
            raise token
        if token is REFUSED:
            return Sampled(grant.slot, [], refused="too slow")
        if token is WHOLE:
            return Sampled(grant.slot, [], is_whole=True)
        if isinstance(token, str):
            return Sampled(grant.slot, [], error=token)
        return Sampled(grant.slot, [token], prompt_logprobs=prompt_logprobs)


def engine_of(scripts, *, blocks=100, chunk=16) -> Engine:
    groups = CacheGroups(plan_groups([None, 4]), BlockPool(blocks, block_size=4))
    scheduler = Scheduler(groups, max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=80)
    return Engine(scheduler, ScriptedRunner(scripts), eos_token_ids=[EOS])


def ask(name, *, prompt=(1, 2, 3), max_tokens=5, **params) -> Request:
    return Request(
        id=name, prompt_token_ids=list(prompt), params=SamplingParams(**params),
        max_tokens=max_tokens, seed=0, arrival=time.monotonic(),
    )  # fmt: skip


def serve(engine, *requests):
    """All outputs by request, stepping until the work is done."""
    outputs = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check()
    assert engine.stats().cache_usage == 0.0
    return outputs


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    "params, script, made, reason, stop",
    [
        ({}, [4, 4, EOS, 4], [4, 4, EOS], "stop", None),
        ({}, [4] * 9, [4] * 5, "length", None),
        ({"ignore_eos": True}, [EOS, 4, EOS, 4, 4], [EOS, 4, EOS, 4, 4], "length", None),
        ({"stop_token_ids": [7]}, [4, 7, 4], [4, 7], "stop", 7),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], [EOS], "stop", EOS),
    ],
    ids=["eos", "length", "ignore-eos", "stop-id", "eos-as-stop-id"],
)
def test_a_sequence_ends_for_the_right_reason(params, script, made, reason, stop):
    outputs = serve(engine_of({"a": script}), ask("a", **params))["a"]
    assert tokens(outputs) == made
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop)


def test_a_sequence_of_no_tokens_ends_with_its_prompt():
    engine = engine_of({"a": [EOS]}, chunk=4)
    outputs = serve(engine, ask("a", prompt=range(10), max_tokens=0, prompt_logprobs=0))["a"]
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], "length")]
    assert len(outputs[0].prompt_logprobs) == 10


def test_a_request_found_to_be_wrong_leaves_the_others_alone():
    engine = engine_of({"a": [1, REFUSED], "b": [4, 4, 4, EOS]})
    outputs = serve(engine, ask("a"), ask("b"))
    last = outputs["a"][-1]
    assert (last.finish_reason, last.refused, last.error) == ("error", "too slow", None)
    assert tokens(outputs["b"]) == [4, 4, 4, EOS]


def test_an_error_of_one_sequence_leaves_the_others_alone():
    engine = engine_of({"a": [4] * 5, "b": [4, "broken"], "c": [5] * 5})
    outputs = serve(engine, ask("a"), ask("b"), ask("c"))
    assert outputs["b"][-1].finish_reason == "error" and outputs["b"][-1].error == "broken"
    assert tokens(outputs["a"]) == [4] * 5 and tokens(outputs["c"]) == [5] * 5


def test_a_step_that_fails_ends_its_sequences_and_the_engine_goes_on():
    engine = engine_of({"a": [4, RuntimeError("no memory")], "b": [4] * 5})
    assert serve(engine, ask("a"))["a"][-1].error == "no memory"
    assert tokens(serve(engine, ask("b"))["b"]) == [4] * 5


def test_a_failed_sequence_leaves_nothing_behind_that_others_could_take_for_good():
    engine = engine_of({"head": [4] * 5, "wrong": [4, "broken"], "same": [4] * 5})
    serve(engine, ask("head", prompt=range(20)))
    failed = serve(engine, ask("wrong", prompt=range(41)))["wrong"]
    assert failed[-1].error == "broken" and failed[0].num_cached == 20
    assert serve(engine, ask("same", prompt=range(41)))["same"][0].num_cached == 20


def test_a_lost_device_ends_the_engine_instead_of_every_step():
    engine = engine_of({"a": [4, DeviceLost("an illegal memory access")], "b": [4] * 5})
    engine.add(ask("a"))
    engine.add(ask("b"))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        while engine.has_work:
            engine.step()


def test_an_abort_ends_a_request_wherever_it_stands():
    engine = engine_of({"running": [4] * 50, "waiting": [4] * 50}, blocks=22)
    engine.add(ask("running", prompt=range(50), max_tokens=20))
    engine.step()
    engine.add(ask("waiting", prompt=range(50), max_tokens=20))
    for name in ("waiting", "running"):
        assert engine.abort(name).finish_reason == "abort"
        assert engine.abort(name) is None
        engine.scheduler.check()
    assert engine.step() == []
    assert not engine.has_work and engine.stats().cache_usage == 0.0


@pytest.mark.parametrize("blocks", [100, 22], ids=["roomy", "with-preemption"])
@pytest.mark.parametrize("chunk", [8, 64])
def test_prompt_logprobs_come_once_and_whole(blocks, chunk):
    names = ["a", "b", "c", "d"]
    engine = engine_of({name: [4] * 30 for name in names}, blocks=blocks, chunk=chunk)
    prompt = list(range(20, 41))
    asked = [ask(name, prompt=prompt, max_tokens=29, prompt_logprobs=0) for name in names]
    for outputs in serve(engine, *asked).values():
        (reports,) = (output.prompt_logprobs for output in outputs if output.prompt_logprobs)
        assert reports[0] is None
        assert [report.token_id for report in reports[1:]] == prompt[1:]
        assert len(tokens(outputs)) == 29
    assert (engine.stats().preemptions > 0) == (blocks == 22)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    engine = engine_of({"a": [4] * 10})
    engine.add(ask("a"))
    with pytest.raises(ValueError, match="already"):
        engine.add(ask("a"))
    while engine.has_work:
        engine.step()
    engine.add(ask("a"))


class Told:
    """What is told of a request: its grammar is there, or why not."""

    def __init__(self, request, refused=None, error=None):
        self.request, self.refused, self.error = request, refused, error


class ScriptedGrammars:
    """Decides on the requests that are named, when they are."""

    def __init__(self):
        self.asked, self.verdicts = {}, {}

    def ask(self, request):
        self.asked[request.id] = request

    def decided(self, *, seconds):
        named = [name for name in self.verdicts if name in self.asked]
        return [Told(self.asked.pop(name), **self.verdicts.pop(name)) for name in named]

    def forget(self, request_id):
        self.asked.pop(request_id, None)


def constrained(name, **given) -> Request:
    return replace(ask(name, **given), constraint=Constraint(tag="{}"))


def test_a_request_waits_for_its_grammar_and_then_takes_its_place_by_arrival():
    engine = engine_of({name: [4] * 5 for name in "abc"})
    engine.grammars = grammars = ScriptedGrammars()
    first, later = constrained("a", prompt=range(16)), ask("c", prompt=range(20, 36))
    engine.add(first)
    assert engine.has_work and engine.step() == [] and engine.stats().waiting == 1
    engine.add(later)
    grammars.verdicts["a"] = {}
    outputs = [engine.step() for _ in range(8)]
    # The step has room for one prompt: the one that came first.
    told = [output.request_id for step in outputs for output in step]
    assert told.index("a") < told.index("c") and not engine.compiling


@pytest.mark.parametrize("verdict", [{"refused": "too deep"}, {"error": "no memory"}])
def test_a_request_without_a_grammar_ends_with_the_reason_and_the_others_go_on(verdict):
    engine = engine_of({"b": [4] * 5})
    engine.grammars = grammars = ScriptedGrammars()
    grammars.verdicts["a"] = verdict
    outputs = serve(engine, constrained("a"), ask("b"))
    last = outputs["a"][-1]
    assert {"refused": last.refused, "error": last.error} == {
        "refused": None,
        "error": None,
        **verdict,
    }
    assert last.finish_reason == "error" and tokens(outputs["b"]) == [4] * 5


def test_an_abort_reaches_a_request_that_waits_for_its_grammar():
    engine = engine_of({})
    engine.grammars = grammars = ScriptedGrammars()
    engine.add(constrained("a"))
    assert engine.abort("a").finish_reason == "abort" and not grammars.asked
    assert engine.abort("a") is None and not engine.has_work


def test_a_whole_answer_ends_without_a_token():
    engine = engine_of({"a": [4, 4, WHOLE]})
    outputs = serve(engine, ask("a", max_tokens=9))["a"]
    assert tokens(outputs) == [4, 4]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
