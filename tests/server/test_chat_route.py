"""/v1/chat/completions: templates, whole answers, streams, usage and log-probabilities."""

import pytest
from server_fakes import FakeEngine, events, ids


def text_of(engine: FakeEngine, at: int = -1) -> str:
    return bytes(engine.requests[at].prompt_token_ids).decode()


def test_a_chat_answer_has_openai_s_shape(make_api):
    engine = FakeEngine()
    answer = make_api(engine).chat("Hi").json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello, world!"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert text_of(engine) == "<user>Hi<assistant>"
    assert engine.requests[0].max_tokens == 100 - len(text_of(engine))
    assert answer["usage"]["completion_tokens"] == 14


def test_a_stream_has_a_role_then_text_then_the_end(api):
    response = api.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, done = events(response)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello, world!"
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["stop_reason"] is None
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in (first, *middle, last)} == {first["id"]}
    assert not any("usage" in chunk for chunk in (first, *middle, last))


def test_usage_comes_once_at_the_end_of_a_stream(api):
    *chunks, last, done = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_can_come_with_every_chunk(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(api.chat(stream=True, max_tokens=4, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 4, 4]


def test_usage_can_be_forced_and_its_details_switched_off(make_api):
    api = make_api(enable_force_include_usage=True, enable_prompt_tokens_details=False)
    *_, last, _ = events(api.chat(stream=True))
    assert last["usage"] == {"prompt_tokens": 19, "completion_tokens": 14, "total_tokens": 33}


def test_choices_are_interleaved_and_each_is_whole(make_api):
    engine = FakeEngine(lambda request: ids(f"choice {request.seed - 7}"), slow=0.001)
    api = make_api(engine)
    *chunks, _ = events(api.chat(stream=True, n=3, seed=7))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert sorted(set(order[:6])) == [0, 1, 2], "no choice waits for another"
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == f"choice {index}"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    whole = api.chat(n=3, seed=7).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == [f"choice {i}" for i in range(3)]


def test_logprobs_carry_true_bytes_and_a_floor(make_api):
    text = "a\N{GRINNING FACE}"
    api = make_api(FakeEngine(lambda request: ids(text)))
    choice = api.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == text
    assert content[0] == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -9999.0, "bytes": [98]},
        ],
    }
    assert content[1]["token"] == "bytes:\\xf0"
    assert (content[-1]["token"], content[-1]["bytes"]) == ("<|end|>", [])
    assert (
        api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )


def test_streamed_logprobs_are_the_whole_ones_in_pieces(api):
    whole = api.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(api.chat(stream=True, logprobs=True, top_logprobs=1))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for piece in pieces if piece for token in piece["content"]] == whole


def test_an_answer_cut_inside_a_character_is_still_valid(make_api):
    api = make_api(FakeEngine(lambda request: ids("ab\N{GRINNING FACE}")))
    assert api.chat(max_tokens=4).json()["choices"][0]["message"]["content"] == "ab\ufffd"


def test_token_ids_come_per_chunk_and_those_of_the_prompt_once(api):
    *chunks, _ = events(api.chat(stream=True, return_token_ids=True))
    assert bytes(chunks[0]["prompt_token_ids"]).decode() == "<user>Hi<assistant>"
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    told = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert told == [*ids("Hello, world!"), 256]
    whole = api.chat(return_token_ids=True).json()
    assert whole["choices"][0]["token_ids"] == told
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"]


def test_prompt_logprobs_of_a_chat_stand_at_the_top(api):
    logprobs = api.chat("x", prompt_logprobs=0).json()["prompt_logprobs"]
    assert logprobs[0] is None and len(logprobs) == len("<user>x<assistant>")
    assert logprobs[1] == {"117": {"logprob": -0.25, "rank": 1, "decoded_token": "u"}}


def test_tools_are_shown_to_the_model_and_its_text_comes_back_raw(make_api):
    engine = FakeEngine(lambda request: ids("<call>now</call>"))
    tools = [{"type": "function", "function": {"name": "now"}}]
    api = make_api(engine)
    for choice in ({}, {"tool_choice": "none"}):
        answer = api.chat(tools=tools, **choice).json()
        assert answer["choices"][0]["message"]["content"] == "<call>now</call>"
        assert text_of(engine) == "[tool now]<user>Hi<assistant>"


def test_text_parts_are_joined_and_earlier_calls_are_objects(make_api):
    engine = FakeEngine()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    answer = make_api(engine).post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    assert text_of(engine) == "<user>a\nb<assistant><tool>4<assistant>"


def test_an_answer_can_be_continued(make_api):
    engine = FakeEngine()
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "It is"}]
    api = make_api(engine)
    api.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert text_of(engine) == "<user>Q<assistant>It is"
    both = {"continue_final_message": True, "add_generation_prompt": True, "messages": messages}
    answer = api.post("/v1/chat/completions", json=both)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
    api.chat("x", add_generation_prompt=False)
    assert text_of(engine) == "<user>x"


def test_template_kwargs_have_defaults_that_a_request_may_change(make_api):
    engine = FakeEngine()
    api = make_api(engine, default_chat_template_kwargs={"mood": "calm"})
    api.chat()
    api.chat(chat_template_kwargs={"mood": "wild"})
    assert text_of(engine, 0).endswith("(calm)")
    assert text_of(engine, 1).endswith("(wild)")


@pytest.mark.parametrize(
    ("field", "limit"), [("max_tokens", 3), ("max_completion_tokens", 4)], ids=str
)
def test_either_name_limits_the_answer(api, field, limit):
    answer = api.chat(**{field: limit}).json()
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = api.chat(**{field: 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    too_many = api.chat(**{field: 101})
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, field)
