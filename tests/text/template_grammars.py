"""For tests: the grammars of templates, tried on texts and walked at random, and read back."""

import json
from functools import cache

import numpy as np
import torch
import xgrammar
from response_templates import TAGS, TEMPLATES, template

from limelight.checkpoint import BUNDLED
from limelight.text.demand import Demand
from limelight.text.response_template import ResponseTemplate
from limelight.text.template_grammar import template_constraint
from limelight.text.template_parser import TemplateParser
from limelight.text.tokenizer import Tokenizer

CALLS = TAGS["fields"]["tool_calls"]
# The other spelling that is known: closers without the next start, calls with it, no newlines.
BARE = {
    "start_anchor_pattern": "<\\|start\\|>assistant",
    "fields": {
        "thinking": {"open_pattern": "<\\|channel\\|>analysis<\\|message\\|>", "close": "<|end|>"},
        "content": {
            "open_pattern": "<\\|channel\\|>final<\\|message\\|>",
            "close": ["<|return|>", "<|end|>"],
        },
        "tool_calls": {
            **CALLS,
            "open_pattern": "(?:<\\|start\\|>assistant )?to=(?P<name>.+?)<\\|channel\\|>analysis"
            "(?: <\\|constrain\\|>xml)?<\\|message\\|>",
            "close": ["<|call|>", "<|end|>"],
            "content_args": {
                "tag_pattern": '<rfl:parameter name="(?P<key>[^"]+)">'
                "(?P<value>.*?)</rfl:parameter>",
                "value_parser": {"name": "text", "args": {"strip": True}},
            },
        },
    },
}
# Values as JSON, and a body that is JSON.
JSON_VALUES = json.loads(json.dumps(TAGS))
JSON_VALUES["fields"]["tool_calls"]["content_args"]["value_parser"] = {"name": "json"}
JSON_BODY = json.loads(json.dumps(TAGS))
JSON_BODY["fields"]["tool_calls"] |= {"content": "json", "content_args": {}}
MADE = {
    "bundled": ResponseTemplate.load(BUNDLED / "beam-nano"),
    "tags": TEMPLATES["tags"],
    "bare": template(BARE),
    "values": template(JSON_VALUES),
    "body": template(JSON_BODY),
}
START = "<|start|>assistant"
THINK = "<|channel|>analysis<|message|>"
THOUGHT = f"{THINK}need it<|end|>{START}"
ANSWER = "<|channel|>final<|message|>"
BEGIN = "<|channel|>analysis <|constrain|>xml<|message|>"


def tool(name, properties=None, required=(), **more):
    if properties is None:
        return {"name": name}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    strict = {"strict": more.pop("strict")} if "strict" in more else {}
    return {"name": name, "parameters": schema | more, **strict}


WEATHER = tool(
    "get_weather",
    {"days": {"type": "integer", "maximum": 9}, "city": {"type": "string"},
     "unit": {"enum": ["c", "f"]}},
    ["city"],
)  # fmt: skip
NOW = tool("now")


def made(name="tags", prompt=START, *, always=True, reasons=True, budget=None, **demand):
    return template_constraint(
        MADE[name] if isinstance(name, str) else name,
        Demand(**demand),
        tokenizer(),
        prompt=prompt,
        always=always,
        reasons=reasons,
        budget=budget,
    )


@cache
def tokenizer():
    return Tokenizer.load(BUNDLED / "beam-nano")


@cache
def compiler():
    known = tokenizer()
    info = xgrammar.TokenizerInfo(
        [known.token_bytes(i) for i in range(known.vocab_size)],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=known.vocab_size,
        stop_token_ids=known.eos_token_ids,
    )
    return xgrammar.GrammarCompiler(info, max_threads=1)


def matcher(constraint):
    return xgrammar.GrammarMatcher(compiler().compile_structural_tag(constraint.tag))


def allows(constraint, text):
    """Whether the whole text is an answer."""
    found = matcher(constraint)
    return found.accept_string(text) and found.is_completed()


def allowed(found):
    """The tokens that may come next."""
    size = tokenizer().vocab_size
    mask = xgrammar.allocate_token_bitmask(1, size)
    if not found.fill_next_token_bitmask(mask):
        return np.arange(size)
    bits = np.unpackbits(mask.view(torch.uint8).numpy()[0], bitorder="little")[:size]
    return np.flatnonzero(bits)


@cache
def marks():
    """The tokens that begin as marks do, and those that end a part of JSON."""
    known = tokenizer()
    texts = [known.token_bytes(i)[:1] for i in range(known.vocab_size)]
    return np.flatnonzero([text in (b"<", b"\n", b'"', b"]", b"}", b",") for text in texts])


@cache
def leads():
    """The tokens that end with a byte behind which a form may be overlong."""
    known = tokenizer()
    texts = [known.token_bytes(i) for i in range(known.vocab_size)]
    return np.flatnonzero([text.endswith((b"\xe0", b"\xf0")) for text in texts])


def walk(constraint, seed, *, most=300):
    """A random answer, and whether it has come to its end. Marks are likelier than other tokens.

    No overlong form comes up, such as xgrammar lets pass (`test_template_grammar_arguments.py`).
    """
    found, random, ids = matcher(constraint), np.random.default_rng(seed), []
    known = tokenizer()
    while len(ids) < most:
        tokens = np.setdiff1d(allowed(found), leads(), assume_unique=True)
        assert len(tokens), "nothing may come next"
        for likelier, chance in ((known.eos_token_ids, 0.15), (marks(), 0.5)):
            some = np.intersect1d(tokens, likelier, assume_unique=True)
            if len(some) and random.random() < chance:
                tokens = some
        token = int(random.choice(tokens))
        assert found.accept_token(token)
        if found.is_terminated():
            return known.decode(ids, skip_special_tokens=False), True
        ids.append(token)
    return known.decode(ids, skip_special_tokens=False), False


def read(name, text, prompt=START, *, tools=(), reason="stop"):
    """Reasoning, content and calls, as the parser finds them."""
    parser = TemplateParser(
        MADE[name] if isinstance(name, str) else name,
        prompt=prompt,
        tools=list(tools) or [NOW],
        reasoning=True,
        calls=True,
    )
    said = [parser.feed(text, 0), parser.finish(reason)]
    calls = [(call.name, json.loads(call.arguments)) for part in said for call in part.calls]
    return "".join(p.reasoning for p in said), "".join(p.content for p in said), calls


def argument(key, value, end="\n</rfl:parameter>"):
    return f'<rfl:parameter name="{key}">\n{value}{end}'


def call(name, *arguments, begin=BEGIN):
    return f" to={name}{begin}" + "".join(arguments)
