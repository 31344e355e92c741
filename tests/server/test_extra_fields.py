"""vLLM's fields beside OpenAI's: cut prompts, told prompts, begun answers, large chunks."""

import pytest
from server_fakes import FakeEngine, FakeForm, events, ids

BOTH = {
    "reasoning_parser": "glm47", "tool_call_parser": "glm47", "enable_auto_tool_choice": True,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "now"}}]
TEXT = "Hello, world!"


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].prompt_token_ids).decode()


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"truncate_prompt_tokens": 3}, "789"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "789"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "012"),
        ({"truncate_prompt_tokens": 10}, "0123456789"),
        ({"truncate_prompt_tokens": None, "truncation_side": "right"}, "0123456789"),
    ],
    ids=str,
)
def test_a_prompt_is_cut_where_the_request_says(make_api, fields, prompt):
    engine = FakeEngine()
    usage = make_api(engine).complete("0123456789", **fields).json()["usage"]
    assert prompt_of(engine) == prompt
    assert usage["prompt_tokens"] == len(prompt)


def test_minus_one_cuts_a_prompt_to_what_fits_beside_the_answer(make_api):
    engine = FakeEngine()
    api = make_api(engine)
    api.complete("a" * 500, truncate_prompt_tokens=-1, max_tokens=30)
    assert len(prompt_of(engine)) == 70 and engine.requests[-1].max_tokens == 30
    api.chat("a" * 500, truncate_prompt_tokens=-1)
    assert len(prompt_of(engine)) == 99 and prompt_of(engine).endswith("a<assistant>")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 101), ("truncate_prompt_tokens", 2.5),
        ("truncation_side", "middle"), ("stream_interval", 0), ("stream_interval", 10**30),
        ("return_prompt_text", 1), ("echo", "yes"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_named(api, field, value):
    answer = api.chat(**{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_the_prompt_s_text_comes_where_it_is_asked_for(api):
    assert api.chat("Hi", return_prompt_text=True).json()["prompt_text"] == "<user>Hi<assistant>"
    first, *rest, _ = events(api.chat("Hi", return_prompt_text=True, stream=True))
    assert first["prompt_text"] == "<user>Hi<assistant>"
    assert not any("prompt_text" in chunk for chunk in rest)
    for prompts in (["ab", "c"], [[97, 98], [99]]):
        choices = api.complete(prompts, return_prompt_text=True).json()["choices"]
        assert [choice["prompt_text"] for choice in choices] == ["ab", "c"]
    assert "prompt_text" not in api.chat("Hi").json()


@pytest.mark.parametrize("echo", [True, False])
def test_a_chat_can_repeat_the_answer_that_it_continues(api, echo):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well: "}]
    fields = {"messages": messages, "continue_final_message": True, "echo": echo}
    begun = "Well: " if echo else ""
    assert api.chat(**fields).json()["choices"][0]["message"]["content"] == begun + TEXT
    chunks = events(api.chat(stream=True, **fields))[:-1]
    told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert told == begun + TEXT
    fields["messages"] = messages[:1]
    del fields["continue_final_message"]
    assert api.chat(**fields).json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("by_flag", [True, False])
@pytest.mark.parametrize("interval", [1, 2, 5, 100])
def test_a_stream_tells_so_many_tokens_at_once(make_api, interval, by_flag):
    flag, field = (
        ({"stream_interval": interval}, {}) if by_flag else ({}, {"stream_interval": interval})
    )
    api = make_api(**flag)
    fields = {"stream": True, "n": 2, "logprobs": True, "return_token_ids": True, **field}
    for index in range(2):
        chunks = [
            chunk["choices"][0]
            for chunk in events(api.chat(**fields))[:-1]
            if chunk["choices"][0]["index"] == index
        ]
        sizes = [len(choice["token_ids"]) for choice in chunks if "token_ids" in choice]
        assert sizes[0] == 1 and sum(sizes) == len(TEXT) + 1
        assert set(sizes[1:-1]) <= {interval} and len(sizes) == 1 + -(-len(TEXT) // interval)
        assert "".join(choice["delta"].get("content", "") for choice in chunks) == TEXT
        told = [
            entry
            for choice in chunks
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert len(told) == len(TEXT) + 1
        assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("interval", [1, 4, 50])
def test_chunks_of_many_tokens_add_up_to_the_same_answer(make_api, interval):
    engine = FakeEngine(lambda request: ids("A(why)B[now][add 1]C"), max_model_len=300)
    api = make_api(engine, form=FakeForm(), **BOTH)
    content, reasoning, calls = "", "", {}
    for chunk in events(api.chat(tools=TOOLS, stream=True, stream_interval=interval))[:-1]:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (
                name + function.get("name", ""),
                arguments + function["arguments"],
            )
    assert (content, reasoning) == ("ABC~", "why")
    assert calls == {0: ("now", "{}"), 1: ("add", "1")}


def test_extra_arguments_of_plugins_are_ignored(api):
    assert api.chat(vllm_xargs={"a": 1}, nvext={"b": 2}).status_code == 200
