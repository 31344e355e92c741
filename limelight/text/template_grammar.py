"""The grammar of an answer by a response template: reasoning, then calls of tools or content.

What it allows, the template's parser reads as what was demanded. Not held is what `json_schema`
says of schemas, and of a regex or grammar for content that it spells no mark that ends content.
"""

import logging
from typing import NoReturn

from limelight.text.demand import Demand, constraint_of
from limelight.text.fence import Fence
from limelight.text.formats import (
    Format,
    any_number,
    either,
    free_text,
    one_of,
    optional,
    sequence,
)
from limelight.text.response_template import ResponseTemplate
from limelight.text.template_arguments import call_of
from limelight.text.template_parser import TemplateParser
from limelight.text.template_spelling import Calls, Region, TemplateSpelling, spelling_of
from limelight.text.template_values import fenced_json
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, Reasoning, RequestError

log = logging.getLogger(__name__)


def template_constraint(
    template: ResponseTemplate,
    demand: Demand,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    always: bool,
    reasons: bool,
    budget: int | None = None,
) -> Constraint | None:
    """What an answer to `prompt` may be; None where anything is right or nothing can be told.

    `always`: answers of which nothing is demanded have a grammar too. `reasons`: reasoning is told
    apart. With a `budget` reasoning may be empty, as what ends it may come first.
    """
    strict = demand.choice == "auto" and any(tool.get("strict") is True for tool in demand.tools)
    if not (always or strict or demand.is_forced or demand.content or demand.choice == "none"):
        return None
    if demand.is_forced and demand.content is not None:
        log.warning("the format of the answer is ignored, as a call of a tool is asked for")
    grammar = _Grammar(spelling_of(template), demand, tokenizer, may_be_empty=budget is not None)
    after = open_field(template, prompt)
    if after == "thinking" and not reasons:
        return grammar.unread("reasoning, which no reasoning parser ends")
    if after == "tool_calls":
        return grammar.unread("a call")
    if after == "content":
        return grammar.rest()
    return grammar.whole(
        reasoning_is_open=after == "thinking",
        must_reason=starts_message(template, prompt) and demand.thinking is not False,
    )


def open_field(template: ResponseTemplate, prompt: str) -> str | None:
    """The field that a prompt has opened and not closed, if any."""
    parser = TemplateParser(template, prompt=prompt, tools=None, reasoning=True, calls=True)
    # Marks at the end of the prompt may be held back until it is seen what follows.
    parser.feed("\0", 0)
    return parser.open_field


def starts_message(template: ResponseTemplate, prompt: str) -> bool:
    """Whether a prompt ends with the start of a message in which nothing was thought yet."""
    ends = [match.end() for match in template.anchor.pattern.finditer(prompt)]
    if ends[-1:] != [len(prompt)]:
        return False
    # Reasoning that the prompt has closed may have ended with the start of the next message.
    thinking = spelling_of(template).thinking
    closed = [text for text in (thinking.next if thinking else ()) if prompt.endswith(text)]
    return not any(open_field(template, prompt[: -len(text)]) == "thinking" for text in closed)


def template_reasoning(
    template: ResponseTemplate,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    prompt_token_ids: list[int],
    budget: int | None,
) -> Reasoning | None:
    """How reasoning begins and ends; None where the template does not tell."""
    region = spelling_of(template).thinking
    if region is None:
        return None
    # An opener that ends with another begins reasoning where that one does.
    opens = [o for o in region.opens if not any(p != o and o.endswith(p) for p in region.opens)]
    starts = [tokenizer.encode(text, add_special_tokens=False) for text in opens]
    # The parser reads marks as texts, so that the ids are those of the texts.
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in region.closes]
    is_open = open_field(template, prompt) == "thinking"
    return Reasoning(
        starts=starts,
        ends=ends,
        is_open=is_open,
        num_tokens=_num_behind(prompt_token_ids, starts) if is_open else 0,
        budget=budget,
        forced_end=tokenizer.encode(_full_closer(template, region), add_special_tokens=False),
    )


def _num_behind(token_ids: list[int], starts: list[list[int]]) -> int:
    """How many tokens follow the last start."""
    for at in range(len(token_ids), 0, -1):
        if any(token_ids[max(at - len(start), 0) : at] == start for start in starts):
            return len(token_ids) - at
    return len(token_ids)


def _full_closer(template: ResponseTemplate, region: Region) -> str:
    """A closer after which the next part may follow: one that starts the next message, if any."""
    starting = [text for text, _ in template.stems["thinking"] if text in region.closes]
    return starting[0] if starting else region.closes[-1]


