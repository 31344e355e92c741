import json
import time

import pytest
from grammar_walks import allows_text

from limelight.text.formats import json_value
from limelight.text.json_schema import prepared
from limelight.types import RequestError

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"n": INTEGER, "of": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["n"],
}


def taken(schema, texts, *, strict=True):
    """Which of the texts the schema's grammar allows."""
    format = json_value(prepared(schema, strict=strict, param="p"), ())
    return [text for text in texts if allows_text(format, text)]


def of(kind, **keywords):
    return {"type": kind, **keywords}


HELD = [
    ({"$ref": "#/$defs/x", "minimum": 4, "$defs": {"x": INTEGER}}, ["5"], ["3", '"a"']),
    ({"$ref": "#/definitions/a%20b", "definitions": {"a b": INTEGER}}, ["5"], ['"a"']),
    ({"allOf": [INTEGER], "minimum": 3, "title": "t"}, ["3"], ["2", '"a"']),
    (
        {"allOf": [of("object", properties={"a": INTEGER}, required=["a"]),
                   {"properties": {"b": STRING}, "required": ["b"]}]},
        ['{"a":1,"b":"x"}'], ['{"a":1}', '{"b":"x"}'],
    ),
    (TREE, ['{"n":1,"of":[{"n":2}]}'], ['{"n":1,"of":[{}]}', "{}"]),
    ({"enum": [1, "a", None, 1.5]}, ["1", '"a"', "null", "1.5"], ["2", '"b"']),
    (of("string", enum=[1, "a"]), ['"a"'], ["1"]),
    ({"enum": [5, 10, "x"], "minimum": 7, "type": "integer"}, ["10"], ["5", '"x"']),
    ({"properties": {"a": INTEGER}}, ['{"a":1}', "{}"], ['{"a":"x"}', '{"b":1}', "1"]),
    (of("object", required=["b"], properties={"a": INTEGER}), ['{"b":"x"}'], ["{}", '{"a":1}']),
    (of("object", properties={"a": INTEGER}, additionalProperties=STRING),
     ['{"a":1,"z":"q"}', "{}"], ['{"z":1}', '{"a":"q"}', '{"\\u0061":"q"}']),
    (of("object", properties={"a": INTEGER, 'b"c': {}, "b\\d": {}}, additionalProperties=True),
     ['{"a":1,"bc":"q"}', '{"b\\"c":1}', '{"\xe9b":{"x":[]}}'], ['{"\\u0061":"q"}', '{"b"cd":1}',
     '{"b\\\\c":1}']),
    (of("object", additionalProperties=INTEGER), ['{"x":1}'], ['{"x":"a"}']),
    (of("object", patternProperties={"^x": INTEGER}), ['{"xy":1}'], ['{"xy":"a"}', '{"a":1}']),
    (of("string", minLength=2, maxLength=3), ['"ab"', '"\xe9\xe9\xe9"'], ['"a"', '"abcd"']),
    (of("string", minLength=2), ['"ab"'], ['"a"']),
    (of("string", pattern="^[a-z]+$", maxLength=2), ['"ab"'], ['"abc"', '""']),
    (of("string", pattern="b"), ['"abc"', '"b"'], ['"a"']),
    (of("string", pattern="^a.c"), ['"abc"', '"abcd"'], ['"a"c"', '"a\\c"', '"xabc"']),
    (of("string", format="date"), ['"2024-12-31"', '"0001-01-01"'], ['"2024-13-01"', '"soon"',
     '"0000-10-10"']),
    (of("integer", exclusiveMinimum=2.5, maximum=5.5), ["3", "5"], ["2", "6"]),
    (of("integer", minimum=3, exclusiveMinimum=True), ["4"], ["3"]),
    (of("integer", minimum=3, maximum=10**400), ["4"], ["2"]),
    (of("number", minimum=0.5, exclusiveMaximum=2), ["0.5", "1.75"], ["0.4", "2"]),
    (of("integer", multipleOf=5), ["10", "-5"], ["11"]),
    ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["2", '"x"']),
    (of("array", items=INTEGER, minItems=1, maxItems=2), ["[1]", "[1,2]"], ["[]", '["x"]',
     "[1,2,3]"]),
    (of("array", items=[INTEGER, STRING], additionalItems=False), ['[1,"a"]'], ['["a"]',
     '[1,"a",2]']),
    (of("array", prefixItems=[INTEGER], items=STRING), ['[1,"a"]'], ['["a"]', "[1,2]"]),
    ({"anyOf": [INTEGER, of("null")], "title": "t"}, ["1", "null"], ['"a"']),
    ({"oneOf": [INTEGER, STRING]}, ["1", '"a"'], ["null"]),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ["{}"],
    ),
    (of("object", properties={"a": {}, "b": {}}, minProperties=2), ['{"a":1,"b":2}'], ['{"a":1}']),
    (True, ["1", '{"a":[null]}'], ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda v: json.dumps(v)[:70])
