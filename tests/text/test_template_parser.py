import json
import logging
import time

import pytest
import regex
from response_templates import CUTS, parse, parser, pieces, template

from limelight.text.parsers import Said


def beam_call(name, *parameters, end="<|call|>"):
    body = "".join(f'<rfl:parameter name="{k}">\n{v}\n</rfl:parameter>' for k, v in parameters)
    return f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{body}{end}"


THOUGHT = "<|channel|>analysis<|message|>need it<|end|><|start|>assistant"
OSLO = beam_call("get_weather", ("city", "Oslo"))
CASES = {
    "json call": ("implicit", "<|bot|>\n<think>",
        'plan\n</think>\nHi <call>{"name":"add","arguments":{"a":"2"}}</call><|eot|>',
        ("plan\n", "\nHi ", [("add", {"a": 2})])),
    "almost an opener": ("implicit", None, "Hello <b> <think>q</think>", ("q", "Hello <b> ", [])),
    "lines": ("lines", "<bot v2>",
        "[[t]]hm[[/t]] junk[[do move]]x=1\ny = two\nnoise\n[[/do]][[a]] done [[/a]]",
        ("hm", " done ", [("move", {"x": 1, "y": "two"})])),
    "prefilled answer": ("tags", "<|start|>assistant<|channel|>final<|message|>Once upon",
        " a time<|end|>", ("", " a time", [])),
    "whole message": ("tags", None, THOUGHT + OSLO,
        ("need it", "", [("get_weather", {"city": "Oslo"})])),
    "without its closer": ("tags", None, THOUGHT + OSLO.removesuffix("<|call|>"),
        ("need it", "", [("get_weather", {"city": "Oslo"})])),
    "two calls": ("tags", None,
        beam_call("get_weather", ("city", "Oslo"), ("days", "3"), end="<|end|><|start|>assistant")
        + beam_call("now"),
        ("", "", [("get_weather", {"city": "Oslo", "days": 3}), ("now", {})])),
    "open thinking": ("tags", "<|start|>assistant<|channel|>analysis<|message|>well",
        ", then<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        (", then", "Hi", [])),
    "end tag missed": ("tags", None, OSLO.replace("\n</rfl:parameter>",
        '<rfl:parameter name="days">\ntwo\n\n</rfl:parameter>'),
        ("", "", [("get_weather", {"city": "Oslo", "days": "two\n"})])),
    "open call": ("tags", "<|start|>assistant" + OSLO.partition("slo")[0], OSLO.partition("O")[2],
        ("", "", [("get_weather", {"city": "Oslo"})])),
    "half an opener in the prompt": ("implicit", "<|bot|>\nSo<th", "ink>q</think>a",
        ("q", "a", [])),
    "no opener after all": ("implicit", "<|bot|>\nSo<th", "at>", ("", "at>", [])),
    "closed thinking": ("implicit", "<|bot|>\n<think>\n</think>", "\nHi", ("", "\nHi", [])),
    "earlier turns": ("implicit", "<|bot|>\n<think>a<|user|><|bot|>\n", "Hi", ("", "Hi", [])),
    "no anchor": ("implicit", "a <think>b", "c</think>d", ("c", "d", [])),
    "openers in bodies": ("implicit", None, "<think>a<think><call>b</think>c</think>",
        ("a<think><call>b", "c</think>", [])),
    "content after the end": ("implicit", None, "a<|eot|>b<think>c", ("c", "ab", [])),
    "bad json": ("implicit", None, 'a<call>{"name":</call>b<call>{"name": "now"}</call>c',
        ("", "abc", [("now", {})])),
    "not a number": ("implicit", None, '<call>{"name": "add", "arguments": {"a": NaN}}</call>',
        ("", "", [])),
    "infinity": ("implicit", None, '<call>{"name": "add", "arguments": {"c": 1e999}}</call>',
        ("", "", [])),
    "arguments as text": ("implicit", None,
        '<call>{"name": "add", "arguments": "{\\"a\\": \\"1\\", \\"b\\": \\"2\\"}"}</call>',
        ("", "", [("add", {"a": 1, "b": "2"})])),
    "arguments of another kind": ("implicit", None,
        '<call>{"name": "add", "arguments": "[]"}</call><call>{"name": "add", "arguments": 3}'
        '</call><call>{"name": "add", "arguments": null}</call>', ("", "", [("add", {})])),
    "no name": ("implicit", None, '<call>{"name": ""}</call><call>[3]</call><call>{"name": '
        '"\\ud800"}</call><call>{"name": "a\\nb"}</call>', ("", "", [])),
    "a date for a number": ("tags", None, beam_call("get_weather", ("days", "2026-01-15")),
        ("", "", [("get_weather", {"days": "2026-01-15"})])),
    "an unknown tool": ("tags", None, beam_call("fly", ("to", "3")),
        ("", "", [("fly", {"to": "3"})])),
    "blanks and markup in a value": ("tags", None, beam_call("get_weather",
        ("city", ' <b>"Oslo"</b>\n\\n '), ("exclude", '["é", 1]')),
        ("", "", [("get_weather", {"city": ' <b>"Oslo"</b>\n\\n ', "exclude": ["é", 1]})])),
    "stopped before the next message": ("tags", None,
        "<|channel|>analysis<|message|>need it<|end|>", ("need it", "", [])),
    "stopped inside the next anchor": ("tags", None,
        "<|channel|>analysis<|message|>need it<|end|><|start|>ass", ("need it", "", [])),
    "only a part of a mark": ("tags", None, "<|channel|>analysis<|message|>need it<|en",
        ("need it<|en", "", [])),
    "nothing": ("tags", None, "", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_answers_are_taken_apart_however_they_are_cut(case, cut):
    name, prompt, text, expected = CASES[case]
    assert parse(name, text, prompt, cut=cut) == expected


@pytest.mark.parametrize("case", CASES)
def test_a_call_comes_with_a_name_once_and_plain_text_at_once(case):
    name, prompt, text, expected = CASES[case]
    said = pieces(parser(name, prompt), text, 1)
    assert all(piece.name for part in said for piece in part.calls)


def test_text_is_held_back_only_while_it_may_be_a_mark():
    parsed = parser("implicit")
    given = [parsed.feed(text, 0) for text in ("He", "llo <", "b> <thi", "nk>q</th", "ink>", "x<")]
    assert [said.content for said in given] == ["He", "llo ", "<b> ", "", "", "x"]
    assert [said.reasoning for said in given] == ["", "", "", "q", "", ""]
    assert parsed.finish("stop") == Said(content="<")


def test_a_mark_that_may_become_longer_is_waited_for():
    parsed = parser("lines")
    assert parsed.feed("[[t]]hm[[/t]]", 0).reasoning == "hm"
    assert parsed.feed(" ", 0) == Said() and parsed.feed("[[a]]x", 0).content == "x"


def test_a_regex_at_the_end_of_the_text_waits_for_one_more_character():
    parsed = parser("tags", calls=False)
    opener = OSLO[: OSLO.index("<rfl")]
    assert parsed.feed(opener, 0) == Said() and parsed.feed("x", 0).content == opener + "x"


def test_a_call_comes_as_soon_as_its_closer_is_there():
    parsed = parser("tags")
    [call] = parsed.feed(OSLO, 0).calls
    assert (call.index, call.name, call.arguments) == (0, "get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_a_call_that_is_cut_short_is_dropped(cut, reason):
    for end in range(len(OSLO) - len("<|call|>") + 1):
        text = OSLO.replace("<|call|>", "<|end|><|start|>assistant") + OSLO[:end]
        expected = [("get_weather", {"city": "Oslo"})]
        assert parse("tags", text, cut=cut, reason=reason) == ("", "", expected)


@pytest.mark.parametrize("cut", CUTS)
def test_a_call_cut_between_its_end_and_the_next_message_is_whole(cut):
    text = OSLO.replace("<|call|>", "<|end|><|st")
    expected = "", "", [("get_weather", {"city": "Oslo"})]
    assert parse("tags", text, cut=cut, reason="length") == expected


@pytest.mark.parametrize("cut", CUTS)
def test_without_a_reasoning_parser_thinking_is_content_without_its_marks(cut):
    text = "<think>a</think>b<call>{}</call>"
    assert parse("implicit", text, cut=cut, reasoning=False) == ("", "ab", [])
    said = pieces(parser("implicit", reasoning=False), text, cut)
    assert sum(part.num_reasoning for part in said) == 0


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("off", [{"calls": False}, {"tools": None}, {"tools": []}])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_without_tools_calls_are_content_as_they_are_written(cut, off, reason):
    whole = THOUGHT + OSLO
    assert parse("tags", whole, cut=cut, reason=reason, **off) == ("need it", OSLO, [])
    for text in ("a<call>{</call>b", "a<call>{", "a<call>{</ca"):
        assert parse("implicit", text, cut=cut, reason=reason, **off) == ("", text, [])


@pytest.mark.parametrize("cut", CUTS)
def test_of_what_the_prompt_has_nothing_is_given_again(cut):
    prompt = '<|bot|>\na<call>{"name": "now"}</call><call>{"name": '
    text = '"now"}</call>b'
    assert parse("implicit", text, prompt, cut=cut) == ("", "b", [("now", {})])
    assert parse("implicit", text, prompt, cut=cut, calls=False) == ("", text, [])


def test_a_malformed_call_is_told_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        parse("implicit", "<call>{</call>")
    assert "dropping a malformed call" in caplog.text


def test_deep_nesting_drops_the_call_and_no_more():
    deep = '<call>{"name": "add", "arguments": ' + '{"a":' * 50_000 + "</call>b"
    assert parse("implicit", deep) == ("", "b", [])
    text = json.dumps("[" * 50_000)
    deep = f'<call>{{"name": "add", "arguments": {text}}}</call>b'
    assert parse("implicit", deep) == ("", "b", [])


def test_half_a_surrogate_pair_in_arguments_stays_an_escape():
    text = '<call>{"name": "add", "arguments": {"b": "\\ud800é"}}</call>'
    [call] = parser("implicit").feed(text, 0).calls
    assert call.arguments == '{"b": "\\ud800\\u00e9"}'
    [call] = parser("implicit").feed(text.replace("\\ud800", ""), 0).calls
    assert call.arguments == '{"b": "é"}'


def test_each_call_of_a_list_counts():
    made = template({
        "start_anchor": "^",
        "fields": {"tool_calls": {
            "open": "[calls]", "close": "[/calls]", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{n}", "arguments": "{a}"}},
        }},
    })  # fmt: skip
    text = '[calls][{"n":"add","a":{"a":"1"}},{"n":3,"a":{}},{"n":"now","a":{}}][/calls]'
    assert parse(made, text, "^")[2] == [("add", {"a": 1}), ("now", {})]


def counted(name, prompt, tokens):
    parsed = parser(name, prompt)
    said = [parsed.feed(text, 0) for text in tokens] + [parsed.finish("stop")]
    return sum(part.num_reasoning for part in said)


@pytest.mark.parametrize(
    ("prompt", "tokens", "num"),
    [
        ("<|bot|>\n", ["<think>", "a", "b", "</think>", "c"], 2),
        ("<|bot|>\n<think>", ["a", "b", "</think>", "c"], 2),
        ("<|bot|>\n", ["x<th", "ink>a", "b</thi", "nk>c"], 2),
        ("<|bot|>\n", ["<think>a</think>b"], 1),
        ("<|bot|>\n", ["<think>", "</think>", "b"], 0),
        ("<|bot|>\n<think>", ["", "", "é", "b", "</think>"], 4),
        ("<|bot|>\n<think>", ["a", "</think>", "", "é"], 1),
        ("<|bot|>\n<think>", ["a", "<", "/", "th", "at"], 5),
        ("<|bot|>\n<think>", ["a", "<", "/"], 3),
        ("<|bot|>\n<think>x<", ["/", "think>", "a"], 0),
        ("<|bot|>\n<think>x<", ["/", "a"], 2),
    ],
)
def test_tokens_with_a_part_of_the_thinking_are_counted(prompt, tokens, num):
    assert counted("implicit", prompt, tokens) == num


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("content", "thinking", "text", "expected"),
    [
        ({"open": "ab"}, {"open": "abc"}, "abcx!", ("x", "")),
        ({"open": "ab"}, {"open": "abc"}, "abx!", ("", "x")),
        ({"open": "bcd"}, {"open": "ab"}, "abcdx!", ("cdx", "")),
        ({"open": "a"}, {"open_pattern": "a"}, "ax!", ("", "x")),
        ({"open_pattern": "a+"}, {"open": "aa"}, "aaax!", ("", "x")),
        ({"open_pattern": "a+"}, {"open": "aa"}, "aax!", ("", "x")),
        ({"open_pattern": "ab?"}, {"open": "a"}, "ax!", ("", "x")),
        ({"open_pattern": "a(?!bc)"}, {"open": "q"}, "abd!abc", ("", "bd")),
        ({"open_pattern": "a(?=bc)"}, {"open": "q"}, "abd!abc", ("", "bc")),
        ({"open_pattern": "(?<=b)a"}, {"open": "q"}, "axbay!", ("", "y")),
        ({"open_pattern": "\\ba\\b"}, {"open": "q"}, "ab a ay!", ("", " ay")),
        ({"open_pattern": "a\\B"}, {"open": "q"}, "a ab!", ("", "b")),
        ({"open_pattern": "a", "close_pattern": "$", "close": None}, {"open": "q"}, "ab!c\n",
         ("", "b!c")),
        ({"open_pattern": "(?m)^a"}, {"open": "q"}, "ba\nab!", ("", "b")),
        ({"open_pattern": "a", "close_pattern": "(?=b)", "close": None}, {"open": "b"}, "axby!",
         ("y", "x")),
    ],
)  # fmt: skip
def test_the_earliest_mark_counts_then_the_longest_then_by_name(
    content, thinking, text, expected, cut
):
    content = {key: value for key, value in ({"close": "!"} | content).items() if value}
    made = template({
        "start_anchor": "^",
        "fields": {"content": content, "thinking": {"close": "!"} | thinking},
    })  # fmt: skip
    assert parse(made, text, "^", cut=cut)[:2] == expected


@pytest.mark.parametrize("cut", CUTS)
def test_opening_goes_before_closing_the_text_outside(cut):
    made = template(
        {"start_anchor": "^", "fields": {"content": {"close": "ab"}, "thinking": {"open": "ab"}}}
    )
    assert parse(made, "xaby", "^", cut=cut)[:2] == ("y", "x")


def test_a_long_answer_is_let_go_of_as_it_is_read():
    parsed = parser("implicit")
    said = [parsed.feed("word <" + "x" * 90, 0) for _ in range(1000)]
    assert len(parsed._text) < 10_000
    assert "".join(part.content for part in said) == ("word <" + "x" * 90) * 1000


@pytest.mark.parametrize("pattern", ["(?<=^x.*)a", "\\Aab", "\\bab"])
def test_a_pattern_that_looks_back_sees_all_that_it_can(pattern):
    made = template({"start_anchor": "^", "fields": {"thinking": {"open_pattern": pattern},
                                                     "content": {}}})  # fmt: skip
    text = "x" + "y " * 5000 + "ab"
    found = regex.search(pattern, text)
    expected = (text[found.end() :], text[: found.start()]) if found else ("", text)
    for cut in (1, 7, 10**6):
        assert parse(made, text, "^", cut=cut)[:2] == expected


def test_strings_that_were_written_as_json_stay_strings():
    made = template({
        "start_anchor": "^",
        "fields": {"tool_calls": {
            "open_pattern": "\\[(?P<name>\\w+)\\]", "close": "!", "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "json"}},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        }},
    })  # fmt: skip
    assert parse(made, '[add]a="1"\nb="2"!', "^")[2] == [("add", {"a": 1, "b": "2"})]


def test_a_long_prompt_of_many_marks_is_read_in_little_time():
    marks = "<|channel|>final<|message|>x<|end|>" * 8000
    start = time.process_time()
    parser("tags", "<|start|>assistant" + marks)
    assert time.process_time() - start < 5


def test_what_begins_like_a_call_for_too_long_is_text_again():
    found = parser("tags", "<|start|>assistant")
    start = time.process_time()
    for _ in range(5000):
        found.feed("abcd" if _ else " to=", 0)
    assert time.process_time() - start < 5
