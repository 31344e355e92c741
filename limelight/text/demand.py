"""What a request demands of the form of its answer, before any model's own format is known."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from limelight.text.formats import Format, json_value, one_of, pattern
from limelight.text.glm_casting import children
from limelight.text.json_schema import prepared
from limelight.text.regex import rewritten
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, RequestError

MAX_CHOICES = 10_000
MAX_GRAMMAR = 100_000  # characters
MAX_TAG_DEPTH = 80
RESPONSE_TYPES = ("text", "json_object", "json_schema", "structural_tag")
# The fields of `structured_outputs` that say what the content is; exactly one is given.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
TAG_FORMATS = frozenset(
    ("const_string", "json_schema", "any_text", "token", "exclude_token", "any_tokens", "grammar")
    + ("regex", "qwen_xml_parameter", "sequence", "or", "tag", "triggered_tags", "optional")
    + ("token_triggered_tags", "tags_with_separator", "plus", "star", "repeat", "dispatch")
    + ("token_dispatch",)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Which calls and which content an answer may have.

    `tools` are the function objects of those that may be called (name, parameters, strict).
    `choice` is auto, required or none, or "named" where `tools` holds the one that must be called.
    `content` is what the content must be, if anything; `thinking` is what the request says of it.
    """

    tools: list[dict[str, object]] = field(default_factory=list)
    choice: str = "auto"
    parallel: bool = True
    content: Format | None = None
    thinking: bool | None = None

    @property
    def is_forced(self) -> bool:
        """Whether a call there must be."""
        return self.choice in ("required", "named")

    @property
    def has_own_tag(self) -> bool:
        """Whether the content is a structural tag that the request brings.

        It may speak of the marks of the model's own format.
        """
        return self.content is not None and self.content["type"] == "sequence"


def constraint_of(
    format: Format,
    tokenizer: Tokenizer,
    *,
    after_reasoning: bool = False,
    marks: Iterable[int] = (),
) -> Constraint:
    """The constraint to a format; the tokens `marks` are no text of it."""
    never = not_in_json(tokenizer) if has_lengths(format) else ()
    return Constraint(
        tag=json.dumps({"type": "structural_tag", "format": format}, ensure_ascii=False),
        after_reasoning=after_reasoning,
        marks=sorted({*marks, *never}),
    )


