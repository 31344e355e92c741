"""Written answers of both models, read through the server: whole, and streamed at every cut."""

import json
from dataclasses import dataclass

import pytest
from glm47_answers import NOW, WEATHER
from server_fakes import Api, FakeEngine, events

from limelight.checkpoint import BUNDLED
from limelight.config import ServerConfig
from limelight.server.app import create_app
from limelight.stats import ModelInfo
from limelight.text.answer_form import find_form
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import Output

STEPS = [1, 2, 3, 7, 10_000]
FORMATS = {"flint": "glm47", "beam": "beam"}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


@dataclass(eq=False)
class Writer(FakeEngine):
    """Writes a text in its model's tokens, `step` of them at a time, and stops by itself."""

    tokenizer: Tokenizer | None = None
    text: str = ""
    step: int = 1
    max_model_len: int = 4000

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            architecture="Tiny", vocab_size=self.tokenizer.vocab_size, max_model_len=4000,
            eos_token_ids=self.tokenizer.eos_token_ids, block_size=16, num_blocks=64,
            dtype="float32",
        )  # fmt: skip

    async def submit(self, request):
        self.requests.append(request)
        ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        ids.append(self.tokenizer.eos_token_ids[0])
        reason = "length" if len(ids) > request.max_tokens else "stop"
        ids = ids[: request.max_tokens]
        for at in range(0, len(ids), self.step):
            last = at + self.step >= len(ids)
            yield Output(
                request_id=request.id, token_ids=ids[at : at + self.step],
                finish_reason=reason if last else None,
            )  # fmt: skip


@pytest.fixture(scope="module")
def servers():
    """model: (engine, api)"""
    made, templates = {}, []
    for name, parser in FORMATS.items():
        folder = BUNDLED / f"{name}-nano"
        tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder, override=None)
        form = find_form(
            parser, reasoning=True, calls=True, folder=folder, tokenizer=tokenizer,
            template=template,
        )  # fmt: skip
        config = ServerConfig(
            reasoning_parser=parser, tool_call_parser=parser, enable_auto_tool_choice=True
        )
        engine = Writer(tokenizer=tokenizer)
        app = create_app(engine, tokenizer, template, config, model=name, form=form)
        made[name] = engine, Api(app)
        templates.append(template)
    yield made
    for template in templates:
        template.close()


def whole(api, **fields):
    """(reasoning, content, calls, finish reason, stop reason), with what else must hold."""
    answer = api.chat(**fields)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert "tool_calls" not in message or calls
    assert message["reasoning"] == message["reasoning_content"]
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return (
        message["reasoning"], message["content"], told,
        choice["finish_reason"], choice["stop_reason"],
    )  # fmt: skip


def streamed(api, **fields):
    """The same of a stream, and what it began to tell of a call that was cut short."""
    reasoning, content, names, arguments = "", "", {}, {}
    for chunk in events(api.chat(stream=True, **fields))[:-1]:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        reasoning += delta.get("reasoning", "")
        content += delta.get("content", "")
        seen = set()
        for call in delta.get("tool_calls", ()):
            assert call["index"] not in seen, "the pieces of a step are joined"
            seen.add(call["index"])
            if call["index"] not in names:
                assert call["id"] and call["type"] == "function"
                names[call["index"]] = call["function"]["name"]
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            arguments.setdefault(call["index"], "")
            arguments[call["index"]] += call["function"]["arguments"]
    assert list(names) == list(range(len(names))) and all(names.values())
    told = [(name, arguments[index]) for index, name in names.items()]
    cut = told.pop() if told and not finished(told[-1][1]) else None
    reasons = choice["finish_reason"], choice["stop_reason"]
    return (reasoning or None, content or None, told, *reasons), cut


def finished(arguments):
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def glm(name, **arguments):
    body = "".join(
        f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items()
    )
    return f"<tool_call>{name}{body}</tool_call>"


def beam(name, *, end="<|call|>", **arguments):
    body = "".join(
        f'<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>'
        for key, value in arguments.items()
    )
    return f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{body}{end}"


