"""How the parts of an answer are spelt by a response template: what a grammar is made of.

All is tried out on the template's own parser, so that what a grammar allows is read as it is meant.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TypeVar

import regex  # type: ignore[import-untyped]

from limelight.text.fence import Fence
from limelight.text.parsers import CallPiece
from limelight.text.regex import Ranges
from limelight.text.response_template import Delimiter, Field, ResponseTemplate
from limelight.text.spelling import Ahead, Hole, Spelling, Untold, plain, spellings
from limelight.text.template_parser import TemplateParser

log = logging.getLogger(__name__)

NAMED = {"name": "{name}", "arguments": "{content}"}
PARTS = ("thinking", "content", "tool_calls")
PROBE = "probe"  # stands for texts and names

Part = TypeVar("Part")
# Reasoning, content and calls.
Read = tuple[str, str, list[CallPiece]]


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer: any of `opens`, a body, any of `closes`.

    `next` is what stands between its body and the next part: its closers, and those with the start
    of a message behind them where they have none. No closers: it goes on to the end of the answer.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    next: tuple[str, ...]
    fence: Fence


@dataclass(frozen=True, slots=True)
class Parameters:
    """How arguments are written, one by one: before the key, after it, and behind the value.

    With `ahead` a value may also end right before the next argument, after one of these texts.
    `reads` is how a value is read: as text, stripped or not, or as JSON. Keys are of `key`.
    """

    tag: regex.Pattern[str]
    opens: tuple[tuple[str, str], ...]
    closes: tuple[str, ...]
    ahead: tuple[str, ...]
    reads: str
    fence: Fence
    key: Ranges | None

    def spells(self, key: str) -> bool:
        """Whether an argument of this name is read as one."""
        texts = [
            before + key + after + PROBE + end
            for before, after in self.opens
            for end in self.closes
        ]
        found = [[(m["key"], m["value"]) for m in self.tag.finditer(text)] for text in texts]
        return self.fence.lets(key) and all(pairs == [(key, PROBE)] for pairs in found)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls: `opens` are what stands around a name. Without `parameters` their bodies are JSON."""

    opener: regex.Pattern[str]
    opens: tuple[tuple[str, str], ...]
    closes: tuple[str, ...]
    next: tuple[str, ...]
    parameters: Parameters | None
    fence: Fence

    def spells(self, name: str) -> bool:
        """Whether a call of a tool of this name is read as one."""
        texts = [before + name + after for before, after in self.opens]
        found = [(self.opener.search(text), text) for text in texts]
        return name.isprintable() and all(
            match and match.end() == len(text) and match["name"] == name for match, text in found
        )


@dataclass(frozen=True, slots=True)
class TemplateSpelling:
    """The parts that can be told, and why the others cannot."""

    template: ResponseTemplate
    thinking: Region | None = None
    content: Region | None = None
    calls: Calls | None = None
    faults: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=8)
def spelling_of(template: ResponseTemplate) -> TemplateSpelling:
    """What can be told of a template; it is looked at once."""
    faults: dict[str, str] = {}
    anchors = _told(faults, "start_anchor", lambda: _texts(template.anchor)) or ()
    if not anchors:
        return TemplateSpelling(template, faults=dict.fromkeys(PARTS, faults["start_anchor"]))
    thinking = _told(faults, "thinking", lambda: _region(template, "thinking", anchors))
    content = _told(faults, "content", lambda: _region(template, "content", anchors))
    calls = _told(faults, "tool_calls", lambda: _calls(template, anchors))
    if thinking is not None and not thinking.closes:
        thinking, faults["thinking"] = None, "it has no closer"
    for name, fault in faults.items():
        log.info("no grammar for %s of the response template: %s", name, fault)
    found = TemplateSpelling(template, thinking, content, calls, faults)
    try:
        _try_out(found, anchors)
    except Untold as fault:
        log.info("no grammar for the response template: %s", fault)
        return TemplateSpelling(template, faults=dict.fromkeys(PARTS, str(fault)))
    return found


def _told(faults: dict[str, str], name: str, tell: Callable[[], Part]) -> Part | None:
    try:
        return tell()
    except Untold as fault:
        faults[name] = str(fault)
        return None


