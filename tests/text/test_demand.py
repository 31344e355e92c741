import json
import subprocess
import sys

import pytest
from grammar_walks import allows, allows_text, flint

from limelight.text.demand import Demand, answer_format, has_lengths, not_in_json
from limelight.types import Constraint, RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def named(schema, **others):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **others}}


RESPONSE = [
    (named(SCHEMA), ['{"a": 1}'], ["{}", "x", '{"a":"x"}']),
    (named(SCHEMA, strict=True, description="d"), ['{"a":1}'], ["{}", '{"a":1,"b":2}']),
    ({"type": "json_object"}, ["{}", '{"b": [1]}'], ["[]", "1"]),
    (TAG, ["x"], ["y"]),
    (OLD_TAG, ['hi<f>{"a":1}</f>'], ["hi<f>x</f>"]),
]
OUTPUTS = [
    ({"json": SCHEMA}, ['{"a":1}'], ["{}"]),
    ({"json": json.dumps(SCHEMA)}, ['{"a":1}'], ["{}"]),
    ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a":1}'], ['{  "a":1}']),
    ({"json": SCHEMA, "regex": None}, ['{"a":1}', '{  "a":1}'], ["{}", '{   "a":1}']),
    ({"json_object": True}, ["{}"], ["[]"]),
    ({"regex": "a+b?"}, ["aab"], ["b", "abc", ""]),
    ({"regex": "^(x|y)$"}, ["x"], ["xy"]),
    ({"choice": ["yes", "no \"*'\n\\", "ye"]}, ["yes", "ye", "no \"*'\n\\"], ["y", "no", "yesno"]),
    ({"grammar": 'root ::= "a" | "b" root'}, ["bba"], ["b"]),
    ({"grammar": 'start: "a" | "b" start'}, ["bba"], ["b"]),
    ({"structural_tag": TAG}, ["x"], ["y"]),
    ({"structural_tag": json.dumps(TAG)}, ["x"], ["y"]),
]


@pytest.mark.parametrize(("given", "good", "bad"), RESPONSE, ids=str)
def test_a_response_format_is_enforced(given, good, bad):
    format = answer_format(given, None)
    assert [text for text in good + bad if allows_text(format, text)] == good


@pytest.mark.parametrize(("given", "good", "bad"), OUTPUTS, ids=str)
def test_structured_outputs_are_enforced(given, good, bad):
    format = answer_format(None, given)
    assert [text for text in good + bad if allows_text(format, text)] == good
    assert answer_format({"type": "text"}, given) == format


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_text_is_no_format(given):
    assert answer_format(given, None) is None


def test_only_a_structural_tag_of_the_request_is_told_as_its_own():
    assert Demand(content=answer_format(TAG, None)).has_own_tag
    assert not Demand().has_own_tag
    formats = [
        answer_format(None, given) for given, _, _ in OUTPUTS if "structural_tag" not in given
    ]
    assert not any(Demand(content=format).has_own_tag for format in formats)


def test_a_text_of_bounded_length_has_no_control_characters():
    tokenizer = flint()
    format = answer_format(None, {"json": {"type": "string", "maxLength": 9}})
    assert has_lengths(format)
    assert not has_lengths(answer_format(None, {"json": SCHEMA}))
    tag = json.dumps({"type": "structural_tag", "format": format})
    constraint = Constraint(tag=tag, marks=list(not_in_json(tokenizer)))
    for text, fits in {'"a b"': True, '"a\x0b"': False, '"a\tb"': False, '"a\n"': False}.items():
        assert allows(constraint, tokenizer.encode(text, add_special_tokens=False)) == fits


def deep():
    format = {"type": "any_text"}
    for _ in range(90):
        format = {"type": "optional", "content": format}
    return {"type": "structural_tag", "format": format}


BAD_FORMATS = [
    {}, "json_object", 3, [], {"type": "xml"}, {"type": []}, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "n"}}, {"type": "json_schema",
    "json_schema": []},
    named(SCHEMA, strict="yes"), named(SCHEMA, name=3), named(3), named({"not": {}}, strict=True),
    {"type": "structural_tag"}, {"type": "structural_tag", "format": {"type": "made_up"}}, deep(),
    {"type": "structural_tag", "structures": 3, "triggers": []},
    {"type": "structural_tag", "structures": [3], "triggers": []},
]  # fmt: skip
BAD_OUTPUTS = [
    {}, [], "x", {"json": None}, {"json": SCHEMA, "regex": "a"}, {"json": "{"},
    {"json": "[" * 100_000}, {"json": '{"enum": ["\\ud800"]}'}, {"json": '{"enum": [1e999, 1]}'},
    {"json": '{"default": NaN}'},
    {"json": 3}, {"json_object": 3}, {"regex": ""}, {"regex": 3}, {"regex": "(?=a)"},
    {"regex": "(a"},
    {"regex": "a{1,100000}"}, {"regex": "x" * 20_000}, {"choice": []}, {"choice": [""]},
    {"choice": "ab"}, {"choice": ["a", 1]}, {"choice": ["a" * 200_000]}, {"grammar": ""},
    {"grammar": " "}, {"grammar": 3}, {"grammar": "x" * 200_000}, {"made_up": 1},
    {"json": SCHEMA, "whitespace_pattern": " "}, {"regex": "a", "disable_any_whitespace": True},
    {"json": SCHEMA, "disable_any_whitespace": "yes"}, {"json": SCHEMA,
    "disable_additional_properties": True},
    {"structural_tag": "{"}, {"structural_tag": 3},
]  # fmt: skip


@pytest.mark.parametrize("given", BAD_FORMATS, ids=lambda v: str(v)[:50])
def test_a_wrong_response_format_is_an_error_that_names_it(given):
    with pytest.raises(RequestError) as caught:
        answer_format(given, None)
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("given", BAD_OUTPUTS, ids=lambda v: str(v)[:50])
def test_wrong_structured_outputs_are_an_error_that_names_them(given):
    with pytest.raises(RequestError) as caught:
        answer_format(None, given)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 600


def test_two_formats_are_an_error():
    with pytest.raises(RequestError, match="beside") as caught:
        answer_format({"type": "json_object"}, {"regex": "a"})
    assert caught.value.param == "structured_outputs"


def test_the_server_learns_what_is_demanded_without_torch():
    program = (
        "import sys, limelight.text.demand, limelight.text.glm_grammar\n"
        "assert not {'torch', 'xgrammar'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
