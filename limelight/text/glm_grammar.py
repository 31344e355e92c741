"""What an answer in GLM 4.7's format may be, as a structural tag, and where reasoning stands.

Marks are allowed by the ids of their tokens alone, so that typed text never becomes one. With
tools that may be called an answer is text and calls, in any order; with a format for the content it
is calls or the content; forced, it is calls and nothing else. A call names a listed tool. Its
arguments are those of the schema: in any order and number, each valid by itself, or, if the tool is
strict, as the schema orders and requires them.
"""

from dataclasses import dataclass

from limelight.text.demand import Demand, constraint_of
from limelight.text.fence import STRIPPED
from limelight.text.formats import (
    Format,
    any_number,
    either,
    free_text,
    literal,
    optional,
    pattern,
    sequence,
)
from limelight.text.glm47 import (
    ASSISTANT,
    CALL,
    CALLED,
    KEY,
    KEY_END,
    THINK,
    THOUGHT,
    TURNS,
    VALUE,
    VALUE_END,
    Glm47Parser,
)
from limelight.text.glm_casting import Argument
from limelight.text.glm_values import Unheld, free_value, options_of, value_format
from limelight.text.json_schema import prepared
from limelight.text.regex import ALL, Ranges, subtracted
from limelight.text.schema import Schema
from limelight.text.spelling import Untold, other_names
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, Reasoning, RequestError

