import json
from pathlib import Path

import pytest
import tokenizers
from glm47_answers import (
    CLOSED,
    MARKS,
    OPEN,
    OSLO,
    ROME,
    TAGS,
    TOOLS,
    WEATHER,
    encode,
    parse,
    said,
    typed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import limelight.nano
from limelight.text.glm47 import Glm47Parser
from limelight.text.parsers import CallPiece
from limelight.text.tokenizer import Tokenizer

FLINT = Path(limelight.nano.__path__[0]) / "flint-nano"
CUTS = [1, 2, 3, 7, 10_000]


@pytest.fixture(scope="module")
def flint():
    return Tokenizer.load(FLINT)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A vocabulary of bytes alone, in which marks are texts of many tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("letters")
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


GET_OSLO = ("get_weather", '{"city": "Oslo"}')
GET_ROME = ("get_weather", '{"city": "Rome"}')
CALL_NOW = ("now", "{}")
DAYS = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>{}</arg_value></tool_call>"
# name: (answer, options, reasoning, content, calls)
CASES = {
    "reasoning and content": ("hm \n</think>\n\nHi ", {}, "hm", "\n\nHi ", []),
    "no closer": ("hm </thin", {}, "hm </thin", "", []),
    "only blanks": (" \n", {}, "", "", []),
    "leading opener": ("<think>hm</think>Hi", {"prompt": "<|assistant|>"}, "hm", "Hi", []),
    "opener again": ("<think> hm</think>Hi", {}, " hm", "Hi", []),
    "stray closer": ("hm</think>a</think>b", {}, "hm", "ab", []),
    "thinks again": ("a</think>b <think>c\n</think>d", {}, "ac", "b d", []),
    "a call without arguments": ("x</think><tool_call>now</tool_call>", {}, "x", "", [CALL_NOW]),
    "blanks in a call": (
        "</think><tool_call>\nget_weather\n<arg_key> city </arg_key>\n "
        "<arg_value> Os\nlo </arg_value>\n</tool_call>",
        {}, "", "", [("get_weather", '{"city": " Os\\nlo "}')],
    ),
    "two arguments": (
        "t</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        {}, "t", "", [("get_weather", '{"city": "Oslo", "days": 3}')],
    ),
    "an argument twice": (
        OSLO.replace("</tool_call>", "<arg_key>city</arg_key><arg_value>Bonn</arg_value>")
        + "</tool_call>",
        {"prompt": CLOSED}, "", "", [("get_weather", '{"city": "Oslo", "city": "Bonn"}')],
    ),
    "an open value": (
        "</think>" + OSLO.replace("</arg_value>", ""), {}, "", "", [GET_OSLO],
    ),
    "a value that does not fit": (
        "</think>" + OSLO.replace("</tool_call>", DAYS.format("2026-01-15")[22:]),
        {}, "", "", [("get_weather", '{"city": "Oslo", "days": "2026-01-15"}')],
    ),
    "tags and marks in a value": (
        "</think>"
        + OSLO.replace("Oslo", "<arg_key><think>ä<|user|>\U0001f468</think><tool_call></a"),
        {}, "", "", [
            ("get_weather", '{"city": "<arg_key><think>ä\U0001f468</think><tool_call></a"}')
        ],
    ),
    "two calls": ("</think>\n" + OSLO + "\n" + ROME, {}, "", "", [GET_OSLO, GET_ROME]),
    "only the first call": (
        "</think>" + OSLO + ROME + "x", {"parallel": False}, "", "x", [GET_OSLO],
    ),
    "a call whose closer is missing before the next": (
        "</think>" + OSLO.removesuffix("</tool_call>") + "<tool_call>now" + ROME, {}, "", "",
        [GET_OSLO, CALL_NOW, GET_ROME],
    ),
    "a call whose closer is missing at the end": (
        "</think>" + OSLO.removesuffix("</tool_call>") + "\n", {}, "", "", [GET_OSLO],
    ),
    "content before a call": (
        "t</think>I will look.<tool_call>now</tool_call>", {}, "t", "I will look.", [CALL_NOW],
    ),
    "content around calls": (
        "t</think>A<tool_call>now</tool_call>B", {}, "t", "AB", [CALL_NOW],
    ),
    "blanks around calls": (
        "t</think> \n<tool_call>now</tool_call>\n A \n<tool_call>now</tool_call>\nB\n",
        {}, "t", "A \n\nB", [CALL_NOW, CALL_NOW],
    ),
    "thinking closed in the prompt": ("Hi", {"prompt": CLOSED}, "", "Hi", []),
    "a call, thinking closed in the prompt": (OSLO, {"prompt": CLOSED}, "", "", [GET_OSLO]),
    "thinking closed in an older turn": (
        "hm</think>Hi", {"prompt": CLOSED + "Yes<|user|>And?<|assistant|>"}, "hm", "Hi", [],
    ),
    "a closer in the question": (
        "<|assistant|>hm</think>Hi", {"prompt": "<|user|>what is </think>?"}, "hm", "Hi", [],
    ),
    "prefilled content": (" time", {"prompt": CLOSED + "Once upon"}, "", " time", []),
    "prefilled reasoning": (" so</think>Hi", {"prompt": OPEN + "Well, "}, " so", "Hi", []),
    "a prefilled call": (
        ">Oslo</arg_value></tool_call>",
        {"prompt": CLOSED + "Look: <tool_call>get_weather<arg_key>city</arg_key><arg_value"},
        "", "", [("get_weather", '{"city": "Oslo"}')],
    ),
    "thinking off": (
        "a</think>b<think>", {"thinking": False, "prompt": CLOSED}, "", "a</think>b<think>", [],
    ),
    "thinking off, prompt silent": (
        "Hi", {"thinking": False, "prompt": "<|assistant|>"}, "", "Hi", [],
    ),
    "thinking off, call": (OSLO, {"thinking": False, "prompt": CLOSED}, "", "", [GET_OSLO]),
    "thinking off, but opened": ("a</think>b", {"thinking": False, "prompt": OPEN}, "a", "b", []),
    "thinking on, but closed": ("Hi", {"thinking": True, "prompt": CLOSED}, "", "Hi", []),
    "a call ends reasoning": ("hm \n" + OSLO + "Hi", {}, "hm", "Hi", [GET_OSLO]),
    "a mark spoken of in reasoning": (
        "I use <tool_call> and </tool_call> tags.</think>Hi", {},
        "I use <tool_call> and </tool_call> tags.", "Hi", [],
    ),
    "a mark at the end of reasoning": (
        "I write <tool_call></think>Hi", {}, "I write <tool_call>", "Hi", [],
    ),
    "half a call in reasoning": (
        "So: " + OSLO.removesuffix("</arg_value></tool_call>") + "</think>Hi", {},
        "So: " + OSLO.removesuffix("</arg_value></tool_call>"), "Hi", [],
    ),
    "an unknown name in reasoning": (
        "So <tool_call>name</tool_call> it is.</think>Hi", {},
        "So <tool_call>name</tool_call> it is.", "Hi", [],
    ),
    "an unknown call in reasoning": (
        "So " + OSLO.replace("get_weather", "get_time") + "it is.</think>Hi", {},
        "So it is.", "Hi", [],
    ),
    "a mark spoken of in content": (
        "</think>Use <tool_call> tags, <tool_call>.", {}, "",
        "Use <tool_call> tags, <tool_call>.", [],
    ),
    "a mark, then a call": (
        "</think>Use <tool_call><tool_call>now</tool_call>", {}, "", "Use <tool_call>", [CALL_NOW],
    ),
    "another form of call": (
        '</think><tool_call>{"name": "now"}</tool_call>', {}, "",
        '<tool_call>{"name": "now"}</tool_call>', [],
    ),
    "a closer alone": ("</think>a</tool_call>b", {}, "", "ab", []),
    "an unknown tool": (
        "</think>A " + OSLO.replace("get_weather", "get_time") + "B", {}, "", "A B", [],
    ),
    "the beginning of a tool's name": ("</think><tool_call>no</tool_call>", {}, "", "", []),
    "no tools": ("</think>A" + OSLO, {"tools": None}, "", "A", []),
    "calls are text": ("a</think>A " + OSLO + " B", {"calls": False}, "a", f"A {OSLO} B", []),
    "calls are text, after reasoning": ("a " + OSLO, {"calls": False}, "a", OSLO, []),
    "calls are text, cut": ("a<tool_call>now", {"calls": False, "reason": "length"},
                            "a<tool_call>now", "", []),
    "thoughts are text": ("a \n</think>\nb", {"reasoning": False}, "", "a \n\nb", []),
    "cut in a value": ("</think>A \n" + OSLO.removesuffix("lo</arg_value></tool_call>"),
                       {"reason": "length"}, "", "A", []),
    "cut before the closer": ("x</think><tool_call>now", {"reason": "length"}, "x", "", []),
    "aborted in a call": ("x</think>" + OSLO + ROME.removesuffix("</tool_call>"),
                          {"reason": "abort"}, "x", "", [GET_OSLO]),
    "stopped in a value": ("</think>A" + OSLO.removesuffix("</arg_value></tool_call>"),
                           {}, "", "A", []),
    "stopped in a tag": ("</think>A<tool_call>now<arg", {}, "", "A<tool_call>now<arg", []),
    "cut after a call": ("</think>" + OSLO + "and", {"reason": "length"}, "", "and", [GET_OSLO]),
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids="cut{}".format)
@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_taken_apart_however_it_is_cut(flint, letters, name, cut):
    answer, options, reasoning, content, calls = CASES[name]
    expected = (reasoning, content, calls)
    assert said(flint, answer, cut=cut, **options) == expected
    assert said(flint, answer, step=cut, **options) == expected
    assert said(letters, answer, step=cut, **options) == expected


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_that_is_typed_is_text(flint, mark):
    ids = encode(flint, "hm ") + typed(flint, mark) + encode(flint, " so</think>")
    ids += encode(flint, "A ") + typed(flint, mark) + encode(flint, " B")
    assert said(flint, ids) == (f"hm {mark} so", f"A {mark} B", [])


def test_a_closer_that_is_typed_in_a_value_is_part_of_it(flint):
    before, after = OSLO.split("Oslo")
    ids = encode(flint, before) + typed(flint, "</tool_call>") + encode(flint, after)
    call = ("get_weather", '{"city": "</tool_call>"}')
    assert said(flint, ids, prompt=CLOSED) == ("", "", [call])


def test_other_special_tokens_are_left_out(flint):
    end = flint.encode("<|endoftext|>", add_special_tokens=False)
    assert len(end) == 1
    ids = encode(flint, "a") + end + encode(flint, "b</think>A") + end + encode(flint, "B")
    assert said(flint, ids) == ("ab", "AB", [])


def test_half_a_character_before_a_mark_is_text(flint):
    half = [i for i in range(flint.vocab_size) if flint.token_bytes(i) == b"\xf0"]
    ids = half + encode(flint, "</think>") + half + encode(flint, OSLO)
    assert said(flint, ids) == ("\ufffd", "\ufffd", [GET_OSLO])


def test_content_is_sent_before_the_answer_ends(flint):
    parser = Glm47Parser(
        flint, prompt_token_ids=encode(flint, CLOSED), tools=TOOLS, reasoning=True, calls=True,
        thinking=None,
    )  # fmt: skip
    ids = encode(flint, "I am <tool_call> not a call", cut=1)
    sent = [parser.feed(flint.token_bytes(i).decode(), i).content for i in ids]
    assert "".join(sent) == "I am <tool_call> not a call"
    # What could be a call is held until a second word shows that it is none.
    assert sent[:4] == ["I", "", " a", "m"]
    assert "".join(sent[:11]) == "I am" and "".join(sent[:12]).startswith("I am <tool_call> not")


def sent(flint, answer, **options):
    """(what was written, pieces of calls) for each token of the answer that sends such pieces."""
    options = {"prompt": CLOSED, "reasoning": True, "calls": True, "thinking": None} | options
    parser = Glm47Parser(
        flint, prompt_token_ids=encode(flint, options.pop("prompt")), tools=TOOLS, **options
    )
    fed, written = [], ""
    for i in encode(flint, answer, cut=1):
        text = flint.token_bytes(i).decode()
        written += text
        if calls := parser.feed(text, i).calls:
            assert len(calls) == 1, "the pieces of one token are joined"
            fed.append((written, calls[0]))
            written = ""
    return fed, parser.finish("length").calls


def test_a_call_is_sent_from_its_first_argument_on(flint):
    fed, rest = sent(flint, OSLO)
    assert fed == [
        ("<tool_call>get_weather<arg_key>", CallPiece(0, "get_weather")),
        ("city</arg_key><arg_value>", CallPiece(0, None, '{"city": "')),
        *((letter, CallPiece(0, None, letter)) for letter in "Oslo"),
        ("</arg_value>", CallPiece(0, None, '"')),
        ("</tool_call>", CallPiece(0, None, "}", ends=True)),
    ]
    assert rest == []


def test_a_text_is_sent_as_json_and_what_may_be_its_tag_is_held(flint):
    fed, _ = sent(flint, OSLO.replace("Oslo", 'a"\n</b'))
    pieces = [(written, piece.arguments) for written, piece in fed[2:-2]]
    assert pieces == [("a", "a"), ('"', '\\"'), ("\n", "\\n"), ("</b", "</b")]


def test_a_value_that_is_no_text_is_sent_when_it_closes(flint):
    fed, rest = sent(flint, DAYS.format("12"))
    assert [(written, piece.arguments) for written, piece in fed[1:]] == [
        ("days</arg_key><arg_value>", '{"days": '), ("12</arg_value>", "12"), ("</tool_call>", "}"),
    ]  # fmt: skip
    fed, rest = sent(flint, DAYS.format("12").removesuffix("</arg_value></tool_call>"))
    assert fed[-1][1].arguments == '{"days": ' and rest == []


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("<tool_call>now", {}),
        (OSLO.replace("get_weather", "get_time"), {}),
        (OSLO, {"calls": False}),
        (OSLO.removesuffix("</tool_call>"), {"prompt": OPEN}),
    ],
    ids=["only a name", "an unknown tool", "calls are text", "in thoughts"],
)
def test_nothing_of_what_may_be_no_call_is_sent(flint, answer, options):
    assert sent(flint, answer, **options) == ([], [])


