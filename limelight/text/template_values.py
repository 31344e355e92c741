"""The values of arguments that a response template writes one by one, as text or as JSON."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from limelight.text.fence import Fence
from limelight.text.formats import Format, either, json_value, literal, pattern
from limelight.text.regex import ALL, JSON_ESCAPED, class_of, rewritten, subtracted
from limelight.text.schema import Schema, finite, mapped, same
from limelight.text.spelling import Untold
from limelight.text.template_spelling import Parameters

# Numbers of so many digits are read back as they are; of more, Python may make infinities.
PLAIN = {
    "integer": "-?(0|[1-9][0-9]{0,30})",
    "number": r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?",
}
# A text that may be read as a value of each type, and what such texts begin with.
PROBES = {
    "integer": ("12345", "-0123456789"),
    "number": ("1.5", "-0123456789"),
    "boolean": ("true", "tf"),
    "null": ("null", "n"),
    "array": ("[]", "["),
    "object": ("{}", "{"),
}
# In JSON half of a surrogate pair would be a text that is none.
NO_TEXT = ("\\ud", "\\uD")
LONGEST_MARK = 3  # characters of a mark that are looked for in JSON
MOST_CHARACTERS = 4_000  # of a text whose characters are counted by a regex
# Schemas of one type that say nothing else of its values.
FREE: dict[str, Schema] = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array", "items": {}},
    "object": {"type": "object", "additionalProperties": {}},
}


@dataclass(frozen=True, slots=True)
class Value:
    """One argument: a prepared schema, where its references lead, and how its text is read.

    `lacks` hears of what cannot be enforced.
    """

    schema: Schema
    definitions: dict[str, Schema]
    spelling: Parameters
    read: Callable[[str], object]
    lacks: Callable[[str], None]

    def format(self) -> Format:
        """The texts that are read as values of the schema."""
        if self.spelling.reads == "json":
            return self._json(self.schema)
        options = self._options(self.schema, ())
        texts = [one for one in options if one.get("type") == "string" or one == {}]
        listed = [one for one in options if "enum" in one]
        others = [one for one in options if one not in texts and one not in listed]
        if not texts and not listed:
            return self._json(self.schema)
        numbers = any(one.get("type") in ("integer", "number") for one in others)
        if numbers and FREE["boolean"] not in others and isinstance(self.read("1"), bool):
            self.lacks("a number beside one of true and false, as 1 and 0 may be read as these")
        made = [literal(text) for one in listed for text in self._listed(one["enum"])]
        made += [self._text(one, others) for one in texts]
        made += [self._json(one) for one in others]
        if not made:
            raise Untold("none of the listed values can be written")
        return either(made)

    def _options(self, schema: Schema, way: tuple[str, ...]) -> list[Schema]:
        """The schemas of one type each that a schema chooses from."""
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            return [] if name in way else self._options(self.definitions[name], (*way, name))
        branches = schema.get("anyOf", [])
        assert isinstance(branches, list)
        found = [one for branch in branches for one in self._options(branch, way)]
        return found if "anyOf" in schema else [schema]

    def _listed(self, values: object) -> list[str]:
        """The texts of those values that are read back as they are."""
        assert isinstance(values, list)
        texts = []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            ends = any(glue and text.endswith(glue) for glue in self.spelling.ahead)
            strips = self.spelling.reads == "stripped" and text != text.strip()
            if self.spelling.fence.lets(text) and not ends and not strips:
                found = self.read(text)
                if same(found, value):
                    texts.append(text)
        if len(texts) < len(values):
            self.lacks("a listed value is not read back as it is written")
        return texts

    def _text(self, schema: Schema, others: list[Schema]) -> Format:
        fence = self.spelling.fence
        if schema == {}:
            return fence.text()
        first_not = self._unfit(others)
        if "pattern" in schema:
            if first_not:
                self.lacks("a pattern of texts that may be read as other values")
            written = self._rewritten(str(schema["pattern"]))
            return fence.text() if written is None else pattern(written)
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        assert isinstance(low, int) and isinstance(high, int | None)
        if max(low, high or 0) > MOST_CHARACTERS:
            self.lacks(f"a length above {MOST_CHARACTERS}")
            high = None if high is not None and high > MOST_CHARACTERS else high
        return fence.text(min(low, MOST_CHARACTERS), high, first_not=first_not)

    def _unfit(self, others: list[Schema]) -> str:
        """What texts must not begin with, as they could be read as what no schema allows."""
        free = {kind for kind, schema in FREE.items() if schema in others}
        free |= {"integer"} if "number" in free else set()
        kinds = [kind for kind, (probe, _) in PROBES.items() if self.read(probe) != probe]
        found = {character for kind in kinds if kind not in free for character in PROBES[kind][1]}
        return "".join(sorted(found))

    def _rewritten(self, regex: str) -> str | None:
        """A regex of texts without marks; None where the pattern needs what begins them."""
        fence = self.spelling.fence
        banned = [(ord(character), ord(character)) for character in fence.first]
        if fence.strips:
            banned += subtracted(ALL, subtracted(ALL, [(0, 32), (0x7F, 0xA0), (0x2000, 0x3000)]))
        try:
            return rewritten(regex, anywhere=False, without=banned)
        except ValueError as error:
            self.lacks(f"a pattern: {error}")
            return None

    def _json(self, schema: Schema) -> Format:
        kind = str(schema.get("type"))
        if schema.keys() == {"type"} and kind in PLAIN and self.spelling.reads != "json":
            return pattern(PLAIN[kind])
        whole = {**schema, "$defs": self.definitions} if self.definitions else schema
        return fenced_json(finite(whole), self.spelling.fence, self.lacks)


def fenced_json(schema: Schema, fence: Fence, lacks: Callable[[str], None]) -> Format:
    """JSON whose texts have no marks in them, nor anything else that begins as they do."""
    # No text of JSON has a control character as it is. Longer marks would take many masks.
    marks = sorted({mark[:LONGEST_MARK] for mark in fence.marks if mark.isprintable()})
    first = [(ord(character), ord(character)) for character in {mark[0] for mark in marks}]
    plain = class_of(subtracted(subtracted(ALL, JSON_ESCAPED), first))

    def kept(regex: str) -> str | None:
        try:
            return rewritten(regex, anywhere=False, without=first)
        except ValueError as error:
            lacks(f"a pattern: {error}")
            return None

    def text(schema: Schema) -> Schema:
        """xgrammar looks for marks in texts without any condition only."""
        if "patternProperties" in schema:
            further = schema["patternProperties"]
            assert isinstance(further, dict)
            keys = [(kept(key), value) for key, value in further.items()]
            return {**schema, "patternProperties": {key: value for key, value in keys if key}}
        if "pattern" in schema:
            found = kept(str(schema["pattern"]))
            without = {key: value for key, value in schema.items() if key != "pattern"}
            return without if found is None else {**without, "pattern": found}
        if schema.get("type") != "string":
            return schema
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low == 0 and high is None:
            return schema
        assert isinstance(low, int) and isinstance(high, int | None)
        if max(low, high or 0) > MOST_CHARACTERS:
            lacks(f"a length above {MOST_CHARACTERS}")
        low = min(low, MOST_CHARACTERS)
        most = "" if high is None or high > MOST_CHARACTERS else str(high)
        return {"type": "string", "pattern": f"{plain}{{{low},{most}}}"}

    return json_value(mapped(schema, text), [*marks, *NO_TEXT])
