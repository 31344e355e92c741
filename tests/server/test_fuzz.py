"""Bodies that are wrong in ways that nobody thought of: refused or answered, and never a 500."""

import asyncio
import copy
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from server_fakes import MODEL, FakeEngine, FakeForm, ids

import limelight.nano
from limelight.config import ServerConfig
from limelight.server.app import ADAPTERS, create_app
from limelight.server.openapi import BODIES
from limelight.text.answer_form import find_form
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F", 3]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}
CALL = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
SAMPLING = {
    "model": MODEL, "stream": False, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01,
    "repetition_penalty": 1.1, "seed": 3, "stop": ["x"], "stop_token_ids": [5], "priority": 1,
    "cache_salt": "salt", "ignore_eos": False, "thinking_token_budget": 9, "stream_interval": 1,
}  # fmt: skip
THINKING = {"enable_thinking": True}
CHAT = {
    **SAMPLING, "chat_template_kwargs": THINKING,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "reasoning": "r", "content": None,
         "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    "tool_choice": "auto", "parallel_tool_calls": True, "max_completion_tokens": 20, "n": 2,
    "response_format": {"type": "json_schema",
                        "json_schema": {"name": "a", "schema": PARAMETERS, "strict": True}},
    "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.1, "logit_bias": {"5": 1},
    "stream_options": None, "reasoning_effort": "low", "include_reasoning": True,
}  # fmt: skip
RESPONSES = {
    **SAMPLING, "chat_template_kwargs": THINKING,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", **CALL},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ],
    "tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "auto",
    "parallel_tool_calls": True, "max_output_tokens": 20, "store": False,
    "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS, "strict": True}},
    "metadata": {"a": "b"},
}  # fmt: skip
MESSAGES = {
    **{name: value for name, value in SAMPLING.items() if name != "stop"},
    "chat_template_kwargs": THINKING,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": ""}, {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "get_weather", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "rain", "is_error": False}]},
    ],
    "tools": [{"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS,
               "strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "max_tokens": 20,
    "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": PARAMETERS}},
}  # fmt: skip
GENERATE = {
    "model": MODEL, "token_ids": [5, 6, 7], "cache_salt": "salt", "priority": 1, "stream": False,
    "sampling_params": {"temperature": 0.7, "top_k": -1, "n": 2, "logprobs": 1, "max_tokens": 5,
                        "prompt_logprobs": 1, "output_kind": 2, "stop": ["x"], "min_tokens": 1},
    "return_sample_support": False,
}  # fmt: skip
VALID = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {
        **SAMPLING, "prompt": ["Once", "Twice"], "max_tokens": 9, "logprobs": 2, "echo": True,
        "prompt_logprobs": 1, "structured_outputs": {"regex": "[a-z]+"},
    },
    "/v1/chat/completions/render": CHAT,
    "/inference/v1/generate": GENERATE,
    "/skyrl/v1/generate": GENERATE,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/tokenize": {"model": MODEL, "prompt": "Once", "return_token_strs": True},
    "/detokenize": {"model": MODEL, "tokens": [1, 2, 3]},
}  # fmt: skip
# Several of these are formats, choices or types that other fields take.
JUNK = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, 1e-320, "", " ", "x",
    "\x00", "\ud800", "\U0001f600", "<think>", "</think>", "<tool_call>", "<|end|>", "a" * 3000,
    "required", "none", "any", "auto", "json_object", "json_schema", "structural_tag", "function",
    "(a+)+$", "[", "\\", "#/$defs/tag", "#", "#/", "http://x/y", [], [[]], {}, {"": {}}, [None],
    {"type": "object"}, {"type": "array"}, {"$ref": "#"}, {"type": "text", "text": "x"},
    {"type": "function", "function": {"name": "f"}}, {"regex": "(a+)+$"}, {"choice": []},
    {"grammar": "root ::= root"}, {"json": {"$ref": "#"}}, {"structural_tag": "{"},
    {"type": "structural_tag", "format": {"type": "or", "elements": []}},
    ["a"] * 1100, {str(n): n for n in range(1100)},
]  # fmt: skip


def places(value, at=()):
    """Where in a body something stands, outermost first."""
    yield at
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, part in inner:
        yield from places(part, (*at, key))


def found(value, at):
    for key in at:
        value = value[key]
    return value


def junk(rng: random.Random, body):
    kind = rng.randrange(10)
    if kind == 0:
        return copy.deepcopy(found(body, rng.choice(list(places(body)))))
    if kind == 1:
        return f"nested {rng.choice((5, 70, 400, 3000))} {rng.choice(('', 'a', 'items', 'anyOf'))}"
    return copy.deepcopy(rng.choice(JUNK))


