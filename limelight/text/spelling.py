"""The texts that a regex can match, where they are few; its named groups may stay open."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

# Python's own reader of regexes; it has no public name.
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as reader  # type: ignore[attr-defined]
from typing import cast

from limelight.text.regex import ALL, BLANKS, DIGITS, WORD, Ranges, class_of, subtracted

MOST_SPELLINGS = 16  # of one regex that are followed
LONGEST_NAME = 200
LONGEST_REGEX = 2**20  # characters; no longer grammar is taken
# Digits and letters of other scripts count for some readers and not for others: for none here.
CLASSES = {
    "CATEGORY_DIGIT": DIGITS,
    "CATEGORY_WORD": WORD,
    "CATEGORY_SPACE": [(9, 13), (32, 32)],
    "CATEGORY_NOT_SPACE": subtracted(ALL, [*BLANKS, (0x1C, 0x1F), (0x85, 0x85)]),
}

Nodes = Sequence[tuple[object, object]]


class Untold(Exception):
    """A regex, or a schema, whose texts cannot be told; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Hole:
    """A named group in a spelling; `nodes` are what it matches."""

    name: str
    nodes: Nodes

    @property
    def is_anything(self) -> bool:
        """Whether it takes any text, and as little of it as it can."""
        return str(self.nodes) == f"[(MIN_REPEAT, (0, {codes.MAXREPEAT}, [(ANY, None)]))]"

    @property
    def characters(self) -> Ranges | None:
        """Those of a class that is repeated once or more; None for any other group."""
        match [(str(op), value) for op, value in self.nodes]:
            case [("MAX_REPEAT" | "POSSESSIVE_REPEAT", (1, codes.MAXREPEAT, inner))]:
                match [(str(op), value) for op, value in cast(Nodes, inner)]:
                    case [("IN", list(items))]:
                        return charset(items)
                    case [("NOT_LITERAL", int(code))]:
                        return subtracted(ALL, [(code, code)])
        return None


@dataclass(frozen=True, slots=True)
class Ahead:
    """A text that must come next, but is not part of what is matched."""

    text: str


Spelling = tuple[str | Hole | Ahead, ...]


def spellings(pattern: str, holes: Iterable[str] = ()) -> list[Spelling]:
    """All that `pattern` matches, with its named groups of `holes` left open."""
    try:
        parsed = reader.parse(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise Untold(f"{pattern!r:.100} cannot be taken apart: {error}") from error
    names = {index: name for name, index in parsed.state.groupdict.items() if name in holes}
    return list(dict.fromkeys(_expand(parsed.data, names)))


def plain(spelling: Spelling) -> str:
    """A spelling that is nothing but text."""
    if not all(isinstance(part, str) for part in spelling):
        raise Untold("a pattern has a group or looks ahead where only text can be")
    return "".join(part for part in spelling if isinstance(part, str))


def _expand(nodes: Nodes, names: dict[object, str]) -> list[Spelling]:
    made: list[Spelling] = [()]
    for op, value in nodes:
        options = _options(str(op), value, names)
        if len(made) * len(options) > MOST_SPELLINGS:
            raise Untold(f"a pattern matches more than {MOST_SPELLINGS} texts")
        made = [_joined(*pair) for pair in product(made, options)]
    return made


def _options(op: str, value: object, names: dict[object, str]) -> list[Spelling]:
    match op, value:
        case "LITERAL", int(code):
            return [(chr(code),)]
        case "IN", list(items):
            found = charset(items)
            if sum(high - low + 1 for low, high in found) > MOST_SPELLINGS:
                raise Untold("a pattern has a class of many characters")
            return [(chr(code),) for low, high in found for code in range(low, high + 1)]
        case "BRANCH", (_, branches):
            return [one for branch in cast(list[Nodes], branches) for one in _expand(branch, names)]
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT", (int(low), int(high), inner):
            if high > MOST_SPELLINGS:
                raise Untold("a pattern repeats without end")
            nodes = list(cast(Nodes, inner))
            return [one for n in range(low, high + 1) for one in _expand(nodes * n, names)]
        case "SUBPATTERN", (group, 0, 0, inner):
            nodes = list(cast(Nodes, inner))
            return [(Hole(names[group], nodes),)] if group in names else _expand(nodes, names)
        case "ASSERT", (1, inner):
            return [(Ahead(plain(one)),) for one in _expand(cast(Nodes, inner), names)]
    raise Untold(f"a pattern uses {op.lower()}")


def _joined(left: Spelling, right: Spelling) -> Spelling:
    if left and right and isinstance(left[-1], str) and isinstance(right[0], str):
        return (*left[:-1], left[-1] + right[0], *right[1:])
    return left + right


def charset(items: Nodes) -> Ranges:
    """The characters of a class; fewer where readers do not agree."""
    negated = bool(items) and str(items[0][0]) == "NEGATE"
    found: Ranges = []
    for op, value in items[negated:]:
        match str(op), value:
            case "LITERAL", int(code):
                found.append((code, code))
            case "RANGE", (int(low), int(high)):
                found.append((low, high))
            case "CATEGORY", name if str(name) in CLASSES:
                found += CLASSES[str(name)]
                if negated:
                    blank = str(name) == "CATEGORY_SPACE"
                    found += [*BLANKS, (0x1C, 0x1F), (0x85, 0x85)] if blank else [(128, 0x10FFFF)]
            case other:
                raise Untold(f"a class has {other[0].lower()} in it")
    return subtracted(ALL, found if negated else subtracted(ALL, found))


def escaped(text: str) -> str:
    """A regex for exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)


def but(ranges: Ranges, characters: Iterable[str]) -> Ranges:
    """`ranges` without these characters."""
    return subtracted(ranges, [(ord(character), ord(character)) for character in characters])


def other_names(names: Iterable[str], allowed: Ranges) -> str:
    """A regex for any text of `allowed` characters, one at least, but for `names`."""
    trie: dict[str, object] = {}
    room = LONGEST_REGEX // len(class_of(allowed))
    for name in names:
        if len(name) > LONGEST_NAME:
            raise Untold(f"a name is longer than {LONGEST_NAME} characters")
        node = trie
        for character in name:
            room -= character not in node
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node["end"] = None
        if room < 0:
            raise Untold("its names have too many characters to be told from others")
    return _others(trie, allowed, is_root=True)


def _others(node: dict[str, object], allowed: Ranges, *, is_root: bool) -> str:
    children = {key: child for key, child in node.items() if isinstance(child, dict)}
    branches = []
    if others := but(allowed, children):
        branches.append(f"{class_of(others)}{class_of(allowed)}*")
    for character, child in children.items():
        if any(low <= ord(character) <= high for low, high in allowed):
            branches.append(escaped(character) + _others(child, allowed, is_root=False))
    if not is_root and "end" not in node:
        branches.append("")
    return f"(?:{'|'.join(branches)})"
