"""/v1/responses: events in order, whole answers that are their sum, and items given back."""

import json

import pytest
from piecewise import PiecewiseForm
from server_fakes import FakeEngine, FakeForm, ids

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
BOTH = {
    "reasoning_parser": "glm47", "tool_call_parser": "glm47", "enable_auto_tool_choice": True,
}  # fmt: skip
ANSWER = '(why)Hi[get_weather {"city": "Oslo"}][now]B'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def make_parsed(make_api):
    """Builds an api whose engine says `text`, its engine and the form that reads its answers."""

    def make(text: str = ANSWER, *, begun: str = "", **config):
        engine = FakeEngine(lambda request: ids(text), max_model_len=400)
        form = FakeForm(begun)
        return make_api(engine, form=form, **(config or BOTH)), engine, form

    return make


def ask(api, **fields):
    return api.post("/v1/responses", json={"input": "Hi", **fields})


def stream(api, **fields) -> list[dict]:
    """The events of a stream; each is called in its `event:` line as in its data."""
    answer = ask(api, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for text in filter(None, answer.text.split("\n\n")):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def plain(value):
    """An answer without what differs each time: ids and times."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: plain(part) for name, part in value.items() if name not in changing}
    return list(map(plain, value)) if isinstance(value, list) else value


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def refused(answer) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["param"]


def test_an_answer_has_its_items_in_the_order_in_which_they_were_said(make_parsed):
    api, _, _ = make_parsed()
    answer = ask(api, tools=[TOOL]).json()
    reasoning, message, first, second, last = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert [part["text"] for part in message["content"]] == ["Hi"]
    assert first["name"] == "get_weather" and first["arguments"] == '{"city": "Oslo"}'
    assert second["arguments"] == "{}" and first["call_id"] != second["call_id"]
    assert [part["text"] for part in last["content"]] == ["B~"]
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert answer["status"] == "completed" and answer["incomplete_details"] is None
    assert len({item["id"] for item in answer["output"]}) == 5
    assert answer["usage"]["output_tokens"] == len(ANSWER) + 1
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 5
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_events_come_in_order_for_each_kind_of_item(make_parsed):
    api, _, _ = make_parsed('(w)H[get_weather {"city": "Oslo"}]')
    names = [each["type"].removeprefix("response.") for each in stream(api, tools=[TOOL])]
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert names == [
        "created", "in_progress",
        *item, "reasoning_text.delta", "reasoning_text.done", *done,
        *item, "output_text.delta", "output_text.done", *done,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        *item, "output_text.delta", "output_text.done", *done,
        "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("limit", [None, 4, 8, 20, 38])
def test_events_add_up_to_the_whole_answer(make_parsed, limit, interval):
    api, _, _ = make_parsed()
    fields = {"tools": [TOOL], "max_output_tokens": limit, "stream_interval": interval}
    fields |= {"include": ["message.output_text.logprobs"]}
    *events, last = stream(api, **fields)
    items, closed = {}, {}
    for each in events[2:]:
        index, kind = each["output_index"], each["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert index == len(items) and each["item"]["status"] == "in_progress"
            items[index] = each["item"]
        elif kind == "content_part.added":
            items[index]["content"].append(each["part"])
        elif kind == "function_call_arguments.delta":
            items[index]["arguments"] += each["delta"]
        elif kind.endswith("text.delta"):
            part = items[index]["content"][each["content_index"]]
            part["text"] += each["delta"]
            if kind == "output_text.delta":
                part["logprobs"] += each["logprobs"]
        elif kind == "output_item.done":
            closed[index] = each["item"]
    for index, item in closed.items():
        assert items[index] | {"status": item["status"]} == item
    whole = last["response"]
    assert whole["output"] == [closed[index] for index in sorted(closed)]
    assert last["type"] == f"response.{whole['status']}"
    if interval == 1:
        assert plain(whole) == plain(ask(api, **fields).json())
    text = "".join(part["text"] for item in whole["output"] for part in item.get("content", ()))
    assert text == "whyHiB~"[: len(text)]


def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item(make_parsed):
    api, _, _ = make_parsed("(why)Hello")
    answer = ask(api, max_output_tokens=7).json()
    assert (answer["status"], answer["max_output_tokens"]) == ("incomplete", 7)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
    assert answer["output"][1]["content"][0]["text"] == "He"
    assert stream(api, max_output_tokens=7)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("limit", [14, 18, 22, 30, 60])
def test_a_call_that_is_cut_is_begun_in_a_stream_and_no_part_of_the_answer(make_api, limit):
    engine = FakeEngine(lambda request: ids('x[f {"a": 1}][g {"b": 2}]'), max_model_len=400)
    api = make_api(engine, form=PiecewiseForm(), **BOTH)
    fields = {"tools": [TOOL], "max_output_tokens": limit}
    *events, last = stream(api, **fields)
    whole = ask(api, **fields).json()
    assert plain(last["response"]) == plain(whole)
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    is_cut = limit < 25
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": 1}, {"b": 2}][: 2 - is_cut]
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    done = [each for each in events if each["type"] == "response.function_call_arguments.done"]
    assert len(done) == len(calls)
    ended = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    begun = [each for each in events if each["type"] == "response.output_item.added"]
    assert len(begun) == len(ended)
    assert [item["status"] for item in ended if item not in last["response"]["output"]] == (
        ["incomplete"] if 15 < limit < 25 else []
    )


def test_logprobs_are_those_of_the_text_alone(make_parsed):
    api, engine, _ = make_parsed('(why)Hi[get_weather {"city": "Oslo"}]yes')
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [TOOL]}
    for interval in (1, 3, 100):
        answer = stream(api, **fields, stream_interval=interval)[-1]["response"]
        parts = [part for item in answer["output"] if item["type"] == "message"
                 for part in item["content"]]  # fmt: skip
        said = [bytes(entry["bytes"]).decode() for part in parts for entry in part["logprobs"]]
        assert "".join(said) == "Hiyes"
        assert {len(entry["top_logprobs"]) for part in parts for entry in part["logprobs"]} == {2}
    assert engine.requests[-1].params.logprobs == 2
    ask(api)
    assert engine.requests[-1].params.logprobs is None


def test_reasoning_can_be_left_out(make_parsed):
    api, _, _ = make_parsed()
    answer = ask(api, tools=[TOOL], include_reasoning=False).json()
    assert "why" not in json.dumps(answer)
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_items_given_back_make_the_prompt_of_the_turns_that_they_were(make_parsed):
    api, engine, _ = make_parsed()
    output = ask(api, tools=[TOOL]).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        for item in output
        if item["type"] == "function_call"
    ]
    question = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    fields = {"tools": [TOOL], "instructions": "Be brief."}
    assert ask(api, **fields, input=[question, *output, *results]).status_code == 200
    assert prompt_of(engine) == (
        "[tool get_weather]<system>Be brief.<user>Hi<assistant>HiB~<tool>rain<tool>rain<assistant>"
    )


def test_messages_of_all_roles_are_read(make_parsed):
    api, engine, _ = make_parsed("Yes")
    given = [
        {"type": "message", "role": "developer", "content": "A"},
        {"role": "system", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "assistant", "content": "C"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "D"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": "E"},
    ]
    assert ask(api, input=given).status_code == 200
    expected = "<system>A<system>B<assistant>C<assistant>D<user>E<assistant>"
    assert prompt_of(engine) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"), ("auto", "auto"), ("required", "required"), ("none", "none"),
        ({"type": "function", "name": "get_weather"}, "named"),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "function", "name": "get_weather"}]}, "required"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_the_choice_of_tools_reaches_the_demand(make_parsed, choice, expected):
    api, _, form = make_parsed("Yes")
    fields = {"tools": [TOOL, {**TOOL, "name": "now"}], "parallel_tool_calls": False}
    answer = ask(api, **fields, tool_choice=choice).json()
    demand = form.demands[-1]
    assert (demand.choice, demand.parallel) == (expected, False)
    names = [tool["name"] for tool in demand.tools]
    alone = isinstance(choice, dict)
    assert names == ([] if choice == "none" else ["get_weather"] if alone else names)
    assert answer["tool_choice"] == (choice or "auto")
    assert answer["parallel_tool_calls"] is False
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "now"]


def test_a_format_reaches_the_demand(make_parsed):
    api, _, form = make_parsed("Yes")
    assert ask(api, text={"format": {"type": "text"}}).status_code == 200
    assert form.demands[-1].content is None
    given = {"type": "json_schema", "name": "A", "schema": SCHEMA, "strict": True}
    answer = ask(api, text={"format": given}).json()
    assert "integer" in json.dumps(form.demands[-1].content)
    assert answer["text"]["format"] == given
    assert ask(api, text={"format": {"type": "json_object"}}).status_code == 200
    assert form.demands[-1].content is not None
    assert ask(api, structured_outputs={"regex": "a+"}).status_code == 200
    assert form.demands[-1].content["type"] == "regex"


def test_fields_reach_the_engine(make_parsed):
    api, engine, _ = make_parsed("Yes")
    answer = ask(
        api, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, seed=7,
        stop=["x"], stop_token_ids=[9], max_output_tokens=11, ignore_eos=False, priority=2,
        cache_salt="s", thinking_token_budget=4, n=5, store=True, user="me", metadata={"a": "b"},
        reasoning={"effort": "high"}, chat_template_kwargs={"mood": "calm"},
    ).json()  # fmt: skip
    [request] = engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 3, 0.1)
    assert (params.repetition_penalty, params.seed, params.stop) == (1.1, 7, ["x"])
    assert (params.stop_token_ids, params.max_tokens, params.n) == ([9], 11, 1)
    assert (request.priority, request.cache_salt, request.reasoning.budget) == (2, "s", 4)
    assert prompt_of(engine).endswith("(calm)")
    assert (answer["temperature"], answer["top_p"], answer["store"]) == (0.5, 0.9, False)
    assert (answer["user"], answer["metadata"]) == ("me", {"a": "b"})
    assert answer["reasoning"]["effort"] == "high"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None), ("input", []), ("input", 5), ("input", ["Hi"]), ("input", [{}]),
        ("input", [{"role": "user"}]), ("input", [{"role": "king", "content": "x"}]),
        ("input", [{"role": 5, "content": "x"}]), ("input", [{"type": 5}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}]),
        ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]),
        ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]),
        ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
        ("input", [{"type": "function_call_output", "output": "x"}]),
        ("input", [{"type": "function_call_output", "call_id": "c"}]),
        ("input", [{"type": "function_call_output", "call_id": "c", "output": 5}]),
        ("input", [{"type": "reasoning", "content": "x"}]),
        ("input", [{"type": "reasoning", "content": [{"text": 5}]}]),
        ("input", "x" * 500),
        ("tools", [{"type": "custom", "name": "f"}]), ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tools", {"a": 1}),
        ("tools", [{**TOOL, "parameters": 5}]), ("tools", [TOOL, TOOL]),
        ("tool_choice", "always"), ("tool_choice", {"type": "mcp"}), ("tool_choice", 5),
        ("tool_choice", {"type": "function", "name": "other"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}),
        ("max_output_tokens", 0), ("max_output_tokens", "many"), ("max_output_tokens", 10**6),
        ("reasoning", {"effort": "huge"}), ("reasoning", "high"), ("include", ["everything"]),
        ("top_logprobs", 3), ("background", True), ("previous_response_id", "resp_1"),
        ("conversation", "c"), ("prompt", {"id": "p"}), ("truncation", "auto"),
        ("text", {"format": {"type": "xml"}}), ("text", {"format": {"type": "json_schema"}}),
        ("text", []), ("temperature", 3), ("metadata", {"a": 1}), ("stop", ["x"] * 5),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named(make_parsed, field, value):
    api, engine, _ = make_parsed("Yes")
    body = {"tools": [TOOL]} | {field: value}
    assert refused(ask(api, **body)) == field
    assert refused(ask(api, **body, stream=True)) == field
    assert engine.requests == []


def test_a_message_calls_a_field_as_the_body_does(make_parsed):
    api, _, _ = make_parsed("Yes")
    answer = ask(api, text={"format": {"type": "json_schema"}})
    assert answer.json()["error"]["message"].startswith("text: json_schema must")


def test_a_format_and_structured_outputs_exclude_each_other(make_parsed):
    api, _, _ = make_parsed("Yes")
    fields = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}
    assert refused(ask(api, **fields)) == "structured_outputs"


def test_a_constraint_that_the_engine_refuses_is_the_clients_mistake(make_parsed):
    api, engine, _ = make_parsed("Yes")
    engine.refused = "the schema is too hard"
    given = {"type": "json_schema", "name": "A", "schema": SCHEMA}
    for streams in (False, True):
        answer = ask(api, text={"format": given}, stream=streams)
        assert refused(answer) == "text"
        assert "too hard" in answer.json()["error"]["message"]


def test_a_stream_that_fails_ends_with_an_event_that_says_so(make_parsed):
    api, engine, _ = make_parsed()
    engine.die_after = 7
    last = stream(api, tools=[TOOL])[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "died" in last["response"]["error"]["message"]
    assert [item["type"] for item in last["response"]["output"]] == ["reasoning"]


def test_without_parsers_all_is_text(make_api):
    api = make_api(FakeEngine())
    answer = ask(api, tool_choice="auto").json()
    [message] = answer["output"]
    assert message["content"][0]["text"] == "Hello, world!"
    assert refused(ask(api, tools=[TOOL], tool_choice="required")) == "tool_choice"
    assert refused(ask(api, include_reasoning=False)) == "include_reasoning"
