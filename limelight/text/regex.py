"""Regexes, written anew in the part of their language that xgrammar holds whole.

xgrammar matches a whole text and passes over in silence what it does not know (lookaround, inner
anchors, flags). Here each of these is an error, a pattern that may match anywhere in a text gets
the rest of the text as well, and characters that must not stand in a text are taken out of every
class. Classes have ECMA-262's meaning; `\\d` and `\\w` are ASCII.
"""

import re
from dataclasses import dataclass
from typing import Literal

# Ranges of code points, both ends included.
Ranges = list[tuple[int, int]]

MAX_LENGTH = 10_000
MAX_DEPTH = 40
MAX_REPEATS = 10_000

# No text has half of a surrogate pair.
ALL: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
BLANKS: Ranges = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
# What a JSON string cannot have as it is.
JSON_ESCAPED: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]

CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
COUNT = re.compile(r"\{([0-9]{1,6})(?:(,)([0-9]{1,6})?)?\}")
NAMED_GROUP = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
ONE_CLASS = re.compile(r"\(*(\[(?:[^\[\]\\]|\\.)+\])(\*|\+)\)*")

DAYS = "(0[1-9]|1[0-9]|2[0-8])"
# Most readers know no year 0.
YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
DATE = f"{YEAR}-((0[13578]|1[02])-({DAYS}|29|30|31)|(0[469]|11)-({DAYS}|29|30)|02-{DAYS})"
TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# The formats that are enforced; a leap day, a leap second and short forms of IPv6 are left out.
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": "P([0-9]{1,6}W|[0-9]{1,6}D(T[0-9]{1,6}H)?|T[0-9]{1,6}(H|M|S))",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{LABEL}(\.{LABEL})*",
    "hostname": rf"{LABEL}(\.{LABEL})*",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(\?[A-Za-z0-9._~!$&'()*+,;=:@/-]*)?",
}  # fmt: skip


class Malformed(ValueError):
    """No regex in any dialect, or one that is larger than is read."""


@dataclass(slots=True)
class Group:
    """Branches, each a list of parts: a group, ranges, an anchor, or one of them repeated."""

    branches: list[list["Part"]]


@dataclass(slots=True)
class Repeated:
    part: Group | Ranges
    low: int
    high: int | None


Part = Group | Ranges | Repeated | Literal["^", "$"]


def rewritten(pattern: str, *, anywhere: bool, without: Ranges | None = None) -> str:
    """A regex whose whole matches are the texts that `pattern` matches, if no `without` is in them.

    `anywhere`: the pattern may match a part of the text. `ValueError` tells what cannot be held,
    `Malformed` what is no regex.
    """
    if len(pattern) > MAX_LENGTH:
        raise Malformed(f"it has {len(pattern)} characters; at most {MAX_LENGTH} are taken")
    reader = _Reader(pattern)
    group = reader.group(0)
    if reader.at < len(pattern):
        raise Malformed(f"there is a ) too many at character {reader.at}")
    banned = without or []
    written = _written(_unanchored(group, subtracted(ALL, banned) if anywhere else None), banned)
    if written is None:
        raise ValueError("it needs characters that cannot stand there")
    return written


def class_of(ranges: Ranges) -> str:
    """The class of these characters."""
    return (
        "["
        + "".join(_point(low) + ("-" + _point(high)) * (high > low) for low, high in ranges)
        + "]"
    )


def subtracted(ranges: Ranges, banned: Ranges) -> Ranges:
    """`ranges`, none of which overlap, without `banned`."""
    banned, at = sorted(banned), 0
    left: Ranges = []
    for low, high in sorted(ranges):
        while at < len(banned) and banned[at][0] <= high:
            first, last = banned[at]
            if low < first:
                left.append((low, first - 1))
            low = max(low, last + 1)
            if last > high:
                break  # it reaches into the next range
            at += 1
        if low <= high:
            left.append((low, high))
    return left


def with_length(written: str, low: int, high: int | None) -> str | None:
    """A pattern of one repeated class with bounds of its length; None for any other."""
    if (match := ONE_CLASS.fullmatch(written)) is None:
        return None
    low = max(low, 1) if match[2] == "+" else low
    return f"{match[1]}{{{low},{'' if high is None else high}}}"


def _point(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"


class _Reader:
    def __init__(self, pattern: str):
        self.pattern = pattern
        self.at = 0

    def group(self, depth: int) -> Group:
        if depth > MAX_DEPTH:
            raise Malformed(f"its groups are nested deeper than {MAX_DEPTH}")
        branches: list[list[Part]] = [[]]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self._takes("|"):
                branches.append([])
            else:
                branches[-1].append(self._part(depth))
        return Group(branches)

    def _takes(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self.at == len(self.pattern):
            raise Malformed("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _part(self, depth: int) -> Part:
        start = self.at
        character = self._next()
        part: Group | Ranges
        match character:
            case "^":
                return "^"
            case "$":
                return "$"
            case "(":
                self._group_start()
                part = self.group(depth + 1)
                if not self._takes(")"):
                    raise Malformed(f"the ( at character {start} is not closed")
            case "[":
                part = self._class()
            case ".":
                part = subtracted(ALL, LINE_ENDS)
            case "\\":
                part = self._escape(in_class=False)
            case "*" | "+" | "?":
                raise Malformed(f"there is nothing to repeat at character {start}")
            case _:
                part = _one(ord(character))
        return self._repeated(part)

    def _group_start(self):
        if self._takes("?:"):
            return
        if (match := NAMED_GROUP.match(self.pattern, self.at)) is not None:
            self.at = match.end()
        elif self.pattern.startswith("?", self.at):
            kind = self.pattern[self.at - 1 : self.at + 3]
            raise ValueError(
                f"groups of the kind {kind!r} are not supported (no lookaround, flags)"
            )

    def _repeated(self, part: Group | Ranges) -> Part:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        low: int
        high: int | None
        if self.at < len(self.pattern) and self.pattern[self.at] in simple:
            low, high = simple[self._next()]
        elif (match := COUNT.match(self.pattern, self.at)) is not None:
            self.at = match.end()
            low = int(match[1])
            high = low if match[2] is None else None if match[3] is None else int(match[3])
        else:
            return part
        if max(low, high or 0) > MAX_REPEATS or (high is not None and low > high):
            raise ValueError(f"it repeats {low} to {high} times; at most {MAX_REPEATS} are taken")
        # A lazy repetition matches the same texts.
        self._takes("?")
        if self.pattern.startswith(("*", "+", "?"), self.at) or COUNT.match(self.pattern, self.at):
            raise ValueError(f"there is a repetition of a repetition at character {self.at}")
        return Repeated(part, low, high)

    def _escape(self, *, in_class: bool) -> Ranges:
        if (match := HEX.match(self.pattern, self.at)) is not None:
            self.at = match.end()
            return _one(int(match[1] or match[2] or match[3], 16))
        letter = self._next()
        if letter in "dws":
            return {"d": DIGITS, "w": WORD, "s": BLANKS}[letter]
        if letter in "DWS":
            return subtracted(ALL, {"D": DIGITS, "W": WORD, "S": BLANKS}[letter])
        if letter == "b" and in_class:
            return _one(0x08)
        if letter in CONTROLS:
            return _one(CONTROLS[letter])
        if letter.isascii() and letter.isalnum():
            raise ValueError(f"\\{letter} is not supported")
        return _one(ord(letter))

    def _class(self) -> Ranges:
        start = self.at - 1
        negated = self._takes("^")
        found: Ranges = []
        while not self._takes("]"):
            if self.at == len(self.pattern):
                raise Malformed(f"the [ at character {start} is not closed")
            first = self._class_part()
            is_range = (
                self.pattern.startswith("-", self.at)
                and not self.pattern.startswith("-]", self.at)
                and len(first) == 1
                and first[0][0] == first[0][1]
            )
            if not is_range:
                found += first
                continue
            self.at += 1
            last = self._class_part()
            if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                raise ValueError(f"a range in the class at character {start} has no proper end")
            found.append((first[0][0], last[0][0]))
        positive = subtracted(ALL, subtracted(ALL, found))
        return subtracted(ALL, found) if negated else positive

    def _class_part(self) -> Ranges:
        character = self._next()
        return self._escape(in_class=True) if character == "\\" else _one(ord(character))


def _one(code: int) -> Ranges:
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise ValueError(f"U+{code:04X} is no character")
    return [(code, code)]


def _unanchored(group: Group, rest: Ranges | None) -> Group:
    """The group with what may come before and after a match in place of its anchors."""
    branches: list[list[Part]] = []
    for branch in group.branches:
        if len(branch) == 1 and isinstance(branch[0], Group) and _has_anchor(branch[0]):
            branches.append([_unanchored(branch[0], rest)])
            continue
        begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
        inner = branch[int(begins) : len(branch) - int(ends)]
        if any(part in ("^", "$") or _has_anchor(part) for part in inner):
            raise ValueError("^ and $ are supported at its start and end only")
        if rest is not None:
            anything = Repeated(rest, 0, None)
            inner = [*([] if begins else [anything]), *inner, *([] if ends else [anything])]
        branches.append(inner)
    return Group(branches)


def _has_anchor(part: Part) -> bool:
    if isinstance(part, Repeated):
        return _has_anchor(part.part)
    if isinstance(part, Group):
        return any(one in ("^", "$") or _has_anchor(one) for b in part.branches for one in b)
    return False


def _written(part: Part, banned: Ranges) -> str | None:
    """The part without `banned` characters; None where nothing is left."""
    if isinstance(part, Repeated):
        inner = _written(part.part, banned)
        if inner is None:
            return "()" if part.low == 0 else None
        return inner + _count(part.low, part.high)
    if isinstance(part, Group):
        branches = [[_written(one, banned) for one in branch] for branch in part.branches]
        kept = ["".join(filter(None, branch)) for branch in branches if None not in branch]
        return f"({'|'.join(kept)})" if kept else None
    assert not isinstance(part, str)
    left = subtracted(part, banned)
    return class_of(left) if left else None


def _count(low: int, high: int | None) -> str:
    if (low, high) in SIGNS:
        return SIGNS[low, high]
    return f"{{{low},{'' if high is None else high}}}"


SIGNS: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