def mutated(rng: random.Random, body: dict) -> bytes:
    """A body like this one, but for a few places, or but for a few bytes."""
    body = copy.deepcopy(body)
    for name in rng.sample(sorted(body), k=rng.randrange(len(body))):
        del body[name]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        at = rng.choice(list(places(body))[1:] or [()])
        if not at:
            continue
        holder = found(body, at[:-1])
        match rng.randrange(6):
            case 0:
                del holder[at[-1]]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("type", "name", "$ref", "", "role", "content", "stream"))] = (
                    junk(rng, body)
                )
            case 2 if isinstance(holder, list):
                holder += copy.deepcopy(holder[:3])
            case _:
                holder[at[-1]] = junk(rng, body)
    text = bytearray(encoded(body))
    if rng.random() < 0.1 and text:
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        text = text[: rng.randrange(len(text))] if rng.random() < 0.3 else text
    return bytes(text)


def encoded(value) -> bytes:
    return re.sub(rb'"nested (\d+) (\w*)"', nested, json.dumps(value).encode())


def nested(found: re.Match) -> bytes:
    """What is nested too deeply for Python to write it."""
    levels, key = int(found[1]), found[2]
    begin, end = (b'{"' + key + b'": ', b"}") if key else (b"[", b"]")
    return begin * levels + b"1" + end * levels


async def post_all(app, bodies: list[tuple[str, bytes]]) -> dict[int, int]:
    """How often each status came; a failure shows the body that did it."""
    counts: dict[int, int] = {}
    headers = {"content-type": "application/json"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://limelight") as client:
        for path, body in bodies:
            answer = await asyncio.wait_for(client.post(path, content=body, headers=headers), 20)
            assert answer.status_code < 500, (path, body[:3000], answer.text)
            assert "internal error" not in answer.text, (path, body[:3000], answer.text)
            if answer.status_code != 200:
                assert "error" in answer.json(), answer.text
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
    return counts


class WideEngine(FakeEngine):
    """Takes prompts of any vocabulary."""

    @property
    def info(self):
        return replace(super().info, vocab_size=200_000)


def bodies(seed: int, count: int) -> list[tuple[str, bytes]]:
    rng = random.Random(seed)
    paths = [rng.choice(list(VALID)) for _ in range(count)]
    return [(path, mutated(rng, VALID[path])) for path in paths]


def fuzz(tokenizer, template, form, *, parser: str, seed: int, count: int):
    script = ids('(why)Hi[get_weather {"city": "Oslo"}]B')
    engine = WideEngine(lambda request: script, max_model_len=4000)
    config = ServerConfig(
        reasoning_parser=parser, tool_call_parser=parser, enable_auto_tool_choice=True
    )
    app = create_app(engine, tokenizer, template, config, model=MODEL, form=form)
    counts = asyncio.run(post_all(app, bodies(seed, count)))
    # Some of both, or the bodies would be too wrong, or too right, to find anything.
    assert counts[200] > count / 10 and counts[400] > count / 10
    assert not engine.running


def nano(name: str):
    """Tokenizer, template and the form of the answers of a bundled model."""
    folder = Path(limelight.nano.__file__).parent / name
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder, override=None)
    parser = "beam" if name == "beam-nano" else "glm47"
    form = find_form(
        parser, reasoning=True, calls=True, always=True, folder=folder, tokenizer=tokenizer,
        template=template,
    )  # fmt: skip
    return tokenizer, template, form, parser


def test_every_valid_body_is_answered(tokenizer, template):
    engine = WideEngine(max_model_len=4000)
    config = ServerConfig(
        reasoning_parser="glm47", tool_call_parser="glm47", enable_auto_tool_choice=True
    )
    app = create_app(engine, tokenizer, template, config, model=MODEL, form=FakeForm())
    counts = asyncio.run(post_all(app, [(path, encoded(body)) for path, body in VALID.items()]))
    # Adapters have tests of their own: what is valid there depends on what is loaded.
    assert counts == {200: len(VALID)} and VALID.keys() == BODIES.keys() - set(ADAPTERS)


def test_random_bodies_are_refused_or_answered(tokenizer, template):
    fuzz(tokenizer, template, FakeForm(), parser="glm47", seed=1, count=200)


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_random_bodies_meet_the_forms_of_the_bundled_models(name):
    tokenizer, template, form, parser = nano(name)
    fuzz(tokenizer, template, form, parser=parser, seed=2, count=50)
    template.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_random_bodies_are_refused_or_answered(tokenizer, template, seed):
    fuzz(tokenizer, template, FakeForm(), parser="glm47", seed=seed, count=500)
    for name in ("flint-nano", "beam-nano"):
        own_tokenizer, own_template, form, parser = nano(name)
        fuzz(own_tokenizer, own_template, form, parser=parser, seed=seed, count=250)
        own_template.close()
