"""Agents of the bundled models on the official clients of two APIs, as they are."""

import json
from typing import Literal

import anthropic
import openai
import pydantic
import pytest

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, CLOCK = "get_weather", "get_time"
ABOUT = {WEATHER: "Get the weather in a city.", CLOCK: "Get the time in a city."}
CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Berlin", "Madrid", "Tokyo", "Vienna", "Dublin")
RESULTS = {WEATHER: "rain, 7 degrees", CLOCK: "12:30"}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
TURNS = pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
SUM = "What is 17 + 25?"


class Place(pydantic.BaseModel):
    """Finite, so that no answer can be cut short."""

    city: Literal["Oslo", "Rome"]
    is_cold: bool


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def responses(client):
    return client.responses


@pytest.fixture
def messages(client):
    url = str(client.base_url).removesuffix("/v1/")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages


def questions(count: int):
    """(the tool that it is for, the city, the text) of each, for the two tools in turns."""
    for index, city in enumerate(CITIES[:count]):
        name, thing = ((WEATHER, "weather"), (CLOCK, "time"))[index % 2]
        yield name, city, f"What is the {thing} in {city}?"


# OpenAI's Responses


def response_tools():
    return [
        {"type": "function", "name": name, "description": about, "parameters": CITY, "strict": True}
        for name, about in ABOUT.items()
    ]


def test_a_response_streams_what_it_gives_whole(model, responses):
    fields = {"model": model, "input": SUM, "temperature": 0, "extra_body": THINKS}
    whole = responses.create(**fields)
    assert "42" in whole.output_text and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    details = whole.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < whole.usage.output_tokens
    thoughts, text = "", ""
    with responses.stream(**fields) as stream:
        for event in stream:
            thoughts += event.delta if event.type == "response.reasoning_text.delta" else ""
            text += event.delta if event.type == "response.output_text.delta" else ""
        last = stream.get_final_response()
    assert thoughts == whole.output[0].content[0].text == last.output[0].content[0].text
    assert text == whole.output_text == last.output_text


@TURNS
def test_an_agent_of_responses_calls_its_tools_turn_after_turn(model, responses, count):
    fields = {"model": model, "tools": response_tools(), "temperature": 0}
    turns = []
    for name, city, question in questions(count):
        turns.append({"role": "user", "content": question})
        first = responses.create(**fields, input=turns)
        [call] = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == (name, {"city": city})
        result = {"call_id": call.call_id, "output": RESULTS[name]}
        turns += [*first.output, {"type": "function_call_output", **result}]
        with responses.stream(**fields, input=turns) as stream:
            second = stream.until_done().get_final_response()
        assert second.status == "completed" and second.output_text
        assert {item.type for item in second.output} <= {"reasoning", "message"}
        turns += second.output
        # The turns so far are the beginning of the prompt, and are not computed again.
        assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 32


@pytest.mark.parametrize("thinks", [False, True])
def test_a_response_is_parsed_into_a_class(model, responses, thinks):
    extra = {"chat_template_kwargs": {"enable_thinking": thinks}}
    extra |= {"thinking_token_budget": 20} if thinks else {}
    fields = {"model": model, "input": "Is it cold there?", "text_format": Place}
    answer = responses.parse(**fields, temperature=1, extra_body=extra)
    assert isinstance(answer.output_parsed, Place)
    assert [item.type for item in answer.output] == ["reasoning", "message"][not thinks :]
    with responses.stream(**fields, temperature=1, extra_body=extra) as stream:
        assert isinstance(stream.until_done().get_final_response().output_parsed, Place)


def test_a_response_cut_short_says_so(model, responses):
    answer = responses.create(model=model, input=SUM, max_output_tokens=2, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_the_openai_client_understands_the_errors_of_responses(model, responses):
    with pytest.raises(openai.BadRequestError) as bad:
        responses.create(model=model, input=[{"type": "item_reference", "id": "x"}])
    assert bad.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        responses.create(model="other", input=SUM)


# Anthropic's Messages


def message_tools():
    return [
        {"name": name, "description": about, "input_schema": CITY} for name, about in ABOUT.items()
    ]


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_message_streams_what_it_gives_whole(model, messages):
    fields = {"model": model, "messages": asked(SUM), "max_tokens": 500}
    fields |= {"extra_body": {"temperature": 0}, "thinking": {"type": "adaptive"}}
    whole = messages.create(**fields)
    thinking, text = whole.content
    assert (thinking.type, text.type, whole.stop_reason) == ("thinking", "text", "end_turn")
    assert "42" in text.text and thinking.thinking
    with messages.stream(**fields) as stream:
        said = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert said == text.text
    assert [block.model_dump(exclude_none=True) for block in last.content] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    assert last.usage.output_tokens == whole.usage.output_tokens
    counted = messages.count_tokens(
        model=model, messages=fields["messages"], thinking={"type": "adaptive"}
    )
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_a_message_thinks_as_long_as_its_budget(model, messages):
    fields = {"model": model, "messages": asked(SUM), "max_tokens": 500}
    for budget in (0, 1, 3):
        thinking = {"type": "enabled", "budget_tokens": budget}
        answer = messages.create(**fields, thinking=thinking, extra_body={"temperature": 0})
        assert answer.usage.output_tokens_details.thinking_tokens == budget
        assert answer.content[-1].type == "text" and answer.stop_reason == "end_turn"
    answer = messages.create(**fields, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]


def test_a_response_thinks_as_long_as_its_budget(model, responses):
    fields = {"model": model, "input": SUM, "temperature": 0}
    for budget in (0, 1, 3):
        answer = responses.create(**fields, extra_body={**THINKS, "thinking_token_budget": budget})
        assert answer.usage.output_tokens_details.reasoning_tokens == budget
        assert answer.output[-1].type == "message" and answer.status == "completed"


@TURNS
def test_an_agent_of_messages_calls_its_tools_turn_after_turn(model, messages, count):
    fields = {"model": model, "tools": message_tools(), "max_tokens": 300}
    fields |= {"extra_body": {"temperature": 0}}
    turns = []
    for name, city, question in questions(count):
        turns += asked(question)
        first = messages.create(**fields, messages=turns)
        [call] = [block for block in first.content if block.type == "tool_use"]
        assert (call.name, call.input) == (name, {"city": city})
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[name]}
        turns += [{"role": "assistant", "content": first.content}]
        turns += [{"role": "user", "content": [result]}]
        with messages.stream(**fields, messages=turns) as stream:
            second = stream.get_final_message()
        assert second.stop_reason == "end_turn" and second.content[-1].text
        turns.append({"role": "assistant", "content": second.content})


def test_a_message_is_parsed_into_a_class(model, messages):
    answer = messages.parse(
        model=model, messages=asked("Is it cold there?"), max_tokens=200,
        output_format=Place, thinking={"type": "disabled"},
    )  # fmt: skip
    assert isinstance(answer.parsed_output, Place)


def test_the_anthropic_client_understands_the_errors_of_messages(model, messages):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        messages.create(model=model, messages=asked("Hi"), max_tokens=0)
    with pytest.raises(anthropic.NotFoundError, match="other"):
        messages.create(model="other", messages=asked("Hi"), max_tokens=5)
