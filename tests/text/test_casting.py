import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limelight.text.casting import cast, cast_arguments, schema_types

UNION = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
TEXT_OR = ["string", "integer", "number", "boolean", "null", "array", "object"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" -3\n", {"type": "integer"}, -3),
        ("3.0", {"type": "integer"}, 3),
        ("9007199254740993.0", {"type": "integer"}, 9007199254740993),
        ("3.5", {"type": "integer"}, "3.5"),
        ("2026-01-15", {"type": "integer"}, "2026-01-15"),
        ("1e999999999", {"type": "integer"}, "1e999999999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("2", {"type": "number"}, 2),
        ("2.0", {"type": "number"}, 2.0),
        ("1e3", {"type": "number"}, 1000),
        ("12345678901234567890", {"type": "number"}, 12345678901234567890),
        ("nan", {"type": "number"}, "nan"),
        ("-inf", {"type": "number"}, "-inf"),
        ("True", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": "null"}, None),
        ("None", UNION, None),
        ("7", UNION, 7),
        ("7", {"type": "integer", "nullable": True}, 7),
        ("null", {"type": "integer", "nullable": True}, None),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        ("[1e999]", {"type": "array"}, "[1e999]"),
        ("[1]", {"type": "object"}, "[1]"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("1", {"type": ["boolean", "integer"]}, True),
        ("1", {"type": ["integer", "boolean"]}, 1),
        ("007", {"type": "string"}, "007"),
        ("3", {}, "3"),
        ("3", None, "3"),
        ("3", True, "3"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("true", {"const": True}, True),
    ],
)
def test_a_text_becomes_what_its_type_says_or_stays(text, schema, value):
    result = cast(text, schema)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-0.5", -0.5), ("true", True), ("null", None), ("[1, 2]", [1, 2]),
        (" 12", " 12"), ("12\n", "12\n"), ("007", "007"), ("+5", "+5"), ("True", "True"),
        ("None", "None"), ("1_000", "1_000"), ("NaN", "NaN"), ("0.10000000000000000000001",) * 2,
        ('"12"', '"12"'), ("", ""), ("1e999", "1e999"),
    ],
)  # fmt: skip
def test_where_a_string_may_be_only_exact_json_becomes_another_type(text, value):
    result = cast(text, {"type": TEXT_OR})
    assert result == value and type(result) is type(value)


def test_what_is_json_of_a_type_that_is_not_listed_stays_a_string():
    assert cast("12", {"type": ["string", "boolean"]}) == "12"
    assert cast("null", {"type": ["string", "integer"]}) == "null"
    assert cast("true", {"type": ["string", "integer"]}) == "true"
    assert cast("1.0", {"type": ["string", "integer"]}) == "1.0"


@settings(deadline=None)
@given(st.text())
def test_no_text_is_lost_where_a_string_may_be(text):
    value = cast(text, {"type": TEXT_OR})
    assert value == text or value == json.loads(text)


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False,
       allow_infinity=False), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))  # fmt: skip
def test_the_json_of_a_value_becomes_the_value(value):
    result = cast(json.dumps(value), {"type": TEXT_OR})
    assert result == value and type(result) is type(value)


def test_types_are_read_through_unions_and_local_references():
    root = {
        "$defs": {
            "count": {"type": "integer"},
            "a/b": {"allOf": [{"$ref": "#/$defs/count"}]},
            "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "array"}]},
        }
    }
    union = {"oneOf": [{"$ref": "#/$defs/a~1b"}, {"type": ["null", "integer"]}]}
    assert schema_types(union, root) == ["integer", "null"]
    assert schema_types({"$ref": "#/$defs/circle"}, root) == ["array"]
    assert schema_types({"$ref": "https://example.com/a"}, root) == []
    assert schema_types({"$ref": "#/$defs/none"}, root) == []


def test_a_schema_that_refers_to_itself_everywhere_is_read_in_no_time():
    root = {"anyOf": [{"$ref": "#"} for _ in range(100)], "oneOf": [{"$ref": "#"}] * 100}
    assert schema_types({"anyOf": [{"$ref": "#"}] * 100}, root) == []


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "$defs": {"n": {"type": "integer"}},
            "properties": {
                "n": {"$ref": "#/$defs/n"},
                "text": {"type": ["string", "integer"]},
                "list": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}


def test_arguments_are_cast_by_the_properties_of_the_tool():
    given = {"n": "3", "text": "4", "other": "5", "list": ["1"]}
    assert cast_arguments(given, TOOL) == {"n": 3, "text": 4, "other": "5", "list": ["1"]}
    assert cast_arguments(given, TOOL["function"]) == cast_arguments(given, TOOL)


def test_arguments_that_came_as_json_keep_the_strings_that_the_schema_allows():
    given = {"n": "3", "text": "4", "list": '["1"]'}
    assert cast_arguments(given, TOOL, decoded=True) == {"n": 3, "text": "4", "list": ["1"]}


def test_each_value_of_a_parameter_given_several_times_is_cast():
    assert cast_arguments({"n": ["1", "2", "x"]}, TOOL) == {"n": [1, 2, "x"]}


@pytest.mark.parametrize(
    "tool", [None, {}, {"function": None}, {"function": {"parameters": []}},
             {"function": {"parameters": {"properties": 3}}}]
)  # fmt: skip
def test_without_a_schema_arguments_stay_as_they_are(tool):
    assert cast_arguments({"n": "3"}, tool) == {"n": "3"}


@pytest.mark.parametrize(
    "text, kind",
    [("1_0", "integer"), ("\u0663", "integer"), ("1_0.5", "number"), ("1e400", "integer")],
)
def test_what_only_python_reads_as_a_number_stays_text(text, kind):
    assert cast(text, {"type": kind}) == text


def test_a_list_with_a_number_that_no_json_has_stays_text():
    assert cast("[1e999]", {"type": ["string", "array"]}) == "[1e999]"
