"""Random tools and random answers that a grammar allows: what is read back is what was demanded."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import DEFS, objects, schemas
from template_grammars import (
    ANSWER,
    NOW,
    START,
    THINK,
    THOUGHT,
    allows,
    argument,
    call,
    made,
    read,
    walk,
)

from limelight.text.json_schema import prepared
from limelight.types import RequestError

LOOSE = settings(deadline=None, max_examples=15)
SEEDS = st.integers(0, 2**32)
FUNCTION = objects(schemas).map(
    lambda schema: {"name": "f", "parameters": {**schema, "$defs": DEFS}}
)
# Schemas that no value fits, or whose values cannot be told apart as they are written.
REFUSED = (
    "no JSON is valid",
    "can be written",
    "read back",
    "other values",
    "read as these",
    "must be an object",
)


def valid(calls, tools):
    known = {one["name"]: one.get("parameters", {"maxProperties": 0}) for one in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, known[name])


@pytest.mark.parametrize("name", ["bundled", "bare", "values", "body"])
@LOOSE
@given(function=FUNCTION, choice=st.sampled_from(["auto", "required", "named"]), seed=SEEDS)
def test_every_call_that_is_allowed_is_valid(name, function, choice, seed):
    tools = [{**function, "strict": True}, *([NOW] if choice != "named" else [])]
    try:
        grammar = made(name, tools=tools, choice=choice, thinking=False)
    except RequestError as error:
        assert any(words in str(error) for words in REFUSED), error
        return
    for turn in range(2):
        text, has_ended = walk(grammar, seed + turn, most=120)
        _, content, calls = read(name, text, tools=tools, reason="stop" if has_ended else "length")
        valid(calls, tools)
        if has_ended:
            begun = text.count("<|channel|>analysis <|constrain|>xml<|message|>")
            assert len(calls) >= (begun if name != "bare" else 0)
            assert (not calls or not content) and (calls or choice == "auto")
            assert choice != "named" or len(calls) == 1


@pytest.mark.parametrize("name", ["bundled", "bare"])
@LOOSE
@given(schema=objects(schemas), seed=SEEDS)
def test_every_answer_that_is_allowed_has_the_format(name, schema, seed):
    whole = {**schema, "$defs": DEFS}
    try:
        held = prepared(whole, strict=True, param="response_format")
    except RequestError:
        return
    grammar = made(name, content={"type": "json_schema", "json_schema": held}, thinking=False)
    text, has_ended = walk(grammar, seed, most=120)
    if has_ended:
        _, content, calls = read(name, text)
        jsonschema.validate(json.loads(content), whole)
        assert not calls


@pytest.mark.parametrize("name", ["bundled", "bare"])
@LOOSE
@given(seed=SEEDS)
def test_every_answer_of_which_nothing_is_demanded_has_reasoning_and_content(name, seed):
    text, has_ended = walk(made(name), seed, most=60)
    reasoning, content, calls = read(name, text, reason="stop" if has_ended else "length")
    assert text.startswith(THINK) and not calls
    if has_ended:
        assert reasoning
        assert text.startswith(f"{THINK}{reasoning}<|end|>")
        assert content in text


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
INTEGER = st.integers(-(10**31) + 1, 10**31 - 1)  # longer ones are no arguments
KEY = st.text(st.characters(codec="utf-8", exclude_characters='"<\n\0'), min_size=1, max_size=6)


@LOOSE
@given(
    thought=TEXT.filter(bool),
    given=st.lists(st.dictionaries(KEY, TEXT | INTEGER, max_size=3), min_size=1, max_size=3),
    answer=TEXT,
)
def test_messages_as_the_model_writes_them_are_allowed_and_come_back(thought, given, answer):
    tools = [
        {"name": f"f{index}", "parameters": {"type": "object", "properties": {
            key: {"type": "integer" if isinstance(value, int) else "string"}
            for key, value in arguments.items()}}}
        for index, arguments in enumerate(given)
    ]  # fmt: skip
    grammar = made("bundled", tools=tools)
    begin = f"{THINK}{thought}<|end|>{START}"
    calls = [
        call(f"f{index}", *(argument(key, value) for key, value in arguments.items()))
        for index, arguments in enumerate(given)
    ]
    text = begin + f"<|end|>{START}".join(calls)
    assert allows(grammar, text + "<|call|>") and allows(grammar, text)
    expected = [(f"f{index}", arguments) for index, arguments in enumerate(given)]
    assert read("bundled", text, tools=tools) == (thought, "", expected)
    assert allows(grammar, begin + ANSWER + answer + "<|return|>")
    assert read("bundled", begin + ANSWER + answer) == (thought, answer, [])
    assert not allows(grammar, THOUGHT + call("g"))
