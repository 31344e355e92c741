"""Reasoning and tools of the bundled models, through the unmodified OpenAI client."""

import json

import openai
import pytest
from served import serve

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
PARSERS = {"flint-nano": "glm47", "beam-nano": "beam"}


@pytest.fixture(scope="module", params=PARSERS)
def client(request, tmp_path_factory):
    parser = PARSERS[request.param]
    flags = ["--reasoning-parser", parser, "--tool-call-parser", parser]
    flags += ["--enable-auto-tool-choice"]
    with serve(tmp_path_factory.mktemp("served"), request.param, *flags) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def ask(client, messages, **fields):
    """The message of a whole answer and its finish reason, which a stream gives as well."""
    fields = {
        "model": client.models.list().data[0].id,
        "temperature": 0,
        "max_tokens": 300,
    } | fields
    whole = client.chat.completions.create(messages=messages, **fields).choices[0]
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in client.chat.completions.create(messages=messages, stream=True, **fields):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            name += call.function.name or ""
            calls[call.index] = name, arguments + (call.function.arguments or "")
        reason = choice.finish_reason
    message = whole.message
    told = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert list(calls.values()) == told
    assert (content, reasoning) == (message.content or "", message.reasoning or "")
    assert reason == whole.finish_reason
    return message, whole.finish_reason


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_a_tool_is_called_and_its_result_told(client, thinking):
    fields = {"tools": TOOLS}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    message, reason = ask(client, messages, **fields)
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )
    assert reason == "tool_calls" and not message.content
    assert bool(message.reasoning) == thinking
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain, 7 degrees"}
    message, reason = ask(client, [*messages, message.model_dump(), result], **fields)
    assert message.tool_calls is None and message.content and reason == "stop"
    assert "<" not in message.content


def test_thinking_is_told_apart_and_counted(client):
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = answer.choices[0].message
    assert message.reasoning and message.reasoning == message.reasoning_content
    assert "42" in message.content
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < answer.usage.completion_tokens
