"""Chat answers taken apart by a parser: reasoning, content and calls, whole and streamed."""

import pytest
from server_fakes import FakeEngine, FakeForm, events, ids

TOOLS = [{"type": "function", "function": {"name": "now"}}]
BOTH = {
    "reasoning_parser": "glm47", "tool_call_parser": "glm47", "enable_auto_tool_choice": True,
}  # fmt: skip
ANSWER = 'A(why)B[now][add {"a": 1}]C'


@pytest.fixture
def make_parsed(make_api):
    """Builds an api whose engine says `text`, read by `FakeParser`, and its form."""

    def make(text: str = ANSWER, *, begun: str = "", **config):
        engine = FakeEngine(lambda request: ids(text), max_model_len=300)
        form = FakeForm(begun)
        api = make_api(engine, form=form, **(config or BOTH))
        return api, engine, form

    return make


def streamed(api, **fields) -> dict:
    """What the chunks of a stream add up to."""
    total = {"content": "", "reasoning": "", "reasoning_content": "", "calls": {}, "ids": []}
    total["logprobs"] = []
    for chunk in events(api.chat(stream=True, tools=TOOLS, **fields))[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                total[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                add_call(total["calls"], call)
            total["ids"] += choice.get("token_ids", [])
            total["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            total["finish_reason"] = choice["finish_reason"]
        total["usage"] = chunk.get("usage")
    return total


def add_call(calls: dict, piece: dict):
    """Add a piece as a client does: the first one names the call, the later ones only add."""
    if piece["index"] not in calls:
        assert set(piece) == {"index", "id", "type", "function"}
        assert piece["id"].startswith("chatcmpl-tool-") and piece["type"] == "function"
        calls[piece["index"]] = {**piece["function"], "id": piece["id"]}
    else:
        assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
        calls[piece["index"]]["arguments"] += piece["function"]["arguments"]


def test_an_answer_comes_apart_whole(make_parsed):
    api, _, _ = make_parsed()
    answer = api.chat(tools=TOOLS).json()
    [choice] = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("ABC~", "why")
    assert message["reasoning_content"] == "why"
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "now", "arguments": "{}"}
    assert second["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert set(first) == {"id", "type", "function"} and first["id"] != second["id"]
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("fields", [{}, {"stop": ["C"]}, {"max_tokens": 12}, {"max_tokens": 3}])
@pytest.mark.parametrize("include", [True, False])
def test_a_stream_adds_up_to_the_whole_answer(make_parsed, fields, include):
    api, _, _ = make_parsed()
    fields = {**fields, "include_reasoning": include, "return_token_ids": True, "logprobs": True}
    whole = api.chat(tools=TOOLS, **fields).json()
    total = streamed(api, **fields, stream_options={"include_usage": True})
    [choice] = whole["choices"]
    message = choice["message"]
    assert total["content"] == (message["content"] or "")
    assert total["reasoning"] == total["reasoning_content"] == (message["reasoning"] or "")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    plain = [{k: v for k, v in call.items() if k != "id"} for call in total["calls"].values()]
    assert plain == calls
    assert total["finish_reason"] == choice["finish_reason"]
    assert (total["ids"], total["usage"]) == (choice["token_ids"], whole["usage"])
    assert total["logprobs"] == choice["logprobs"]["content"]


def test_calls_alone_have_no_content_and_an_answer_without_calls_has_no_list(make_parsed):
    api, _, _ = make_parsed("[now](", begun="")
    message = api.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None and message["reasoning"] is None
    api, _, _ = make_parsed("Hi", begun="(")
    message = api.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "Hi")
    assert "tool_calls" not in message


def test_a_call_cut_by_length_leaves_no_call_behind(make_parsed):
    api, _, _ = make_parsed("[now][add")
    for length, calls in ((3, 0), (7, 1)):
        choice = api.chat(tools=TOOLS, max_tokens=length).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["message"].get("tool_calls", [])) == calls
        total = streamed(api, max_tokens=length)
        assert (total["finish_reason"], len(total["calls"])) == ("length", calls)


def test_stop_texts_are_looked_for_in_content_alone(make_parsed):
    api, engine, _ = make_parsed("(a stop)x [now stop] to stop more")
    choice = api.chat(tools=TOOLS, stop="stop").json()["choices"][0]
    assert choice["message"]["reasoning"] == "a stop"
    assert choice["message"]["content"] == "x  to "
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "stop"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "stop")
    assert len(engine.aborted) == 1


