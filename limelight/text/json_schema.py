"""JSON schemas, made into the part of the language that xgrammar enforces whole.

Enforced: types, enum and const, properties, required, additionalProperties, items, prefixItems, the
bounds of numbers, lengths of texts and arrays, numbers of properties where no others are allowed,
pattern, the formats of `regex.FORMATS`, local $ref (recursive ones too), anyOf, allOf whose parts
can be joined, and oneOf whose branches, 256 at most, exclude each other. Without
additionalProperties an object has no others than its properties, if it names some; properties come
in the order of the schema.
Texts with a pattern, a format or a short length are written without escapes, and so are keys that
are none of an object's properties.

Not enforced, so an error where the schema is strict and left out otherwise: not, if, dependent*,
unevaluated*, contains, uniqueItems, patternProperties and propertyNames beside properties,
multipleOf beside bounds or of fractions, a length beside most patterns and all formats, other
formats, references to other documents, and what `regex` says of patterns.

Annotations (title, description, default, ...) and keywords that JSON Schema does not know are
passed over. What no value can fulfil is an error.
"""

from collections.abc import Hashable, Iterable

from limelight.text.glm_casting import ALIASES, TYPE_OF, children
from limelight.text.json_bounds import Nothing
from limelight.text.json_kinds import KINDS, kinds_of, listed_that_fit
from limelight.text.regex import Ranges
from limelight.text.schema import Contradiction, Schema, bare, identity, joined, referred, same
from limelight.types import RequestError

MAX_DEPTH = 64
MAX_SIZE = 1_000_000  # characters of its JSON
MAX_SCHEMAS = 5_000  # that are made of it; references may multiply them
MAX_COMPARED = 256  # branches of oneOf, each with each
# Types of other languages, as tools may name them: there anything may stand.
FOREIGN = {"any", "date", "datetime", "decimal", "enum", "file", "json", "set", "unknown", "uuid"}
UNHELD = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip


