"""Which parser reads the answers of chat: made at the start, and asked for each answer."""

import logging
from collections.abc import Callable
from pathlib import Path

from limelight.config import ServerConfig
from limelight.server.messages import Conversation
from limelight.server.prompts import Prompt
from limelight.text.glm47 import Glm47Parser
from limelight.text.parsers import AnswerParser
from limelight.text.response_template import ResponseTemplate
from limelight.text.template import ChatTemplate
from limelight.text.template_parser import TemplateParser
from limelight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Makes the parser of one answer to a prompt.
MakeParser = Callable[[Prompt, Conversation], AnswerParser]
SWITCHES = ("enable_thinking", "thinking")


def find_parser(
    config: ServerConfig,
    folder: Path,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> MakeParser | None:
    """What `config` asks for; `ValueError` where the model in `folder` lacks what that takes."""
    if config.tool_call_parser is not None and not config.enable_auto_tool_choice:
        logger.warning("no calls of tools are read without --enable-auto-tool-choice")
    if config.answer_format is None:
        return None
    if tokenizer is None:
        raise ValueError(
            f"{folder} has no tokenizer, which the {config.answer_format} parser needs; "
            "leave --reasoning-parser and --tool-call-parser out"
        )
    if config.answer_format == "glm47":
        return _glm47(config, tokenizer, template)
    return _beam(config, folder, tokenizer)


def _glm47(config: ServerConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> MakeParser:
    reasoning, calls = config.reasoning_parser is not None, config.reads_calls
    sources = template.sources.values() if template is not None else ()
    # Where a template knows no switch, a request that sets one still gets a prompt that reasons.
    has_switch = any(name in source for source in sources for name in SWITCHES)
    if reasoning and not has_switch:
        logger.warning(
            "the chat template has no enable_thinking, so reasoning cannot be turned off"
        )

    def make(prompt: Prompt, conversation: Conversation) -> AnswerParser:
        given = [conversation.template_kwargs.get(name) for name in SWITCHES]
        unset = not has_switch or given == [None, None]
        return Glm47Parser(
            tokenizer,
            prompt_token_ids=prompt.token_ids,
            tools=conversation.callable,
            reasoning=reasoning,
            calls=calls,
            thinking=None if unset else any(given),
            parallel=conversation.parallel,
        )

    return make


def _beam(config: ServerConfig, folder: Path, tokenizer: Tokenizer) -> MakeParser:
    template = ResponseTemplate.load(folder)
    path = folder / "tokenizer_config.json"
    advice = (
        "leave --reasoning-parser and --tool-call-parser out, or name a --tokenizer that has it"
    )
    if template is None:
        raise ValueError(f"{path} has no response_template, which the beam parser needs: {advice}")
    wanted = ["thinking", "tool_calls"] if config.reads_calls else ["thinking"]
    for name in wanted:
        if name not in template.fields:
            raise ValueError(f"{path}: response_template has no field {name}: {advice}")

    def make(prompt: Prompt, conversation: Conversation) -> AnswerParser:
        text = prompt.text
        if text is None:
            text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return TemplateParser(
            template,
            prompt=text,
            tools=conversation.callable,
            reasoning=True,
            calls=config.reads_calls,
        )

    return make
