"""What is enforced of a JSON schema for each type of its values."""

import json
import math
from collections.abc import Callable
from contextlib import suppress

from limelight.text.json_bounds import (
    Lacking,
    Nothing,
    bounds_of,
    held_lengths,
    in_bounds,
    lengths_of,
)
from limelight.text.regex import (
    ALL,
    FORMATS,
    JSON_ESCAPED,
    Malformed,
    Ranges,
    class_of,
    rewritten,
    subtracted,
    with_length,
)
from limelight.text.schema import MAX_INTEGER, MAX_NUMBER, Schema
from limelight.text.spelling import Untold, other_names

MAX_LENGTH = 100_000
MAX_ITEMS = 10_000
# As a regex a length takes long to compile; beside what else a text may not have it must be one.
SHORT = 8
MAX_STEP = 1024


def kinds_of(schema: Schema) -> list[str] | None:
    """The types that the keywords of a schema without types speak of; None for none."""
    found = [kind for kind, keywords in KEYWORDS.items() if schema.keys() & keywords]
    return found or None


def listed_that_fit(
    reader: Lacking, values: list[object], schema: Schema, place: str
) -> list[object]:
    """Those of the listed values that the bounds beside them allow."""
    for keyword in sorted(schema.keys() & BESIDE_LISTED):
        reader.lacks(f"{keyword} beside enum or const", place)
    kept: dict[str, object] = {}  # by their JSON, in which true is not 1
    for value in values:
        if isinstance(value, str):
            low, high = lengths_of(reader, schema, "Length", place)
            spelt = not reader.is_plain and _has_any(value, reader.without)
            fits = low <= len(value) and (high is None or len(value) <= high) and not spelt
        elif isinstance(value, int | float) and not isinstance(value, bool):
            fits = in_bounds(value, reader, schema, place)
        else:
            fits = not (isinstance(value, dict | list) and _has_any(value, reader.without))
        if fits:
            kept.setdefault(json.dumps(value), value)
    if not kept:
        raise Nothing(f"{place[1:] or 'it'} lists no value that fits")
    return list(kept.values())


def _has_any(value: object, characters: Ranges) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    return any(first <= ord(c) <= last for c in text for first, last in characters)


def _null(reader: Lacking, schema: Schema, place: str) -> Schema:
    return {"type": "null"}


def _boolean(reader: Lacking, schema: Schema, place: str) -> Schema:
    return {"type": "boolean"}


def _integer(reader: Lacking, schema: Schema, place: str) -> Schema:
    low, above, high, below = bounds_of(reader, schema, place)
    lows = [math.ceil(low)] if low is not None else []
    lows += [math.floor(above) + 1] if above is not None else []
    highs = [math.floor(high)] if high is not None else []
    highs += [math.ceil(below) - 1] if below is not None else []
    made: Schema = {"type": "integer"}
    if lows:
        made["minimum"] = max([*lows, -MAX_INTEGER])
    if highs:
        made["maximum"] = min([*highs, MAX_INTEGER])
    least, most = made.get("minimum", -MAX_INTEGER), made.get("maximum", MAX_INTEGER)
    assert isinstance(least, int) and isinstance(most, int)
    if least > most:
        raise Nothing(f"{place[1:] or 'it'} has bounds that no integer is in")
    if (step := schema.get("multipleOf")) is not None and step != 1:
        held = isinstance(step, int) and not isinstance(step, bool) and 0 < step <= MAX_STEP
        if held and len(made) == 1:
            made["multipleOf"] = step
        else:
            reader.lacks("multipleOf", place, "only whole ones up to 1024, without bounds, are")
    return made


def _number(reader: Lacking, schema: Schema, place: str) -> Schema:
    low, above, high, below = bounds_of(reader, schema, place)
    if low is not None and above is not None:
        low, above = (None, above) if above >= low else (low, None)
    if high is not None and below is not None:
        high, below = (None, below) if below <= high else (high, None)
    least = low if low is not None else above
    most = high if high is not None else below
    if (
        least is not None
        and most is not None
        and (least > most or (least == most and (low is None or high is None)))
    ):
        raise Nothing(f"{place[1:] or 'it'} has bounds that no number is in")
    made: Schema = {"type": "number"}
    given = {
        "minimum": low, "exclusiveMinimum": above, "maximum": high, "exclusiveMaximum": below,
    }  # fmt: skip
    for keyword, bound in given.items():
        if bound is None:
            continue
        if abs(bound) > MAX_NUMBER or bound != round(bound, 6):
            reader.lacks(f"{keyword} {bound}", place, "it has too many digits")
        else:
            made[keyword] = bound
    if "multipleOf" in schema:
        reader.lacks("multipleOf", place, "only that of integers is")
    return made


