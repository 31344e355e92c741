"""The arguments of a glm47 call: texts, made into what the schema of the tool asks for.

A text that fits none of its types stays a text, and so does one that could not be told again from
its value where the schema allows a text as well ("007", "1.10", " 3").
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from limelight.text.schema import MOST_SCHEMAS, leads_to

ALIASES = {
    "null": "null", "none": "null", "nonetype": "null",
    "integer": "integer", "int": "integer", "long": "integer",
    "number": "number", "float": "number", "double": "number",
    "boolean": "boolean", "bool": "boolean",
    "object": "object", "dict": "object", "map": "object",
    "array": "array", "list": "array", "tuple": "array",
    "string": "string", "str": "string", "text": "string",
}  # fmt: skip
TYPE_OF = {
    type(None): "null", int: "integer", float: "number", bool: "boolean",
    dict: "object", list: "array", str: "string",
}  # fmt: skip
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Deeper values stay texts: whatever reads or writes them would come near its own limit.
MAX_DEPTH = 64
# Above it a float does not tell which integer was meant.
EXACT = 2**53

Schema = dict[str, object]


class Argument:
    """The argument `key` of a tool with these parameters; without a property it is a text."""

    def __init__(self, key: str, parameters: object):
        self._root = parameters
        schema = _property(_branches(parameters, parameters), key)
        self._allowed = Allowed.by(schema, parameters)
        self.is_text = self._allowed.types <= {"string"}

    def cast(self, text: str) -> object:
        """The value that is written as `text`; the text itself if the argument `is_text`."""
        return _cast(text, self._allowed, self._root, MAX_DEPTH, nested=False)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a value may be: by which schemas, of which types, and which texts are listed."""

    branches: list[Schema]
    types: set[str]
    texts: frozenset[str]

    @classmethod
    def by(cls, schema: object, root: object) -> "Allowed":
        branches = _branches(schema, root)
        listed = [value for branch in branches for value in _listed(branch)]
        texts = frozenset(value for value in listed if isinstance(value, str))
        return cls(branches, _types(branches), texts)


def _cast(value: object, allowed: Allowed, root: object, room: int, *, nested: bool) -> object:
    """What is `allowed` of `value`; `nested`: it comes from a JSON, where a text has its quotes."""
    branches, types = allowed.branches, allowed.types
    if not branches or room == 0:
        return value
    if isinstance(value, str):
        return _cast_text(value, allowed, root, room, nested=nested)
    if isinstance(value, dict):
        return {
            key: _cast(one, Allowed.by(_property(branches, key), root), root, room - 1, nested=True)
            for key, one in value.items()
        }
    if isinstance(value, list):
        schema = _merged([branch["items"] for branch in branches if "items" in branch])
        items = Allowed.by(schema, root)
        return [_cast(one, items, root, room - 1, nested=True) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value) if "integer" in types and "number" not in types else value
    return value


def _cast_text(text: str, allowed: Allowed, root: object, room: int, *, nested: bool) -> object:
    types = allowed.types
    exact = "string" in types
    if not types or (exact and (nested or text in allowed.texts)):
        return text
    given = text if exact else text.strip()
    for kind, scalar in SCALARS.items():
        if kind in types:
            try:
                return scalar(given, exact)
            except ValueError:
                pass
    try:
        value = _json(given, room, exact=exact) if types & {"object", "array"} else None
    except ValueError:
        return text
    if value is None or TYPE_OF[type(value)] not in types:
        return text
    return _cast(value, allowed, root, room, nested=True)


def _branches(schema: object, root: object) -> list[Schema]:
    """The schema and all that it refers to or chooses from, each once."""
    found: dict[int, Schema] = {}
    waiting = [schema]
    while waiting and len(found) < MOST_SCHEMAS:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in found:
            continue
        found[id(one)] = one
        waiting += leads_to(one, root)
    return list(found.values())


def _types(branches: list[Schema]) -> set[str]:
    """All types that a value may have; none if the schema does not say."""
    types: set[str] = set()
    for branch in branches:
        named = branch.get("type")
        for name in named if isinstance(named, list) else [named]:
            if isinstance(name, str) and name.lower() in ALIASES:
                types.add(ALIASES[name.lower()])
        types |= {TYPE_OF[type(value)] for value in _listed(branch) if type(value) in TYPE_OF}
        if branch.get("nullable") is True:
            types.add("null")
        if "type" not in branch:
            types |= {"object"} if isinstance(branch.get("properties"), dict) else set()
            types |= {"array"} if isinstance(branch.get("items"), dict) else set()
    return types


def _listed(branch: Schema) -> list[object]:
    values = branch.get("enum")
    constant = [branch["const"]] if "const" in branch else []
    return [*values, *constant] if isinstance(values, list) else constant


def _property(branches: list[Schema], key: str) -> object:
    found: list[object] = []
    for branch in branches:
        if isinstance(properties := branch.get("properties"), dict) and key in properties:
            found.append(properties[key])
    others = [branch["additionalProperties"] for branch in branches if _has_others(branch)]
    return _merged(found or others)


def _has_others(branch: Schema) -> bool:
    return isinstance(branch.get("additionalProperties"), dict)


def _merged(schemas: list[object]) -> object:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _null(text: str, exact: bool) -> None:
    if text != "null" and (exact or text.lower() not in ("null", "none")):
        raise ValueError


def _boolean(text: str, exact: bool) -> bool:
    names = {"true": True, "false": False}
    if not exact:
        names |= {"1": True, "0": False}
    if (name := text if exact else text.lower()) not in names:
        raise ValueError
    return names[name]


def _integer(text: str, exact: bool) -> int:
    value = _number(text, exact)
    if isinstance(value, float):
        raise ValueError
    return value


def _number(text: str, exact: bool) -> int | float:
    if INTEGER.fullmatch(text):
        whole = int(text)
        if exact and str(whole) != text:
            raise ValueError
        return whole
    if not NUMBER.fullmatch(text):
        raise ValueError
    value = _finite(text)
    if exact and json.dumps(value) != text:
        raise ValueError
    return int(value) if value.is_integer() and abs(value) < EXACT else value


# In the order in which they are tried; objects and arrays come after them.
SCALARS: dict[str, Callable[[str, bool], object]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}


def _json(text: str, room: int, *, exact: bool) -> object:
    """An object or array that can be written again; with `exact` without blanks around it."""
    if not text.startswith(("{", "[")) or (exact and text != text.strip()):
        raise ValueError
    try:
        value: object = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError from error
    level = [value]
    for _ in range(room):
        level = [child for one in level for child in children(one)]
    if level:
        raise ValueError
    # Half a surrogate pair can be escaped in JSON, but not be sent.
    json.dumps(value, ensure_ascii=False).encode()
    return value


def children(value: object) -> list[object]:
    """What a value of JSON is made of."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