def _texts(delimiter: Delimiter | None) -> tuple[str, ...]:
    if delimiter is None:
        return ()
    if delimiter.literals:
        return delimiter.literals
    texts = [plain(spelling) for spelling in spellings(delimiter.pattern.pattern)]
    if not all(delimiter.pattern.fullmatch(text) for text in texts):
        raise Untold(f"{delimiter.pattern.pattern!r:.100} matches other texts than it seems")
    return tuple(sorted(set(texts), key=lambda text: (-len(text), text)))


def _field(template: ResponseTemplate, name: str) -> Field:
    if name not in template.fields:
        raise Untold("the template has no such field")
    found = template.fields[name]
    if found.opener is None:
        raise Untold("it has no opener")
    return found


def _region(template: ResponseTemplate, name: str, anchors: tuple[str, ...]) -> Region:
    found = _field(template, name)
    opens = list(_texts(found.opener))
    opens += [text.removeprefix(a) for text in opens for a in anchors if text.startswith(a)]
    opens = [text for text in opens if text and _is_read(template, anchors, text + PROBE, name)]
    # What goes on to be a longer opener is read as that.
    opens = [o for o in opens if not any(p != o and p.startswith(o) for p in opens)]
    if not opens:
        raise Untold("nothing that opens it can be told")
    closes = _texts(found.closer)
    fence = Fence.against(_marks(template, name, closes))
    fence.check(closes)
    return Region(tuple(dict.fromkeys(opens)), closes, _next(template, closes, anchors), fence)


def _marks(template: ResponseTemplate, name: str, closes: Iterable[str]) -> list[str]:
    """What a body must not have in it: its closers, up to where the next message starts in them.

    A shorter mark takes fewer masks, and what ends a message is no text in any case.
    """
    stems = dict(template.stems[name])
    return [text[: stems.get(text, len(text))] for text in closes]


def _next(
    template: ResponseTemplate, closes: Iterable[str], anchors: tuple[str, ...]
) -> tuple[str, ...]:
    """The closers, and those that do not start the next message also with what starts it."""
    more = []
    if template.implicit is None:
        bare = [text for text in closes if not text.endswith(anchors)]
        more = [text + anchor for text in bare for anchor in anchors]
    return (*closes, *more)


def _calls(template: ResponseTemplate, anchors: tuple[str, ...]) -> Calls:
    found = _field(template, "tool_calls")
    assert found.opener is not None
    transform = found.transform if isinstance(found.transform, dict) else {}
    if transform.get("function") != NAMED or found.transform_each:
        raise Untold("its transform must have a function with name {name} and arguments {content}")
    closes = _texts(found.closer)
    if not closes:
        raise Untold("it has no closer")
    given = spellings(found.opener.pattern.pattern, ["name"])
    opens = [_around(spelling, "name") for spelling in given]
    opens += [(b.removeprefix(a), after) for b, after in opens for a in anchors if b.startswith(a)]
    marks = _marks(template, "tool_calls", closes)
    parameters = _parameters(found, marks) if found.content == "xml-inline" else None
    if parameters is None and (found.content != "json" or found.content_args):
        raise Untold(f"its content is {found.content}, with options of its own or not")
    body = "" if parameters else "{}"
    texts = {pair: f"{pair[0]}{PROBE}{pair[1]}{body}" for pair in opens}
    opens = [pair for pair, text in texts.items() if _is_read(template, anchors, text, "calls")]
    if not opens:
        raise Untold("nothing that opens it can be told")
    fence = Fence.against(marks)
    fence.check(closes)
    return Calls(
        found.opener.pattern,
        tuple(opens),
        closes,
        _next(template, closes, anchors),
        parameters,
        fence,
    )


def _around(spelling: Spelling, name: str) -> tuple[str, str]:
    match spelling:
        case (Hole(), str(after)):
            return "", after
        case (str(before), Hole(), str(after)):
            return before, after
    raise Untold(f"its opener must be one {name} with text behind it")


