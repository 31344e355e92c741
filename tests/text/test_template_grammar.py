"""What an answer by a response template may be, with and without tools, formats and reasoning."""

import json

import pytest
from response_templates import TEMPLATES
from template_grammars import (
    ANSWER,
    BEGIN,
    MADE,
    NOW,
    START,
    THINK,
    THOUGHT,
    WEATHER,
    allowed,
    allows,
    argument,
    call,
    made,
    matcher,
    read,
    tokenizer,
    tool,
)

from limelight.text.template_grammar import template_reasoning
from limelight.types import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": SCHEMA | {"additionalProperties": False}}
CITY = argument("city", "Oslo")
SPELLINGS = ["bundled", "tags"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_without_tools_there_is_one_answer(name):
    grammar = made(name)
    assert allows(grammar, f"{THOUGHT}{ANSWER}hi")
    assert allows(grammar, f"{THOUGHT}{ANSWER}hi<|return|>")
    assert allows(grammar, f"{THOUGHT}{ANSWER}")
    assert not allows(grammar, f"{THOUGHT}{ANSWER}hi<|end|>more")
    assert not allows(grammar, THOUGHT + call("now"))


def test_a_format_is_the_whole_content():
    grammar = made(content=FORMAT)
    assert allows(grammar, THOUGHT + ANSWER + '{"a": 1}<|end|>')
    assert not allows(grammar, THOUGHT + ANSWER + '{"a": "x"}')
    assert not allows(grammar, THOUGHT + ANSWER + 'Sure! {"a": 1}')


def test_tools_are_called_or_there_is_an_answer_but_never_both():
    grammar = made(tools=[WEATHER, NOW])
    first = THOUGHT + call("now")
    assert allows(grammar, first)
    assert allows(grammar, first + f"<|end|>{START}" + call("get_weather", CITY) + "<|call|>")
    assert allows(grammar, f"{THOUGHT}{ANSWER}hi")
    assert not allows(grammar, f"{first}<|end|>{START}{ANSWER}hi")
    assert not allows(grammar, f"{THOUGHT}{ANSWER}hi<|end|>" + call("now"))


def test_a_call_that_is_required_leaves_no_room_for_an_answer():
    grammar = made(tools=[WEATHER, NOW], choice="required", content=FORMAT)
    assert allows(grammar, THOUGHT + call("now") + f"<|end|>{START}" + call("now"))
    assert not allows(grammar, THOUGHT + ANSWER + '{"a": 1}')
    assert not matcher(grammar).accept_string(THOUGHT + "<|channel|>f")


def test_a_named_tool_is_called_once():
    grammar = made(tools=[NOW], choice="named")
    assert allows(grammar, THOUGHT + call("now") + "<|call|>")
    assert not allows(grammar, THOUGHT + call("now") + f"<|end|>{START}" + call("now"))
    assert not allows(grammar, THOUGHT + call("get_weather", CITY))


def test_with_the_choice_none_no_call_can_be_written():
    grammar = made(tools=[WEATHER], choice="none", always=False)
    assert allows(grammar, f"{THOUGHT}{ANSWER}hi")
    assert not allows(grammar, THOUGHT + call("get_weather", CITY))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_that_are_not_parallel_are_one(choice):
    grammar = made(tools=[NOW], choice=choice, parallel=False)
    assert allows(grammar, THOUGHT + call("now") + "<|call|>")
    assert not allows(grammar, THOUGHT + call("now") + f"<|end|>{START}" + call("now"))


def test_a_format_and_tools_leave_calls_or_the_format():
    grammar = made(tools=[NOW], content=FORMAT)
    assert allows(grammar, THOUGHT + call("now"))
    assert allows(grammar, THOUGHT + ANSWER + '{"a": 1}')
    assert not allows(grammar, THOUGHT + ANSWER + "hi")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_only_listed_tools_are_called(choice):
    texts = [THOUGHT + call(name, argument("a", "b")) for name in ("nope", "get_weath", "nowhere")]
    grammar = made(tools=[WEATHER, NOW], choice=choice)
    assert not any(allows(grammar, text) for text in texts)
    assert not allows(grammar, THOUGHT + call("get_weather", argument("a", "b")))


def test_nothing_is_demanded_without_the_switch():
    assert made(always=False) is None
    assert made(always=False, tools=[NOW]) is None
    assert made(always=False, tools=[NOW | {"strict": True}]) is not None


def test_at_the_start_of_a_message_reasoning_comes_first_and_is_not_empty():
    grammar = made(content=FORMAT)
    first = {tokenizer().token_text(int(i)) for i in allowed(matcher(grammar))}
    assert all(THINK.startswith(text) for text in first) and "<|channel|>" in first
    closed = f"<|end|>{START}"
    assert not allows(grammar, THINK + closed + ANSWER + '{"a": 1}')
    assert not allows(grammar, ANSWER + '{"a": 1}')
    assert allows(grammar, THINK + " " + closed + ANSWER + '{"a": 1}')
    assert allows(grammar, f"{THINK}a < b <c>" + closed + ANSWER + '{"a": 1}')


@pytest.mark.parametrize("budget", [0, 5])
def test_with_a_budget_reasoning_may_be_empty(budget):
    grammar = made(budget=budget)
    assert allows(grammar, f"{THINK}<|end|>{START}{ANSWER}hi")
    assert allows(grammar, f"{THINK}<<|end|>{START}{ANSWER}hi")
    assert not allows(grammar, f"{ANSWER}hi")


def test_without_thinking_reasoning_may_be_left_out():
    grammar = made(thinking=False, tools=[NOW])
    for thought in ("", THOUGHT, f"{THINK}<|end|>{START}"):
        assert allows(grammar, thought + call("now"))
        assert allows(grammar, f"{thought}{ANSWER}hi")


def test_reasoning_that_the_prompt_has_closed_is_not_asked_for_again():
    grammar = made(prompt=f"{START}{THINK}<|end|>{START}", thinking=None)
    assert allows(grammar, f"{ANSWER}hi")
    assert allows(grammar, f"{THOUGHT}{ANSWER}hi")
    told = f"{START}{THINK}so<|end|>{START}{ANSWER}x<|end|><|start|>user<|message|>y<|end|>{START}"
    assert not allows(made(prompt=told), f"{ANSWER}hi")


def test_open_reasoning_delays_the_grammar():
    grammar = made(prompt=START + THINK, tools=[NOW])
    assert grammar.after_reasoning
    assert allows(grammar, call("now")) and allows(grammar, f"{ANSWER}hi")
    assert allows(grammar, f"{THOUGHT}{ANSWER}hi")
    assert not allows(grammar, "hi")
    assert not made(tools=[NOW]).after_reasoning


@pytest.mark.parametrize("name", ["tags", "bare"])
def test_an_open_answer_goes_on(name):
    prompt = START + ANSWER
    grammar = made(name, prompt=prompt + "Once upon", tools=[NOW])
    assert allows(grammar, " a time<|end|>") and allows(grammar, "")
    assert not allows(grammar, " a time<|end|>x")
    assert allows(made(name, prompt=prompt, content=FORMAT), '{"a": 1}<|end|>')
    assert not allows(made(name, prompt=prompt, content=FORMAT), "a")


@pytest.mark.parametrize("prompt", ["<|start|>user<|message|>x<|end|>", START + " junk"])
def test_elsewhere_the_grammar_holds_from_the_first_token(prompt):
    grammar = made(prompt=prompt)
    assert not grammar.after_reasoning
    assert allows(grammar, f"{ANSWER}hi") and allows(grammar, f"{THOUGHT}{ANSWER}hi")
    assert not allows(grammar, "hi")


@pytest.mark.parametrize("given, faults", [
    ({"prompt": START + ANSWER}, ("tool_choice", "inside of an answer")),
    ({"prompt": START + THINK, "reasons": False}, ("tool_choice", "no reasoning parser")),
    ({"prompt": START + call("now")}, ("tool_choice", "inside of a call")),
    ({"name": TEMPLATES["lines"]}, ("tool_choice", "kv-lines")),
    ({"name": TEMPLATES["implicit"]}, ("tool_choice", "transform")),
])  # fmt: skip
def test_a_call_that_cannot_be_guaranteed_is_refused(given, faults):
    for choice in ("required", "named"):
        with pytest.raises(RequestError, match=faults[1]) as refused:
            made(**given, tools=[NOW], choice=choice)
        assert refused.value.param == faults[0]


def test_strict_tools_are_refused_where_there_is_no_grammar():
    with pytest.raises(RequestError, match="strict tools") as refused:
        made(TEMPLATES["lines"], tools=[NOW | {"strict": True}])
    assert refused.value.param == "tools"
    assert made(TEMPLATES["lines"], tools=[NOW]) is None


def test_a_format_alone_is_held_where_the_template_has_no_grammar():
    grammar = made(TEMPLATES["implicit"], prompt="<|bot|>\n<think>", content=FORMAT)
    assert grammar.after_reasoning and allows(grammar, '{"a": 1}')
    bare = made(prompt=START + THINK, reasons=False, content=FORMAT)
    assert not bare.after_reasoning and allows(bare, '{"a": 1}')


def test_a_text_with_a_mark_cannot_be_chosen():
    choices = {"type": "or", "elements": [{"type": "const_string", "value": v} for v in "ab"]}
    assert allows(made(content=choices), f"{THOUGHT}{ANSWER}a")
    choices["elements"][1]["value"] = "b<|end|>c"
    with pytest.raises(RequestError, match="mark"):
        made(content=choices)


def test_no_text_of_a_format_has_a_mark_in_it():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}
    grammar = made(content={"type": "json_schema", "json_schema": schema})
    assert not matcher(grammar).accept_string(THOUGHT + ANSWER + '{"a": "x<|end|>')
    assert allows(grammar, THOUGHT + ANSWER + '{"a": "<b>x</b> < y"}')
    free = made(content={"type": "any_text", "excludes": ["z"]})
    assert allows(free, f"{THOUGHT}{ANSWER}x<|end|>")
    assert not matcher(free).accept_string(f"{THOUGHT}{ANSWER}z")


