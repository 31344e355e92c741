"""Which arguments calls may have by the schemas of tools; all are read as what they are."""

import time

import jsonschema
import pytest
from template_grammars import THOUGHT, WEATHER, allows, argument, call, made, matcher, read, tool

from limelight.types import RequestError

VALUES = {"days": "3", "city": "Oslo", "unit": "c"}


def given(keys):
    return call("get_weather", *(argument(key, VALUES[key]) for key in keys.split()))


@pytest.mark.parametrize("keys, right", [
    ("days city unit", True), ("city days unit", True), ("city unit", True), ("city", True),
    ("unit city days", False), ("days unit", False), ("city city", False), ("", False),
])  # fmt: skip
def test_arguments_come_in_the_order_of_the_schema_or_the_alphabet(keys, right):
    assert allows(made(tools=[WEATHER], choice="required"), THOUGHT + given(keys)) == right


def test_a_value_may_end_where_the_next_argument_opens():
    text = '<rfl:parameter name="days">\n3{}<rfl:parameter name="city">\nOslo'
    end = "\n</rfl:parameter>"
    grammar = made(tools=[WEATHER])
    for glue in ("", "\n", end, end + "\n"):
        whole = THOUGHT + call("get_weather", text.format(glue) + end)
        assert allows(grammar, whole)
        expected = [("get_weather", {"days": 3, "city": "Oslo"})]
        assert read("tags", whole, tools=[WEATHER])[2] == expected
    assert not allows(grammar, THOUGHT + call("get_weather", text.format("\n\n") + end))
    assert not allows(grammar, THOUGHT + call("get_weather", text.format("")))


@pytest.mark.parametrize("form", [b"\xf0\x84\xb8\x8d", b"\xe0\x84\x80"], ids=bytes.hex)
@pytest.mark.xfail(strict=True, reason="xgrammar 0.2 takes these for characters of a JSON pattern")
def test_overlong_forms_are_no_characters_of_a_text_within_an_argument(form):
    schema = {"type": "array", "items": {"type": "string", "maxLength": 2}}
    tools = [tool("f", {"a": schema}, strict=True)]
    text = THOUGHT + call("f", argument("a", '["?"]'))
    assert allows(made(tools=tools), text)
    assert not allows(made(tools=tools), text.encode().replace(b"?", form))


PAIR = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}
POINTS = {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1}


