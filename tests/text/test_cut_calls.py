"""What the parsers say at the end of a call that was cut short: as much as was written of it."""

from pathlib import Path

import pytest

import limelight
from limelight.text.glm47 import Glm47Parser
from limelight.text.response_template import ResponseTemplate
from limelight.text.template_parser import TemplateParser
from limelight.text.tokenizer import Tokenizer

NANO = Path(limelight.__file__).parent / "nano"
TOOLS = [{"type": "function", "function": {"name": "now"}}]
TEMPLATE = {
    "start_anchor": "<bot>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[do (?P<name>\w+)\]", "close": "[/do]", "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip


def finished(parser, pieces: list[tuple[str, int]], reason: str):
    calls = []
    for text, token_id in pieces:
        calls += parser.feed(text, token_id).calls
    said = parser.finish(reason)
    return said, [*calls, *said.calls]


@pytest.mark.parametrize("cut", ["<tool_call>now<arg_key>a", "<tool_call>now", "<tool_call>"])
def test_glm47_keeps_what_was_written_of_a_call(cut):
    tokenizer = Tokenizer.load(NANO / "flint-nano")
    token_ids = tokenizer.encode("</think>Hi" + cut, add_special_tokens=False)
    pieces = [(tokenizer.decode([i], skip_special_tokens=False), i) for i in token_ids]
    parser = Glm47Parser(
        tokenizer, prompt_token_ids=[], tools=TOOLS, reasoning=True, calls=True, thinking=None
    )
    said, calls = finished(parser, pieces, "length")
    assert said.cut == cut and not any(call.ends for call in calls)


@pytest.mark.parametrize(
    ("begun", "text", "reason", "cut"),
    [
        ("", 'Hi[do now]{"a": ', "length", '[do now]{"a": '),
        ("", "Hi[do now]", "length", "[do now]"),
        ("", 'Hi[do now]{"a": 1}[/d', "length", '[do now]{"a": 1}[/d'),
        ('[do now]{"a', '": 1', "length", '": 1'),
        ('[do now]{"a": 1}', "[/do][do x]", "length", "[do x]"),
        ("", 'Hi[do now]{"a": 1}', "stop", ""),
        ("", 'Hi[do now]{"a": 1}[/do]', "length", ""),
        ("", "Hi", "length", ""),
    ],
)
def test_a_template_keeps_what_was_written_of_a_call(begun, text, reason, cut):
    template = ResponseTemplate.from_dict(TEMPLATE, source="test")
    for size in (1, 3, 100):
        parser = TemplateParser(
            template, prompt="<bot>" + begun, tools=TOOLS, reasoning=True, calls=True
        )
        pieces = [(text[at : at + size], at) for at in range(0, len(text), size)]
        said, _ = finished(parser, pieces, reason)
        assert said.cut == cut


def test_a_template_tells_one_call_where_only_one_may_be():
    template = ResponseTemplate.from_dict(TEMPLATE, source="test")
    text = "[do now]{}[/do][do now]{}[/do]"
    for parallel, number in ((True, 2), (False, 1)):
        parser = TemplateParser(
            template, prompt="<bot>", tools=TOOLS, reasoning=True, calls=True, parallel=parallel
        )
        _, calls = finished(parser, [(text, 0)], "stop")
        assert len(calls) == number
