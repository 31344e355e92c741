"""What becomes of an answer: what it may be, where its reasoning stands, and what reads it."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from limelight.config import ServerConfig
from limelight.server.messages import Conversation
from limelight.server.openai import Question
from limelight.server.prompts import Prompt
from limelight.text.answer_form import AnswerForm, Asked, Handling, find_form, plain_constraint
from limelight.text.demand import Demand, answer_format
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, Reasoning, RequestError

logger = logging.getLogger(__name__)


def find_answer_form(
    config: ServerConfig,
    folder: Path,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> AnswerForm | None:
    """What `config` asks for; `ValueError` where the model in `folder` lacks what that takes."""
    if config.tool_call_parser is not None and not config.enable_auto_tool_choice:
        logger.warning("no calls of tools are read without --enable-auto-tool-choice")
    if config.structured_outputs_config:
        logger.info("--structured-outputs-config: answers are held to their form by xgrammar")
    if config.reasoning_config is not None and tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which --reasoning-config needs; leave it out")
    if config.answer_format is None:
        return None
    return find_form(
        config.answer_format,
        reasoning=config.reasoning_parser is not None,
        calls=config.reads_calls,
        always=config.beam_always_constrain_output,
        folder=folder,
        tokenizer=tokenizer,
        template=template,
    )


class Handler:
    """Finds the `Handling` of the answers to a question. Long prompts take time: for threads."""

    def __init__(self, form: AnswerForm | None, tokenizer: Tokenizer | None, config: ServerConfig):
        self.form = form
        self.tokenizer = tokenizer
        given = config.structured_outputs_config or {}
        self.compact = bool(given.get("disable_any_whitespace"))
        self.marks = _Marks.of(config, tokenizer)
        if form is not None and self.marks is not None:
            self.marks.check(form.reasoning(Asked(token_ids=[], text="")))

    def demand(self, question: Question) -> Demand:
        """All that a question demands; to read a large schema takes time."""
        fields = question.shared
        content = answer_format(
            fields.response_format, fields.structured_outputs, compact=self.compact
        )
        if content is not None and question.demand.is_forced:
            logger.warning("%s: a format is ignored where a call is forced", question.id)
            content = None
        return replace(question.demand, content=content)

    def handle(self, question: Question, demand: Demand, prompt: Prompt) -> Handling:
        """How the answers to this prompt are handled; `RequestError` for what cannot be."""
        source = question.source
        asked = Asked(token_ids=prompt.token_ids, text=prompt.text)
        is_read = isinstance(source, Conversation) and self.form is not None
        if isinstance(source, Conversation):
            asked = replace(
                asked,
                tools=source.tools.callable,
                parallel=source.parallel,
                template_kwargs=source.template_kwargs,
            )
        reasoning = self._reasoning(asked, question.budget, is_read=is_read)
        is_marked = reasoning is not None or (is_read and demand.thinking is False)
        if question.budget is not None and not is_marked:
            raise RequestError(
                "thinking_token_budget needs a server with --reasoning-parser, or with "
                "--reasoning-config, and a model that marks its reasoning",
                param="thinking_token_budget",
            )
        if is_read and self.form is not None:
            parser = self.form.parser(asked)
            constraint = self.form.constraint(asked, demand, budget=question.budget)
        else:
            parser = None
            constraint = self._plain(demand, reasoning, question.demanded_by)
        if constraint is None and demand.is_forced:
            raise RequestError(
                "this server cannot guarantee that a tool is called", param="tool_choice"
            )
        waits = constraint is not None and constraint.after_reasoning
        needed = waits or question.budget is not None
        return Handling(parser, constraint, reasoning if needed else None)

    def _reasoning(self, asked: Asked, budget: int | None, *, is_read: bool) -> Reasoning | None:
        found = None
        if self.form is not None:
            found = self.form.reasoning(asked, budget=budget)
        if self.marks is not None:
            found = self.marks.reasoning(found, budget)
        # A prompt that is no conversation reasons only if it says so itself.
        return found if is_read or found is None else as_marked(found, asked.token_ids)

    def _plain(
        self, demand: Demand, reasoning: Reasoning | None, param: str | None
    ) -> Constraint | None:
        """The constraint of an answer that has no form beside what its content must be."""
        if demand.content is None:
            return None
        if self.tokenizer is None:
            raise RequestError(f"{param} needs a tokenizer, and this model has none", param=param)
        return plain_constraint(demand, self.tokenizer, reasoning)


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks of --reasoning-config, in token ids."""

    start: list[int]
    end: list[int]

    @classmethod
    def of(cls, config: ServerConfig, tokenizer: Tokenizer | None) -> "_Marks | None":
        given = config.reasoning_config
        if given is None or tokenizer is None:
            return None
        start, end = (
            tokenizer.encode(str(given.get(name) or ""), add_special_tokens=False)
            for name in ("reasoning_start_str", "reasoning_end_str")
        )
        return cls(start, end)

    def check(self, found: Reasoning | None):
        """`ValueError` unless the end is one that the parser takes for the end of reasoning."""
        ends = [] if found is None else found.ends
        if not any(self.end[-len(end) :] == end for end in ends):
            raise ValueError(
                "--reasoning-config: reasoning_end_str must end with a mark that the reasoning "
                "parser knows"
            )

    def reasoning(self, found: Reasoning | None, budget: int | None) -> Reasoning:
        """What a parser has found, with the end that a budget forces; or all, without a parser."""
        if found is not None:
            return replace(found, forced_end=self.end)
        return Reasoning(
            starts=[self.start], ends=[self.end], is_open=False, budget=budget, forced_end=self.end
        )


def as_marked(reasoning: Reasoning, token_ids: list[int]) -> Reasoning:
    """Where the marks in a prompt leave its reasoning: open after a start that has no end."""
    start = max((_after_last(token_ids, mark) for mark in reasoning.starts), default=-1)
    ends = [*reasoning.ends, *reasoning.ends_kept]
    end = max((_after_last(token_ids, mark) for mark in ends), default=-1)
    is_open = start > end
    return replace(reasoning, is_open=is_open, num_tokens=len(token_ids) - start if is_open else 0)


def _after_last(token_ids: list[int], mark: list[int]) -> int:
    """Where the last `mark` among the tokens ends; -1 if there is none."""
    size = len(mark)
    for end in range(len(token_ids), size - 1, -1):
        if token_ids[end - 1] == mark[-1] and token_ids[end - size : end] == mark:
            return end
    return -1