def prepared(
    schema: object,
    *,
    strict: bool,
    param: str,
    without: Ranges | None = None,
    arguments: bool = False,
) -> dict[str, object]:
    """What xgrammar enforces of a schema, as a schema with all of its references in `$defs`.

    Texts and keys hold none of the characters `without`. With `arguments` the properties of the
    schema are written one by one, and texts among them without quotes: their patterns and lengths
    are those of the texts, not of JSON. `RequestError` (`param`) for what is no schema, is too
    large, allows nothing or, if `strict`, cannot be enforced.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError(f"{param}: a JSON schema must be an object", param=param)
    _check_size(schema, param)
    reader = _Reader(schema, strict=strict, param=param, without=without or [], raw=arguments)
    try:
        made = reader.read(schema, "")
        used = _definitions(made, reader.definitions)
    except Nothing as error:
        raise RequestError(
            f"{param}: no JSON is valid by the schema: {error}", param=param
        ) from error
    return {**made, "$defs": used} if used else made


def _check_size(schema: Schema, param: str):
    level: list[object] = [schema]
    size = depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestError(
                f"{param}: the JSON schema is nested deeper than {MAX_DEPTH} levels", param=param
            )
        size += sum(len(one) if isinstance(one, str) else 4 for one in level)
        size += sum(len(str(key)) for one in level if isinstance(one, dict) for key in one)
        if size > MAX_SIZE:
            raise RequestError(
                f"{param}: the JSON schema has more than {MAX_SIZE} characters", param=param
            )
        level = [child for one in level for child in children(one)]


def _definitions(schema: Schema, known: dict[str, Schema]) -> dict[str, Schema]:
    """The definitions that a schema refers to, directly or not."""
    used: dict[str, Schema] = {}
    waiting: list[object] = [schema]
    while waiting:
        one = waiting.pop()
        reference = one.get("$ref") if isinstance(one, dict) else None
        if isinstance(reference, str) and (name := reference.rpartition("/")[2]) not in used:
            if name not in known:
                raise Nothing("what it refers to cannot be fulfilled")
            used[name] = known[name]
            waiting.append(known[name])
        waiting += children(one)
    return dict(sorted(used.items(), key=lambda item: int(item[0])))


class _Reader:
    """Makes the schemas of one root; `definitions` are those that references lead to."""

    def __init__(self, root: Schema, *, strict: bool, param: str, without: Ranges, raw: bool):
        self.definitions: dict[str, Schema] = {}
        self.without = without
        self._is_raw = raw
        self._level = 0  # of arrays and objects around what is read
        self._root, self._strict, self._param = root, strict, param
        # Of the definitions, by the schemas that they are made of and how their texts are written.
        self._names: dict[tuple[int, bool], str] = {}
        self._num_read = self._depth = 0

    @property
    def is_plain(self) -> bool:
        """Whether a text stands here without quotes."""
        return self._is_raw and self._level <= 1

    def lacks(self, keyword: str, place: str, why: str = ""):
        """`keyword` cannot be enforced: an error if the schema is strict."""
        if self._strict:
            self.refuse(f"{keyword} cannot be enforced{why and ': '}{why}", place)

    def refuse(self, fault: str, place: str):
        where = f" at {place[1:][:200]}" if place else ""
        raise RequestError(f"{self._param}: the JSON schema{where}: {fault}", param=self._param)

    def read(self, schema: object, place: str) -> Schema:
        """What is enforced of one schema; `Nothing` where it allows no value."""
        self._num_read += 1
        if self._num_read > MAX_SCHEMAS:
            self.refuse(f"it stands for more than {MAX_SCHEMAS} schemas", "")
        if schema is True:
            return {}
        if schema is False:
            raise Nothing(f"{place[1:] or 'it'} is false")
        if not isinstance(schema, dict):
            self.refuse(f"a schema must be an object, got {str(schema)[:50]!r}", place)
        assert isinstance(schema, dict)
        own = bare(schema)
        if own.keys() == {"allOf"} and isinstance(own["allOf"], list) and len(own["allOf"]) == 1:
            return self.read(own["allOf"][0], f"{place}.allOf[0]")
        if own.keys() == {"$ref"}:
            return self._reference(own["$ref"], place)
        return self._chosen(self._flat(own, place, []), place)

    def _reference(self, reference: object, place: str) -> Schema:
        target = self._target(reference, place)
        if not isinstance(target, dict) or bare(target).keys() == {"$ref"}:
            # References that lead to references may lead in circles.
            return self._chosen(self._flat({"$ref": reference}, place, []), place)
        key = (id(target), self.is_plain)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = str(len(self._names))
            self.definitions[name] = self.read(target, place)
            if self.definitions[name] == {"$ref": f"#/$defs/{name}"}:
                self.refuse("it refers to itself and says nothing else", place)
        return {"$ref": f"#/$defs/{name}"}

    def _target(self, reference: object, place: str) -> object:
        target = referred(reference, self._root) if isinstance(reference, str) else None
        if target is not None:
            return target
        shown = str(reference)[:100]
        if isinstance(reference, str) and reference.startswith("#/"):
            self.refuse(f"$ref {shown!r} leads nowhere", place)
        self.lacks(f"$ref {shown!r}", place, "only references within the schema are followed")
        return True

    def _flat(self, schema: object, place: str, way: list[str]) -> object:
        """The schema with its references and the parts of allOf joined into it."""
        if not isinstance(schema, dict):
            return schema
        schema = bare(schema)
        parts: list[object] = []
        if "$ref" in schema:
            reference = str(schema["$ref"])
            if reference in way or len(way) > MAX_DEPTH:
                self.refuse(f"$ref {reference[:100]!r} leads in a circle", place)
            parts.append(self._flat(self._target(schema["$ref"], place), place, [*way, reference]))
        for part in self._list(schema, "allOf", place):
            parts.append(self._flat(part, f"{place}.allOf", way))
        made: object = {key: schema[key] for key in schema if key not in ("$ref", "allOf")}
        for part in parts:
            self._num_read += 1
            try:
                made = joined(made, part)
            except Contradiction as error:
                self.lacks(f"allOf with two different {error}", place)
            except RecursionError:
                self.refuse("it is too deep", place)
        return made

    def _list(self, schema: Schema, keyword: str, place: str) -> list[object]:
        value = schema.get(keyword, [])
        if not isinstance(value, list) or (keyword in schema and not value):
            self.refuse(f"{keyword} must be a list with at least one schema", place)
        assert isinstance(value, list)
        return value

    def _chosen(self, schema: object, place: str) -> Schema:
        """A schema without references that may choose from others."""
        if not isinstance(schema, dict):
            return self.read(schema, place)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.refuse(f"with its references it is nested deeper than {MAX_DEPTH} levels", "")
        try:
            return self._made(schema, place)
        finally:
            self._depth -= 1

    def _made(self, schema: Schema, place: str) -> Schema:
        for keyword in UNHELD:
            if keyword in schema:
                self.lacks(keyword, place)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._union(schema, keyword, place)
        if "const" in schema or "enum" in schema:
            return {"enum": self._listed(schema, place)}
        kinds = self._kinds(schema, place)
        if kinds is None:
            return {}
        return either(self._each(((kind, schema) for kind in kinds), place), place)

    def _each(self, kinds: Iterable[tuple[str, Schema]], place: str) -> list[Schema]:
        made: list[Schema] = []
        for kind, schema in kinds:
            try:
                made.append(self._one(kind, schema, place))
            except Nothing as error:
                nothing = error
        if not made:
            raise nothing
        return made

    def _one(self, kind: str, schema: Schema, place: str) -> Schema:
        self._level += kind in ("array", "object")
        try:
            return KINDS[kind](self, schema, place)
        finally:
            self._level -= kind in ("array", "object")

    def _union(self, schema: Schema, keyword: str, place: str) -> Schema:
        others = {key: value for key, value in schema.items() if key != keyword}
        made: list[Schema] = []
        for index, branch in enumerate(self._list(schema, keyword, place)):
            where = f"{place}.{keyword}[{index}]"
            try:
                if not others:
                    made.append(self.read(branch, where))
                    continue
                whole = joined(others, self._flat(branch, where, []))
                self._num_read += 1
                made.append(self._chosen(whole, where))
            except Contradiction as error:
                self.lacks(f"{keyword} beside another {error}", where)
                made.append(self.read(branch, where))
            except Nothing:
                continue
        if not made:
            raise Nothing(
                f"no branch of {place[1:]}{'.' if place else ''}{keyword} can be fulfilled"
            )
        if keyword == "oneOf" and not self._exclude(made):
            self.lacks("oneOf", place, "its branches do not clearly exclude each other; use anyOf")
        return either(made, place)

    def _exclude(self, branches: list[Schema]) -> bool:
        """Whether no value is valid by two of the branches, as far as is easily seen."""
        seen: list[Schema] = []
        for branch in branches:
            options = self.options(branch)
            if len(seen) + len(options) > MAX_COMPARED:
                return False
            if any(not _differ(one, other) for one in options for other in seen):
                return False
            seen += options
        return True

    def options(self, made: Schema, way: tuple[str, ...] = ()) -> list[Schema]:
        """The schemas of single types that one chooses from."""
        if "$ref" in made:
            name = str(made["$ref"]).rpartition("/")[2]
            known = self.definitions.get(name)
            return [{}] if known is None or name in way else self.options(known, (*way, name))
        branches = made.get("anyOf", [made])
        if branches == [made]:
            return [made]
        assert isinstance(branches, list)
        return [one for branch in branches for one in self.options(branch, way)]

    def _kinds(self, schema: Schema, place: str) -> list[str] | None:
        """The types that a schema allows; None for all, without any condition."""
        if "type" not in schema:
            return kinds_of(schema)
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds: list[str] = []
        for name in named:
            known = name if isinstance(name, str) and name in KINDS else None
            if known is None and not self._strict and isinstance(name, str):
                # Tools are often described with the names of other languages.
                if name.lower() in FOREIGN:
                    return None
                known = ALIASES.get(name.lower())
            if not isinstance(known, str):
                self.refuse(f"there is no type {str(name)[:50]!r}", place)
            kinds.append(str(known))
        if not kinds:
            raise Nothing(f"{place[1:]} has an empty list of types")
        return [k for k in dict.fromkeys(kinds) if not (k == "integer" and "number" in kinds)]

    def _listed(self, schema: Schema, place: str) -> list[object]:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list):
            self.refuse("enum must be a list", place)
        assert isinstance(values, list)
        if "const" in schema:
            values = [value for value in values if same(value, schema["const"])]
        kinds = self._kinds(schema, place) if "type" in schema else None
        fitting = [
            value
            for value in values
            if kinds is None
            or TYPE_OF[type(value)] in kinds
            or (TYPE_OF[type(value)] == "integer" and "number" in kinds)
        ]
        return listed_that_fit(self, fitting, schema, place)


def _differ(one: Schema, other: Schema) -> bool:
    """Whether two schemas of single types have no value in common."""
    first, second = _values(one), _values(other)
    if first is not None and second is not None:
        return {identity(value) for value in first}.isdisjoint(map(identity, second))
    kinds, others = _types_of(one), _types_of(other)
    if not kinds or not others:
        return False
    if "number" in kinds | others:
        kinds, others = ({("number" if k == "integer" else k) for k in x} for x in (kinds, others))
    if not kinds & others:
        return True
    if kinds != {"object"} or others != {"object"}:
        return False
    return any(
        _differ(schema, _properties(other)[key])
        for key, schema in _properties(one).items()
        if key in _required(one) and key in _required(other)
    )


def _values(schema: Schema) -> list[object] | None:
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types_of(schema: Schema) -> set[str]:
    if (values := _values(schema)) is not None:
        return {TYPE_OF[type(value)] for value in values}
    return {str(schema["type"])} if "type" in schema else set()


def _properties(schema: Schema) -> dict[str, Schema]:
    found = schema.get("properties", {})
    assert isinstance(found, dict)
    return found


def _required(schema: Schema) -> list[str]:
    found = schema.get("required", [])
    assert isinstance(found, list)
    return found


def either(branches: list[Schema], place: str) -> Schema:
    """Any of the branches; those of other choices become its own."""
    found: dict[Hashable, Schema] = {}
    for branch in branches:
        inner = branch.get("anyOf", [branch])
        assert isinstance(inner, list)
        for one in inner:
            found.setdefault(identity(one), one)
    flat = list(found.values())
    if {} in flat:
        return {}
    return flat[0] if len(flat) == 1 else {"anyOf": flat}