def test_reasoning_can_be_left_out_with_its_tokens_and_logprobs(make_parsed):
    api, _, _ = make_parsed("(why)B")
    answer = api.chat(include_reasoning=False, logprobs=True, return_token_ids=True).json()
    [choice] = answer["choices"]
    assert choice["message"]["reasoning"] is None and "why" not in str(choice)
    # The mark that ends reasoning belongs to what follows it.
    assert bytes(choice["token_ids"][:-1]).decode() == ")B"
    assert [entry["token"] for entry in choice["logprobs"]["content"]][:2] == [")", "B"]
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_leaving_reasoning_out_needs_a_parser_that_finds_it(api):
    answer = api.chat(include_reasoning=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include_reasoning")


def test_the_old_name_of_reasoning_can_be_left_out(make_parsed):
    api, _, _ = make_parsed(**BOTH, reasoning_content=False)
    assert "reasoning_content" not in api.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert streamed(api)["reasoning_content"] == ""


def test_without_a_reasoning_parser_answers_have_no_such_field(make_parsed):
    api, _, _ = make_parsed("B[now]", tool_call_parser="glm47", enable_auto_tool_choice=True)
    answer = api.chat(tools=TOOLS).json()
    assert not {"reasoning", "reasoning_content"} & set(answer["choices"][0]["message"])
    assert "completion_tokens_details" not in answer["usage"]


def test_each_choice_is_read_by_itself_and_the_prompt_once(make_parsed):
    api, _, form = make_parsed()
    choices = api.chat(tools=TOOLS, n=3).json()["choices"]
    assert [choice["message"]["reasoning"] for choice in choices] == ["why"] * 3
    ids_of_calls = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(form.asked) == 1 and len(ids_of_calls) == 6


def test_completions_are_text_alone(make_parsed):
    api, _, form = make_parsed()
    assert api.complete("x", max_tokens=100).json()["choices"][0]["text"] == ANSWER
    assert form.asked == []


@pytest.mark.parametrize("excluded", [False, True])
def test_tool_choice_none_calls_nothing_and_can_hide_the_tools(make_parsed, excluded):
    api, engine, form = make_parsed(**BOTH, exclude_tools_when_tool_choice_none=excluded)
    for choice, shown in (("none", not excluded), ("auto", True), (None, True)):
        answer = api.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]
        prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
        assert ("[tool now]" in prompt) == shown
        calls = choice != "none"
        assert (answer["finish_reason"] == "tool_calls") == calls
        assert ("tool_calls" in answer["message"]) == calls
        assert (form.asked[-1].tools == TOOLS) == calls


def test_auto_needs_a_server_that_reads_calls(make_api, make_parsed):
    tools = {"tools": TOOLS, "tool_choice": "auto"}
    idle, _, _ = make_parsed(reasoning_parser="glm47", tool_call_parser="glm47")
    for api in (make_api(), idle):
        answer = api.chat(**tools)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
        assert "--enable-auto-tool-choice" in answer.json()["error"]["message"]
    message = idle.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert "[now]" in message["content"] and "tool_calls" not in message


@pytest.mark.parametrize("keeps", [False, True])
def test_a_cut_call_can_be_kept_as_the_end_of_the_content(make_parsed, keeps):
    api, _, _ = make_parsed("B[now][add", **BOTH, keep_cut_calls=keeps)
    for length, cut in ((3, "[n"), (8, "[a"), (40, "[add")):
        choice = api.chat(tools=TOOLS, max_tokens=length).json()["choices"][0]
        content = choice["message"]["content"]
        assert content == ("B" + cut if keeps else "B")
        assert streamed(api, max_tokens=length)["content"] == content
