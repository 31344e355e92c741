import copy
import json

import pytest
from response_templates import IMPLICIT, LINES, TAGS, template
from transformers.utils.chat_parsing.response_templates import load_response_template

from limelight.checkpoint import BUNDLED
from limelight.text.response_body import read_body, transformed
from limelight.text.response_template import ResponseTemplate

CALLS = "fields.tool_calls"


def changed(base, path, value):
    """A copy of a template with the value at `path` set, or removed for None."""
    made = copy.deepcopy(base)
    *above, last = path.split(".") if path else []
    at = made
    for key in above:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return made


@pytest.mark.parametrize("given", [IMPLICIT, LINES, TAGS])
def test_good_templates_are_good_for_the_library_too(given):
    assert set(template(given).fields) == set(load_response_template(given).fields)


def test_the_bundled_model_has_a_template_and_one_without_has_none(tmp_path):
    loaded = ResponseTemplate.load(BUNDLED / "beam-nano")
    assert set(loaded.fields) == {"thinking", "content", "tool_calls"} and loaded.implicit is None
    assert ResponseTemplate.load(BUNDLED / "flint-nano") is None
    assert ResponseTemplate.load(tmp_path) is None


def test_a_fault_names_the_file_and_the_key(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"response_template": changed(TAGS, "fields.content.open", "")}))
    with pytest.raises(ValueError, match="fields.content.open: must be a text") as caught:
        ResponseTemplate.load(tmp_path)
    assert str(caught.value).startswith(f"{path}: response_template.")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("version", 2, "version: only 1"),
        ("version", True, "version: only 1"),
        ("defaults", [], "defaults: must be an object"),
        ("defaults", {"name": "x"}, "defaults.name: unknown"),
        ("extra", 1, "extra: unknown"),
        ("fields", [], "fields: must be an object"),
        ("fields", {}, "fields: needs a field"),
        ("start_anchor", "", "start_anchor: must be a text or a list"),
        ("start_anchor", [], "start_anchor: must be a text or a list"),
        ("start_anchor", ["a", ""], "start_anchor: must be a text or a list"),
        ("start_anchor", 3, "start_anchor: must be a text or a list"),
        ("start_anchor", None, "needs start_anchor or start_anchor_pattern"),
        ("start_anchor_pattern", "a", "start_anchor_pattern: cannot stand beside start_anchor"),
        ("fields.other", {}, "fields.other: not one of the fields thinking"),
        ("fields.reasoning_content", {"open": "r"}, "reasoning_content: the same field"),
        ("fields.thinking", 3, "fields.thinking: must be an object"),
        ("fields.thinking.size", 3, "fields.thinking.size: unknown"),
        ("fields.thinking.open", None, "fields: only one may lack open and open_pattern"),
        ("fields.thinking.open_pattern", "a", "open_pattern: cannot stand beside open"),
        ("fields.thinking.close_pattern", "a", "close_pattern: cannot stand beside close"),
        ("fields.thinking.content", "json", "fields.thinking.content: must be text"),
        ("fields.thinking.transform", "{content}", "fields.thinking.transform: thinking cannot"),
        ("fields.content.optional", 1, "fields.content.optional: must be true or false"),
        ("fields.content.content_args", {"strip": 1}, "content_args.strip: must be true or false"),
        ("fields.content.content_args", {"trim": True}, "content_args.trim: unknown"),
        (f"{CALLS}.open", None, f"{CALLS}: needs open or open_pattern"),
        (f"{CALLS}.repeats", "yes", f"{CALLS}.repeats: must be true or false"),
        (f"{CALLS}.join", "", f"{CALLS}.join: calls are no texts"),
        (f"{CALLS}.join", 3, f"{CALLS}.join: must be a text"),
        (f"{CALLS}.content", "yaml", f"{CALLS}.content: must be one of text"),
        (f"{CALLS}.content", [], f"{CALLS}.content: must be one of text"),
        (f"{CALLS}.content_args", {"string_delims": [["a"]]}, "string_delims: must be a list of"),
        (f"{CALLS}.content_args", {"string_delims": "ab"}, "string_delims: must be a list of"),
        (f"{CALLS}.transform", "to {content}", f"{CALLS}.transform: 'to {{content}}' mixes"),
        (f"{CALLS}.transform", ["{name}"], f"{CALLS}.transform: {{name}} stands for nothing"),
        (f"{CALLS}.transform_each", 1, f"{CALLS}.transform_each: must be true or false"),
    ],
)
def test_each_fault_is_told_with_its_key(path, value, named):
    with pytest.raises(ValueError) as caught:
        template(changed(IMPLICIT, path, value))
    assert str(caught.value).startswith("test: response_template") and named in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("start_anchor_pattern", "(", "start_anchor_pattern: not a regex"),
        ("start_anchor_pattern", 3, "start_anchor_pattern: must be a regex"),
        ("fields.thinking.open_pattern", "x", "open_pattern: cannot stand beside open"),
        (f"{CALLS}.transform", None, f"{CALLS}.transform: needed for the named groups name"),
        (f"{CALLS}.open_pattern", "(?r)ab", f"{CALLS}.open_pattern: uses what cannot"),
        (f"{CALLS}.open_pattern", "a(?R)?", f"{CALLS}.open_pattern: uses what cannot"),
        (f"{CALLS}.content_args", {}, "content_args.tag_pattern: needed"),
        (f"{CALLS}.content_args.tag_pattern", "(?P<key>a)", "tag_pattern: needs the named groups"),
        (f"{CALLS}.content_args.value_parser", "json", "value_parser: must be an object"),
        (f"{CALLS}.content_args.value_parser", {"name": "x"}, "value_parser.name: must be one"),
        (f"{CALLS}.content_args.value_parser", {"kind": "x"}, "value_parser.kind: unknown"),
        (f"{CALLS}.content_args.value_parser", {"name": "json", "args": {"strip": True}},
         "value_parser.args.strip: unknown"),
    ],
)  # fmt: skip
def test_each_fault_of_a_pattern_is_told_with_its_key(path, value, named):
    with pytest.raises(ValueError) as caught:
        template(changed(TAGS, path, value))
    assert named in str(caught.value)


