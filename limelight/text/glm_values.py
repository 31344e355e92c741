"""The values of arguments in glm47 calls: texts as they are, everything else as JSON.

A value ends at the first `</arg_value>`, so no text has it in it; a text that must match a pattern
or has a greatest length has no `<` at all. What a grammar allows is what `glm_casting` makes a
valid value of.
"""

import json
from collections.abc import Iterable

from limelight.text.formats import (
    Format,
    either,
    free_text,
    json_value,
    literal,
    one_of,
    pattern,
    sequence,
)
from limelight.text.glm47 import VALUE_END
from limelight.text.glm_casting import Argument
from limelight.text.regex import ALL, class_of
from limelight.text.schema import Schema, finite, same
from limelight.text.spelling import but

PLAIN, GOES_ON = class_of(but(ALL, "<")), class_of(but(ALL, "</"))
# In JSON all of a text can be written with escapes; half of a surrogate pair would be no text.
IN_JSON = ("</", "\\ud", "\\uD")
# Longer numbers are no longer read as numbers everywhere.
INTEGER = "-?(0|[1-9][0-9]{0,30})"
NUMBER = f"{INTEGER}(\\.[0-9]{{1,30}})?([eE][+-]?[0-9]{{1,2}})?"
# A longer least length of a text is counted, which leaves `<` out.
SHORT = 8
# Beside texts only what is written as JSON writes it is read as a number.
SPELT_INTEGER = "0|-?[1-9][0-9]{0,30}"
SPELT_NUMBER = "0|-?[1-9][0-9]{0,8}(\\.[0-9]{0,3}[1-9])?|-?0\\.[0-9]{0,3}[1-9]"
# A text that would be read as each of the types, and what such texts begin with.
PROBES = {
    "integer": ("12345", "-0123456789"),
    "number": ("1.5", "-0123456789"),
    "boolean": ("true", "tf"),
    "null": ("null", "n"),
    "array": ("[]", "["),
    "object": ("{}", "{"),
}
FREE: tuple[Schema, ...] = (
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "array", "items": {}},
    {"type": "object", "additionalProperties": {}},
)


class Unheld(Exception):
    """Values that cannot be told from others as they are written; the text says why."""


def value_format(
    schema: Schema, definitions: dict[str, Schema], argument: Argument, marks: tuple[str, ...]
) -> Format:
    """What may be written for a value of `schema`, as prepared, with its end, read as `argument`.

    No text has one of `marks` in it. `Unheld` where no value can be written, or wrong ones could.
    """
    options = options_of(schema, definitions)
    if {} in options:
        return free_value(marks)
    read = {kind for kind, (probe, _) in PROBES.items() if argument.cast(probe) != probe}
    # Where a text may stand, a number with blanks is one.
    has_texts = argument.cast(" 12345") == " 12345"
    formats: list[Format] = []
    for option in options:
        if "enum" in option:
            formats += map(_ended, _listed(option["enum"], argument))
        elif option["type"] == "string":
            formats.append(_text(option, options, read, marks))
        else:
            formats.append(_ended(_json(option, definitions, beside_texts=has_texts)))
    if not formats:
        raise Unheld("none of the listed values can be written")
    return either(formats)


def options_of(schema: Schema, definitions: dict[str, Schema]) -> list[Schema]:
    """The schemas without references and choices that a prepared one chooses from."""
    found: list[Schema] = []
    seen: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop(0)
        reference = one.get("$ref")
        if isinstance(reference, str):
            name = reference.rpartition("/")[2]
            waiting += [] if name in seen else [definitions[name]]
            seen.add(name)
        elif isinstance(branches := one.get("anyOf"), list):
            waiting = branches + waiting
        elif one not in found:
            found.append({key: value for key, value in one.items() if key != "$defs"})
    return found


def _listed(values: object, argument: Argument) -> list[Format]:
    assert isinstance(values, list)
    kept: list[str] = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if VALUE_END not in text and same(argument.cast(text), value):
            kept.append(text)
    return [one_of(dict.fromkeys(kept))] if kept else []


def free_value(marks: tuple[str, ...]) -> Format:
    """Any text, and its end."""
    # xgrammar takes bytes for text that are none, such as those of marks.
    return _ended(free_text((VALUE_END, *marks)))


def _text(
    option: Schema, options: list[Schema], read: Iterable[str], marks: tuple[str, ...]
) -> Format:
    free = [one["type"] for one in options if one in FREE]
    # What is read as another type must be valid as such.
    unfit = "".join(
        PROBES[kind][1]
        for kind in read
        if kind not in free and not (kind == "integer" and "number" in free)
    )
    written = option.get("pattern")
    is_free = option.keys() == {"type"}
    bounded = [one for one in options if one.get("type") in ("integer", "number")]
    if not is_free and any(one not in FREE for one in bounded):
        raise Unheld("texts and numbers that both have conditions cannot be told apart")
    if isinstance(written, str):
        if unfit:
            raise Unheld("a text with this pattern could be read as another type")
        return _ended(pattern(written))
    low, high = option.get("minLength", 0), option.get("maxLength")
    assert isinstance(low, int) and isinstance(high, int | None)
    unfit = "".join(sorted(set(unfit)))
    if high is None and low <= SHORT and not (unfit and low == 0):
        if low == 0:
            return free_value(marks)
        # Each part is a character at least, and none is the beginning of the end.
        first = f"({class_of(but(ALL, '<' + unfit))}|<+{GOES_ON})"
        begun = first + f"({PLAIN}|<+{GOES_ON}){{{low - 1}}}" * (low > 1)
        return sequence(pattern(begun), free_value(marks))
    return _counted(low, high, unfit)


def _counted(low: int, high: int | None, unfit: str) -> Format:
    """Texts of `low` to `high` characters with their end; `unfit` ones do not begin them.

    They have no `<`: only what a single character ends is counted without much ado.
    """
    end = json.dumps(VALUE_END)
    if high == 0:
        return literal(VALUE_END)
    rest = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    first = "".join(f"\\x{ord(character):02x}" for character in "<" + unfit)
    whole = f"root ::= [^{first}] [^<]{rest} {end}"
    return {"type": "grammar", "grammar": whole if low else f"{whole} | {end}", "syntax": "ebnf"}


def _ended(format: Format) -> Format:
    return sequence(format, literal(VALUE_END))


def _json(option: Schema, definitions: dict[str, Schema], *, beside_texts: bool) -> Format:
    if option == {"type": "null"}:
        return literal("null")
    if option == {"type": "boolean"}:
        return one_of(("true", "false"))
    if option == {"type": "integer"}:
        return pattern(SPELT_INTEGER if beside_texts else INTEGER)
    if option == {"type": "number"}:
        return pattern(SPELT_NUMBER if beside_texts else NUMBER)
    used = definitions if option["type"] in ("array", "object") else {}
    return json_value(finite({**option, "$defs": used} if used else option), IN_JSON)
