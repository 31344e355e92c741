"""/v1/messages: Anthropic's shape of questions, of answers whole and streamed, and of errors."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from piecewise import PiecewiseForm
from server_fakes import FakeEngine, FakeForm, ids, wait_until

TOOL = {
    "name": "get_weather",
    "description": "Get the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
BOTH = {
    "reasoning_parser": "glm47", "tool_call_parser": "glm47", "enable_auto_tool_choice": True,
}  # fmt: skip
ANSWER = '(why)Hi[get_weather {"city": "Oslo"}][now]B'
COUNT = "/v1/messages/count_tokens"


@pytest.fixture
def make_parsed(make_api):
    """Builds an api whose engine says `text`, its engine and the form that reads its answers."""

    def make(text: str = ANSWER, **config):
        engine = FakeEngine(lambda request: ids(text), max_model_len=400)
        form = FakeForm()
        return make_api(engine, form=form, **(config or BOTH)), engine, form

    return make


def ask(api, path="/v1/messages", **fields):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
    return api.post(path, json=body | fields)


def stream(api, **fields) -> list[dict]:
    """The events of a stream; each is called in its `event:` line as in its data."""
    answer = ask(api, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for text in filter(None, answer.text.split("\n\n")):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added(events: list[dict]) -> dict:
    """The message that the events of a stream add up to, as a client adds them."""
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    names = {
        "text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature",
        "input_json_delta": "partial_json",
    }  # fmt: skip
    inputs: dict[int, str] = {}
    closed = set()
    for each in events[1:]:
        match each["type"]:
            case "content_block_start":
                assert each["index"] == len(message["content"]) == len(closed)
                message["content"].append(each["content_block"])
            case "content_block_delta":
                name = names[each["delta"]["type"]]
                news, index = each["delta"][name], each["index"]
                assert index not in closed
                if name == "partial_json":
                    inputs[index] = inputs.get(index, "") + news
                else:
                    message["content"][index][name] += news
            case "content_block_stop":
                closed.add(each["index"])
            case "message_delta":
                message |= each["delta"] | {"usage": each["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert len(closed) == len(message["content"])
    return message


def plain(message: dict) -> dict:
    """A message without what differs each time: its ids."""
    blocks = [{**block, "id": None} for block in message["content"]]
    return {**message, "id": None, "content": blocks}


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def refused(answer, status: int = 400, kind: str = "invalid_request_error") -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    return body["error"]["message"]


def test_an_answer_has_a_block_for_all_that_it_says(make_parsed):
    api, _, _ = make_parsed()
    message = ask(api, tools=[TOOL]).json()
    thinking, text, first, second, last = message["content"]
    assert thinking == {"type": "thinking", "thinking": "why", "signature": ""}
    assert (text, last) == ({"type": "text", "text": "Hi"}, {"type": "text", "text": "B~"})
    assert first == {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"},
                     "id": first["id"]}  # fmt: skip
    assert second["input"] == {} and first["id"] != second["id"]
    assert first["id"].startswith("toolu_") and message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert usage["output_tokens"] == len(ANSWER) + 1
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}
    assert usage["cache_read_input_tokens"] == 5
    counted = ask(api, COUNT, tools=[TOOL]).json()
    assert counted == {"input_tokens": usage["input_tokens"] + 5}


def test_events_come_in_order(make_parsed):
    api, _, _ = make_parsed("(w)H[now]")
    names = [each["type"] for each in stream(api, tools=[TOOL])]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = ["content_block_start", *["content_block_delta"] * 2, "content_block_stop"]
    ends = ["message_delta", "message_stop"]
    assert names == ["message_start", *signed, *block, *block, *block, *ends]


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 7}, {"max_tokens": 4}, {"max_tokens": 2},
                                    {"stop_sequences": ["i"]}], ids=str)  # fmt: skip
def test_events_add_up_to_the_whole_answer(make_parsed, fields, interval):
    api, _, _ = make_parsed()
    total = added(stream(api, tools=[TOOL], stream_interval=interval, **fields))
    whole = ask(api, tools=[TOOL], **fields).json()
    if interval == 1:
        assert plain(total) == plain(whole)
    texts = [
        "".join(block.get("text", "") for block in message["content"]) for message in (total, whole)
    ]
    assert texts[0] == texts[1]
    assert (total["stop_reason"], total["usage"]) == (whole["stop_reason"], whole["usage"])


@pytest.mark.parametrize("limit", [14, 18, 22, 30, 60])
def test_a_call_that_is_cut_is_begun_in_a_stream_and_no_part_of_the_answer(make_api, limit):
    engine = FakeEngine(lambda request: ids('x[f {"a": 1}][g {"b": 2}]'), max_model_len=400)
    api = make_api(engine, form=PiecewiseForm(), **BOTH)
    message = ask(api, tools=[TOOL], max_tokens=limit).json()
    events = stream(api, tools=[TOOL], max_tokens=limit)
    is_cut = limit < 25
    inputs = [block["input"] for block in message["content"] if block["type"] == "tool_use"]
    assert inputs == [{"a": 1}, {"b": 2}][: 2 - is_cut]
    assert message["stop_reason"] == ("max_tokens" if is_cut else "tool_use")
    kinds = [each["type"] for each in events]
    begun = kinds.count("content_block_start")
    assert begun == kinds.count("content_block_stop")
    assert begun - len(message["content"]) == (15 < limit < 25)


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("Hi", {}, "end_turn", None),
        ("Hi", {"max_tokens": 1}, "max_tokens", None),
        ("Hi, you", {"stop_sequences": ["x", ", "]}, "stop_sequence", ", "),
        ("[now]", {}, "tool_use", None),
        ("[now]B", {"max_tokens": 6}, "max_tokens", None),
        ("[now", {"max_tokens": 3}, "max_tokens", None),
    ],
)
def test_the_reason_of_the_end_is_told(make_parsed, text, fields, reason, sequence):
    api, _, _ = make_parsed(text)
    message = ask(api, tools=[TOOL], **fields).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    delta = stream(api, tools=[TOOL], **fields)[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_blocks_given_back_make_the_prompt_of_the_turns_that_they_were(make_parsed):
    api, engine, _ = make_parsed()
    user = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    content = ask(api, tools=[TOOL]).json()["content"]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "rain"},
        {"type": "tool_result", "tool_use_id": calls[1], "is_error": True,
         "content": [{"type": "text", "text": "late"}]},
        {"type": "text", "text": "And now?"},
    ]  # fmt: skip
    turns = [user, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert ask(api, tools=[TOOL], system=system, messages=turns).status_code == 200
    assert prompt_of(engine) == (
        "[tool get_weather]<system>Be brief.<user>Hi<assistant>Hi\nB~<tool>rain<tool>late"
        "<user>And now?<assistant>"
    )


def test_an_answer_goes_on_with_a_last_turn_of_the_assistant(make_parsed):
    api, engine, _ = make_parsed(", you")
    turns = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Hi"}]
    message = ask(api, messages=turns).json()
    assert prompt_of(engine) == "<user>Say it<assistant>Hi"
    assert message["content"] == [{"type": "text", "text": ", you~"}]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True), ({"type": "auto"}, "auto", True), ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True), ({"type": "tool", "name": "now"}, "named", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_the_choice_of_tools_reaches_the_demand(make_parsed, choice, expected, parallel):
    api, _, form = make_parsed("Yes")
    fields = {"tools": [TOOL, {**TOOL, "type": "custom", "name": "now", "strict": True}]}
    if choice is not None:
        fields["tool_choice"] = choice
    assert ask(api, **fields).status_code == 200
    demand = form.demands[-1]
    assert (demand.choice, demand.parallel) == (expected, parallel)
    names = {"none": [], "named": ["now"]}.get(expected, ["get_weather", "now"])
    assert [tool["name"] for tool in demand.tools] == names
    if names:
        assert demand.tools[-1]["parameters"] == TOOL["input_schema"]
        assert demand.tools[-1]["strict"] is True


@pytest.mark.parametrize(
    ("thinking", "switch", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 3}, True, 3),
        ({"type": "enabled", "budget_tokens": 0}, True, 0),
        ({"type": "adaptive"}, True, None), ({"type": "disabled"}, False, None),
        (None, None, None),
    ],
    ids=str,
)  # fmt: skip
def test_thinking_is_switched_and_has_a_budget(make_parsed, thinking, switch, budget):
    api, engine, form = make_parsed("Yes")
    assert ask(api, thinking=thinking).status_code == 200
    assert form.asked[-1].template_kwargs.get("enable_thinking") is switch
    reasoning = engine.requests[-1].reasoning
    assert (reasoning and reasoning.budget) == budget


def test_thinking_can_be_left_out_of_the_answer(make_parsed):
    api, _, _ = make_parsed("(why)Hi")
    message = ask(api, thinking={"type": "adaptive", "display": "omitted"}).json()
    assert [block["type"] for block in message["content"]] == ["text"]


def test_a_schema_reaches_the_demand(make_parsed):
    api, _, form = make_parsed("Yes")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    assert ask(api, output_config=config).status_code == 200
    assert "integer" in json.dumps(form.demands[-1].content)
    assert form.asked[-1].template_kwargs["reasoning_effort"] == "low"


def test_fields_reach_the_engine(make_parsed):
    api, engine, _ = make_parsed("Yes")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["x"], "seed": 7}
    fields |= {"max_tokens": 11, "metadata": {"user_id": "me"}, "service_tier": "auto", "n": 5}
    # As Claude Code sends it: nothing is to be cleared.
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    fields |= {"context_management": {"edits": edits}, "mcp_servers": []}
    assert ask(api, **fields).status_code == 200
    [request] = engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 3, 7)
    assert (params.stop, params.max_tokens, params.n) == (["x"], 11, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None), ("messages", []), ("messages", "Hi"), ("messages", [{}]),
        ("messages", [{"role": "user"}]), ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [5]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}]),
        ("messages", [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]),
        ("messages", [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": "{}"}]}]),
        ("messages", [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "thinking"}]}]),
        ("messages", [{"role": "user", "content": "x" * 500}]),
        ("max_tokens", None), ("max_tokens", 0), ("max_tokens", "many"), ("max_tokens", 10**6),
        ("system", 5), ("system", [{"type": "image"}]), ("stop_sequences", "x"),
        ("stop_sequences", [""]), ("stop_sequences", ["x"] * 5), ("temperature", 3),
        ("top_k", 1.5),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("tools", [{"name": "f"}]), ("tools", [{"input_schema": {}}]), ("tools", [TOOL, TOOL]),
        ("tool_choice", {"type": "some"}), ("tool_choice", {"type": "tool"}), ("tool_choice", {}),
        ("tool_choice", {"type": "tool", "name": "other"}), ("tool_choice", "any"),
        ("tool_choice", {"type": "auto", "disable_parallel_tool_use": "yes"}),
        ("thinking", {"type": "enabled"}), ("thinking", {"type": "maybe"}), ("thinking", True),
        ("thinking", {"type": "enabled", "budget_tokens": -1}),
        ("output_config", {"format": {"type": "xml"}}), ("output_config", {"effort": "huge"}),
        ("mcp_servers", [{"name": "x"}]), ("container", "c"),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919", "keep": "all"}]}),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015"}]}),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named_in_the_message(make_parsed, field, value):
    api, engine, _ = make_parsed("Yes")
    body = {"tools": [TOOL]} | {field: value}
    assert field in refused(ask(api, **body))
    assert field in refused(ask(api, **body, stream=True))
    assert engine.requests == []


def test_errors_have_the_shape_and_the_codes_of_the_api(make_api):
    engine = FakeEngine()
    api = make_api(engine, api_key=["key"], max_body_bytes=500)
    refused(ask(api), 401, "authentication_error")
    headers = {"x-api-key": "key"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}

    def post(**fields):
        return api.post("/v1/messages", json=body | fields, headers=headers)

    assert post().status_code == 200
    refused(post(model="other"), 404, "not_found_error")
    refused(post(system="x" * 600), 413, "request_too_large")
    refused(api.get("/v1/messages", headers=headers), 405)
    engine.error = "out of luck"
    refused(post(), 500, "api_error")
    engine.phase = "loading"
    refused(post(), 503, "api_error")
    refused(api.post(COUNT, json=body, headers=headers), 503, "api_error")
    refused(api.post("/v1/messages", json=body, headers={"x-api-key": "lock"}), 401,
            "authentication_error")  # fmt: skip


def test_a_key_in_either_header_lets_in(make_api):
    api = make_api(FakeEngine(), api_key=["one", "two"])
    for headers in (
        {"x-api-key": "two"}, {"Authorization": "Bearer one"},
        {"x-api-key": "wrong", "Authorization": "Bearer one"},
    ):  # fmt: skip
        assert api.get("/v1/models", headers=headers).status_code == 200
    for headers in ({"x-api-key": ""}, {"x-api-key": "three"}, {"Authorization": "Basic one"}, {}):
        assert api.get("/v1/models", headers=headers).status_code == 401


def test_a_full_queue_is_an_overload(live):
    engine = FakeEngine(hold=True)
    server = live(engine, max_num_queued_reqs=0)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    with ThreadPoolExecutor(1) as threads:
        # An empty queue takes any request.
        first = threads.submit(server.post, "/v1/messages", json=body)
        wait_until(lambda: engine.running)
        answer = server.post("/v1/messages", json=body)
        refused(answer, 529, "overloaded_error")
        assert answer.headers["retry-after"] == "1"
        engine.hold = False
        assert first.result().status_code == 200


def test_a_stream_that_fails_ends_with_an_error_event(make_parsed):
    api, engine, _ = make_parsed()
    engine.die_after = 7
    last = stream(api, tools=[TOOL])[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "died" in last["error"]["message"]


def test_without_parsers_all_is_text(make_api):
    api = make_api(FakeEngine())
    message = ask(api, tool_choice={"type": "auto"}, max_tokens=50).json()
    assert message["content"] == [{"type": "text", "text": "Hello, world!"}]
    choice = {"type": "any"}
    assert "tool_choice" in refused(ask(api, tools=[TOOL], tool_choice=choice, max_tokens=50))
    thinking = {"type": "enabled", "budget_tokens": 5}
    assert "--reasoning-parser" in refused(ask(api, thinking=thinking, max_tokens=50))
    assert ask(api, thinking={"type": "disabled"}, max_tokens=50).status_code == 200