@pytest.mark.parametrize("schema, right, wrong", [
    ({"type": "integer", "maximum": 9}, {"9": 9, "-3": -3}, ["12", "1.5", "x", "1_0"]),
    ({"type": "number"}, {"1.5": 1.5, "2e3": 2000}, ["", "one", "1e999"]),
    ({"type": "boolean"}, {"true": True}, ["True", "1", "yes"]),
    ({"type": ["integer", "null"]}, {"3": 3, "null": None}, ["None", ""]),
    ({"type": "string"}, {"": "", "12": "12", "a\n<b>": "a\n<b>"}, ["<|call|>"]),
    ({}, {"12": "12", "x": "x"}, ["<|end|>"]),
    ({"type": ["string", "integer"]}, {"12": 12, "x": "x"}, []),
    ({"enum": ["a", 1, None]}, {"a": "a", "1": 1, "null": None}, ["2", "None", '"a"']),
    ({"enum": ["<", "<=", " "]}, {"<": "<", "<=": "<=", " ": " "}, [">"]),
    ({"const": 3}, {"3": 3}, ["4"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, {"ab": "ab", "éé!": "éé!"},
     ["a", "abcd", ""]),
    ({"type": "string", "minLength": 1}, {"<b>": "<b>", "x\ny": "x\ny"}, [""]),
    ({"type": "string", "maxLength": 2}, {"": "", "a\n": "a\n"}, ["abc", "<a"]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, {"a": "a", "\u00e9\nb": "\u00e9\nb"},
     ["", "a\n", "abcd"]),
    ({"type": "string", "maxLength": 30}, {"": "", "a b>\nc\n": "a b>\nc\n", "x" * 30: "x" * 30},
     ["x" * 31, " a", "a<|call|>", "a<b"]),
    ({"type": "string", "minLength": 2, "maxLength": 30}, {"ab\nc>": "ab\nc>"}, ["a", "x" * 31]),
    ({"type": "string", "pattern": "^[a-z]+-.$"}, {"ab-c": "ab-c", "b-é": "b-é"},
     ["ab-<", "a-\n", "ab-cd"]),
    ({"type": "string", "format": "date"}, {"2026-02-28": "2026-02-28"}, ["2026-13-01", "x"]),
    ({"$ref": "#/$defs/point"}, {'{"lat": 1.5}': {"lat": 1.5}}, ["{}", '{"lat": "x"}', "1"]),
    ({"allOf": [{"type": "integer", "minimum": 2}]}, {"2": 2}, ["1", "x"]),
    (POINTS, {'[{"lat":1}]': [{"lat": 1}]}, ["[]", "[1]"]),
    ({"anyOf": [{"type": "string"}, POINTS]}, {"x": "x", '[{"lat":1}]': [{"lat": 1}], "": ""},
     ["[]", "[1]"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, {"9": 9, "x9": "x9"},
     ["12", "-"]),
    ({"type": "array", "items": {"type": "string", "maxLength": 2}}, {'["ab", "<"]': None},
     ['["abc"]', '["<|call|>"]', '["<rfl:parameter name="]']),
    ({"type": "array", "items": {"type": "string"}}, {'["<b>x</b>"]': ["<b>x</b>"]},
     ['["<|call|>"]', '["<rfl:parameter name="]']),
    ({"type": "array"}, {'[1.5,{"a":[]}]': [1.5, {"a": []}]}, ["[16E60008]", '[{"a":1E400}]']),
    ({"type": "array", "items": {"type": "integer", "minimum": 0}}, {"[7]": [7]},
     [f"[{'9' * 5000}]"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
     {'{"a":1,"b":"x"}': {"a": 1, "b": "x"}},
     ['{"\\u0061":"x"}', '{"b":1E400}', '{"<|call|>":1}', '{"a<":1}']),
    ({"enum": [[True], [1]]}, {"[true]": [True], "[1]": [1]}, ["[false]"]),
    ({"type": "array", "items": {"type": "string", "pattern": ".*"}}, {'["x"]': ["x"]},
     ['["<|call|>"]', '["<rfl:parameter name="]', "[  \n1]"]),
])  # fmt: skip
def test_a_value_is_kept_to_its_schema(schema, right, wrong):
    function = tool("f", {"v": schema}, ["v"], **{"$defs": {"point": PAIR}}, strict=True)
    grammar = made(tools=[function])
    for text, value in right.items():
        if value is None and text.startswith('["ab"'):
            # Where lengths are counted in JSON, no text has the beginning of a mark in it.
            assert not allows(grammar, THOUGHT + call("f", argument("v", text)))
            text, value = '["ab", "é"]', ["ab", "é"]
        whole = THOUGHT + call("f", argument("v", text))
        assert allows(grammar, whole), text
        [(name, arguments)] = read("tags", whole, tools=[function])[2]
        assert (name, arguments) == ("f", {"v": value})
        assert type(arguments["v"]) is type(value)
        jsonschema.validate(arguments, function["parameters"])
    for text in wrong:
        assert not allows(grammar, THOUGHT + call("f", argument("v", text))), text


@pytest.mark.parametrize("parameters, right, wrong", [
    (None, [""], [argument("a", 1)]),
    ({}, [""], [argument("a", 1)]),
    ({"type": "object"}, ["", argument("a", 1) + argument("b", 2)], []),
    ({"type": "object", "additionalProperties": False}, [""], [argument("a", 1)]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
     ["", argument("a", 1), argument("a", 1) + argument("b", "x"), argument("b", "x")],
     [argument("a", "x"), argument("b", "x") + argument("a", "y")]),
    ({"type": "object", "properties": {"ab": {}}, "required": ["ab"],
      "additionalProperties": {"type": "integer"}},
     [argument("ab", "x") + argument(key, 5) for key in ("a", "abc", "b", "ba")],
     [argument("ab", "x") + argument("c", "y"), argument("ab", "x") + argument("ab", 1),
      argument("c", 1)]),
    ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
     [argument("a", "x") + argument("b", "y")], [argument("a", "x"), argument("b", "y")]),
    ({"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}]},
     [argument("a", 1), argument("b", "true")], ["", argument("a", "true"), argument("b", 1)]),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {
        "a": {"type": "integer"}}, "required": ["a"]}}}, [argument("a", 1)], [argument("a", "b")]),
])  # fmt: skip
def test_which_arguments_there_are_is_the_schemas_to_say(parameters, right, wrong):
    function = {"name": "f", "parameters": parameters, "strict": True}
    grammar = made(tools=[function])
    for text in right:
        whole = THOUGHT + call("f", text)
        assert allows(grammar, whole), text
        [(_, arguments)] = read("tags", whole, tools=[function])[2]
        jsonschema.validate(arguments, parameters or {"type": "object", "maxProperties": 0})
    for text in wrong:
        assert not allows(grammar, THOUGHT + call("f", text)), text


@pytest.mark.parametrize("schema, words", [
    ({"v": {"type": "string", "pattern": "<b>|<"}}, "pattern"),
    ({"v": {"type": "string", "pattern": "a(?=b)"}}, "pattern"),
    ({"v": {"enum": ["1", 1]}}, "listed value"),
    ({"v": {"enum": ["x<|call|>"]}}, "listed value"),
    ({"v": {"anyOf": [{"type": "string", "pattern": "^a$"}, {"enum": [1]}]}}, "pattern of texts"),
    ({"v": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"v": {"anyOf": [{"const": False}, {"type": "integer"}]}}, "true and false"),
])  # fmt: skip
def test_a_strict_tool_that_cannot_be_kept_to_is_refused(schema, words):
    strict = tool("f", schema, ["v"], strict=True)
    with pytest.raises(RequestError, match=words) as refused:
        made(tools=[strict], always=False)
    assert refused.value.param == "tools" and "'f'" in str(refused.value)


