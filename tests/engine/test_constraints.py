"""Constraints and budgets in a real engine: each answer fits, whatever else is served beside it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tiny import Answer, run

from limelight.config import EngineConfig
from limelight.engine.client import EngineClient
from limelight.engine.engine import Engine
from limelight.engine.front import make_requests
from limelight.engine.grammar import LONGEST_TAG, MOST_TRIED, Fault, Grammars, Kept
from limelight.engine.grammar_worker import Vocabulary
from limelight.engine.startup import start_engine
from limelight.progress import Progress
from limelight.stats import ModelInfo
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, Reasoning, Request, RequestError, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "kind": {"enum": ["big", "small", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
HOSTILE = {
    "nested repeats": r"((.{1,1000}){1,1000}){1,1000}",
    "any of any": r"(.*.*.*.*)*x",
    "maybe 5000": r"(.?){5000}",
}


def tag(form) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


JSON = tag({"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 1})


class Small:
    """flint-nano in so little cache that some requests are computed anew, and its tokens."""

    def __init__(self, **changes: object):
        config = EngineConfig(
            model="flint-nano", device="cpu", max_num_seqs=12, max_model_len=256,
            kv_cache_memory_bytes=5 * 2**18, **changes,
        )  # fmt: skip
        started = start_engine(config, Progress(quiet=True))
        self.engine: Engine = started.engine
        self.info: ModelInfo = started.info
        self.tokenizer = Tokenizer.load(started.folder)
        self.count = 0
        self.think, self.end, self.call = (
            self.ids(mark) for mark in ("<think>", "</think>", "<tool_call>")
        )
        assert len(self.think) == len(self.end) == len(self.call) == 1

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, text="Tell me about it.", *, form=JSON, waits=False, budget=None, **params):
        self.count += 1
        reasoning = None
        if waits or budget is not None:
            text += "<think>"
            reasoning = Reasoning(
                starts=[self.think], ends=[self.end], ends_kept=[self.call], is_open=True,
                budget=budget, forced_end=self.end,
            )  # fmt: skip
        constraint = Constraint(
            tag=form, after_reasoning=waits, marks=[*self.think, *self.end, *self.call]
        )
        params = {"temperature": 1.5, "max_tokens": 120, "seed": self.count} | params
        return make_requests(
            f"request-{self.count}", self.ids(text), SamplingParams(**params), info=self.info,
            tokenizer=self.tokenizer, reasoning=reasoning,
            constraint=constraint if form is not None else None,
        )  # fmt: skip

    def text(self, answer: Answer) -> str:
        assert (answer.last.finish_reason, answer.last.error) == ("stop", None)
        return self.tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=False)


@pytest.fixture(scope="module")
def small():
    one = Small()
    yield one
    one.engine.close()


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "sizes", "kind"] and len(value["name"]) <= 6
    assert len(value["sizes"]) <= 2 and all(type(size) is int for size in value["sizes"])
    assert value["kind"] in ("big", "small", None)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_every_answer_fits_its_schema_and_leaves_the_others_as_they_are(small, overlap):
    free = [small.ask(form=None, seed=seed, max_tokens=24)[0] for seed in range(2)]
    expected = run(small.engine, free)
    again = [small.ask(form=None, seed=seed, max_tokens=24)[0] for seed in range(2)]
    bound = [small.ask(f"Item {i}: {'on and ' * i}", seed=i)[0] for i in range(6)]
    small.engine.overlap = overlap
    preemptions = small.engine.stats().preemptions
    answers = run(small.engine, bound + again)
    small.engine.overlap = False
    assert small.engine.stats().preemptions > preemptions
    for answer in answers[:6]:
        check(small.text(answer))
    assert [a.token_ids for a in answers[6:]] == [a.token_ids for a in expected]


def test_both_loops_give_the_same_tokens(small):
    def ask():
        made = [small.ask(f"Item {i}.", seed=i, waits=i > 1, budget=3 * i if i > 2 else None,
                      max_tokens=60)[0]
                for i in range(5)]  # fmt: skip
        made += [small.ask(form=tag({"type": "regex", "pattern": "[ab]{3}"}), ignore_eos=True)[0]]
        return made + [small.ask(form=None, seed=9, max_tokens=24)[0]]

    count = small.count
    plain = run(small.engine, ask())
    small.count, small.engine.overlap = count, True
    overlapped = run(small.engine, ask())
    small.engine.overlap = False
    for one, other in zip(plain, overlapped, strict=True):
        assert one.token_ids == other.token_ids
        assert one.last.finish_reason == other.last.finish_reason


@pytest.mark.parametrize("budget", [0, 1, 5, 40])
def test_reasoning_has_exactly_its_budget_and_the_answer_still_fits(small, budget):
    # A model that would never end its reasoning by itself.
    never = {"logit_bias": {small.end[0]: -100.0}}
    preemptions = small.engine.stats().preemptions
    asked = [small.ask(waits=True, budget=budget, seed=i, **never)[0] for i in range(5)]
    asked += [small.ask(form=None, budget=budget, max_tokens=60, **never)[0]]
    answers = run(small.engine, asked)
    for answer in answers:
        assert answer.token_ids.index(small.end[0]) == budget
    for answer in answers[:5]:
        check(small.text(answer).partition("</think>")[2])
    assert budget < 40 or small.engine.stats().preemptions > preemptions


def test_choices_of_one_request_share_a_grammar_and_a_cached_prompt_changes_nothing(small):
    def ask():
        return small.ask("Say it. " * 12, n=2, seed=7)

    first, second = run(small.engine, ask()), run(small.engine, ask())
    assert [a.token_ids for a in first] == [a.token_ids for a in second]
    assert len({tuple(a.token_ids) for a in first}) > 1 and second[0].last.num_cached > 0
    for answer in first:
        check(small.text(answer))
    assert not small.engine.grammars.of_request


def test_an_answer_that_may_not_end_by_itself_ends_with_its_form(small):
    answers = run(small.engine, small.ask(form=tag({"type": "regex", "pattern": "ab"}),
                                          ignore_eos=True))  # fmt: skip
    assert small.tokenizer.decode(answers[0].token_ids, skip_special_tokens=False) == "ab"
    assert answers[0].last.finish_reason == "stop" and answers[0].last.token_ids == []


@pytest.mark.parametrize(
    "form, reason",
    [
        ("{", "Failed to parse JSON"),
        (tag({"type": "no such"}), "no such"),
        (tag({"type": "regex", "pattern": "(a"}), "not closed"),
        (tag({"type": "json_schema", "json_schema": {"$ref": "#/$defs/x"}}), r"\$defs"),
        (tag({"type": "const_string", "value": "x" * LONGEST_TAG}), "characters"),
        ("\ud800", "surrogate"),
        *[
            pytest.param(
                tag({"type": "regex", "pattern": pattern}),
                "takes",
                marks=[] if name == "nested repeats" else pytest.mark.slow,
            )
            for name, pattern in HOSTILE.items()
        ],
    ],
    ids=["no json", "unknown", "bad regex", "no ref", "too long", "half a letter", *HOSTILE],
)
def test_a_form_that_cannot_be_enforced_is_refused_while_others_go_on(small, form, reason):
    run(small.engine, small.ask(form=tag({"type": "regex", "pattern": "a"})))  # all has started
    engine, other = small.engine, small.ask(form=None, max_tokens=220, ignore_eos=True)[0]
    engine.add(other)
    for _ in range(3):
        engine.step()
    one, started, made, last = small.ask(form=form)[0], time.monotonic(), 0, None
    engine.add(one)
    assert engine.stats().waiting == 1
    while last is None:
        for output in engine.step():
            last = output if output.request_id == one.id else last
            made += len(output.token_ids) if output.request_id == other.id else 0
    seconds = time.monotonic() - started
    assert last.finish_reason == "error" and last.error is None and last.token_ids == []
    assert re.search(reason, last.refused) and len(last.refused) < 700
    # A quiet machine takes 2 s at most; the limit is a core's time, and a busy one has less of it.
    assert seconds < 30 and (seconds < 0.5 or made > 10)
    engine.abort(other.id)
    # What was refused is not tried again.
    started = time.monotonic()
    again = run(engine, small.ask(form=form))[0]
    assert again.last.refused == last.refused and time.monotonic() - started < 2.0


def test_many_hostile_forms_keep_no_honest_one_from_its_turn(small):
    engine = small.engine
    run(engine, small.ask())  # all has started
    hostile = [small.ask(form=tag({"type": "regex", "pattern": f"(.*.*.*.*)*{i}x"}))[0]
               for i in range(20)]  # fmt: skip
    for one in hostile:
        engine.add(one)
    started = time.monotonic()
    for i in range(3):
        honest = small.ask(form=tag({"type": "regex", "pattern": f"abc{i}"}))[0]
        engine.add(honest)
        while honest.id in engine.compiling:
            engine.step()
        engine.abort(honest.id)
    # One after the other all would take 30 s; on a quiet machine this is 2 s.
    assert time.monotonic() - started < 25
    # Who goes away leaves no work behind.
    for one in hostile:
        engine.abort(one.id)
    assert not engine.compiling and len(engine.grammars._asked) <= MOST_TRIED
    while engine.grammars._asked:
        assert time.monotonic() - started < 120
        engine.grammars.decided(seconds=0.1)


def test_a_refusal_is_kept_without_what_was_refused():
    kept, key = Kept(), ("x" * 10**6, (1,))
    kept.refuse(key, Fault("no"))
    assert kept.refusal(key) == Fault("no") and kept.refusal(("x", (1,))) is None
    assert max(map(len, kept.refusals)) < 100


def test_a_request_can_be_given_up_while_its_form_is_compiled(small):
    pattern = "(.*.*.*.*)*y"
    one, two = (small.ask(form=tag({"type": "regex", "pattern": pattern}))[0] for _ in range(2))
    small.engine.add(one)
    small.engine.add(two)
    assert small.engine.stats().waiting == 2
    assert small.engine.abort(one.id).finish_reason == "abort"
    assert small.engine.abort(one.id) is None and small.engine.stats().waiting == 1
    outputs = []
    while small.engine.has_work:
        outputs += small.engine.step()
    assert [output.request_id for output in outputs] == [two.id] and outputs[0].refused


def test_a_form_of_a_hundred_properties_is_ready_at_once(small):
    kinds = [{"type": "string"}, {"type": "integer"}, {"enum": ["x", "y"]}, {"type": "boolean"}]
    properties = {f"property_{i}": kinds[i % 4] for i in range(100)}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    form = tag({"type": "json_schema", "json_schema": schema})
    small.engine.add(small.ask(form=form)[0])
    started = time.monotonic()
    while small.engine.compiling:
        small.engine.step()
    # 0.2 s on a quiet machine.
    assert time.monotonic() - started < 10.0
    small.engine.abort(f"request-{small.count}")


def test_a_model_without_a_tokenizer_takes_no_constraint(small):
    with pytest.raises(RequestError, match="needs a tokenizer"):
        make_requests(
            "r", [1], SamplingParams(), info=small.info, tokenizer=None,
            constraint=Constraint(tag=JSON),
        )  # fmt: skip


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_of_ours_and_the_next_one_answers(small):
    run(small.engine, small.ask())
    small.engine.add(small.ask(form=tag({"type": "regex", "pattern": "(.*.*.*.*)*z"}))[0])
    time.sleep(0.3)
    (child,) = children(os.getpid())
    os.kill(child, signal.SIGKILL)
    outputs = []
    while small.engine.has_work:
        outputs += small.engine.step()
    assert "process" in outputs[0].error and outputs[0].refused is None
    answers = run(small.engine, small.ask(form=tag({"type": "regex", "pattern": "abc"})))
    assert small.text(answers[0]) == "abc"


def test_a_library_that_cannot_be_loaded_is_an_error_and_no_wait_without_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    grammars = Grammars(lambda: Vocabulary(tokens=[b"a", b"b"], size=2, ends=[1]))
    params = SamplingParams()
    constraint = Constraint(tag=tag({"type": "regex", "pattern": "a"}))
    grammars.ask(
        Request(id="a", prompt_token_ids=[0], params=params, max_tokens=1, seed=0,
                constraint=constraint)
    )  # fmt: skip
    [decided] = grammars.decided(seconds=60.0)
    assert "xgrammar cannot be loaded" in str(decided.error)
    grammars.close()


def children(pid: int) -> list[int]:
    """The processes started by one."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    names = {
        int(line): f"/proc/{line.strip()}/cmdline" for line in found.stdout.split("\n") if line
    }
    return [one for one, path in names.items() if b"grammar_worker" in read(path)]


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_killed_engine_process_leaves_no_other_behind_and_hostile_forms_disturb_no_one(small):
    async def main():
        client = EngineClient(EngineConfig(model="flint-nano", device="cpu", max_num_seqs=8))
        await client.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 60)

            async def last(one):
                return [output async for output in client.submit(one)][-1]

            assert (await last(small.ask()[0])).finish_reason == "stop"
            times = []

            async def watch(one):
                async for _ in client.submit(one):
                    times.append(time.monotonic())

            free = asyncio.create_task(
                watch(small.ask(form=None, max_tokens=230, ignore_eos=True)[0])
            )
            await asyncio.sleep(0.2)
            started = time.monotonic()
            hostile = [
                small.ask(form=tag({"type": "regex", "pattern": pattern + "q"}))[0]
                for pattern in HOSTILE.values()
            ]
            outputs = await asyncio.gather(*map(last, hostile))
            assert all(output.refused for output in outputs) and time.monotonic() - started < 4
            during = [at for at in times if at > started]
            gaps = [b - a for a, b in zip(during, during[1:], strict=False)]
            assert len(gaps) > 10 and max(gaps) < 0.5
            free.cancel()
            engine = client._process.pid
            (child,) = children(engine)
            os.kill(engine, signal.SIGKILL)
            deadline = time.monotonic() + 3
            while b"grammar_worker" in read(f"/proc/{child}/cmdline"):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        finally:
            await client.close()

    asyncio.run(main())