def test_other_faults_that_need_two_keys():
    for keys, named in (
        ({"join": ",", "repeats": False}, f"{CALLS}.join: needs repeats"),
        ({"transform": None, "transform_each": True}, f"{CALLS}.transform_each: needs a transform"),
    ):
        made = copy.deepcopy(IMPLICIT)
        made["fields"]["tool_calls"].update(keys)
        with pytest.raises(ValueError) as caught:
            template(made)
        assert named in str(caught.value)
    with pytest.raises(ValueError, match="kv_sep: must be a text that is not empty"):
        template(changed(LINES, f"{CALLS}.content_args.kv_sep", ""))


@pytest.mark.parametrize("given", [None, [], "x", 3])
def test_a_template_is_an_object(given):
    with pytest.raises(ValueError, match="test: response_template: must be an object"):
        template(given)


def test_the_other_name_of_thinking_is_taken_for_it():
    made = changed(IMPLICIT, "fields.thinking", None)
    made["fields"]["reasoning_content"] = {"open": "<think>", "close": "</think>"}
    assert "thinking" in template(made).fields


def test_a_message_begins_after_the_last_anchor():
    made = template(changed(IMPLICIT, "start_anchor", ["<|bot|>", "<|bot|>!", "<|bot|>"]))
    assert made.after_anchor("<|bot|>a<|user|>b<|bot|>!c") == "c"
    assert made.after_anchor("<|bot|>") == ""
    assert made.after_anchor("no anchor") == "no anchor"