def test_a_tool_that_is_not_strict_is_kept_to_as_far_as_it_can_be():
    loose = tool(
        "f", {"v": {"type": "string", "pattern": "a(?=b)"}, "w": {"enum": ["1", 2]}}, ["v"]
    )
    grammar = made(tools=[loose])
    assert allows(grammar, THOUGHT + call("f", argument("v", "x") + argument("w", "2")))
    assert not allows(grammar, THOUGHT + call("f", argument("v", "x") + argument("w", "3")))


def test_thousands_of_listed_values_take_no_time_to_speak_of():
    values = [*range(4_000), *(f"s{i}" for i in range(4_000))]
    begun = time.perf_counter()
    made(tools=[tool("f", {"v": {"enum": values}}, ["v"])])
    assert time.perf_counter() - begun < 4


@pytest.mark.parametrize("name", ["get weather", "a<b", "", "x\ny", None, "é\u2028"])
def test_a_name_that_the_format_cannot_write_is_refused(name):
    with pytest.raises(RequestError, match="cannot be encoded in tool calls") as refused:
        made(tools=[{"name": name}])
    assert refused.value.param == "tools"


@pytest.mark.parametrize("key", ['a"b', "", "x<|call|>y"])
def test_a_key_that_the_format_cannot_write_is_refused_where_it_is_needed(key):
    for needed in (tool("f", {key: {}}, [key]), tool("f", {key: {}, "b": {}}, strict=True)):
        with pytest.raises(RequestError, match="cannot be encoded in tool calls"):
            made(tools=[needed])
    left_out = made(tools=[tool("f", {key: {}, "b": {}})])
    assert allows(left_out, THOUGHT + call("f", argument("b", 1)))


@pytest.mark.parametrize("text, right", [('"a\\nb"', True), ('""', True), ("a", False)])
def test_values_that_are_read_as_json_are_written_as_json(text, right):
    function = tool("f", {"v": {"type": "string"}}, ["v"], strict=True)
    whole = THOUGHT + call("f", argument("v", text))
    assert allows(made("values", tools=[function]), whole) == right
    if right:
        assert read("values", whole, tools=[function])[2] == [("f", {"v": eval(text)})]


def test_a_body_of_json_is_the_arguments():
    function = tool("f", {"v": {"type": "integer"}}, ["v"])
    grammar = made("body", tools=[function, {"name": "now"}])
    whole = THOUGHT + call("f", '{"v": 1}') + "<|call|>"
    assert allows(grammar, whole) and allows(grammar, THOUGHT + call("now", "{}"))
    assert read("body", whole, tools=[function])[2] == [("f", {"v": 1})]
    assert not allows(grammar, THOUGHT + call("f", '{"v": "x"}'))


@pytest.mark.parametrize("parameters", [{}, {"title": "t"}, {"type": ["object", "null"]}])
def test_a_body_of_json_is_never_another_value(parameters):
    grammar = made("body", tools=[{"name": "f", "parameters": parameters}])
    assert allows(grammar, THOUGHT + call("f", "{}"))
    assert not any(allows(grammar, THOUGHT + call("f", text)) for text in ("3", "null", "[]", '""'))


@pytest.mark.parametrize("name, text", [("values", argument("v", "{}")), ("body", '{{"v": {}}}')])
def test_numbers_in_json_are_never_infinite(name, text):
    for schema in ({}, {"type": "number"}, {"type": "number", "minimum": 0}, {"type": "array"}):
        grammar = made(name, tools=[tool("f", {"v": schema}, ["v"])], choice="required")
        for value, right in (("[1.5]", True), ("1.5", True), ("[1E400]", False), ("1E400", False)):
            fits = right and (not schema or value.startswith("[") == (schema["type"] == "array"))
            whole = THOUGHT + call("f", text.format(value))
            assert allows(grammar, whole) == fits, (schema, value)


def test_blanks_do_not_count_where_values_are_stripped():
    function = tool(
        "f", {"v": {"type": "string", "minLength": 2}, "w": {"enum": ["a", " b"]}}, ["v"]
    )
    grammar = made("bare", tools=[function])
    begin, end = "to=f<|channel|>analysis<|message|>", "</rfl:parameter>"

    def whole(key, text):
        return f'{THOUGHT}{begin}<rfl:parameter name="{key}">{text}{end}'

    assert allows(grammar, whole("v", "ab ")) and not matcher(grammar).accept_string(
        whole("v", "  ")
    )
    assert not allows(grammar, whole("v", "a "))


@pytest.mark.parametrize("depth", [70, 5000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="deeper") as refused:
        made(tools=[tool("f", {"v": schema})])
    assert refused.value.param == "tools"
