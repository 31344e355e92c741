"""How the parts of a JSON schema lead to each other, and what two schemas are together."""

from collections.abc import Callable, Hashable
from urllib.parse import unquote

UNIONS = ("anyOf", "oneOf", "allOf")
MOST_SCHEMAS = 200  # that are looked at for the types of one value
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly")
    + ("writeOnly", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions")
)
# Of two bounds the one that holds; of two lists what both have.
HIGHER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
LOWER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
BOTH = ("items", "additionalProperties", "propertyNames")
# Bounds of integers that xgrammar takes, and of other numbers that it writes exactly.
MAX_INTEGER = 2**63 - 1
MAX_NUMBER = 1e15

Schema = dict[str, object]

ANY: Schema = {"$ref": "#/$defs/any"}
ANYTHING: Schema = {
    "anyOf": [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER},
        {"type": "string"},
        {"type": "array", "items": ANY},
        {"type": "object", "additionalProperties": ANY},
    ]
}


class Contradiction(Exception):
    """A keyword that two schemas have and that cannot be made one."""


def leads_to(schema: Schema, root: object) -> list[object]:
    """What a schema refers to within `root` (#/$defs/name), and what it chooses from or joins."""
    reference = schema.get("$ref")
    found = [referred(reference, root)] if isinstance(reference, str) else []
    for union in UNIONS:
        if isinstance(listed := schema.get(union), list):
            found += listed
    return found


def referred(reference: str, root: object) -> object:
    """What a local reference points to; None for any other."""
    document, _, path = reference.partition("#")
    if document or not reference or (path and not path.startswith("/")):
        return None
    found = root
    for step in unquote(path).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isascii() and step.isdigit() and len(step) < 6:
            found = found[int(step)] if int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def bare(schema: Schema) -> Schema:
    """The schema without what asserts nothing."""
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def joined(first: object, second: object) -> object:
    """What is valid by both; `Contradiction` names the keyword that cannot be joined."""
    if first is False or second is False:
        return False
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second if first is True else first
    made = dict(first)
    for key, value in second.items():
        made[key] = _joined_keyword(key, made[key], value) if key in made else value
    # A property of the one that the other does not list is one of the other's further properties.
    if "properties" in made and {"additionalProperties"} & (first.keys() | second.keys()):
        made["properties"] = {
            key: _further(key, _further(key, value, first), second)
            for key, value in _dict(made["properties"]).items()
        }
    return made


def _further(key: str, schema: object, other: Schema) -> object:
    if key in _dict(other.get("properties")) or "additionalProperties" not in other:
        return schema
    return joined(schema, other["additionalProperties"])


def _joined_keyword(key: str, first: object, second: object) -> object:
    if first == second and type(first) is type(second):
        return first
    if key in HIGHER + LOWER and _is_number(first) and _is_number(second):
        assert isinstance(first, int | float) and isinstance(second, int | float)
        return max(first, second) if key in HIGHER else min(first, second)
    if key == "type":
        return _joined_types(_list(first), _list(second))
    if key == "enum" and isinstance(first, list) and isinstance(second, list):
        return _common(first, second)
    if key == "required" and isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    if key == "properties" and isinstance(first, dict) and isinstance(second, dict):
        both = {name: joined(first[name], second[name]) for name in first if name in second}
        return first | second | both
    if key in BOTH:
        return joined(first, second)
    raise Contradiction(key)


def _common(first: list[object], second: list[object]) -> list[object]:
    """Those of the first values that are among the second."""
    known = {identity(value) for value in second}
    return [value for value in first if identity(value) in known]


def _joined_types(first: list[object], second: list[object]) -> list[object]:
    """`integer` is a part of `number`."""
    kept = _common(first, second)
    for one, other in ((first, second), (second, first)):
        if "integer" in one and "number" in other and "integer" not in kept:
            kept.append("integer")
    return kept


def mapped(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A prepared schema with all that are in it, and at last itself, as `change` makes them."""
    made: Schema = {}
    for key, value in schema.items():
        match key, value:
            case "properties" | "patternProperties" | "$defs", dict():
                made[key] = {name: mapped(inner, change) for name, inner in value.items()}
            case "anyOf" | "prefixItems", list():
                made[key] = [mapped(inner, change) for inner in value]
            case "items" | "additionalProperties" | "propertyNames", dict():
                made[key] = mapped(value, change)
            case _:
                made[key] = value
    return change(made)


def finite(schema: Schema) -> Schema:
    """A prepared schema, with the `$defs` that it uses, for JSON of which no number is infinite.

    Nor has an integer more digits than readers take.
    """
    known = {**_dict(schema.get("$defs")), "any": ANYTHING}
    made = mapped({key: value for key, value in schema.items() if key != "$defs"}, _finite)
    used: dict[str, object] = {}
    waiting: list[object] = [made]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
            name = str(one.get("$ref")).rpartition("/")[2]
            if name in known and name not in used:
                used[name] = mapped(_dict(known[name]), _finite)
                waiting.append(used[name])
    return {**made, "$defs": used} if used else made


def _finite(schema: Schema) -> Schema:
    if not schema:
        return ANY
    if schema.get("type") not in ("integer", "number") or "multipleOf" in schema:
        return schema
    most = MAX_INTEGER if schema["type"] == "integer" else MAX_NUMBER
    low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -most}
    high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": most}
    return {**schema, **low, **high}


def identity(value: object) -> Hashable:
    """What is equal of two values of JSON if, and only if, they are one; true is not 1."""
    match value:
        case bool():
            return ("boolean", value)
        case list():
            return ("array", *map(identity, value))
        case dict():
            return ("object", frozenset((key, identity(one)) for key, one in value.items()))
    return value


def same(first: object, second: object) -> bool:
    """Whether two values of JSON are one."""
    return identity(first) == identity(second)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _dict(value: object) -> Schema:
    return value if isinstance(value, dict) else {}