def _string(reader: Lacking, schema: Schema, place: str) -> Schema:
    low, high = held_lengths(reader, schema, "Length", MAX_LENGTH, place)
    has_length = low > 0 or high is not None
    written = _pattern(reader, schema, place)
    if written is not None and has_length:
        bounded = with_length(written, low, high)
        if bounded is None:
            reader.lacks("a length beside this pattern or format", place)
        return {"type": "string", "pattern": bounded or written}
    if written is not None:
        return {"type": "string", "pattern": written}
    if has_length and reader.without and not reader.is_plain:
        if max(low, high or 0) > SHORT:
            reader.lacks("a length above 8", place, "within other arguments it is not enforced")
            return {"type": "string"}
        plain = class_of(subtracted(subtracted(ALL, JSON_ESCAPED), reader.without))
        return {"type": "string", "pattern": f"{plain}{{{low},{'' if high is None else high}}}"}
    made: Schema = {"type": "string"}
    made |= {"minLength": low} if low else {}
    return made | ({"maxLength": high} if high is not None else {})


def _pattern(reader: Lacking, schema: Schema, place: str) -> str | None:
    """The regex that a text must match as a whole, if there is one."""
    pattern, format = schema.get("pattern"), schema.get("format")
    banned = [*([] if reader.is_plain else JSON_ESCAPED), *reader.without]
    if pattern is not None and not isinstance(pattern, str):
        reader.refuse("pattern must be a string", place)
    if format is not None and (pattern is not None or format not in FORMATS):
        reader.lacks(f"format {str(format)[:50]!r}", place)
    try:
        if isinstance(pattern, str):
            return rewritten(pattern, anywhere=True, without=banned)
        if isinstance(format, str) and format in FORMATS:
            return rewritten(FORMATS[format], anywhere=False, without=banned)
    except Malformed as error:
        reader.refuse(f"pattern {str(pattern)[:50]!r} is no regex: {error}", place)
    except ValueError as error:
        reader.lacks(f"pattern {str(pattern)[:50]!r}", place, str(error))
    return None


def _array(reader: Lacking, schema: Schema, place: str) -> Schema:
    for keyword in ("uniqueItems", "contains", "minContains", "maxContains"):
        if schema.get(keyword, False) is not False:
            reader.lacks(keyword, place)
    low, high = held_lengths(reader, schema, "Items", MAX_ITEMS, place)
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    if not isinstance(first, list):
        reader.refuse("prefixItems must be a list", place)
    assert isinstance(first, list)
    made: list[Schema] = []
    for index, item in enumerate(first[:high]):
        try:
            made.append(reader.read(item, f"{place}.prefixItems[{index}]"))
        except Nothing:
            high = index
            break
    others: object = False
    if high is None or high > len(made):
        try:
            others = reader.read(rest, f"{place}.items")
        except Nothing:
            high = len(made)
    if high is not None and low > high:
        raise Nothing(f"{place[1:] or 'it'} cannot have {low} items")
    array: Schema = {"type": "array", "items": others}
    array |= {"prefixItems": made} if made else {}
    array |= {"minItems": low} if low else {}
    if high is not None and (others is not False or not made):
        array["maxItems"] = high
    return array