TAGS = (KEY, KEY_END, VALUE, VALUE_END)
# No text within JSON has it as it is, since it could begin the end of the value.
OPENS_TAGS: Ranges = [(ord("<"), ord("<"))]
Tool = dict[str, object]


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a vocabulary: `ids` of those that are tokens, and what else is never text."""

    ids: dict[str, int]
    others: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Marks":
        found = {
            mark: token_ids(tokenizer, mark) for mark in (THINK, THOUGHT, CALL, CALLED, *TURNS)
        }
        ids = {mark: one[0] for mark, one in found.items() if len(one) == 1}
        return cls(ids, frozenset(tokenizer.special_ids - set(ids.values())))

    @property
    def all(self) -> list[int]:
        return sorted({*self.ids.values(), *self.others})

    def texts(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """How they are spelt; a text of a value has none of these spellings."""
        spelt = {tokenizer.token_bytes(i).decode(errors="replace") for i in self.others}
        return tuple(sorted({THINK, THOUGHT, CALL, CALLED, *TURNS, *spelt} - {""}))

    def end(self, mark: str) -> Format | str:
        """The mark as the begin or end of a tag."""
        return {"type": "token", "token": self.ids[mark]} if mark in self.ids else mark


def token_ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    """The one token that is this mark, or those that spell it."""
    return tokenizer.encode(mark, add_special_tokens=False)


def glm_constraint(
    demand: Demand, *, reasons: bool, open: bool, tokenizer: Tokenizer
) -> Constraint | None:
    """What the answer may be; None if nothing is demanded.

    `reasons`: reasoning is told from content, and `open`: the prompt leaves it open, so that the
    constraint waits for its end. `RequestError` for tools that cannot be called in this format.
    """
    marks = Marks.of(tokenizer)
    waits = open and reasons
    if demand.has_own_tag and not demand.is_forced:
        assert demand.content is not None
        return constraint_of(demand.content, tokenizer, after_reasoning=waits)
    thinks = open and not reasons
    if demand.tools and demand.choice != "none":
        calls = [_call(tool, marks, marks.texts(tokenizer)) for tool in demand.tools]
        if demand.is_forced:
            format = _several(calls, demand.parallel and demand.choice == "required")
        elif demand.content is not None:
            format = either([demand.content, _several(calls, demand.parallel)])
        else:
            format = _text_and_calls(calls, demand.parallel, marks, tokenizer, thinks=thinks)
    elif demand.is_forced:
        raise RequestError("there is no tool that could be called", param="tool_choice")
    elif demand.content is not None:
        format = demand.content
    elif demand.choice == "none":
        format = _text(marks, tokenizer, thinks=thinks)
    else:
        return None
    return constraint_of(format, tokenizer, after_reasoning=waits, marks=marks.all)


def _several(calls: list[Format], parallel: bool) -> Format:
    one = either(calls)
    return {"type": "plus", "content": one} if parallel else one


def _not_text(marks: Marks, tokenizer: Tokenizer, *, thinks: bool) -> list[int]:
    """The tokens that free text does not have; thoughts that are content may end, and begin."""
    tags = [ids[0] for ids in (token_ids(tokenizer, tag) for tag in TAGS) if len(ids) == 1]
    kept = {marks.ids.get(mark) for mark in (THINK, THOUGHT) if thinks}
    return sorted({*marks.all, *tags} - kept - set(tokenizer.eos_token_ids))


def _text(marks: Marks, tokenizer: Tokenizer, *, thinks: bool) -> Format:
    """Free text without a call."""
    if CALL not in marks.ids:
        return free_text([CALL, CALLED])
    excluded = _not_text(marks, tokenizer, thinks=thinks)
    return {"type": "any_tokens", "exclude_tokens": excluded}


def _text_and_calls(
    calls: list[Format], parallel: bool, marks: Marks, tokenizer: Tokenizer, *, thinks: bool
) -> Format:
    if CALL not in marks.ids:
        return {
            "type": "triggered_tags",
            "triggers": [CALL],
            "tags": calls,
            "excludes": [CALLED],
            "stop_after_first": not parallel,
        }
    opener = marks.ids[CALL]
    excluded = _not_text(marks, tokenizer, thinks=thinks)
    return {
        "type": "token_triggered_tags",
        "trigger_tokens": [opener],
        "tags": calls,
        "exclude_tokens": [token_id for token_id in excluded if token_id != opener],
        "stop_after_first": not parallel,
    }


def _call(tool: Tool, marks: Marks, texts: tuple[str, ...]) -> Format:
    name = str(tool["name"])
    if name != name.strip() or not name or any(mark in name for mark in (CALL, CALLED, *TAGS)):
        raise RequestError(
            f"the name {name[:100]!r} cannot be encoded in tool calls", param="tools"
        )
    begin, end = marks.end(CALL), marks.end(CALLED)
    content = sequence(literal(name), Arguments(tool, texts).format())
    if isinstance(begin, str):
        # Where marks are texts, tags are told apart by all that they begin with.
        begin, content = CALL + name, Arguments(tool, texts).format()
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a tool as they may be written; no text of them has one of `texts` in it."""

    tool: Tool
    texts: tuple[str, ...]

    def format(self) -> Format:
        parameters, strict = self.tool.get("parameters"), self.tool.get("strict") is True
        if not parameters:
            return literal("")
        made = prepared(
            parameters, strict=strict, param="tools", without=OPENS_TAGS, arguments=True
        )
        known = made.get("$defs", {})
        assert isinstance(known, dict)
        shapes = [one for one in options_of(made, known) if one.get("type", "object") == "object"]
        if not shapes:
            raise self._cannot("its parameters must be an object")
        if strict:
            return either([self._in_order(shape, known) for shape in shapes])
        choices = {
            key: one for shape in shapes for key, one in self._in_any_order(shape, known).items()
        }
        return any_number(either(choices.values())) if choices else literal("")

    def _cannot(self, why: str) -> RequestError:
        name = str(self.tool["name"])[:100]
        return RequestError(
            f"the tool {name!r} cannot be encoded in tool calls: {why}", param="tools"
        )

    def _in_order(self, shape: Schema, known: dict[str, Schema]) -> Format:
        """In the order of the schema, the required ones always."""
        if shape.get("additionalProperties", {}) is not False:
            raise self._cannot("it is strict, so additionalProperties must be false")
        for keyword in ("minProperties", "maxProperties"):
            if keyword in shape:
                raise self._cannot(f"it is strict, and {keyword} cannot be enforced")
        required = shape.get("required", [])
        assert isinstance(required, list)
        parts: list[Format] = []
        for key, schema in _properties(shape).items():
            try:
                one = self._one(key, schema, known)
            except (Unheld, Untold) as error:
                raise self._cannot(f"{key[:100]}: {error}") from error
            parts.append(one if key in required else optional(one))
        return sequence(*parts)

    def _in_any_order(self, shape: Schema, known: dict[str, Schema]) -> dict[str, Format]:
        """What each may be; a condition that cannot be held gives way to any text."""
        made: dict[str, Format] = {}
        for key, schema in _properties(shape).items():
            try:
                made[key] = self._one(key, schema, known)
            except (Unheld, Untold):
                made[key] = _tagged(key, free_value(self.texts))
        further = shape.get("additionalProperties", {})
        if isinstance(further, dict):
            made[""] = self._others(list(_properties(shape)), further, known)
        return made

    def _others(self, names: list[str], schema: Schema, known: dict[str, Schema]) -> Format:
        """One that the schema does not name."""
        allowed = subtracted(ALL, [*OPENS_TAGS, *STRIPPED])
        try:
            key = pattern(other_names(names, allowed))
        except Untold:
            key = pattern(other_names((), allowed))
        try:
            value = self._value("", schema, known)
        except (Unheld, Untold):
            value = free_value(self.texts)
        return sequence(literal(KEY), key, literal(KEY_END + VALUE), value)

    def _one(self, key: str, schema: Schema, known: dict[str, Schema]) -> Format:
        if key != key.strip() or KEY_END in key:
            raise self._cannot(f"its parameter {key[:100]!r} cannot be told apart as it is written")
        return _tagged(key, self._value(key, schema, known))

    def _value(self, key: str, schema: Schema, known: dict[str, Schema]) -> Format:
        read_as = Argument(key, self.tool.get("parameters"))
        return value_format(schema, known, read_as, self.texts)