def _parameters(found: Field, marks: list[str]) -> Parameters:
    given = spellings(str(found.content_args["tag_pattern"]), ["key", "value"])
    opens: set[tuple[str, str]] = set()
    ends: set[str] = set()
    ahead: set[str] = set()
    keys: list[Hole] = []
    for spelling in given:
        match spelling:
            case (str(before), Hole("key") as key, str(after), Hole("value") as value, end) if (
                value.is_anything and not isinstance(end, Hole)
            ):
                opens.add((before, after))
                keys.append(key)
                ahead |= {end.text} if isinstance(end, Ahead) else set()
                ends |= {end} if isinstance(end, str) else set()
            case _:
                raise Untold("its tag_pattern must be text, key, text, any value, text")
    if not ends:
        raise Untold("nothing ends a value but the next one")
    closers = tuple(sorted(ends))
    befores = {before for before, _ in opens}
    if ahead and len(befores) > 1 or any(not text.endswith(tuple(befores)) for text in ahead):
        raise Untold("a value may end before what is no argument")
    glue = tuple(sorted(text.removesuffix(before) for text in ahead for before in befores))
    reads = _reads(found)
    fence = Fence.against([*marks, *closers, *ahead], strips=reads == "stripped")
    fence.check([*closers, *ahead])
    tag = regex.compile(str(found.content_args["tag_pattern"]), regex.DOTALL)
    return Parameters(tag, tuple(sorted(opens)), closers, glue, reads, fence, keys[0].characters)


def _reads(found: Field) -> str:
    """How values are read."""
    reader = found.content_args.get("value_parser")
    if found.content_args.get("merge_duplicates") or not isinstance(reader, dict | None):
        raise Untold("values that are given twice become a list")
    name, args = (reader or {}).get("name", "text"), (reader or {}).get("args", {})
    if reader is None or (name == "text" and args.get("strip") is False):
        return "text"
    if name == "text":
        return "stripped"
    if name == "json" and not args:
        return "json"
    raise Untold(f"its values are read as {name}, with options of its own or not")


def _read(template: ResponseTemplate, anchors: tuple[str, ...], text: str) -> Read:
    """Reasoning, content and calls of a whole answer that starts a message."""
    tools: list[dict[str, object]] = [{"function": {"name": PROBE}}]
    parser = TemplateParser(template, prompt=anchors[0], tools=tools, reasoning=True, calls=True)
    said = [parser.feed(text, 0), parser.finish("stop")]
    return (
        "".join(part.reasoning for part in said),
        "".join(part.content for part in said),
        [call for part in said for call in part.calls],
    )


def _is_read(template: ResponseTemplate, anchors: tuple[str, ...], text: str, name: str) -> bool:
    found = _read(template, anchors, text)
    expected = {
        "thinking": (PROBE, "", []),
        "content": ("", PROBE, []),
        "calls": ("", "", [CallPiece(0, PROBE, "{}", ends=True)]),
    }
    return found == expected[name]


def _try_out(found: TemplateSpelling, anchors: tuple[str, ...]):
    """Read all that may follow each other; `Untold` for what is not read as it is meant."""
    thoughts = ["", *_thoughts(found.thinking)]
    calls = list(_some_calls(found.calls))
    between = found.calls.next if found.calls else ()
    answers = [text + PROBE for text in found.content.opens] if found.content else []
    for thought, answer in product(thoughts, answers):
        expected: Read = (PROBE if thought else "", PROBE, [])
        _expect(_read(found.template, anchors, thought + answer), expected)
    for thought, (first, count) in product(thoughts, [(call, 1) for call in calls] + [
        (calls[0] + glue + call, 2) for glue in between for call in calls
    ]):  # fmt: skip
        given = [CallPiece(index, PROBE, "{}", ends=True) for index in range(count)]
        expected = (PROBE if thought else "", "", given)
        _expect(_read(found.template, anchors, thought + first), expected)


def _thoughts(region: Region | None) -> list[str]:
    pairs = product(region.opens, region.next) if region else []
    return [before + PROBE + after for before, after in pairs]


def _some_calls(calls: Calls | None) -> Iterable[str]:
    for before, after in calls.opens if calls else ():
        yield before + PROBE + after + ("" if calls and calls.parameters else "{}")


def _expect(found: object, expected: object):
    if found != expected:
        raise Untold(f"its parts would be read as {found!r:.200}")
