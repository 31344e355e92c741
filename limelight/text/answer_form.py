"""The form that a model's answers have: found at the start, it makes the parser of each answer."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from limelight.text.demand import Demand, constraint_of
from limelight.text.glm47 import Glm47Parser
from limelight.text.glm_grammar import glm_constraint, glm_reasoning
from limelight.text.parsers import AnswerParser
from limelight.text.response_template import ResponseTemplate
from limelight.text.template import ChatTemplate
from limelight.text.template_grammar import template_constraint, template_reasoning
from limelight.text.template_parser import TemplateParser
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, Reasoning

logger = logging.getLogger(__name__)

SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, and what else was asked: `tools` are those that the answer may call."""

    token_ids: list[int]
    text: str | None = None
    tools: list[dict[str, object]] | None = None
    parallel: bool = True
    template_kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def thinking(self) -> bool | None:
        """Whether thinking was switched on or off; None where nothing was said."""
        return thinking_of(self.template_kwargs)


@dataclass(frozen=True, slots=True)
class Handling:
    """How one answer is made and read; all of it None where it is nothing but text."""

    parser: AnswerParser | None = None
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None


class AnswerForm(Protocol):
    """Reads answers of one model; `calls` of tools where that was asked for."""

    calls: bool

    def parser(self, asked: Asked) -> AnswerParser:
        """What reads one answer; it takes its start from the prompt."""
        ...

    def constraint(
        self, asked: Asked, demand: Demand, *, budget: int | None = None
    ) -> Constraint | None:
        """What holds one answer to what is demanded; `budget` is that of its reasoning."""
        ...

    def reasoning(self, asked: Asked, *, budget: int | None = None) -> Reasoning | None:
        """How reasoning is marked and whether the prompt leaves it open.

        None if it is not told apart, or the request switched it off.
        """
        ...


class Glm47Form:
    """Answers in the format of GLM 4.7; `reasoning` and `calls` are told apart where asked for."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, reasoning: bool, calls: bool
    ):
        self.tokenizer, self.is_told, self.calls = tokenizer, reasoning, calls
        sources = template.sources.values() if template is not None else ()
        # A template that knows no switch makes a prompt that reasons, whatever a request says.
        self.has_switch = any(name in source for source in sources for name in SWITCHES)
        if reasoning and not self.has_switch:
            logger.warning(
                "the chat template has no enable_thinking, so reasoning cannot be turned off"
            )

    def thinking(self, asked: Asked) -> bool | None:
        """What the request says of thinking; None where it says nothing that counts."""
        return asked.thinking if self.has_switch else None

    def parser(self, asked: Asked) -> AnswerParser:
        return Glm47Parser(
            self.tokenizer,
            prompt_token_ids=asked.token_ids,
            tools=asked.tools,
            reasoning=self.is_told,
            calls=self.calls,
            thinking=self.thinking(asked),
            parallel=asked.parallel,
        )

    def constraint(
        self, asked: Asked, demand: Demand, *, budget: int | None = None
    ) -> Constraint | None:
        reasoning = self._reasoning(asked)
        return glm_constraint(
            replace(demand, thinking=self.thinking(asked)),
            reasons=self.is_told,
            open=reasoning is not None and reasoning.is_open,
            tokenizer=self.tokenizer,
        )

    def reasoning(self, asked: Asked, *, budget: int | None = None) -> Reasoning | None:
        return self._reasoning(asked, budget) if self.is_told else None

    def _reasoning(self, asked: Asked, budget: int | None = None) -> Reasoning | None:
        return glm_reasoning(
            asked.token_ids,
            self.tokenizer,
            budget,
            thinking=self.thinking(asked),
            calls=self.calls,
        )


class TemplateForm:
    """Answers by the response template of the model: reasoning and, where asked for, calls.

    `always`: each answer is held to the template, also where nothing is demanded.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path, *, calls: bool, always: bool):
        self.tokenizer, self.calls, self.always = tokenizer, calls, always
        path = folder / "tokenizer_config.json"
        advice = (
            "leave --reasoning-parser and --tool-call-parser out, or name a --tokenizer that has it"
        )
        template = ResponseTemplate.load(folder)
        if template is None:
            raise ValueError(
                f"{path} has no response_template, which the beam parser needs: {advice}"
            )
        for name in ["thinking", "tool_calls"] if calls else ["thinking"]:
            if name not in template.fields:
                raise ValueError(f"{path}: response_template has no field {name}: {advice}")
        self.template = template

    def parser(self, asked: Asked) -> AnswerParser:
        return TemplateParser(
            self.template,
            prompt=self.prompt(asked),
            tools=asked.tools,
            reasoning=True,
            calls=self.calls,
            parallel=asked.parallel,
        )

    def constraint(
        self, asked: Asked, demand: Demand, *, budget: int | None = None
    ) -> Constraint | None:
        return template_constraint(
            self.template,
            demand,
            self.tokenizer,
            prompt=self.prompt(asked),
            always=self.always,
            reasons=True,
            budget=budget,
        )

    def reasoning(self, asked: Asked, *, budget: int | None = None) -> Reasoning | None:
        return template_reasoning(
            self.template,
            self.tokenizer,
            prompt=self.prompt(asked),
            prompt_token_ids=asked.token_ids,
            budget=budget,
        )

    def prompt(self, asked: Asked) -> str:
        """The text of the prompt, with its special tokens."""
        if asked.text is not None:
            return asked.text
        return self.tokenizer.decode(asked.token_ids, skip_special_tokens=False)


def find_form(
    name: str,
    *,
    reasoning: bool,
    calls: bool,
    always: bool = True,
    folder: Path,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> Glm47Form | TemplateForm:
    """The form that is called `name`; `ValueError` where the model in `folder` cannot have it."""
    if tokenizer is None:
        raise ValueError(
            f"{folder} has no tokenizer, which the {name} parser needs; "
            "leave --reasoning-parser and --tool-call-parser out"
        )
    if name == "glm47":
        return Glm47Form(tokenizer, template, reasoning=reasoning, calls=calls)
    return TemplateForm(tokenizer, folder, calls=calls, always=always)


def usual_format(architecture: str, folder: Path) -> str | None:
    """The format that models of this architecture write, if the one in `folder` is known to."""
    if architecture.startswith("Flint"):
        return "glm47"
    known = architecture.startswith("Beam") and ResponseTemplate.load(folder) is not None
    return "beam" if known else None


def thinking_of(template_kwargs: dict[str, object]) -> bool | None:
    """What the arguments of a chat template say of thinking, if anything."""
    given = [template_kwargs.get(name) for name in SWITCHES]
    return None if given == [None, None] else any(given)


def plain_constraint(
    demand: Demand, tokenizer: Tokenizer, reasoning: Reasoning | None = None
) -> Constraint | None:
    """That of an answer which is nothing but content, from where open reasoning ends.

    A special token is no text of it, nor is one that begins reasoning.
    """
    content = demand.content
    if content is None:
        return None
    marks: set[int] = set()
    if not demand.has_own_tag:
        starts = [] if reasoning is None else reasoning.starts
        marks = {*tokenizer.special_ids, *(mark[0] for mark in starts if len(mark) == 1)}
    waits = reasoning is not None and reasoning.is_open
    return constraint_of(content, tokenizer, after_reasoning=waits, marks=marks)
