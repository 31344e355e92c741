"""The value of a region of an answer: its text read as JSON, tags or lines, then transformed."""

import json
from collections.abc import Callable, Iterator
from typing import NoReturn

import regex  # type: ignore[import-untyped]

SECONDS = 1.0  # for the tags of one region
PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")

Args = dict[str, object]


def read_body(text: str, content: str, args: Args) -> object:
    """The value of `text` by the reader that is named `content`; `ValueError` if it has none."""
    try:
        return READERS[content](text, args)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except TimeoutError as error:
        raise ValueError(f"its tags take longer than {SECONDS} s") from error


def transformed(transform: object, scope: dict[str, object]) -> object:
    """`transform` with its placeholders replaced; `ValueError` for one that `scope` lacks."""
    if isinstance(transform, dict):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    found = PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: object = scope
    for key in found[1].split("."):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"nothing for the placeholder {transform}")
        value = value[key]
    return value


def texts_of(transform: object) -> Iterator[str]:
    """All texts in a transform, but for keys."""
    if isinstance(transform, str):
        yield transform
    elif isinstance(transform, dict | list):
        for value in transform.values() if isinstance(transform, dict) else transform:
            yield from texts_of(value)


def strict_json(text: str) -> object:
    """JSON without NaN and infinities, which Python would take."""
    return json.loads(text, parse_constant=_refuse)


def _text(text: str, args: Args) -> str:
    return text.strip() if args.get("strip", True) else text


def _bool(text: str, args: Args) -> bool:
    return text.strip().lower() in ("true", "1")


def _json(text: str, args: Args) -> object:
    try:
        return strict_json(_plain_json(text, args))
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _plain_json(text: str, args: Args) -> str:
    """JSON of a text with strings between marks of its own and with bare keys."""
    own = [tuple(pair) for pair in _listed(args.get("string_delims"))]
    branches = [
        f"{regex.escape(opener)}(?P<s{i}>.*?){regex.escape(closer)}"
        for i, (opener, closer) in enumerate(own)
    ]
    branches.append(r'"(?:\\.|[^"\\])*"')
    if args.get("unquoted_keys"):
        branches.append(r"(?<=[{,])(?P<before>\s*)(?P<key>\w+)(?P<after>\s*):")
    if len(branches) == 1:
        return text

    def quoted(found: regex.Match[str]) -> str:
        groups = {key: value for key, value in found.groupdict().items() if value is not None}
        if "key" in groups:
            return f'{groups["before"]}"{groups["key"]}"{groups["after"]}:'
        return json.dumps(next(iter(groups.values()))) if groups else found[0]

    return regex.sub("|".join(branches), quoted, text, flags=regex.DOTALL)


def _xml_inline(text: str, args: Args) -> dict[str, object]:
    values: dict[str, list[object]] = {}
    pattern = regex.compile(str(args["tag_pattern"]), regex.DOTALL)
    for found in pattern.finditer(text, timeout=SECONDS):
        if found["key"] is None:
            raise ValueError("a tag without a key")
        values.setdefault(found["key"], []).append(_inner(found["value"] or "", args))
    merge = args.get("merge_duplicates")
    return {key: given if merge and len(given) > 1 else given[-1] for key, given in values.items()}


def _kv_lines(text: str, args: Args) -> dict[str, object]:
    separator = str(args.get("kv_sep", ":"))
    values = {}
    for line in text.split(str(args.get("line_sep", "\n"))):
        key, found, value = _text(line, args).partition(separator)
        if found:
            values[_text(key, args)] = _inner(_text(value, args), args)
    return values


def _inner(text: str, args: Args) -> object:
    reader = args.get("value_parser")
    if not isinstance(reader, dict):
        return text
    inner = reader.get("args", {})
    assert isinstance(inner, dict)
    return READERS[reader.get("name", "text")](text, inner)


def _listed(value: object) -> list[list[str]]:
    return value if isinstance(value, list) else []


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


READERS: dict[str, Callable[[str, Args], object]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": _bool,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
# The options of each reader, and whether each is a text (one character at least), a switch, ...
OPTIONS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("text", "int", "float", "bool"), {"strip": "switch"}),
    "json": {"unquoted_keys": "switch", "string_delims": "pairs", "allow_non_json": "switch"},
    "xml-inline": {"tag_pattern": "pattern", "value_parser": "reader",
                   "merge_duplicates": "switch"},
    "kv-lines": {"line_sep": "text", "kv_sep": "text", "value_parser": "reader",
                 "strip": "switch"},
}  # fmt: skip