def _properties(shape: Schema) -> dict[str, Schema]:
    found = shape.get("properties", {})
    assert isinstance(found, dict)
    return found


def _tagged(key: str, value: Format) -> Format:
    return sequence(literal(f"{KEY}{key}{KEY_END}{VALUE}"), value)


def glm_reasoning(
    prompt_token_ids: list[int],
    tokenizer: Tokenizer,
    budget: int | None,
    *,
    thinking: bool | None = None,
    calls: bool = True,
    forced_end: str = THOUGHT,
) -> Reasoning | None:
    """Where the prompt leaves reasoning, and what ends it: with `calls` also a call.

    `thinking` is what the request says; switched off, marks of thoughts are text. None where there
    can be no reasoning.
    """
    parser = Glm47Parser(
        tokenizer, prompt_token_ids=prompt_token_ids, tools=None, reasoning=True, calls=calls,
        thinking=thinking,
    )  # fmt: skip
    marks = Marks.of(tokenizer)
    turns = {marks.ids[turn] for turn in TURNS if turn in marks.ids}
    last = max((i for i, one in enumerate(prompt_token_ids) if one in turns), default=None)
    begun = _after(prompt_token_ids, marks.ids.get(THINK), last or 0)
    # A text that is no chat has thoughts only where it begins some.
    is_open = parser.is_reasoning and (last is not None or begun is not None)
    if thinking is False and not is_open:
        return None
    start = begun if begun is not None else _after(prompt_token_ids, marks.ids.get(ASSISTANT), 0)
    return Reasoning(
        starts=[token_ids(tokenizer, THINK)],
        ends=[token_ids(tokenizer, THOUGHT)],
        ends_kept=[token_ids(tokenizer, CALL)] if calls else [],
        is_open=is_open,
        num_tokens=len(prompt_token_ids) - (start or 0) if is_open else 0,
        budget=budget,
        forced_end=token_ids(tokenizer, forced_end),
    )


def _after(ids: list[int], token_id: int | None, first: int) -> int | None:
    """The position after the last of these tokens from `first` on."""
    return max((i + 1 for i in range(first, len(ids)) if ids[i] == token_id), default=None)
