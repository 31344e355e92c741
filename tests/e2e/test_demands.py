"""What requests demand of the bundled models' answers, through the unmodified OpenAI client."""

import json

import jsonschema
import openai
import pytest
from served import ask
from weather import TOOLS

PLAN = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["place", "days", "unit"],
    "additionalProperties": False,
}
PLANNING = [{"type": "function", "function": {"name": "plan", "strict": True, "parameters": PLAN}}]
NAMED = {"type": "function", "function": {"name": "plan"}}
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]


def thinks(thinking: bool, **fields) -> dict:
    return {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}, **fields}}


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_valid_however_wildly_it_is_sampled(client, choice, thinking):
    budget = {"thinking_token_budget": 20}
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=WEATHER, tools=PLANNING, n=2, seed=1,
        temperature=1.5, max_tokens=400, tool_choice=choice, parallel_tool_calls=False,
        **thinks(thinking, **budget),
    )  # fmt: skip
    for told in answer.choices:
        [call] = told.message.tool_calls
        assert call.function.name == "plan" and told.message.content == ""
        jsonschema.validate(json.loads(call.function.arguments), PLAN)
        assert told.finish_reason == ("stop" if choice == NAMED else "tool_calls")


def test_calls_use_the_keys_of_the_schema(client):
    parameters = {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"],
    }  # fmt: skip
    function = {"name": "get_weather", "strict": True, "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    message, _ = ask(client, WEATHER, tools=tools, **thinks(False))
    [call] = message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["place"]


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_an_answer_keeps_to_its_schema_after_it_has_thought(client, thinking):
    form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN, "strict": True}}
    message, reason = ask(client, WEATHER, response_format=form, **thinks(thinking))
    assert reason == "stop" and bool(message.reasoning) == thinking
    jsonschema.validate(json.loads(message.content), PLAN)


def test_a_completion_keeps_to_its_schema_from_its_first_token(client):
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PLAN}}},
        {"structured_outputs": {"json": PLAN}},
    ):
        answer = client.completions.create(
            model=client.models.list().data[0].id, prompt="The plan: ", max_tokens=300,
            temperature=1.5, seed=1, extra_body=body,
        )  # fmt: skip
        jsonschema.validate(json.loads(answer.choices[0].text), PLAN)


@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_keeps_to_its_budget(client, budget):
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, temperature=0, max_tokens=300,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        **thinks(True, thinking_token_budget=budget),
    )  # fmt: skip
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget
    assert bool(answer.choices[0].message.reasoning) == bool(budget)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"


def test_tool_choice_none_calls_nothing(client):
    message, reason = ask(client, WEATHER, tools=TOOLS, tool_choice="none", **thinks(False))
    assert message.tool_calls is None and reason in ("stop", "length")
    assert "get_weather" not in message.content


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "("}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": NAMED}),
    ],
)
def test_what_cannot_be_enforced_is_a_400(client, param, fields):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, WEATHER, **fields)
    assert refused.value.param == param