def _object(reader: Lacking, schema: Schema, place: str) -> Schema:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        reader.refuse("properties must be an object", place)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        reader.refuse("required must be a list of names", place)
    assert isinstance(properties, dict) and isinstance(required, list)
    if not properties and not required:
        return _map(reader, schema, place)
    for keyword in ("patternProperties", "propertyNames"):
        if keyword in schema:
            reader.lacks(keyword, place, "only objects without properties have it enforced")
    further = schema.get("additionalProperties", True)
    made: dict[str, Schema] = {}
    needed = dict.fromkeys(required)
    for name in properties | needed:
        try:
            _check_name(reader, name)
            made[name] = reader.read(properties.get(name, further), f"{place}.{name}")
        except Nothing:
            if name in needed:
                raise
    object_: Schema = {"type": "object", "properties": made, "required": list(needed)}
    object_["additionalProperties"] = False
    if "additionalProperties" in schema and further is not False:
        with suppress(Nothing):
            object_["additionalProperties"] = reader.read(further, f"{place}.additionalProperties")
    object_ |= _counts(reader, schema, object_, place)
    return object_ if reader.is_plain else _without_escapes(reader, object_, place)


def _without_escapes(reader: Lacking, made: Schema, place: str) -> Schema:
    """The object with further keys that no escape makes those of its properties."""
    further, named = made["additionalProperties"], made["properties"]
    if further is False:
        return made
    assert isinstance(named, dict)
    try:
        keys = other_names(named, subtracted(subtracted(ALL, JSON_ESCAPED), reader.without))
    except Untold as error:
        reader.lacks("additionalProperties", place, str(error))
        return {**made, "additionalProperties": False}
    return {**made, "patternProperties": {keys: further}, "additionalProperties": False}


def _check_name(reader: Lacking, name: str):
    if not reader.is_plain and _has_any(name, reader.without):
        raise Nothing(f"the property {name[:50]!r} has a character that cannot stand there")


def _counts(reader: Lacking, schema: Schema, made: Schema, place: str) -> Schema:
    """The numbers of properties of an object that names some."""
    low, high = lengths_of(reader, schema, "Properties", place)
    named, required = made["properties"], made["required"]
    assert isinstance(named, dict) and isinstance(required, list)
    is_closed = made["additionalProperties"] is False
    counts: Schema = {}
    if low > len(required) and is_closed:
        if low > len(named):
            raise Nothing(f"{place[1:] or 'it'} cannot have {low} properties")
        counts["minProperties"] = low
    elif low > len(required):
        reader.lacks("minProperties", place, "only objects without others have it enforced")
    if high is not None and high < len(required):
        raise Nothing(f"{place[1:] or 'it'} requires more than {high} properties")
    if high is not None and not (is_closed and high >= len(named)):
        counts["maxProperties"] = high
    return counts


def _map(reader: Lacking, schema: Schema, place: str) -> Schema:
    """An object that names no properties."""
    patterns, names = schema.get("patternProperties"), schema.get("propertyNames")
    further = schema.get("additionalProperties", True)
    low, high = lengths_of(reader, schema, "Properties", place)
    if low > 1:
        # A key that comes twice would count as two.
        reader.lacks("minProperties", place, "only objects without others have it enforced")
        low = 1
    made: Schema = {"type": "object"} | ({"minProperties": low} if low else {})
    made |= {"maxProperties": high} if high is not None else {}
    if isinstance(patterns, dict) and len(patterns) == 1 and names is None:
        pattern, values = next(iter(patterns.items()))
        if (written := _pattern(reader, {"pattern": pattern}, place)) is not None:
            # Keys that do not match have no place here, which is within what the schema allows.
            made["propertyNames"] = {"pattern": written}
            further = values
    elif patterns is not None:
        reader.lacks("patternProperties", place, "only one pattern is")
        further = False
    if isinstance(names, dict) and names.keys() <= {"pattern", "type"} and "pattern" in names:
        if (written := _pattern(reader, names, place)) is not None:
            made["propertyNames"] = {"pattern": written}
    elif names is not None and names is not True:
        reader.lacks("propertyNames", place, "only its pattern is")
    try:
        made["additionalProperties"] = reader.read(further, f"{place}.additionalProperties")
    except Nothing:
        if low:
            raise
        return {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    return made


KINDS: dict[str, Callable[[Lacking, Schema, str], Schema]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "string": _string,
    "array": _array,
    "object": _object,
}
KEYWORDS = {
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"},
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    },
}  # fmt: skip
# What a listed value is not looked at for.
BESIDE_LISTED = (
    (KEYWORDS["array"] | KEYWORDS["object"] | {"pattern", "format", "multipleOf"})
    - {"required"}
)  # fmt: skip
