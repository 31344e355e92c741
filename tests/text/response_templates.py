"""Three response templates for tests: implicit content and JSON; lines; and tags, as Beam's."""

import json

from limelight.text.response_template import ResponseTemplate
from limelight.text.template_parser import TemplateParser

IMPLICIT = {
    "start_anchor": "<|bot|>\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|eot|>"},
    },
}
LINES = {
    "start_anchor_pattern": "<bot(?: v\\d)?>",
    "fields": {
        "thinking": {"open": "[[t]]", "close": ["[[/t]]", "[[/t]] "]},
        "content": {"open": "[[a]]", "close": "[[/a]]"},
        "tool_calls": {
            "open_pattern": "\\[\\[do (?P<name>\\w+)\\]\\]",
            "close": "[[/do]]",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
TAGS = {
    "start_anchor_pattern": "<\\|start\\|>assistant",
    "fields": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close": "<|end|><|start|>assistant",
        },
        "content": {
            "open": "<|channel|>final<|message|>",
            "close": ["<|return|>", "<|end|>", "<|call|>"],
        },
        "tool_calls": {
            "open_pattern": " to=(?P<name>[^\\s<]+)<\\|channel\\|>analysis "
            "<\\|constrain\\|>xml<\\|message\\|>",
            "close": ["<|end|><|start|>assistant", "<|call|>"],
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": '<rfl:parameter name="(?P<key>[^"]+)">\\n(?P<value>.*?)'
                '(?:\\n</rfl:parameter>|(?=\\n?<rfl:parameter name="))'
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}


def template(given):
    return ResponseTemplate.from_dict(given, source="test")


CUTS = [1, 2, 3, 7, 10**6]
JSONS = {"implicit": IMPLICIT, "lines": LINES, "tags": TAGS}
TEMPLATES = {name: template(made) for name, made in JSONS.items()}
PROMPTS = {"implicit": "<|bot|>\n", "lines": "<bot>", "tags": "<|start|>assistant"}


def tool(name, **properties):
    parameters = {"type": "object", "properties": {k: {"type": t} for k, t in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("add", a="integer", b=["string", "integer"]),
    tool("move", x="integer", y="string"),
    tool("get_weather", city="string", days="integer", exclude="array"),
    tool("now"),
]


def parser(name, prompt=None, *, tools=TOOLS, reasoning=True, calls=True):
    prompt = PROMPTS[name] if prompt is None else prompt
    made = TEMPLATES[name] if isinstance(name, str) else name
    return TemplateParser(made, prompt=prompt, tools=tools, reasoning=reasoning, calls=calls)


def pieces(parsed, text, cut, reason="stop"):
    said = [parsed.feed(text[at : at + cut], 0) for at in range(0, len(text), cut)]
    return [*said, parsed.finish(reason)]


def joined(said):
    calls = {}
    for piece in (piece for part in said for piece in part.calls):
        assert (piece.name is None) == (piece.index in calls)
        name, arguments = calls.get(piece.index, (piece.name, ""))
        calls[piece.index] = name, arguments + piece.arguments
    assert list(calls) == list(range(len(calls)))
    return (
        "".join(part.reasoning for part in said),
        "".join(part.content for part in said),
        [(name, json.loads(arguments)) for name, arguments in calls.values()],
    )


def parse(name, text, prompt=None, *, cut=10**6, reason="stop", **given):
    return joined(pieces(parser(name, prompt, **given), text, cut, reason))
