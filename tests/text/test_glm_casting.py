import pytest

from limelight.text.glm_casting import Argument

# (schema, text, value)
CASTS = [
    ("string", "007", "007"),
    ("string", " null\n", " null\n"),
    ("number", "2.0", 2),
    ("number", "-1.5e3", -1500),
    ("number", "0.25", 0.25),
    ("number", "NaN", "NaN"),
    ("number", "1e999", "1e999"),
    ("float", "\n3\n", 3),
    ("integer", "3.0", 3),
    ("int", "+3", 3),
    ("integer", "3.5", "3.5"),
    ("integer", "three", "three"),
    ("integer", "1_000", "1_000"),
    ("integer", "9" * 5000, "9" * 5000),
    ("boolean", "True", True),
    ("bool", "0", False),
    ("boolean", "yes", "yes"),
    ("null", "None", None),
    (["string", "null"], "null", None),
    (["string", "null"], "None", "None"),
    (["string", "integer"], "12", 12),
    (["integer", "string"], "007", "007"),
    (["string", "integer"], " 12", " 12"),
    (["string", "number"], "1.10", "1.10"),
    (["string", "boolean"], "true", True),
    (["string", "boolean"], "1", "1"),
    (["integer", "boolean"], "1", 1),
    (["string", "object"], '{"a": 1}', {"a": 1}),
    (["string", "object"], ' {"a": 1}', ' {"a": 1}'),
    (["string", "array"], '{"a": 1}', '{"a": 1}'),
    ("array", " [1, 2] ", [1, 2]),
    ("dict", "{}", {}),
    ("object", "[1]", "[1]"),
    ("object", "{1}", "{1}"),
    ("object", '{"a": NaN}', '{"a": NaN}'),
    ("object", '{"a": 1e999}', '{"a": 1e999}'),
    ("object", r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
    ("array", "[" * 5000, "[" * 5000),
    ("array", "[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
    ("unheard", "12", "12"),
    ({"type": "array", "items": {"type": "integer"}}, '["1", 2, 3.0, "x"]', [1, 2, 3, "x"]),
    ({"type": "array", "items": {"type": ["string", "integer"]}}, '["1", 2]', ["1", 2]),
    ({"properties": {"n": {"type": "number"}, "s": {}}}, '{"n": "2.5", "s": "1"}',
     {"n": 2.5, "s": "1"}),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, '{"a": "true"}', {"a": True}),
    ({"type": "string", "nullable": True}, "null", None),
    ({"enum": [1, "auto"]}, "1", 1),
    ({"enum": [1, "1"]}, "1", "1"),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"const": 5}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
    ({"allOf": [{"$ref": "#/$defs/count"}]}, "12", 12),
    ({"$ref": "#/$defs/tree"}, '{"left": {"left": null, "n": "1"}}',
     {"left": {"left": None, "n": 1}}),
    ({"$ref": "#/$defs/nothing"}, "12", "12"),
    ({"$ref": "http://example.org/count"}, "12", "12"),
    ({"$ref": "#/$defs/loop"}, "12", "12"),
    ({}, "12", "12"),
    (True, "12", "12"),
]  # fmt: skip
DEFINITIONS = {
    "count": {"type": "integer"},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
    "tree": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
        },
    },
}


@pytest.mark.parametrize(("schema", "text", "value"), CASTS, ids=lambda value: str(value)[:30])
def test_an_argument_becomes_what_its_schema_asks_for(schema, text, value):
    if isinstance(schema, str | list):
        schema = {"type": schema}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    argument = Argument("a", parameters)
    cast = argument.cast(text)
    assert cast == value and type(cast) is type(value)
    assert cast == text or not argument.is_text
    assert Argument("other", parameters).cast("1") == "1"


@pytest.mark.parametrize(
    "parameters", [None, {}, True, [], {"properties": []}, {"type": 3}], ids=str
)
def test_without_properties_arguments_stay_texts(parameters):
    argument = Argument("a", parameters)
    assert argument.cast("1") == "1" and argument.is_text
