"""The conversation in a chat body: checked, and ready for a chat template."""

from dataclasses import dataclass

import msgspec

from limelight.config import ServerConfig
from limelight.server.tools import Tools, read_tools
from limelight.text.answer_form import thinking_of
from limelight.text.demand import Demand
from limelight.text.messages import plain_messages
from limelight.text.template import RESERVED
from limelight.types import RequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ConversationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that make the prompt of a chat."""

    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, object]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: object = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template is rendered with, and the `tools`; several calls only if `parallel`."""

    messages: list[dict[str, object]]
    tools: Tools
    documents: list[dict[str, object]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, object]
    parallel: bool = True

    @property
    def thinking(self) -> bool | None:
        """What the request, or the server's default, says of thinking."""
        return thinking_of(self.template_kwargs)

    def demand(self, config: ServerConfig) -> Demand:
        """Which calls the answer may have."""
        strict = {}
        if config.tool_strict_level == "parameter":
            strict = {"strict": True}
        if not self.tools.forced and not config.enforce_strict_tool_calling:
            strict = {"strict": False}
        return Demand(
            tools=[function | strict for function in self.tools.functions],
            choice=self.tools.choice,
            parallel=self.parallel,
            thinking=self.thinking,
        )


def read_conversation(fields: ConversationFields, config: ServerConfig) -> Conversation:
    """The conversation of a chat's fields; `RequestError` names the one that is wrong."""
    if not fields.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    add_prompt = fields.add_generation_prompt
    goes_on = bool(fields.continue_final_message)
    if goes_on and add_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return Conversation(
        messages=plain_messages(fields.messages),
        tools=read_tools(fields.tools, fields.tool_choice, config),
        documents=fields.documents,
        add_generation_prompt=not goes_on if add_prompt is None else add_prompt,
        continue_final_message=goes_on,
        template_kwargs=_template_kwargs(fields, config.default_chat_template_kwargs or {}),
        parallel=fields.parallel_tool_calls is not False,
    )


def _template_kwargs(
    fields: ConversationFields, default_kwargs: dict[str, object]
) -> dict[str, object]:
    if fields.chat_template is not None:
        raise RequestError("a request may not bring a chat template", param="chat_template")
    given = fields.chat_template_kwargs or {}
    for name in given:
        if name in RESERVED:
            raise RequestError(
                f"chat_template_kwargs may not set {name[:100]!r}", param="chat_template_kwargs"
            )
    kwargs = dict(default_kwargs)
    effort = fields.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort"
            )
        kwargs |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return kwargs | given