def test_a_strict_schema_is_enforced(schema, good, bad):
    assert taken(schema, good + bad) == good


UNHELD = [
    ("multipleOf", of("integer", multipleOf=5, minimum=1), "3"),
    ("multipleOf", of("number", multipleOf=0.5), "0.3"),
    ("uniqueItems", of("array", items=INTEGER, uniqueItems=True), "[1,1]"),
    ("contains", of("array", items=INTEGER, contains=INTEGER), "[]"),
    ("not", {"not": INTEGER}, "1"),
    ("if", {"if": INTEGER, "then": {"minimum": 3}}, "1"),
    ("dependentRequired", of("object", properties={"a": {}}, dependentRequired={"a": ["b"]}),
     '{"a":1}'),
    ("format 'phone'", of("string", format="phone"), '"x"'),
    ("length", of("string", pattern="^(ab|c)+$", maxLength=1), '"ab"'),
    ("pattern", of("string", pattern="(?=a)b"), '"x"'),
    ("pattern", of("string", pattern='^"$'), '"x"'),
    ("patternProperties", of("object", properties={"a": {}}, patternProperties={"b": {}}), "{}"),
    ("oneOf", {"oneOf": [INTEGER, of("number")]}, "1"),
    ("allOf", {"allOf": [of("string", pattern="^a"), of("string", pattern="b$")]}, '"a"'),
    ("ref", {"$ref": "http://example.com/s.json"}, "1"),
    ("maxLength", of("string", maxLength=10**9), '"a"'),
    ("minProperties", of("object", properties={"a": {}}, additionalProperties=True,
     minProperties=2), "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "schema", "text"), UNHELD, ids=lambda v: json.dumps(v)[:50])
def test_what_cannot_be_enforced_is_an_error_if_strict_and_left_out_otherwise(word, schema, text):
    nested = of("object", properties={"deep": schema}, required=["deep"])
    with pytest.raises(RequestError, match=word) as caught:
        prepared(nested, strict=True, param="response_format")
    assert caught.value.param == "response_format"
    assert "deep" in str(caught.value)
    assert taken(schema, [text], strict=False) == [text]


NOTHING = [
    False, of("integer", minimum=3, maximum=2), {"enum": []}, of("string", enum=[1]),
    {"allOf": [INTEGER, STRING]}, of("array", minItems=2, maxItems=1), {"anyOf": [False]},
    of("object", required=["a"], additionalProperties=False), of("string", minLength=2,
    maxLength=1),
    {"const": 1, "enum": [2]}, of("object", properties={"a": False}, required=["a"]),
]  # fmt: skip


@pytest.mark.parametrize("schema", NOTHING, ids=json.dumps)
@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_nothing_fulfils_is_an_error(schema, strict):
    with pytest.raises(RequestError):
        prepared(of("object", properties={"x": schema}, required=["x"]), strict=strict, param="p")


FAULTS = [
    3, None, [], "x", {"type": 3}, {"type": ["string", 3]}, {"properties": []}, {"required": "a"},
    {"required": [1]}, {"anyOf": []}, {"anyOf": {}}, {"allOf": 3}, {"enum": 3}, {"items": 3},
    {"prefixItems": {}}, {"pattern": 3}, {"minLength": -1}, {"minLength": True}, {"minimum": "3"},
    {"maxItems": 1.5}, {"minimum": float("nan")}, {"$ref": "#/$defs/none"}, {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"allOf": [{"$ref": "#"}]}, of("object", properties={"x": {"$ref": "#/x", "minimum": 1}}),
    of("object", properties={"x": {"allOf": [{"$ref": "#"}, {"title": "t"}]}}, minProperties=10),
    {"type": "strin"}, {"type": ["string", "strin"]},
    *(of("string", pattern=p) for p in ("[", "(a", "a)", "a|*b", "a\\", "(" * 30_000)),
]  # fmt: skip


@pytest.mark.parametrize("schema", FAULTS, ids=lambda schema: str(schema)[:50])
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_no_schema_is_an_error(schema, strict):
    with pytest.raises(RequestError) as caught:
        prepared(schema, strict=strict, param="p")
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    ("name", "known"), [("Str", "string"), ("float", "number"), ("Date", None)]
)
def test_types_of_other_languages_are_known_unless_strict(name, known):
    said = prepared({"type": name}, strict=False, param="p")
    assert said == ({} if known is None else {"type": known})
    with pytest.raises(RequestError, match="there is no type"):
        prepared({"type": name}, strict=True, param="p")


def nested(depth):
    schema = INTEGER
    for _ in range(depth):
        schema = of("array", items=schema)
    return schema


def wide(count):
    names = [f"s{i}" for i in range(count)]
    later = [*names[1:], names[0]]
    defs = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}", "minLength": i} for i in range(9)]}
        for name, other in zip(names, later, strict=True)
    }
    return {"$ref": "#/$defs/s0", "$defs": defs}


