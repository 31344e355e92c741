"""Calls as a response template writes them: the names of tools, and arguments by their schemas."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from limelight.text.casting import argument_types, cast_to
from limelight.text.formats import (
    Format,
    any_number,
    either,
    literal,
    one_of,
    optional,
    pattern,
    sequence,
)
from limelight.text.json_schema import prepared
from limelight.text.regex import ALL, rewritten, subtracted
from limelight.text.schema import Schema, finite
from limelight.text.spelling import Untold, but, other_names
from limelight.text.template_spelling import Calls, Parameters
from limelight.text.template_values import Value, fenced_json
from limelight.types import RequestError

NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
PARAM = "tools"

# One argument: its key and value, and whether it must be there.
Argument = tuple[Format, bool]


def call_of(tool: dict[str, object], calls: Calls) -> Format:
    """One call of a tool; `RequestError` if it cannot be written, or a strict one not kept to."""
    name = tool.get("name")
    strict = tool.get("strict") is True
    if not isinstance(name, str) or not calls.spells(name):
        raise RequestError(
            f"the tool {str(name)[:100]!r} cannot be encoded in tool calls of this model; "
            "give it a name of letters, digits, _ and -",
            param=PARAM,
        )
    names = one_of(before + name + after for before, after in calls.opens)
    try:
        return sequence(names, Arguments(tool, calls, strict=strict).format())
    except RequestError as error:
        raise RequestError(f"tool {name[:100]!r}: {error}", param=PARAM) from error
    except Untold as error:
        raise RequestError(f"tool {name[:100]!r}: {error}", param=PARAM) from error


class Arguments:
    """The arguments of one tool, in the order of its schema or of the alphabet."""

    def __init__(self, tool: dict[str, object], calls: Calls, *, strict: bool):
        self._tool, self._calls, self._strict = tool, calls, strict
        schema = tool.get("parameters")
        one_by_one = calls.parameters is not None and calls.parameters.reads != "json"
        self._schema = NO_ARGUMENTS
        if schema:
            self._schema = prepared(schema, strict=strict, param=PARAM, arguments=one_by_one)
        found = self._schema.get("$defs", {})
        assert isinstance(found, dict)
        self._definitions: dict[str, Schema] = found

    def format(self) -> Format:
        objects = [one for one in self._objects(self._schema, ()) if one is not None]
        if not objects:
            raise Untold("its parameters must be an object")
        if self._calls.parameters is None:
            body: Schema = {"anyOf": objects, "$defs": self._definitions}
            return fenced_json(finite(body), self._calls.fence, self._lacks)
        return either([self._object(one, self._calls.parameters) for one in objects])

    def _objects(self, schema: Schema, way: tuple[str, ...]) -> list[Schema | None]:
        """The schemas of objects that the parameters may be."""
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            return [] if name in way else self._objects(self._definitions[name], (*way, name))
        if "anyOf" in schema:
            branches = schema["anyOf"]
            assert isinstance(branches, list)
            return [one for branch in branches for one in self._objects(branch, way)]
        if schema.keys() <= {"$defs"}:
            return [{"type": "object", "additionalProperties": {}}]
        return [schema if schema.get("type") == "object" else None]

    def _object(self, schema: Schema, spelling: Parameters) -> Format:
        for keyword in ("minProperties", "maxProperties"):
            if keyword in schema:
                self._lacks(f"{keyword} of all arguments")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        assert isinstance(properties, dict) and isinstance(required, list)
        made: dict[str, Argument] = {}
        for key, value in properties.items():
            if spelling.spells(key):
                argument = self._argument(literal(key), self._value(key, value, spelling), spelling)
                made[key] = argument, key in required
            elif self._strict or key in required:
                raise Untold(f"the parameter {key[:100]!r} cannot be encoded in tool calls")
        further = schema.get("additionalProperties", False)
        extra = None
        if isinstance(further, dict):
            extra = self._further(further, list(properties), schema.get("propertyNames"), spelling)
        orders = dict.fromkeys((tuple(made), tuple(sorted(made))))
        return either([_in_order([made[key] for key in keys], extra, spelling) for keys in orders])

    def _argument(self, key: Format, value: Format, spelling: Parameters) -> Format:
        """An argument up to the end of its value."""
        opens = [sequence(literal(before), key, literal(after)) for before, after in spelling.opens]
        return sequence(either(opens), value)

    def _further(
        self, schema: Schema, declared: list[str], names: object, spelling: Parameters
    ) -> Format | None:
        """An argument that the schema does not name."""
        if spelling.key is None:
            self._lacks("additionalProperties, as the format has no rule for keys")
            return None
        allowed = but(spelling.key, spelling.fence.first)
        keys = pattern(other_names(declared, allowed))
        if isinstance(names, dict):
            try:
                written = rewritten(str(names["pattern"]), anywhere=False,
                                    without=subtracted(ALL, allowed))  # fmt: skip
            except ValueError as error:
                raise Untold(f"propertyNames: {error}") from error
            keys = pattern(written)
        return self._argument(keys, self._value("\0", schema, spelling), spelling)

    def _value(self, key: str, schema: Schema, spelling: Parameters) -> Format:
        read = partial(cast_to, argument_types(self._tool, key))

        def lacks(what: str):
            self._lacks(f"{key[:100]}: {what}" if key != "\0" else f"additionalProperties: {what}")

        return Value(schema, self._definitions, spelling, read, lacks).format()

    def _lacks(self, what: str):
        """An error if the tool is strict; the tool is else kept to as far as it can be."""
        if self._strict:
            _refuse(what)


def _refuse(what: str) -> NoReturn:
    raise Untold(f"{what} cannot be enforced in tool calls of this model")


def _in_order(arguments: list[Argument], extra: Format | None, spelling: Parameters) -> Format:
    """Arguments one after the other, each of which ends with a mark or where the next begins."""
    end, blank = one_of(spelling.closes), optional(literal("\n"))
    last = max((i for i, (_, needed) in enumerate(arguments) if needed), default=None)
    if last is None:
        # Which one is the first is open, so that each has an end of its own.
        ended: Callable[[Format], Format] = lambda argument: sequence(argument, end, blank)  # noqa: E731
        made = [optional(ended(argument)) for argument, _ in arguments]
        return sequence(*made, *([any_number(ended(extra))] if extra else []))
    ends = [sequence(end, blank), *(literal(glue) for glue in spelling.ahead)]
    glue = either(ends)
    made = []
    for index, (argument, needed) in enumerate(arguments):
        if index < last:
            whole = sequence(argument, glue)
        else:
            whole = argument if index == last else sequence(glue, argument)
        made.append(whole if needed else optional(whole))
    return sequence(*made, *([any_number(sequence(glue, extra))] if extra else []), end)
