import json
import time

import pytest
import xgrammar
from glm47_answers import CLOSED, MARKS, OPEN, encode, said, typed
from grammar_walks import allows, compiled, flint

from limelight.text.demand import Demand, answer_format
from limelight.text.glm_grammar import glm_constraint, glm_reasoning
from limelight.types import RequestError

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
    },
}
NOW = {"name": "now"}
STRICT = {**WEATHER, "strict": True}
OSLO = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
CALL_NOW = "<tool_call>now</tool_call>"
FORMAT = answer_format({"type": "json_object"}, None)


@pytest.fixture(scope="module")
def tokenizer():
    return flint()


def made(tokenizer, *, reasons=True, open=False, tools=(WEATHER, NOW), **demand):
    demanded = Demand(tools=list(tools), **demand)
    return glm_constraint(demanded, reasons=reasons, open=open, tokenizer=tokenizer)


def takes(tokenizer, answer, **demand):
    ids = encode(tokenizer, answer) if isinstance(answer, str) else answer
    return allows(made(tokenizer, **demand), ids)


def call(**arguments):
    pairs = [
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    ]
    return f"<tool_call>get_weather{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize("names", [["x" * 201], [f"{i:04}" * 40 for i in range(2_000)]])
def test_names_that_cannot_be_told_from_others_may_have_any_value(tokenizer, names):
    properties = {name: {"type": "integer"} for name in names}
    schema = {"type": "object", "properties": properties, "additionalProperties": True}
    tool = {"name": "get_weather", "parameters": schema}
    begun = time.perf_counter()
    grammar = made(tokenizer, tools=[tool], choice="required")
    assert time.perf_counter() - begun < 4
    if len(names) == 1:
        assert allows(grammar, encode(tokenizer, call(y="7")))


def test_thousands_of_listed_values_take_no_time_to_speak_of(tokenizer):
    values = [*range(4_000), *(f"s{i}" for i in range(4_000))]
    schema = {"type": "object", "properties": {"v": {"enum": values}}}
    begun = time.perf_counter()
    made(tokenizer, tools=[{"name": "f", "parameters": schema}])
    assert time.perf_counter() - begun < 4


AUTO = {
    "": True, "Hello.": True, OSLO: True, f"Look: {OSLO} and {CALL_NOW} done": True,
    CALL_NOW + CALL_NOW: True, "<tool_call>other</tool_call>": False, "<tool_call>now": False,
    "a</think>b": False, "a<think>b": False, "</tool_call>": False, "<arg_key>": False,
    "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>": False,
}  # fmt: skip


@pytest.mark.parametrize(("answer", "fits"), AUTO.items(), ids=repr)
def test_an_answer_with_tools_is_text_and_calls_of_listed_tools(tokenizer, answer, fits):
    assert takes(tokenizer, answer) == fits


CHOICES = {
    "required": {OSLO: True, OSLO + CALL_NOW: True, "": False, "Hi" + OSLO: False, "Hi": False},
    "named": {OSLO: True, OSLO + OSLO: False, CALL_NOW: False, "": False, OSLO + "x": False},
    "none": {"Hi": True, "": True, OSLO: False, "Hi" + CALL_NOW: False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "answer", "fits"),
    [(choice, *case) for choice, cases in CHOICES.items() for case in cases.items()],
)
def test_a_choice_forces_or_forbids_calls(tokenizer, choice, answer, fits):
    tools = [WEATHER] if choice == "named" else [WEATHER, NOW]
    assert takes(tokenizer, answer, choice=choice, tools=tools) == fits
    assert takes(tokenizer, answer, choice=choice, tools=tools, content=None) == fits


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_without_parallel_calls_nothing_follows_the_first(tokenizer, choice):
    assert takes(tokenizer, OSLO, choice=choice, parallel=False)
    assert not takes(tokenizer, OSLO + CALL_NOW, choice=choice, parallel=False)
    assert not takes(tokenizer, OSLO + "x", choice=choice, parallel=False)