@lru_cache(maxsize=4)
def not_in_json(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens with characters that a text in JSON has only as escapes.

    xgrammar lets them into texts of bounded length, so where a format has such texts they must be
    among the marks of the constraint. A line end it keeps out itself.
    """
    controls = {*range(0x20)} - {ord("\n"), ord("\r")}
    ids = range(tokenizer.vocab_size)
    return tuple(i for i in ids if not controls.isdisjoint(tokenizer.token_bytes(i)))


def has_lengths(format: Format) -> bool:
    """Whether a JSON schema in it bounds the length of a text."""
    return any(f'"{name}"' in json.dumps(format) for name in ("minLength", "maxLength"))


def answer_format(
    response_format: object, structured_outputs: object, *, compact: bool = False
) -> Format | None:
    """What the two fields of a request ask of the content; `RequestError` names the wrong one.

    A structural tag becomes a sequence; nothing else is one. `compact`: JSON without blanks.
    """
    asked = _response_format(response_format)
    if structured_outputs is not None:
        if asked is not None:
            raise _wrong("structured_outputs", "it cannot be given beside response_format")
        asked = _structured_outputs(structured_outputs)
    if compact and asked is not None and asked["type"] == "json_schema":
        asked = _compact(asked)
    return asked


def _compact(format: Format) -> Format:
    """One blank between two tokens is the least that xgrammar can be told to allow."""
    return {**format, "max_whitespace_cnt": 1}


def _wrong(param: str, fault: str) -> RequestError:
    return RequestError(f"{param}: {fault}", param=param)


def _response_format(given: object) -> Format | None:
    param = "response_format"
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") not in RESPONSE_TYPES:
        raise _wrong(param, f"its type must be one of {', '.join(RESPONSE_TYPES)}")
    match given["type"]:
        case "text":
            return None
        case "json_object":
            return json_value({"type": "object"}, ())
        case "structural_tag":
            return _structural_tag(given, param)
    named = given.get("json_schema")
    if not isinstance(named, dict) or named.get("schema") is None:
        raise _wrong(param, "json_schema must be an object with a name and a schema")
    for key, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(named.get(key), kind | None):
            expected = "true or false" if kind is bool else "a string"
            raise _wrong(param, f"json_schema.{key} must be {expected}")
    schema = prepared(named["schema"], strict=named.get("strict") is True, param=param)
    return json_value(schema, ())


def _structured_outputs(given: object) -> Format:
    param = "structured_outputs"
    if not isinstance(given, dict):
        raise _wrong(param, f"it must be an object with one of {', '.join(KINDS)}")
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    for name in asked:
        if name not in KINDS + OPTIONS:
            raise _wrong(param, f"it has no field {name[:50]!r}; it takes {', '.join(KINDS)}")
    kinds = [name for name in asked if name in KINDS]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise _wrong(param, f"exactly one of {', '.join(KINDS)} must be given, found {found}")
    for name in ("disable_additional_properties", "whitespace_pattern"):
        if name in asked:
            raise _wrong(param, f"{name} is not supported; write it into the schema or a grammar")
    if not isinstance(asked.get("disable_any_whitespace", True), bool):
        raise _wrong(param, "disable_any_whitespace must be true or false")
    (kind,) = kinds
    made = _asked(kind, asked[kind], f"{param}.{kind}")
    if "disable_any_whitespace" in asked:
        if made["type"] != "json_schema":
            raise _wrong(param, "disable_any_whitespace is for json and json_object")
        made = _compact(made)
    return made


def _asked(kind: str, value: object, where: str) -> Format:
    param = "structured_outputs"
    match kind:
        case "json":
            schema = _json(value, where) if isinstance(value, str) else value
            return json_value(prepared(schema, strict=False, param=param), ())
        case "json_object":
            if value is not True:
                raise _wrong(param, "json_object must be true or false")
            return json_value({"type": "object"}, ())
        case "regex":
            return _regex(value)
        case "choice":
            return _choice(value)
        case "grammar":
            return _grammar(value)
    tag = _json(value, where) if isinstance(value, str) else value
    return _structural_tag(tag, param)


def _json(text: str, where: str) -> object:
    param = where.partition(".")[0]
    if len(text) > 1_000_000:
        raise _wrong(param, f"{where} has more than 1000000 characters")
    try:
        # As bodies are read: without NaN, infinities and halves of surrogate pairs.
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(param, f"{where} is not JSON: {str(error)[:100]}") from error


def _regex(value: object) -> Format:
    param = "structured_outputs"
    if not isinstance(value, str) or not value:
        raise _wrong(param, "regex must be a string that is not empty")
    try:
        return pattern(rewritten(value, anywhere=False))
    except ValueError as error:
        raise _wrong(param, f"the regex {value[:50]!r} cannot be enforced: {error}") from error


def _choice(value: object) -> Format:
    param = "structured_outputs"
    choices = [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
    if not 0 < len(choices) <= MAX_CHOICES or choices != value or "" in choices:
        raise _wrong(param, f"choice must be a list of 1 to {MAX_CHOICES} strings, none empty")
    if sum(map(len, choices)) > MAX_GRAMMAR:
        raise _wrong(param, f"the choices have more than {MAX_GRAMMAR} characters")
    return one_of(dict.fromkeys(choices))


def _grammar(value: object) -> Format:
    """A grammar in EBNF (root ::= ...) or in Lark's language (start: ...)."""
    param = "structured_outputs"
    if not isinstance(value, str) or not value.strip():
        raise _wrong(param, "grammar must be a string that is not empty")
    if len(value) > MAX_GRAMMAR:
        raise _wrong(param, f"the grammar has more than {MAX_GRAMMAR} characters")
    return {"type": "grammar", "grammar": value, "syntax": "ebnf" if "::=" in value else "lark"}


def _structural_tag(given: object, param: str) -> Format:
    if not isinstance(given, dict) or given.get("type") != "structural_tag":
        raise _wrong(param, "a structural tag must be an object of type structural_tag")
    is_old = "structures" in given or "triggers" in given
    format: object = _triggered(given, param) if is_old else given.get("format")
    if not isinstance(format, dict) or format.get("type") not in TAG_FORMATS:
        raise _wrong(param, f"its format needs a type of {', '.join(sorted(TAG_FORMATS))}")
    level: list[object] = [format]
    for _ in range(MAX_TAG_DEPTH):
        level = [child for one in level for child in children(one)]
    if level:
        raise _wrong(param, f"the structural tag is nested deeper than {MAX_TAG_DEPTH} levels")
    return {"type": "sequence", "elements": [format]}


def _triggered(given: dict[str, object], param: str) -> Format:
    """The older form: structures (begin, schema, end) and the triggers of their beginnings."""
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise _wrong(param, "structures and triggers must be lists")
    tags: list[Format] = []
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str):
            raise _wrong(param, f"structures[{index}] needs a begin, a schema and an end")
        schema = one.get("schema")
        schema = _json(schema, f"{param}.schema") if isinstance(schema, str) else schema
        content = json_value(prepared(schema, strict=False, param=param), ())
        tags.append(
            {"type": "tag", "begin": one["begin"], "content": content, "end": one.get("end")}
        )
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
