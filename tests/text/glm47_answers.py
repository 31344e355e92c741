"""Answers in the format glm47, made of tokens and taken apart again."""

import codecs
import json

from limelight.text.glm47 import Glm47Parser
from limelight.text.parsers import CallPiece, Said

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exclude": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
OPEN, CLOSED = "<|user|>Hi<|assistant|><think>", "<|user|>Hi<|assistant|><think></think>"
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
OSLO = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
ROME = OSLO.replace("Oslo", "Rome")
TAGS = [*MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|endoftext|>"]


def encode(tokenizer, text, *, cut=10_000):
    """The ids of a text with its marks, its plain text in pieces of `cut` letters."""
    ids, at = [], 0
    while at < len(text):
        mark = next((mark for mark in MARKS if text.startswith(mark, at)), None)
        end = min([i for m in MARKS if (i := text.find(m, at)) >= 0], default=len(text))
        piece = mark or text[at : min(end, at + cut)]
        ids += tokenizer.encode(piece, add_special_tokens=False)
        at += len(piece)
    return ids


def typed(tokenizer, text):
    """The ids of a text that a model spells letter by letter, so that no mark is a token."""
    return [i for letter in text for i in tokenizer.encode(letter, add_special_tokens=False)]


def parse(
    tokenizer, answer, *, prompt=OPEN, tools=TOOLS, reasoning=True, calls=True, thinking=None,
    parallel=True, reason="stop", step=1, cut=10_000,
):  # fmt: skip
    """(reasoning, content, calls, tokens of reasoning), summed over groups of `step` tokens."""
    prompt_ids = encode(tokenizer, prompt) if isinstance(prompt, str) else prompt
    ids = encode(tokenizer, answer, cut=cut) if isinstance(answer, str) else answer
    parser = Glm47Parser(
        tokenizer, prompt_token_ids=prompt_ids, tools=tools, reasoning=reasoning, calls=calls,
        thinking=thinking, parallel=parallel,
    )  # fmt: skip
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    fed = [parser.feed(decoder.decode(tokenizer.token_bytes(i)), i) for i in ids]
    fed.append(parser.finish(reason))
    return add_up([merge(fed[start : start + step]) for start in range(0, len(fed), step)])


def merge(group):
    """What one step of the engine says that brings several tokens."""
    return Said(
        reasoning="".join(one.reasoning for one in group),
        content="".join(one.content for one in group),
        calls=[call for one in group for call in one.calls],
        num_reasoning=sum(one.num_reasoning for one in group),
    )


def add_up(pieces):
    names, texts, ended = {}, {}, set()
    for said in pieces:
        for call in said.calls:
            assert isinstance(call, CallPiece)
            assert (call.index in names) == (call.name is None), "a name comes once and first"
            names.setdefault(call.index, call.name)
            assert call.index not in ended, "nothing comes behind the end of a call"
            texts[call.index] = texts.get(call.index, "") + call.arguments
            ended |= {call.index} if call.ends else set()
    assert list(names) == list(range(len(names)))
    cut = set(names) - ended
    assert cut <= {len(names) - 1}, "only the last call can be cut short"
    assert not any(is_json(texts[i]) for i in cut), "a call that was cut looks finished"
    return (
        "".join(said.reasoning for said in pieces),
        "".join(said.content for said in pieces),
        [(names[i], texts[i]) for i in names if i in ended],
        sum(said.num_reasoning for said in pieces),
    )


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def said(*arguments, **options):
    """(reasoning, content, calls)."""
    return parse(*arguments, **options)[:3]
