"""The formats of xgrammar's structural tags that grammars are put together from."""

from collections.abc import Iterable

# A format of xgrammar's structural tags, as the object that its JSON text is.
Format = dict[str, object]

# Blanks that may stand between two tokens of JSON; a model may else write them without end.
MOST_BLANKS = 2


def literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def pattern(text: str) -> Format:
    """What matches a regex as a whole."""
    return {"type": "regex", "pattern": text}


def free_text(excludes: Iterable[str], most: int | None = None) -> Format:
    """Any text, of `most` characters at most, that has none of `excludes` in it."""
    format: Format = {"type": "any_text", "excludes": list(excludes)}
    return format if most is None else {**format, "max_chars": most}


def json_value(schema: object, excludes: Iterable[str]) -> Format:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": MOST_BLANKS,
        "excludes": list(excludes),
    }


def sequence(*elements: Format) -> Format:
    """One after the other; literals that meet become one."""
    joined: list[Format] = []
    for element in elements:
        parts = element["elements"] if element["type"] == "sequence" else [element]
        assert isinstance(parts, list)
        for part in parts:
            if part["type"] == joined[-1]["type"] == "const_string" if joined else False:
                joined[-1] = literal(f"{joined[-1]['value']}{part['value']}")
            elif part != literal(""):
                joined.append(part)
    if len(joined) < 2:
        return joined[0] if joined else literal("")
    return {"type": "sequence", "elements": joined}


def either(elements: Iterable[Format]) -> Format:
    kept = list(elements)
    assert kept, "nothing to choose from"
    return kept[0] if len(kept) == 1 else {"type": "or", "elements": kept}


def one_of(texts: Iterable[str]) -> Format:
    return either(literal(text) for text in texts)


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def any_number(content: Format) -> Format:
    return {"type": "star", "content": content}