def test_with_a_format_an_answer_is_calls_or_the_format_and_nothing_else(tokenizer):
    for answer, fits in {
        '{"a": 1}': True, OSLO: True, OSLO + OSLO: True, "Hi": False, '{"a": 1}' + OSLO: False,
        OSLO + '{"a": 1}': False, "": False,
    }.items():  # fmt: skip
        assert takes(tokenizer, answer, content=FORMAT) == fits
    assert not takes(tokenizer, OSLO * 2, content=FORMAT, parallel=False)
    assert not takes(tokenizer, '{"a": 1}', content=FORMAT, choice="required")
    assert takes(tokenizer, '{"a": 1}', content=FORMAT, tools=[])
    assert not takes(tokenizer, OSLO, content=FORMAT, choice="none")


LOOSE = [
    (call(city="Oslo", days=3, unit="F"), True), (call(unit="C", city="Oslo"), True),
    (call(), True), (call(days=3), True), (call(days="three"), False), (call(days=10), False),
    (call(unit="K"), False), (call(wind="1"), False), (call(city='a "b"\n<c> 1'), True),
    (call(city=""), True), (call(city="a</arg_key>"), True), (call(days=" 3"), False),
    ("<tool_call>get_weather<arg_key>city</arg_key></tool_call>", False),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "fits"), LOOSE)
def test_arguments_come_in_any_order_and_number_each_valid_by_itself(tokenizer, answer, fits):
    assert takes(tokenizer, answer, choice="required") == fits


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        (call(city="Oslo", days=3, unit="F"), True), (call(city="Oslo"), True),
        (call(city="Oslo", unit="F"), True), (call(unit="F", city="Oslo"), False),
        (call(), False), (call(days=3), False), (call(city="Oslo", days=12), False),
    ],
)  # fmt: skip
def test_a_strict_tool_has_its_arguments_in_order_and_the_required_ones_always(
    tokenizer, answer, fits
):
    assert takes(tokenizer, answer, choice="required", tools=[STRICT]) == fits


def test_marks_that_are_typed_are_text(tokenizer):
    spelt = typed(tokenizer, "a<tool_call>now</think>")
    assert takes(tokenizer, spelt)
    assert said(tokenizer, spelt, prompt=CLOSED) == ("", "a<tool_call>now</think>", [])
    assert not takes(tokenizer, typed(tokenizer, CALL_NOW), choice="required")
    schema = {"type": "object", "properties": {"a": {"const": "<tool_call>"}}, "required": ["a"]}
    content = answer_format(None, {"json": schema})
    written = '{"a":"<tool_call>"}'
    assert takes(tokenizer, typed(tokenizer, written), content=content, tools=[])
    assert not takes(tokenizer, encode(tokenizer, written), content=content, tools=[])


def test_the_constraint_waits_for_the_end_of_reasoning_where_it_is_open_and_told_apart(tokenizer):
    assert made(tokenizer, open=True).after_reasoning
    assert not made(tokenizer, open=True, reasons=False).after_reasoning
    assert not made(tokenizer, open=False).after_reasoning
    # Thoughts that count as content may end.
    assert takes(tokenizer, "a</think>b" + OSLO, open=True, reasons=False)


def test_nothing_demanded_is_no_constraint(tokenizer):
    assert made(tokenizer, tools=[]) is None


def test_a_structural_tag_of_the_request_may_speak_of_marks(tokenizer):
    format = {"type": "const_string", "value": "<think>a</think>"}
    content = answer_format({"type": "structural_tag", "format": format, "x": 1}, None)
    constraint = made(tokenizer, content=content)
    assert constraint.marks == []
    assert allows(constraint, encode(tokenizer, "<think>a</think>"))


def forced(tokenizer, schema, value, *, strict=True):
    tool = {"name": "f", "strict": strict, "parameters": {
        "type": "object", "properties": {"v": schema}, "required": ["v"],
    }}  # fmt: skip
    answer = f"<tool_call>f<arg_key>v</arg_key><arg_value>{value}</arg_value></tool_call>"
    return takes(tokenizer, answer, choice="required", tools=[tool])