@pytest.mark.parametrize("opening", ["to=", " to=", f"{START} to="])
@pytest.mark.parametrize("closer", ["<|end|>", f"<|end|>{START}"])
def test_another_spelling_is_read_from_the_template(opening, closer):
    text = f"{THINK}need it{closer}{opening}get_weather<|channel|>analysis<|message|>"
    text += '<rfl:parameter name="city"> Oslo </rfl:parameter>'
    more = text + f"<|call|>{START} to=now{BEGIN}"
    grammar = made("bare", tools=[WEATHER, NOW])
    assert allows(grammar, text) and allows(grammar, more)
    expected = [("get_weather", {"city": "Oslo"}), ("now", {})]
    assert read("bare", more, tools=[WEATHER, NOW]) == ("need it", "", expected)
    answer = f"{THINK}need it{closer}{ANSWER}hi<|end|>"
    assert allows(grammar, answer)
    assert read("bare", answer) == ("need it", "hi", [])


def test_where_reasoning_begins_and_ends_is_told_in_token_ids():
    known = tokenizer()
    for prompt, is_open, count in [
        (START, False, 0), (START + THINK, True, 0), (f"{START}{THINK}a b", True, 2),
        (START + ANSWER, False, 0), (f"{START}{THINK}a<|end|>{START}", False, 0),
    ]:  # fmt: skip
        ids = known.encode(prompt, add_special_tokens=False)
        told = template_reasoning(
            MADE["bundled"], known, prompt=prompt, prompt_token_ids=ids, budget=7
        )
        assert (told.is_open, told.num_tokens, told.budget) == (is_open, count, 7)
        texts = [known.decode(ids, skip_special_tokens=False) for ids in told.starts + told.ends]
        assert texts == [THINK, f"<|end|>{START}"]
        assert known.decode(told.forced_end, skip_special_tokens=False) == f"<|end|>{START}"


def test_the_shortest_opener_is_where_reasoning_starts():
    given = {"start_anchor": START, "fields": {
        "thinking": {"open": [f"{START}<t>", "<t>"], "close": ["</t>", f"</t>{START}"]},
        "content": {"open": "<a>"},
    }}  # fmt: skip
    from response_templates import template

    known = tokenizer()
    told = template_reasoning(
        template(given), known, prompt=START, prompt_token_ids=[], budget=None
    )
    assert [known.decode(ids, skip_special_tokens=False) for ids in told.starts] == ["<t>"]
    assert known.decode(told.forced_end, skip_special_tokens=False) == f"</t>{START}"
    endless = {"start_anchor": "a", "fields": {"thinking": {"open": "b"}, "content": {"open": "c"}}}
    assert template_reasoning(
        template(endless), known, prompt="a", prompt_token_ids=[], budget=None
    ) is None  # fmt: skip


def test_a_tag_is_json_that_says_no_more_than_it_must():
    tag = json.loads(made(tools=[NOW]).tag)
    assert tag["type"] == "structural_tag"
    many = [tool(f"tool_{i}", WEATHER["parameters"]["properties"], ["city"]) for i in range(20)]
    assert len(made(tools=many).tag) < 200_000
