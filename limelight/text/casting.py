"""Arguments of a call that a model wrote as text, cast to the types of the tool's schema.

A cast loses nothing: where a parameter may be a string, only text that is exactly the JSON of
another listed type becomes that; what fits no type stays text.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation

from limelight.text.response_body import strict_json
from limelight.text.schema import MOST_SCHEMAS, leads_to

INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")


def cast_arguments(
    arguments: dict[str, object], tool: dict[str, object] | None, *, decoded: bool = False
) -> dict[str, object]:
    """The arguments with their texts cast by the parameters of `tool`, as OpenAI's API has it.

    `decoded`: they were written as JSON, so that a string stays one where the schema allows it.
    """
    root = _parameters(tool)
    schemas = {key: _property(root, key) for key in arguments}
    return {
        key: value if schemas[key] is None else _cast_value(value, schemas[key], root, decoded)
        for key, value in arguments.items()
    }


def cast(text: str, schema: object, *, root: object = None) -> object:
    """The value that `text` writes for a parameter; `root` is where local references point."""
    return cast_to(schema_types(schema, root), text)


def cast_to(types: list[str], text: str) -> object:
    """The value that `text` writes, of one of these types if it can be."""
    if "string" in types:
        value = exact_json(text)
        others = [IS[name] for name in types if name in IS and name != "string"]
        fits = value is not None and any(is_one(value) for is_one in others)
        return value if fits else None if text == "null" and "null" in types else text
    for name in types:
        if name == "null" and text.strip() in ("null", "None"):
            return None
        value = CASTS[name](text) if name in CASTS else None
        if value is not None:
            return value
    return text


def argument_types(tool: dict[str, object] | None, key: str) -> list[str]:
    """The types of one argument of a tool; none where its parameters say nothing of it."""
    root = _parameters(tool)
    return schema_types(_property(root, key), root)


def schema_types(schema: object, root: object = None) -> list[str]:
    """The types that a schema names, in its order; without a name, those of its listed values."""
    return list(dict.fromkeys(_types(schema, root, set())))


def exact_json(text: str) -> object:
    """The value whose JSON is exactly `text`, with all of its digits; None if there is none."""
    if text != text.strip():
        return None
    try:
        value = strict_json(text)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
        same = not isinstance(value, float) or Decimal(repr(value)) == Decimal(text)
    except (ValueError, InvalidOperation, RecursionError):
        return None
    return value if same else None


def _parameters(tool: dict[str, object] | None) -> dict[str, object]:
    function = (tool or {}).get("function", tool)
    parameters = function.get("parameters") if isinstance(function, dict) else None
    return parameters if isinstance(parameters, dict) else {}


def _property(root: dict[str, object], key: str) -> object:
    """The schema of one argument; None where the parameters say nothing of it."""
    named: list[object] = []
    others: list[object] = []
    waiting: list[object] = [root]
    for schema in waiting:
        if not isinstance(schema, dict) or len(waiting) > MOST_SCHEMAS:
            continue
        properties, further = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and key in properties:
            named.append(properties[key])
        elif isinstance(further, dict):
            others.append(further)
        waiting += leads_to(schema, root)
    found = named or others
    return {"anyOf": found} if len(found) > 1 else next(iter(found), None)


def _cast_value(value: object, schema: object, root: object, decoded: bool) -> object:
    if isinstance(value, str):
        keep = decoded and "string" in schema_types(schema, root)
        return value if keep else cast(value, schema, root=root)
    if isinstance(value, list) and not decoded and "array" not in schema_types(schema, root):
        # A parameter that was given several times.
        return [_cast_value(item, schema, root, decoded) for item in value]
    return value


def _types(schema: object, root: object, seen: set[int]) -> Iterator[str]:
    # References may lead in circles, or to one schema by many ways.
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > MOST_SCHEMAS:
        return
    seen.add(id(schema))
    named = False
    declared = schema.get("type")
    for name in declared if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            named = True
            yield name
    for branch in leads_to(schema, root):
        for name in _types(branch, root, seen):
            named = True
            yield name
    if not named:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in listed if isinstance(listed, list) else []:
            yield next(name for name in NAMES if IS[name](value))
    if schema.get("nullable") is True:
        yield "null"


def _plain_integer(text: str) -> int | None:
    """Digits and a sign; Python's int takes 1_0 and digits of other scripts as well."""
    try:
        return int(text) if INTEGER.fullmatch(text) else None
    except ValueError:
        return None  # more digits than Python reads


def _integer(text: str) -> int | None:
    whole = _plain_integer(text)
    if whole is not None or not text.isascii():
        return whole
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    # Far exponents would make numbers of many digits that no one wrote.
    if (
        not number.is_finite()
        or number.adjusted() > 30
        or "_" in text
        or number != number.to_integral_value()
    ):
        return None
    return int(number)


def _number(text: str) -> int | float | None:
    whole_number = _plain_integer(text)
    if whole_number is not None or "_" in text or not text.isascii():
        return whole_number
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    whole = number.is_integer() and abs(number) < 2**53 and "." not in text
    return int(number) if whole else number


def _boolean(text: str) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())


def _json_of(kind: type) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            value = strict_json(text)
            json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, kind) else None

    return read


CASTS: dict[str, Callable[[str], object]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _json_of(dict),
    "array": _json_of(list),
}
IS: dict[str, Callable[[object], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
}
# A value's own type: the first that it is.
NAMES = ("null", "boolean", "integer", "number", "string", "object", "array")