VALUES = [
    ({"type": "string", "minLength": 2}, ["ab", "a<b", "<b>c"], ["", "a"]),
    ({"type": "string", "minLength": 9}, ["a" * 9, "a" * 99], ["a" * 8]),
    ({"type": "string", "maxLength": 0}, [""], ["a"]),
    ({"type": "string", "minLength": 2, "maxLength": 900}, ["ab", "a" * 900], ["a", "a" * 901]),
    ({"type": "string", "maxLength": 3}, ["", "a", "abc"], ["abcd", "a<b"]),
    ({"type": "string", "maxLength": 20}, ["", "a" * 20], ["a" * 21, "a</arg_value>"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["ab"], ["", "a1", '"ab"']),
    ({"type": "string", "pattern": '^"'}, ['"ab"'], ["ab"]),
    ({"type": "string", "format": "date"}, ["2024-05-31"], ["2024-05-32", "soon"]),
    ({"type": "string", "enum": ["a", "b<c"]}, ["a", "b<c"], ["b", '"a"']),
    ({"enum": [1, "1", None]}, ["1", "null"], ["2", '"1"']),
    ({"const": {"a": [1]}}, ['{"a": [1]}'], ['{"a": [2]}', "x"]),
    ({"type": "integer"}, ["1", "-20"], ["1.5", "1e3", "x", "01"]),
    ({"type": "number"}, ["1", "1.5", "2e10"], ["1e999", "x", "1."]),
    ({"type": "number", "minimum": 0}, ["1", "0.5"], ["-1", "x"]),
    ({"type": ["integer", "null"]}, ["1", "null"], ["", "x"]),
    ({"type": ["string", "null"]}, ["1", "null", "x"], []),
    ({"type": ["string", "integer"], "maximum": 5}, ["5", "x"], ["6", "12"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": "array", "items": {"type": "string"}}, ['["a"]', "[]"], ["a", '["</arg_value>"]']),
    ({"type": "array", "items": {"maxLength": 1, "type": "string"}}, ['["a"]'], ['["ab"]']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
     ['{"a": 1}'], ["{}", '{"a": "x"}', '{"a": 1, "b": 2}']),
    ({"type": "array"}, ["[1.5, {}]", "[[null]]"], ["[16E60008]", "[[1E400]]", f"[{'9' * 5000}]"]),
    ({"type": "object"}, ['{"a": {"b": 2}}'], ['{"a": 1E400}', '{"a": {"b": 1E400}}']),
    ({"type": "array", "items": {"type": "number", "minimum": 0}}, ["[1.5]"], [f"[{'9' * 400}.5]"]),
    ({"type": "array", "items": {"type": "integer"}}, ["[-12]"], [f"[{'9' * 5000}]"]),
    ({"type": "integer", "minimum": 0}, ["12"], ["9" * 5000]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
     ['{"a": 1, "b": "x"}'], ['{"\\u0061": "x"}', '{"b": 1E400}', '{"b<": 1}']),
    ({"allOf": [{"type": "integer"}]}, ["1"], ["x"]),
    ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
     ["1", "[null]"], ["[1]", "x"]),
    ({}, ["anything", "1", '{"a"'], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES, ids=lambda v: json.dumps(v)[:60])
def test_a_value_is_what_its_schema_says(tokenizer, schema, good, bad):
    assert [value for value in good if not forced(tokenizer, schema, value)] == []
    assert [value for value in bad if forced(tokenizer, schema, value)] == []


def test_a_recursive_schema_is_held_at_every_level(tokenizer):
    tree = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "of": {"items": {"$ref": "#/$defs/tree"}}},
        "required": ["n"],
    }
    parameters = {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/tree"}},
        "$defs": {"tree": tree},
    }
    tools = [{"name": "f", "parameters": parameters}]
    for value, fits in {'{"n":1,"of":[{"n":2}]}': True, '{"n":1,"of":[{"n":"a"}]}': False}.items():
        answer = f"<tool_call>f<arg_key>t</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert takes(tokenizer, answer, choice="required", tools=tools) == fits


FAULTS = [
    ({"name": " f"}, "encoded"),
    ({"name": "f<arg_key>"}, "encoded"),
    ({"name": "f", "parameters": {"properties": {"a ": {}}}}, "told apart"),
    ({"name": "f", "parameters": {"type": "string"}}, "must be an object"),
    ({"name": "f", "strict": True, "parameters": {"type": "object"}}, "additionalProperties"),
    ({"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}, "not"),
    (
        {
            "name": "f",
            "strict": True,
            "parameters": {"properties": {"a": {"enum": ["</arg_value>"]}}},
        },
        "written",
    ),
]


@pytest.mark.parametrize(("tool", "word"), FAULTS)
def test_a_tool_that_cannot_be_called_in_this_format_is_refused(tokenizer, tool, word):
    with pytest.raises(RequestError, match=word) as caught:
        made(tokenizer, tools=[tool])
    assert caught.value.param == "tools"


REASONING = {
    OPEN: (True, 0),
    CLOSED: (False, 0),
    OPEN + "abc": (True, 3),
    "<|user|>Hi<|assistant|>": (True, 0),
    "<|user|><think>Hi<|assistant|></think>": (False, 0),
    "<|assistant|><think>old</think><|user|>Hi<|assistant|><think>": (True, 0),
    "no chat": (False, 0),
    "no chat<think>a": (True, 1),
}


@pytest.mark.parametrize(("prompt", "expected"), REASONING.items(), ids=repr)
def test_reasoning_stands_where_the_last_turn_of_the_prompt_leaves_it(tokenizer, prompt, expected):
    ids = [i for part in prompt.split("abc") for i in encode(tokenizer, part)]
    ids += [tokenizer.encode(c, add_special_tokens=False)[0] for c in "abc" if "abc" in prompt]
    reasoning = glm_reasoning(ids, tokenizer, 5)
    assert (reasoning.is_open, reasoning.num_tokens) == expected
    assert reasoning.budget == 5
    assert reasoning.forced_end == reasoning.ends[0] == encode(tokenizer, "</think>")
    assert reasoning.ends_kept == [encode(tokenizer, "<tool_call>")]


def test_thoughts_that_are_switched_off_are_not_followed(tokenizer):
    assert glm_reasoning(encode(tokenizer, CLOSED), tokenizer, 0, thinking=False) is None
    opened = glm_reasoning(encode(tokenizer, OPEN), tokenizer, 0, thinking=False, calls=False)
    assert opened.is_open
    assert opened.ends_kept == []


@pytest.mark.parametrize(
    "schema",
    [{}, {"type": "string"}, {"type": "string", "minLength": 1}, {"type": "string", "maxLength": 9},
     {"type": "string", "maxLength": 40}, {"pattern": "a*"}, {"type": "array"}, {"type": "object"}],
)  # fmt: skip
def test_no_value_has_the_token_of_a_mark(tokenizer, schema):
    tools = [{"name": "f", "parameters": {"properties": {"v": schema}}}]
    grammar = compiled(made(tokenizer, tools=tools, choice="required"))
    quote = {"array": '["', "object": '{"'}.get(schema.get("type"), "")
    matcher = xgrammar.GrammarMatcher(grammar)
    begun = f"<tool_call>f<arg_key>v</arg_key><arg_value>{quote}a"
    assert all(matcher.accept_token(token_id) for token_id in encode(tokenizer, begun))
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    matcher.fill_next_token_bitmask(mask)
    allowed = [i for i in range(tokenizer.vocab_size) if mask[0, i // 32] >> (i % 32) & 1]
    assert allowed
    assert not set(allowed) & {*encode(tokenizer, "".join(MARKS)), *tokenizer.special_ids}


@pytest.mark.parametrize(
    "text",
    ["", "<", "</", "a<<</arg", "</arg_value", "</arg_</arg_value", "</arg_value</arg", "<<b>>",
     "</arg_valuf>", "a\n\U0001f468<", "</arg_<value>"],
)  # fmt: skip
def test_a_text_may_hold_all_but_the_end_of_its_value(tokenizer, text):
    assert forced(tokenizer, {"type": "string"}, text)
    assert not forced(tokenizer, {"type": "string"}, f"{text}</arg_value>x")


def test_the_key_of_a_further_argument_has_no_tag_and_is_none_of_the_others(tokenizer):
    parameters = {
        "type": "object",
        "properties": {"a<b": {"type": "integer"}, "a": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    }
    tools = [{"name": "f", "parameters": parameters}]
    for key, fits in {"ab": True, "a": False, "a<b": False, "a</arg_key>": False}.items():
        answer = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>true</arg_value></tool_call>"
        assert takes(tokenizer, answer, choice="required", tools=tools) == fits