@pytest.mark.parametrize(
    ("name", "args", "text", "value"),
    [
        ("text", {}, " a ", "a"),
        ("text", {"strip": False}, " a ", " a "),
        ("int", {}, " 3\n", 3),
        ("float", {}, "2.5", 2.5),
        ("bool", {}, " TRUE ", True),
        ("bool", {}, "yes", False),
        ("json", {}, ' {"a": [1, null]} ', {"a": [1, None]}),
        ("json", {"allow_non_json": True}, " nothing ", "nothing"),
        ("json", {"unquoted_keys": True}, '{a: "b, c: d", e : {f:1}}',
         {"a": "b, c: d", "e": {"f": 1}}),
        ("json", {"string_delims": [["<|", "|>"]]}, '{"a": <|say "hi"\n{b: 1}|>, "c": <||>}',
         {"a": 'say "hi"\n{b: 1}', "c": ""}),
        ("json", {"string_delims": [["<q>", "<q>"], ["'", "'"]], "unquoted_keys": True},
         "{a: <q>it's, b: 1<q>, c: 'x', d: \"'e'\"}",
         {"a": "it's, b: 1", "c": "x", "d": "'e'"}),
        ("kv-lines", {}, "a: 1\nnoise\n\nb:c:d\na:2", {"a": "2", "b": "c:d"}),
        ("kv-lines", {"line_sep": ";", "kv_sep": "=", "strip": False}, " a = 1;b=", {" a ": " 1",
                                                                               "b": ""}),
        ("kv-lines", {"value_parser": {"name": "json"}}, "a: [1]\nb: {}", {"a": [1], "b": {}}),
        ("xml-inline", {"tag_pattern": "<(?P<key>\\w+)>(?P<value>.*?)</>"},
         "<a> 1\n</> <b></><a>2</>", {"a": "2", "b": ""}),
        ("xml-inline", {"tag_pattern": "<(?P<key>\\w+)>(?P<value>.*?)</>", "merge_duplicates": True,
                        "value_parser": {"name": "int", "args": {}}}, "<a>1</><b>2</><a>3</>",
         {"a": [1, 3], "b": 2}),
    ],
)  # fmt: skip
def test_bodies_are_read_by_their_reader(name, args, text, value):
    assert read_body(text, name, args) == value


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("int", {}, "x"),
        ("float", {}, ""),
        ("json", {}, '{"a": NaN}'),
        ("json", {}, '{"a": 1'),
        ("json", {}, "[" * 100_000),
        ("xml-inline", {"tag_pattern": "<(?P<key>x)?(?P<value>y)>"}, "<y>"),
        ("xml-inline", {"tag_pattern": "(?P<key>(a+)+)(?P<value>b)"}, "a" * 5000),
    ],
)
def test_a_body_that_says_nothing_is_told(name, args, text):
    with pytest.raises(ValueError):
        read_body(text, name, args)


def test_placeholders_stand_for_values_and_reach_into_them():
    scope = {"content": {"args": {"x": [1]}, "id": None}, "name": "f"}
    made = transformed({"n": "{name}", "l": ["{content.args.x}", "{content.id}", 3, "{ }"]}, scope)
    assert made == {"n": "f", "l": [[1], None, 3, "{ }"]}
    for missing in ("{nobody}", "{content.y}", "{name.x}"):
        with pytest.raises(ValueError, match="nothing for the placeholder"):
            transformed([missing], scope)


def test_a_transform_of_each_needs_a_list_of_objects():
    made = changed(IMPLICIT, f"{CALLS}.transform_each", True)
    made = changed(made, f"{CALLS}.transform", {"function": {"name": "{n}", "arguments": "{a}"}})
    field = template(made).fields["tool_calls"]
    assert field.value('[{"n": "f", "a": {}}]', {}) == [
        {"function": {"name": "f", "arguments": {}}}
    ]
    for text in ("{}", "[3]"):
        with pytest.raises(ValueError, match="not a list of objects"):
            field.value(text, {})
