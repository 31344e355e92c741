"""What requests demand of their answers: forced calls, formats, budgets, and what is refused."""

import json
import logging

import pytest
from server_fakes import FakeEngine, FakeForm, events, ids

BOTH = {
    "reasoning_parser": "glm47", "tool_call_parser": "glm47", "enable_auto_tool_choice": True,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def tool(name: str, **fields) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [tool("now"), tool("add", parameters={"type": "object"})]
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture
def make_formed(make_api):
    """Builds an api whose engine says `text`, read by a `FakeForm`."""

    def make(text: str = "[now]", **config):
        engine = FakeEngine(lambda request: ids(text), max_model_len=300)
        form = FakeForm()
        return make_api(engine, form=form, **(BOTH | config)), engine, form

    return make


def refused(answer, param: str | None) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    return error["message"]


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "demanded", "names"),
    [
        (None, "auto", ["now", "add"]), ("auto", "auto", ["now", "add"]),
        ("required", "required", ["now", "add"]), (NOW, "named", ["now"]), ("none", "none", []),
        (allowed("auto", "add"), "auto", ["add"]),
        (allowed("required", "add"), "required", ["add"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_tool_choice_becomes_a_demand(make_formed, choice, demanded, names):
    api, engine, form = make_formed()
    assert api.chat(tools=TOOLS, tool_choice=choice).status_code == 200
    [demand] = form.demands
    assert (demand.choice, [each["name"] for each in demand.tools]) == (demanded, names)
    assert [each["function"]["name"] for each in form.asked[0].tools or ()] == names
    assert "[tool now][tool add]" in bytes(engine.requests[0].prompt_token_ids).decode()


@pytest.mark.parametrize(
    ("choice", "content", "reason"),
    [("auto", None, "tool_calls"), ("required", "", "tool_calls"), (NOW, "", "stop")],
    ids=str,
)
def test_forced_calls_have_empty_content_and_a_named_one_ends_with_stop(
    make_formed, choice, content, reason
):
    api, _, _ = make_formed("[now]~"[:5])
    [choice_told] = api.chat(tools=TOOLS, tool_choice=choice, stop="~").json()["choices"]
    message = choice_told["message"]
    assert message["tool_calls"][0]["function"]["name"] == "now"
    assert (message["content"], choice_told["finish_reason"]) == (content, reason)
    *_, last, _ = events(api.chat(tools=TOOLS, tool_choice=choice, stream=True))
    assert last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": NOW}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "now"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": tool("other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("never", "now")}, "tool_choice"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool("a", strict="yes")]}, "tools"),
        ({"tools": [tool("a", parameters=[1])]}, "tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
    ids=str,
)  # fmt: skip
def test_a_choice_that_cannot_be_is_refused_by_name(make_formed, fields, param):
    api, engine, _ = make_formed()
    refused(api.chat(**fields), param)
    assert engine.requests == []


@pytest.mark.parametrize("choice", ["auto", "required", NOW], ids=str)
def test_calls_need_a_server_that_reads_them(make_api, choice):
    flags = {"reasoning_parser": "glm47", "tool_call_parser": "glm47"}
    for api in (make_api(), make_api(form=FakeForm(), **flags)):
        message = refused(api.chat(tools=TOOLS, tool_choice=choice), "tool_choice")
        assert "--enable-auto-tool-choice" in message and "--tool-call-parser" in message


@pytest.mark.parametrize(
    ("config", "choice", "strict"),
    [
        ({}, "auto", [None, True]),
        ({"tool_strict_level": "parameter"}, "auto", [True, True]),
        ({"enforce_strict_tool_calling": False}, "auto", [False, False]),
        ({"enforce_strict_tool_calling": False}, "required", [None, True]),
    ],
    ids=str,
)
def test_the_server_says_how_strict_tools_are(make_formed, config, choice, strict):
    api, _, form = make_formed(**config)
    tools = [tool("now"), tool("add", strict=True)]
    assert api.chat(tools=tools, tool_choice=choice).status_code == 200
    assert [each.get("strict") for each in form.demands[0].tools] == strict


def test_what_the_request_says_of_one_call_and_of_thinking_is_demanded(make_formed):
    api, _, form = make_formed()
    api.chat(tools=TOOLS, parallel_tool_calls=False, reasoning_effort="none")
    api.chat(tools=TOOLS, chat_template_kwargs={"thinking": True})
    first, second = form.demands
    assert (first.parallel, first.thinking) == (False, False)
    assert (second.parallel, second.thinking) == (True, True)


@pytest.mark.parametrize(
    "fields",
    [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_format_constrains_chats_by_their_form_and_other_answers_as_it_is(
    make_formed, make_api, fields
):
    api, engine, form = make_formed()
    api.chat(**fields)
    content = form.demands[0].content
    assert content is not None and "integer" in json.dumps(content)
    assert json.loads(engine.requests[0].constraint.tag)["content"] == content
    api.complete(**fields)
    plain = FakeEngine()
    make_api(plain).chat(**fields)
    for request in (engine.requests[1], plain.requests[0]):
        assert json.loads(request.constraint.tag) == {"type": "structural_tag", "format": content}
        assert request.constraint.after_reasoning is False and request.reasoning is None


def test_the_server_can_make_all_json_compact(make_api):
    blanks = []
    for compact in (False, True):
        engine = FakeEngine()
        api = make_api(engine, structured_outputs_config={"disable_any_whitespace": compact})
        api.chat(response_format=FORMAT)
        api.chat(structured_outputs={"regex": "a+"})
        first, second = (json.loads(each.constraint.tag)["format"] for each in engine.requests)
        blanks.append(first["max_whitespace_cnt"])
        assert second["type"] == "regex" and "max_whitespace_cnt" not in second
    assert blanks[0] > blanks[1] == 1


def test_a_completion_that_opens_reasoning_is_constrained_after_it(make_formed):
    api, engine, _ = make_formed()
    for prompt, opened in (("x", False), ("x(why", True), ("x(why)", False), ("x(why)(", True)):
        api.complete(prompt, response_format=FORMAT)
        request = engine.requests[-1]
        assert request.constraint.after_reasoning == opened
        assert (request.reasoning is not None) == opened
        if opened:
            assert request.reasoning.is_open
            assert request.reasoning.num_tokens == len(prompt.rpartition("(")[2])


@pytest.mark.parametrize("choice", ["required", NOW], ids=str)
def test_a_forced_call_leaves_no_room_for_a_format(make_formed, choice, caplog):
    api, _, form = make_formed()
    answer = api.chat(tools=TOOLS, tool_choice=choice, response_format=FORMAT)
    assert answer.status_code == 200 and form.demands[0].content is None
    assert "ignored" in caplog.text


def test_a_format_needs_a_tokenizer(make_api):
    api = make_api(texts=False)
    message = refused(api.complete([65], response_format=FORMAT), "response_format")
    assert "needs a tokenizer" in message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"response_format": FORMAT}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "allowed_token_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_engine_refuses_is_a_400_before_a_stream_begins(
    make_formed, fields, param, stream
):
    api, engine, _ = make_formed()
    engine.refused = "takes too long"
    assert refused(api.chat(stream=stream, **fields), param) == "takes too long"


def test_a_budget_goes_to_the_engine_with_the_marks_of_reasoning(make_formed):
    api, engine, _ = make_formed("(why)B")
    for ask in (api.chat, api.complete):
        for budget in (0, 5):
            assert ask(thinking_token_budget=budget).status_code == 200
            reasoning = engine.requests[-1].reasoning
            assert (reasoning.budget, reasoning.forced_end) == (budget, ids(")"))
        for unlimited in (-1, None):
            assert ask(thinking_token_budget=unlimited).status_code == 200
            assert engine.requests[-1].reasoning is None


@pytest.mark.parametrize("budget", [-2, 1.5, True, "5", 10**30, [1]], ids=str)
def test_a_budget_must_be_a_number_of_tokens(make_formed, budget):
    api, _, _ = make_formed()
    for ask in (api.chat, api.complete):
        refused(ask(thinking_token_budget=budget), "thinking_token_budget")


def test_a_budget_needs_marks_that_the_server_knows(make_api):
    message = refused(make_api().chat(thinking_token_budget=5), "thinking_token_budget")
    assert "--reasoning-parser" in message and "--reasoning-config" in message
    engine = FakeEngine()
    marks = {"reasoning_start_str": "<t>", "reasoning_end_str": "Enough.</t>"}
    api = make_api(engine, reasoning_config=marks)
    api.chat("<t>so", thinking_token_budget=5)
    reasoning = engine.requests[0].reasoning
    assert (reasoning.starts, reasoning.ends) == ([ids("<t>")], [ids("Enough.</t>")])
    assert (reasoning.is_open, reasoning.budget) == (True, 5)
    assert reasoning.num_tokens == len("so<assistant>")


def test_the_end_that_a_budget_forces_can_be_chosen_beside_a_parser(make_formed):
    api, engine, _ = make_formed(reasoning_config={"reasoning_end_str": "Enough.)"})
    api.chat(thinking_token_budget=5)
    reasoning = engine.requests[0].reasoning
    assert (reasoning.ends, reasoning.forced_end) == ([ids(")")], ids("Enough.)"))


def test_an_end_that_the_parser_does_not_know_is_refused_at_the_start(make_formed):
    with pytest.raises(ValueError, match="reasoning_end_str must end with a mark"):
        make_formed(reasoning_config={"reasoning_end_str": "Enough."})


def test_stop_texts_can_be_looked_for_in_reasoning_too(make_formed):
    text = "(a st)B(c stop d)e stop"
    for flag, reasoning, content in ((False, "a stc stop d", "Be "), (True, "a stc ", "B")):
        api, _, _ = make_formed(text, stop_in_reasoning=flag)
        whole = api.chat(stop="stop").json()["choices"][0]
        assert (whole["message"]["reasoning"], whole["message"]["content"]) == (reasoning, content)
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "stop")
        deltas = [
            chunk["choices"][0]["delta"]
            for chunk in events(api.chat(stop="stop", stream=True))[:-1]
        ]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == reasoning
        assert "".join(delta.get("content", "") for delta in deltas) == content


def test_former_names_are_ignored_with_a_word(api, caplog):
    caplog.set_level(logging.WARNING)
    assert api.chat(guided_json=SCHEMA, guided_regex="a").status_code == 200
    assert "guided_json" in caplog.text and "structured_outputs" in caplog.text
