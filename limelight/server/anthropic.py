"""From a body of /v1/messages, Anthropic's shape, to the chat question that asks the same."""

import msgspec

from limelight.server.bodies import ChatFields, SharedFields, decode
from limelight.server.http import Refused, clean_request_id
from limelight.server.messages import ConversationFields
from limelight.server.openai import Question, Reader
from limelight.text.messages import plain_text
from limelight.types import RequestError

JSON = dict[str, object]

# What a chat calls otherwise.
FIELD_NAMES: dict[str | None, str] = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "thinking_token_budget": "thinking",
    "parallel_tool_calls": "tool_choice",
    "include_reasoning": "thinking",
}
# Fields that ask for tools and stores of Anthropic's.
NOT_HERE = ("container", "context_management", "mcp_servers")
OVERLOADED = 529  # Anthropic's code for what other APIs call 503
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    OVERLOADED: "overloaded_error",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(msgspec.Struct, frozen=True):
    """Whether to think before the answer, and of how many tokens at most."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """How hard to try, and what the text is to be."""

    effort: str | None = None
    format: JSON | None = None


class MessageFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/messages, beside the fields that chat has by the same names."""

    messages: list[JSON] | None = None
    system: str | list[JSON] | None = None
    stop_sequences: list[str] | None = None
    tools: list[JSON] | None = None
    tool_choice: JSON | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: JSON | None = None


def read_message(reader: Reader, body: bytes, request_id: str, *, counts: bool = False) -> Question:
    """The question of a body; `RequestError` names the field that is wrong.

    With `counts` its prompt is only to be counted, which takes no max_tokens.
    """
    fields = decode(body, MessageFields)
    _refuse_what_is_not_here(body)
    shared = decode(body, SharedFields)
    if shared.max_tokens is None and not counts:
        raise RequestError("max_tokens is missing", param="max_tokens")
    shared = msgspec.structs.replace(
        shared, stop=fields.stop_sequences or None, n=None, prompt_logprobs=None,
        stream_options=None, max_tokens=None if counts else shared.max_tokens,
        response_format=_response_format(fields),
    )  # fmt: skip
    thinking = fields.thinking
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or budget < 0:
            raise RequestError(
                "thinking.budget_tokens must be an integer of at least 0", param="thinking"
            )
        shared = msgspec.structs.replace(shared, thinking_token_budget=budget)
    omitted = thinking is not None and thinking.display == "omitted"
    return reader.chat_question(
        shared,
        ChatFields(include_reasoning=False if omitted else None),
        _conversation(fields),
        api="other",
        id="msg_" + (clean_request_id(shared.request_id) or request_id),
        field_names=FIELD_NAMES,
    )


def _refuse_what_is_not_here(body: bytes):
    present = decode(body, dict[str, msgspec.Raw])
    for name in NOT_HERE:
        if name not in present:
            continue
        value = decode(bytes(present[name]), object)
        match value:
            # Claude Code says so: nothing is to be taken out of the conversation.
            case {"edits": list(edits)} if all(_keeps_all(edit) for edit in edits):
                value = None
        if value:
            raise RequestError(f"{name} is not supported here; leave it out", param=name)


def _keeps_all(edit: object) -> bool:
    match edit:
        case {"type": str(kind), "keep": "all"}:
            return kind.startswith("clear_thinking_")
    return False


