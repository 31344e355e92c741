"""Reasoning and tools of the bundled models, through the unmodified OpenAI client."""

import json

import pytest
from served import ask
from weather import TOOLS


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