class _Grammar:
    """The parts of one answer put together."""

    def __init__(
        self,
        spelling: TemplateSpelling,
        demand: Demand,
        tokenizer: Tokenizer,
        *,
        may_be_empty: bool,
    ):
        self._spelling, self._demand, self._tokenizer = spelling, demand, tokenizer
        self._may_be_empty = may_be_empty
        self._forced = demand.is_forced
        self._strict = any(tool.get("strict") is True for tool in demand.tools)
        self._format = None if self._forced else demand.content

    def unread(self, what: str) -> Constraint | None:
        """The prompt ends inside of what is not told apart from the answer."""
        self._refuse_calls(f"the prompt ends inside of {what}")
        return None if self._format is None else self._constraint(self._format)

    def rest(self) -> Constraint | None:
        """The rest of content that the prompt has opened."""
        if self._forced:
            self._refuse_calls("the prompt ends inside of an answer")
        content = self._spelling.content
        if content is not None:
            return self._constraint(self._content(content))
        return None if self._format is None else self._constraint(self._format)

    def whole(self, *, reasoning_is_open: bool, must_reason: bool) -> Constraint | None:
        """All that follows the start of a message, or reasoning that is open."""
        thinking, faults = self._spelling.thinking, self._spelling.faults
        if thinking is None and "thinking" in self._spelling.template.fields:
            return self._untold(faults["thinking"], reasoning_is_open)
        content, calls = self._spelling.content, self._spelling.calls
        parts: list[Format] = []
        if self._demand.tools and self._demand.choice != "none":
            if calls is None:
                return self._untold(faults["tool_calls"], reasoning_is_open)
            parts.append(self._calls(calls))
        if not self._forced:
            if content is None:
                return self._untold(faults["content"], reasoning_is_open)
            parts.append(sequence(one_of(content.opens), self._content(content)))
        body = either(parts)
        if thinking is not None:
            must = must_reason and not reasoning_is_open
            body = sequence(self._thinking(thinking, must=must), body)
        return self._constraint(body, after_reasoning=reasoning_is_open)

    def _untold(self, fault: str, reasoning_is_open: bool) -> Constraint | None:
        """The template has no grammar: a format alone can be held to, where reasoning has ended."""
        self._refuse_calls(f"the response template has no grammar: {fault}")
        if self._format is None:
            return None
        if reasoning_is_open and self._spelling.thinking is None:
            raise RequestError(
                f"the answer cannot be held to a format, as its reasoning has no end: {fault}",
                param="response_format",
            )
        return self._constraint(self._format, after_reasoning=reasoning_is_open)

    def _constraint(self, format: Format, *, after_reasoning: bool = False) -> Constraint:
        return constraint_of(format, self._tokenizer, after_reasoning=after_reasoning)

    def _refuse_calls(self, why: str):
        if self._forced:
            raise RequestError(
                f"cannot guarantee {self._demand.choice} tool choice for this request: {why}",
                param="tool_choice",
            )
        if self._strict and self._demand.choice == "auto":
            raise RequestError(
                f"cannot guarantee strict tools for this request: {why}", param="tools"
            )

    def _thinking(self, region: Region, *, must: bool) -> Format:
        """Reasoning, which may be left out and be empty unless it `must` not."""
        text = region.fence.text(int(must and not self._may_be_empty))
        made = sequence(one_of(region.opens), text, one_of(region.next))
        return made if must else optional(made)

    def _content(self, region: Region) -> Format:
        """The answer itself, and its end."""
        text = free_text(region.fence.marks) if self._format is None else self._fenced(region)
        return sequence(text, optional(one_of(region.closes))) if region.closes else text

    def _fenced(self, region: Region) -> Format:
        assert self._format is not None
        return fenced(self._format, region.fence)

    def _calls(self, spelling: Calls) -> Format:
        """One call or several, each with its closer but the last, which may go without."""
        demand = self._demand
        made = [call_of(tool, spelling) for tool in demand.tools]
        call, parallel = either(made), demand.parallel and demand.choice != "named"
        more = [any_number(sequence(one_of(spelling.next), call))] if parallel else []
        return sequence(call, *more, optional(one_of(spelling.closes)))


def fenced(format: Format, fence: Fence) -> Format:
    """A format with no mark in the texts that it leaves free."""
    match format:
        case {"type": "json_schema", "json_schema": schema} if (
            format.get("style", "json") == "json"
        ):
            made = fenced_json(schema, fence, lambda what: None)  # type: ignore[arg-type]
            return {**format, "json_schema": made["json_schema"], "excludes": made["excludes"]}
        case {"type": "any_text"}:
            excludes = format.get("excludes", [])
            assert isinstance(excludes, list)
            return {**format, "excludes": [*excludes, *fence.marks]}
        case {"type": "const_string", "value": str(text)} if not fence.lets(text):
            _refuse_text(text)
        case {"type": "or" | "sequence", "elements": list(elements)}:
            return {**format, "elements": [fenced(one, fence) for one in elements]}
        case {"content": dict(content)}:
            return {**format, "content": fenced(content, fence)}
    return format


def _refuse_text(text: str) -> NoReturn:
    raise RequestError(
        f"{text[:100]!r} has a mark of this model's format in it, so it cannot be an answer",
        param="response_format",
    )