def _response_format(fields: MessageFields) -> JSON | None:
    """The form of the text as chat has it; Anthropic's schemas are always kept to."""
    given = fields.output_config.format if fields.output_config else None
    if not given:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise RequestError(
            "output_config.format must be of type json_schema and have a schema",
            param="output_config",
        )
    schema = {"name": "answer", "schema": given["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _conversation(fields: MessageFields) -> ConversationFields:
    messages = _messages(fields)
    # Where the last turn is the assistant's, the answer goes on with it.
    goes_on = messages[-1]["role"] == "assistant"
    if goes_on and "tool_calls" in messages[-1]:
        raise RequestError(
            "messages: the last one calls tools; their tool_result blocks must follow",
            param="messages",
        )
    tools, choice, parallel = _tools(fields)
    return ConversationFields(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        chat_template_kwargs=_switch(fields.thinking) | (fields.chat_template_kwargs or {}),
        reasoning_effort=fields.output_config.effort if fields.output_config else None,
    )


def _switch(thinking: Thinking | None) -> JSON:
    if thinking is None:
        return {}
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise RequestError("thinking.type must be enabled, disabled or adaptive", param="thinking")
    return {"enable_thinking": thinking.type != "disabled"}


def _tools(fields: MessageFields) -> tuple[list[JSON] | None, str | JSON | None, bool | None]:
    """The tools, the choice among them, and whether several may be called, as chat has them."""
    tools: list[JSON] = []
    for index, tool in enumerate(fields.tools or ()):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"{where}: the tool {str(tool['type'])[:50]!r} is none of this server's; only "
                "tools with an input_schema can be called here",
                param="tools",
            )
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise RequestError(f"{where} needs a name", param="tools")
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestError(f"{where}.input_schema must be an object", param="tools")
        function: JSON = {"name": tool["name"], "parameters": tool["input_schema"]}
        kept = ("description", "strict")
        function |= {name: tool[name] for name in kept if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    given = fields.tool_choice
    choice: str | JSON | None = None
    match given:
        case {"type": "tool", "name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in CHOICES:
            choice = CHOICES[kind]
        case dict():
            raise RequestError(
                "tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice"
            )
    if not tools and choice == "auto":
        choice = None
    alone = given and given.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise RequestError(
            "tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice"
        )
    return tools or None, choice, False if alone else None


def _messages(fields: MessageFields) -> list[JSON]:
    """The system prompt and the messages, as the messages of a chat."""
    messages: list[JSON] = []
    if fields.system:
        text = plain_text("system", fields.system, param="system")
        messages.append({"role": "system", "content": text})
    if not fields.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    for index, message in enumerate(fields.messages):
        where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if content is None:
            raise RequestError(f"{where} needs content", param="messages")
        match role:
            case "user":
                messages += _user(f"{where}.content", content)
            case "assistant":
                messages.append(_assistant(f"{where}.content", content))
            case "system":
                text = plain_text(f"{where}.content", content)
                messages.append({"role": "system", "content": text})
            case _:
                raise RequestError(
                    f"{where}.role must be user, assistant or system", param="messages"
                )
    return messages


def _blocks(where: str, content: object, kinds: tuple[str, ...]) -> list[tuple[str, str, JSON]]:
    """(where it is, its type, the block) of each; of a text, the one block that it stands for."""
    if isinstance(content, str):
        return [(where, "text", {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of blocks", param="messages")
    blocks = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or not isinstance(kind, str) or kind not in kinds:
            raise RequestError(
                f"{where}[{index}]: blocks of type {str(kind)[:50]!r} cannot be read here; only "
                f"{', '.join(kinds)}",
                param="messages",
            )
        blocks.append((f"{where}[{index}]", kind, block))
    return blocks


def _user(where: str, content: object) -> list[JSON]:
    """A user's turn: results of tools, each a message of its own, and texts between them."""
    messages: list[JSON] = []
    texts: list[str] = []
    for at, kind, block in _blocks(where, content, ("text", "tool_result")):
        if kind == "text":
            texts.append(_field(at, block, "text"))
            continue
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts = []
        result = plain_text(f"{at}.content", block.get("content"))
        call_id = _field(at, block, "tool_use_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _assistant(where: str, content: object) -> JSON:
    texts, thoughts, calls = [], [], []
    kinds = ("text", "thinking", "redacted_thinking", "tool_use")
    for at, kind, block in _blocks(where, content, kinds):
        if kind == "text":
            texts.append(_field(at, block, "text"))
        elif kind == "thinking":
            thoughts.append(_field(at, block, "thinking"))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise RequestError(f"{at}.input must be an object", param="messages")
            function = {"name": _field(at, block, "name"), "arguments": block["input"]}
            call_id = _field(at, block, "id")
            calls.append({"id": call_id, "type": "function", "function": function})
    message: JSON = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _field(where: str, block: JSON, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a text", param="messages")
    return value


class Told(Refused):
    """An error in Anthropic's shape, which has no place for the field but the message."""

    def __init__(self, refused: Refused):
        message, param = refused.message, refused.param
        if param and param not in message:
            message = f"{param}: {message}"
        status = OVERLOADED if refused.code == "queue_full" else refused.status
        super().__init__(status, message, retry_after=refused.retry_after)

    @property
    def body(self) -> JSON:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}
