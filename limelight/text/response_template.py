"""Response templates: how a model writes an answer down, read from tokenizer_config.json.

A template has a field each for thinking, content and calls, with the texts or regexes that open
and close it. Every fault is a `ValueError` that names its key; nothing is left to be found while
an answer is read.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import regex  # type: ignore[import-untyped]

from limelight.checkpoint import read_json
from limelight.text.response_body import OPTIONS, PLACEHOLDER, read_body, texts_of, transformed

log = logging.getLogger(__name__)

KEYS = {"version", "defaults", "start_anchor", "start_anchor_pattern", "fields"}
FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats",
    "join", "optional", "transform", "transform_each",
}  # fmt: skip
FIELDS = {
    "thinking": "thinking",
    "reasoning_content": "thinking",
    "content": "content",
    "tool_calls": "tool_calls",
}
# What looks at the end of a text, but does not tell that it does.
EDGES = regex.compile(r"\$|\\[bBmMRzZ]")
# What means something else, or cannot be watched, where a pattern is part of another.
REFUSED = regex.compile(r"\(\?[R0]\)|\(\*[A-Z]|\\[GKX]")

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Delimiter:
    """What opens or closes a field: one pattern, of literals with the longest first.

    `unsettled` never matches: what it matches in part is where more text may change a match.
    `edges`: the pattern looks at the end of the text, which such a match does not tell.
    """

    pattern: regex.Pattern[str]
    unsettled: regex.Pattern[str]
    literals: tuple[str, ...] = ()
    edges: bool = False

    @property
    def looks_back(self) -> bool:
        return not self.literals and "(?<" in self.pattern.pattern

    def find(self, text: str, start: int, *, final: bool) -> tuple[regex.Match[str] | None, int]:
        """The first match from `start` on, and where text may still change what matches."""
        found = self.pattern.search(text, start)
        if final:
            return found, len(text)
        partial = self.unsettled.search(text, start, partial=True)
        hold = partial.start() if partial else len(text)
        if self.edges:
            seen = [found, *(self.pattern.search(text + next_, start) for next_ in "\0\nw")]
            if len({match and (match.span(), match.groups()) for match in seen}) > 1:
                hold = min(hold, *(match.start() for match in seen if match))
        return found, hold


@dataclass(frozen=True, slots=True)
class Field:
    """One part of an answer; without an opener it is all the text outside of other fields."""

    name: str
    opener: Delimiter | None
    closer: Delimiter | None
    content: str = "text"
    content_args: Json = field(default_factory=dict)
    transform: object = None
    transform_each: bool = False

    @property
    def decodes(self) -> bool:
        """Whether values come as JSON, so that a string in them is meant to be one."""
        inner = self.content_args.get("value_parser")
        return "json" in (self.content, inner.get("name") if isinstance(inner, dict) else None)

    def value(self, body: str, captures: dict[str, str]) -> object:
        """What a region of this field says; `ValueError` for a body that says nothing."""
        value = read_body(body, self.content, self.content_args)
        if self.transform is None:
            return value
        if not self.transform_each:
            return transformed(self.transform, {**captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("not a list of objects")
        return [transformed(self.transform, {**captures, **item}) for item in value]


@dataclass(frozen=True, slots=True, eq=False)
class ResponseTemplate:
    """The fields by name. `stems` are closers that end with the start of the next message, each
    with the length of what stands before that."""

    fields: dict[str, Field]
    anchor: Delimiter
    implicit: Field | None
    stems: dict[str, list[tuple[str, int]]]

    def __deepcopy__(self, memo: dict[int, object]) -> "ResponseTemplate":
        """Itself: it never changes."""
        return self

    @classmethod
    def load(cls, folder: Path) -> "ResponseTemplate | None":
        """The template of a model folder; None if there is none."""
        path = folder / "tokenizer_config.json"
        given = read_json(path).get("response_template") if path.is_file() else None
        return None if given is None else cls.from_dict(given, source=str(path))

    @classmethod
    def from_dict(cls, json: object, *, source: str) -> "ResponseTemplate":
        """The template in a JSON value; `source` stands before what is wrong with it."""
        where = f"{source}: response_template"
        given = _object(where, json)
        _known(where, given, KEYS)
        if given.get("version", 1) != 1 or isinstance(given.get("version"), bool):
            _fail(f"{where}.version", f"only 1 is known, got {given['version']!r}")
        _known(f"{where}.defaults", _object(f"{where}.defaults", given.get("defaults", {})),
               {"role"})  # fmt: skip
        anchor = _delimiter(where, given, "start_anchor")
        if anchor is None:
            _fail(where, "needs start_anchor or start_anchor_pattern")
        fields: dict[str, Field] = {}
        for name, spec in _object(f"{where}.fields", given.get("fields", {})).items():
            at = f"{where}.fields.{name}"
            if name not in FIELDS:
                _fail(at, f"not one of the fields {', '.join(FIELDS)}")
            if FIELDS[name] in fields:
                _fail(at, "the same field as thinking")
            fields[FIELDS[name]] = _field(at, FIELDS[name], _object(at, spec))
        if not fields:
            _fail(f"{where}.fields", "needs a field")
        implicit = [field for field in fields.values() if field.opener is None]
        if len(implicit) > 1:
            names = " and ".join(field.name for field in implicit)
            _fail(f"{where}.fields", f"only one may lack open and open_pattern, not {names}")
        stems = {name: list(_stems(field.closer, anchor)) for name, field in fields.items()}
        return cls(fields, anchor, implicit[0] if implicit else None, stems)

    def after_anchor(self, prompt: str) -> str:
        """What a prompt has of the message that is to be continued: the text after the last
        anchor."""
        end = None
        for found in self.anchor.pattern.finditer(prompt):
            end = found.end()
        if end is None:
            log.info("the prompt has no start anchor of the response template; all of it is read")
        return prompt[end:]


def _field(where: str, name: str, given: Json) -> Field:
    _known(where, given, FIELD_KEYS)
    opener, closer = _delimiter(where, given, "open"), _delimiter(where, given, "close")
    for key in ("repeats", "optional", "transform_each"):
        _switch(f"{where}.{key}", given.get(key, False))
    _join(where, given)
    content = given.get("content", "text")
    args = _object(f"{where}.content_args", given.get("content_args", {}))
    _reader(where, "content", content, "content_args", args)
    transform, each = given.get("transform"), bool(given.get("transform_each"))
    captures = {
        group for part in (opener, closer) if part is not None for group in part.pattern.groupindex
    }
    if each and transform is None:
        _fail(f"{where}.transform_each", "needs a transform")
    if captures and transform is None:
        _fail(f"{where}.transform", f"needed for the named groups {', '.join(sorted(captures))}")
    _transform(f"{where}.transform", transform, None if each else captures | {"content"})
    if name != "tool_calls":
        if content != "text":
            _fail(f"{where}.content", f"must be text, got {content!r}")
        for key in ("transform", "join"):
            if given.get(key) is not None:
                _fail(f"{where}.{key}", f"{name} cannot have it")
    elif opener is None:
        _fail(where, "needs open or open_pattern")
    elif given.get("join") is not None:
        _fail(f"{where}.join", "calls are no texts to join")
    return Field(name, opener, closer, str(content), args, transform, each)


def _join(where: str, given: Json):
    join = given.get("join")
    if join is None:
        return
    if not isinstance(join, str):
        _fail(f"{where}.join", f"must be a text, got {join!r}")
    if not given.get("repeats"):
        _fail(f"{where}.join", "needs repeats")


def _delimiter(where: str, given: Json, key: str) -> Delimiter | None:
    """The delimiter under `key` (a literal or several) or under `key`_pattern (a regex)."""
    pattern_key = f"{key}_pattern"
    if key in given and pattern_key in given:
        _fail(f"{where}.{pattern_key}", f"cannot stand beside {key}")
    if pattern_key in given:
        pattern = _pattern(f"{where}.{pattern_key}", given[pattern_key])
        if pattern.flags & regex.REVERSE or REFUSED.search(pattern.pattern):
            _fail(f"{where}.{pattern_key}", "uses what cannot be matched as text comes")
        # A repetition does not tell that the text's end has ended it; the character after it does.
        unsettled = _pattern(f"{where}.{pattern_key}", f"(?:{pattern.pattern})(?s:.)(?!)")
        return Delimiter(pattern, unsettled, edges=bool(EDGES.search(pattern.pattern)))
    if key not in given:
        return None
    literals = given[key] if isinstance(given[key], list) else [given[key]]
    assert isinstance(literals, list)
    if not literals or not all(isinstance(literal, str) and literal for literal in literals):
        _fail(f"{where}.{key}", "must be a text or a list of texts, none empty")
    literals = sorted(set(literals), key=lambda literal: (-len(literal), literal))
    either = "|".join(regex.escape(literal, special_only=True) for literal in literals)
    return Delimiter(
        regex.compile(either, regex.DOTALL),
        regex.compile(f"(?:{either})(?!)", regex.DOTALL),
        tuple(literals),
    )


def _stems(closer: Delimiter | None, anchor: Delimiter) -> list[tuple[str, int]]:
    stems = []
    for literal in closer.literals if closer else ():
        starts = [m.start() for m in anchor.pattern.finditer(literal) if m.end() == len(literal)]
        stems += [(literal, start) for start in starts if start]
    return stems


def _reader(where: str, name_key: str, name: object, args_key: str, args: Json):
    """Check a reader of bodies and its options."""
    if not isinstance(name, str) or name not in OPTIONS:
        _fail(f"{where}.{name_key}", f"must be one of {', '.join(OPTIONS)}, got {name!r}")
    where = f"{where}.{args_key}"
    options = OPTIONS[name]
    _known(where, args, set(options))
    if name == "xml-inline" and "tag_pattern" not in args:
        _fail(f"{where}.tag_pattern", "needed")
    for key, value in args.items():
        _option(f"{where}.{key}", options[key], value)


def _option(where: str, kind: str, value: object):
    match kind:
        case "switch":
            _switch(where, value)
        case "text":
            if not isinstance(value, str) or not value:
                _fail(where, f"must be a text that is not empty, got {value!r}")
        case "pattern":
            missing = {"key", "value"} - set(_pattern(where, value).groupindex)
            if missing:
                _fail(where, f"needs the named groups key and value, lacks {min(missing)}")
        case "pairs":
            if not isinstance(value, list) or not all(_is_pair(pair) for pair in value):
                _fail(where, "must be a list of pairs of texts, none empty")
        case "reader":
            reader = _object(where, value)
            _known(where, reader, {"name", "args"})
            args = _object(f"{where}.args", reader.get("args", {}))
            _reader(where, "name", reader.get("name", "text"), "args", args)


def _is_pair(value: object) -> bool:
    texts = value if isinstance(value, list) and len(value) == 2 else [None]
    return all(isinstance(text, str) and text for text in texts)


def _transform(where: str, transform: object, roots: set[str] | None):
    for text in texts_of(transform):
        found = PLACEHOLDER.search(text)
        if found is None:
            continue
        if found[0] != text:
            _fail(where, f"{text!r} mixes a placeholder with text")
        root = found[1].partition(".")[0]
        if roots is not None and root not in roots:
            _fail(where, f"{text} stands for nothing; there are {', '.join(sorted(roots))}")


def _pattern(where: str, value: object) -> regex.Pattern[str]:
    if not isinstance(value, str) or not value:
        _fail(where, f"must be a regex, got {value!r}")
    try:
        return regex.compile(value, regex.DOTALL)
    except (regex.error, RecursionError, OverflowError) as error:
        _fail(where, f"not a regex: {error}")


def _switch(where: str, value: object):
    if not isinstance(value, bool):
        _fail(where, f"must be true or false, got {value!r}")


def _object(where: str, value: object) -> Json:
    if not isinstance(value, dict):
        _fail(where, f"must be an object, got {type(value).__name__}")
    return value


def _known(where: str, given: Json, known: set[str]):
    for key in given:
        if key not in known:
            _fail(f"{where}.{key}", f"unknown; known are {', '.join(sorted(known))}")


def _fail(where: str, what: str) -> NoReturn:
    raise ValueError(f"{where}: {what}")