ONE = "<|end|><|start|>assistant"
OSLO, ROME = ("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "Rome"}')
BOTH_ARGUMENTS = ("get_weather", '{"city": "Oslo", "days": 3}')
# name: (model, answer, fields, reasoning, content, calls, finish reason, stop reason)
CASES = {
    "a call without arguments": (
        "flint", "x</think>" + glm("now"), THINKS, "x", None, [("now", "{}")], "tool_calls", None,
    ),
    "a call without arguments, beam": (
        "beam", "x" + ONE + beam("now"), THINKS, "x", None, [("now", "{}")], "tool_calls", None,
    ),
    "several arguments": (
        "flint", "t</think>" + glm("get_weather", city="Oslo", days=3), THINKS,
        "t", None, [BOTH_ARGUMENTS], "tool_calls", None,
    ),
    "several arguments, beam": (
        "beam", beam("get_weather", city="Oslo", days=3), {}, None, None, [BOTH_ARGUMENTS],
        "tool_calls", None,
    ),
    "a value that does not fit": (
        "flint", glm("get_weather", city="Oslo", days="2026-01-15"), {}, None, None,
        [("get_weather", '{"city": "Oslo", "days": "2026-01-15"}')], "tool_calls", None,
    ),
    "two calls": (
        "flint", glm("get_weather", city="Oslo") + "\n" + glm("get_weather", city="Rome"), {},
        None, None, [OSLO, ROME], "tool_calls", None,
    ),
    "two calls, beam": (
        "beam", beam("get_weather", city="Oslo", end=ONE) + beam("get_weather", city="Rome"), {},
        None, None, [OSLO, ROME], "tool_calls", None,
    ),
    "one of two calls": (
        "flint", glm("get_weather", city="Oslo") + glm("get_weather", city="Rome"),
        {"parallel_tool_calls": False}, None, None, [OSLO], "tool_calls", None,
    ),
    "one of two calls, beam": (
        "beam", beam("get_weather", city="Oslo", end=ONE) + beam("get_weather", city="Rome"),
        {"parallel_tool_calls": False}, None, None, [OSLO], "tool_calls", None,
    ),
    "content before a call": (
        "flint", "t</think>I will look." + glm("now"), THINKS, "t", "I will look.",
        [("now", "{}")], "tool_calls", None,
    ),
    "content around a call": (
        "flint", "t</think>A" + glm("now") + "B", THINKS, "t", "AB", [("now", "{}")],
        "tool_calls", None,
    ),
    "an unknown tool": (
        "flint", "A " + glm("get_time", city="Oslo") + "B", {}, None, "A B", [], "stop", None,
    ),
    "the beginning of a name": ("flint", "A" + glm("no"), {}, None, "A", [], "stop", None),
    "no tool may be called": (
        "flint", "A" + glm("now") + "B", {"tool_choice": "none"}, None, "AB", [], "stop", None,
    ),
    "stop texts are of the answer": (
        "flint", "First, Question: is it?</think>The answer is 4. Question: next",
        THINKS | {"stop": ["Question:"]}, "First, Question: is it?", "The answer is 4. ", [],
        "stop", "Question:",
    ),
    "stop texts are of the answer, beam": (
        "beam", "Question: is it?" + ONE + "<|channel|>final<|message|>It is. Question: next",
        THINKS | {"stop": ["Question:"]}, "Question: is it?", "It is. ", [], "stop", "Question:",
    ),
    "thinking off": ("flint", "Hi", {}, None, "Hi", [], "stop", None),
    "thinking switched off": (
        "flint", "Hi", {"chat_template_kwargs": {"enable_thinking": False}}, None, "Hi", [],
        "stop", None,
    ),
    "thinking off, a call": (
        "flint", glm("get_weather", city="Oslo"), {"reasoning_effort": "none"}, None, None, [OSLO],
        "tool_calls", None,
    ),
    "thinking switched off, beam": (
        "beam", "<|channel|>final<|message|>Hi<|end|>", {"reasoning_effort": "none"}, None, "Hi",
        [], "stop", None,
    ),
    "no end of thinking": ("flint", "hm, so", THINKS, "hm, so", None, [], "stop", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_stream_tells_what_a_whole_answer_tells_however_it_is_cut(servers, name):
    model, text, fields, reasoning, content, calls, *reasons = CASES[name]
    engine, api = servers[model]
    fields = {"tools": [WEATHER, NOW]} | fields
    for engine.step in STEPS:
        engine.text = text
        told = whole(api, **fields)
        assert told == (reasoning, content, calls, *reasons)
        assert streamed(api, **fields) == (told, None)


@pytest.mark.parametrize("model", FORMATS)
def test_a_call_cut_by_length_never_looks_finished(servers, model):
    engine, api = servers[model]
    write = {"flint": glm, "beam": beam}[model]
    engine.text = write("get_weather", city="Oslo", days=3)
    num_tokens = len(engine.tokenizer.encode(engine.text, add_special_tokens=False))
    begun = set()
    for engine.step in STEPS:
        for length in range(1, num_tokens, 3):
            fields = {"tools": [WEATHER, NOW], "max_tokens": length}
            told = whole(api, **fields)
            assert told == (None, "", [], "length", None)
            stream, cut = streamed(api, **fields)
            assert stream == (None, None, [], "length", None)
            begun |= {cut and cut[0]}
    assert begun == ({None, "get_weather"} if model == "flint" else {None})


@pytest.mark.parametrize("step", STEPS)
def test_a_call_whose_arguments_came_before_the_end_is_kept_when_text_behind_it_is_cut(
    servers, step
):
    engine, api = servers["flint"]
    engine.step, engine.text = step, glm("now") + "one two three four"
    call = len(engine.tokenizer.encode(glm("now"), add_special_tokens=False))
    fields = {"tools": [NOW], "max_tokens": call + 2}
    told = whole(api, **fields)
    assert told[2:] == ([("now", "{}")], "length", None) and "one two three".startswith(told[1])
    assert streamed(api, **fields) == (told, None)


@pytest.mark.parametrize("model", FORMATS)
def test_reasoning_of_earlier_answers_is_taken_by_either_name(servers, model):
    engine, api = servers[model]
    engine.text, prompts = "Hi", []
    for name in ("reasoning", "reasoning_content"):
        earlier = {"role": "assistant", "content": "c", name: "because"}
        messages = [{"role": "user", "content": "a"}, earlier, {"role": "user", "content": "b"}]
        assert api.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
        prompts.append(engine.requests[-1].prompt_token_ids)
    assert prompts[0] == prompts[1]
    text = engine.tokenizer.decode(prompts[0], skip_special_tokens=False)
    assert "because" in text


def test_a_long_argument_comes_in_many_pieces(servers):
    engine, api = servers["flint"]
    city = 'A very long name of a city, with "quotes" and é'
    engine.step, engine.text = 1, glm("get_weather", city=city)
    pieces = [
        call["function"]["arguments"]
        for chunk in events(api.chat(stream=True, tools=[WEATHER]))[:-1]
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert json.loads("".join(pieces)) == {"city": city}
    assert len(pieces) > 10 and max(map(len, pieces[1:])) < 20
