"""The conversation in a chat body: checked, and ready for a chat template."""

from dataclasses import dataclass

import msgspec

from limelight.config import ServerConfig
from limelight.server.bodies import decode
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
    """What a chat template is rendered with: `tools` are shown to the model.

    `callable` are those that its answer may call, if calls are read; several, if `parallel`.
    """

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    documents: list[dict[str, object]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, object]
    callable: list[dict[str, object]] | None = None
    parallel: bool = True


def read_conversation(body: bytes, config: ServerConfig) -> Conversation:
    """The conversation of a chat body; `RequestError` names the field that is wrong."""
    fields = decode(body, ConversationFields)
    if not fields.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    add_prompt = fields.add_generation_prompt
    goes_on = bool(fields.continue_final_message)
    if goes_on and add_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    _check_tools(fields, config)
    tools = fields.tools or None
    forbidden = fields.tool_choice == "none"
    return Conversation(
        messages=plain_messages(fields.messages),
        tools=None if forbidden and config.exclude_tools_when_tool_choice_none else tools,
        documents=fields.documents,
        add_generation_prompt=not goes_on if add_prompt is None else add_prompt,
        continue_final_message=goes_on,
        template_kwargs=_template_kwargs(fields, config.default_chat_template_kwargs or {}),
        callable=tools if config.reads_calls and not forbidden else None,
        parallel=fields.parallel_tool_calls is not False,
    )


def _check_tools(fields: ConversationFields, config: ServerConfig):
    for index, tool in enumerate(fields.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(f"tools[{index}] must be of type function", param="tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{index}].function needs a name", param="tools")
    if fields.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            "tool_choice other than none and auto is not supported yet", param="tool_choice"
        )
    if fields.tools and fields.tool_choice == "auto" and not config.reads_calls:
        raise RequestError(
            "tool_choice auto needs a server with --enable-auto-tool-choice and --tool-call-parser",
            param="tool_choice",
        )
    keeps_to_one = config.reads_calls and config.tool_call_parser == "glm47"
    if fields.tools and fields.parallel_tool_calls is False and not keeps_to_one:
        raise RequestError(
            "parallel_tool_calls: false is not supported yet", param="parallel_tool_calls"
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