HOSTILE = [
    nested(70), nested(20_000), wide(30), {"enum": ["x" * 2_000_000]},
    of("object", properties={f"k{i}": {"anyOf": [INTEGER] * 50} for i in range(3_000)}),
    of("string", pattern="(" * 5_000 + ")" * 5_000), of("string", pattern="a{9999}" * 2_000),
    of("string", pattern=f"[{''.join(chr(0x4E00 + 2 * i) for i in range(9_000))}](?=a)"),
    {"allOf": [{"enum": [*range(50_000)]}, {"enum": [*range(50_000, 100_000)]}]},
    {"allOf": [{"type": [f"{one}{i}" for i in range(50_000)]} for one in "ab"]},
    {"oneOf": [of("object", properties={"k": {"const": i}}, required=["k"]) for i in range(4_000)]},
]  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_schema_is_refused_at_once(schema):
    begun = time.perf_counter()
    with pytest.raises(RequestError):
        prepared(schema, strict=True, param="p")
    assert time.perf_counter() - begun < 2


def test_texts_without_a_character_have_it_neither_in_values_nor_in_keys():
    schema = of("object", properties={"a": of("string", maxLength=5)}, additionalProperties=False)
    format = json_value(prepared(schema, strict=True, param="p", without=[(60, 60)]), ())
    assert allows_text(format, '{"a":"b>"}')
    assert not allows_text(format, '{"a":"b<"}')
    with pytest.raises(RequestError):
        prepared({"enum": ["<"]}, strict=True, param="p", without=[(60, 60)])


def test_keys_that_are_too_many_to_be_told_from_others_close_an_object():
    names = [f"{i:04}" * 40 for i in range(2_000)]
    schema = of("object", properties=dict.fromkeys(names, INTEGER), additionalProperties=INTEGER)
    assert prepared(schema, strict=False, param="p")["additionalProperties"] is False
    with pytest.raises(RequestError, match="too many characters"):
        prepared(schema, strict=True, param="p")