def test_of_several_calls_only_the_first_is_sent_where_one_is_wanted(flint):
    fed, rest = sent(flint, OSLO + ROME.removesuffix("</tool_call>"), parallel=False)
    assert {piece.index for _, piece in fed} == {0} and rest == []
    fed, rest = sent(flint, OSLO + ROME.removesuffix("</tool_call>"))
    assert {piece.index for _, piece in fed} == {0, 1} and rest == []


@pytest.mark.parametrize("reasoning", [True, False])
def test_tokens_of_thoughts_are_counted_without_their_marks(flint, letters, reasoning):
    for tokenizer in (flint, letters):
        thought = encode(tokenizer, "one < two\n")
        expected = len(thought) if reasoning else 0
        assert parse(tokenizer, "<think>one < two\n</think>Hi", reasoning=reasoning)[3] == expected
        assert parse(tokenizer, "one < two\n" + OSLO, reasoning=reasoning)[3] == expected
        spoken = "a <tool_call> b c"
        expected = len(encode(tokenizer, spoken)) if reasoning else 0
        assert parse(tokenizer, spoken + "</think>", reasoning=reasoning)[3] == expected


def test_tools_in_the_form_of_responses_are_known(flint):
    flat = [{"type": "function", **WEATHER["function"]}]
    assert said(flint, OSLO, prompt=CLOSED, tools=flat) == ("", "", [GET_OSLO])


def test_a_template_that_opens_thoughts_all_the_same_is_named_in_the_log(flint, caplog):
    said(flint, "a</think>b", thinking=False)
    assert "opens thoughts" in caplog.text


WRITTEN = st.sampled_from([*TAGS[:-1], *"now get_weather city Oslo < xy".split(), " ", "\n"])


@given(
    parts=st.lists(WRITTEN, max_size=14),
    reason=st.sampled_from(["stop", "length"]),
    calls=st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_nothing_that_a_model_writes_depends_on_its_tokens(flint, letters, parts, reason, calls):
    text = "".join(parts)
    options = {"reason": reason, "calls": calls}
    whole = said(flint, text, **options)
    assert said(flint, text, cut=1, **options) == whole
    assert said(letters, text, **options) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)
