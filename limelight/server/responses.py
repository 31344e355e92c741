"""From a body of /v1/responses to the chat question that asks the same. Nothing is ever stored."""

import json
from collections.abc import Callable

import msgspec

from limelight.server.bodies import ChatFields, SharedFields, decode
from limelight.server.http import clean_request_id
from limelight.server.messages import ConversationFields
from limelight.server.openai import Question, Reader
from limelight.text.messages import plain_text
from limelight.types import RequestError

JSON = dict[str, object]

# What a chat calls otherwise.
FIELD_NAMES: dict[str | None, str] = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "logprobs": "include",
}
LOGPROBS = "message.output_text.logprobs"
# Reasoning is given in plain, so there is nothing to encrypt; the others are of tools of OpenAI's.
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results", "code_interpreter_call.outputs", "file_search_call.results",
    "computer_call_output.output.image_url", "message.input_image.image_url",
)  # fmt: skip
# Fields that ask for what a server without memory and without tools of its own cannot do, and the
# values that do not ask for it.
NOT_HERE: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "moderation": (),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
ADVICE = "send all items of the conversation as input instead"


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How much to reason; a summary cannot be had, since reasoning is told as it is."""

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """The form of the answer's text."""

    format: JSON | None = None
    verbosity: str | None = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/responses, beside the fields that chat has by the same names."""

    input: str | list[JSON] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[JSON] | None = None
    tool_choice: str | JSON | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: JSON | None = None
    include_reasoning: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    user: str | None = None

    @property
    def format(self) -> JSON:
        """What the text is to be; by default just text."""
        return (self.text and self.text.format) or {"type": "text"}


def read_response(reader: Reader, body: bytes, request_id: str) -> tuple[Question, ResponseFields]:
    """The question of a body, and its own fields; `RequestError` names the one that is wrong."""
    fields = decode(body, ResponseFields)
    _refuse_what_is_not_here(body)
    shared = decode(body, SharedFields)
    shared = msgspec.structs.replace(
        shared, max_tokens=fields.max_output_tokens, n=None, prompt_logprobs=None,
        stream_options=None, response_format=_response_format(fields, shared),
    )  # fmt: skip
    tools, choice = _tools(fields)
    wants_logprobs = _wants_logprobs(fields)
    question = reader.chat_question(
        shared,
        ChatFields(
            logprobs=wants_logprobs,
            top_logprobs=fields.top_logprobs if wants_logprobs else None,
            include_reasoning=fields.include_reasoning,
        ),
        ConversationFields(
            messages=_messages(fields),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=fields.parallel_tool_calls,
            chat_template_kwargs=fields.chat_template_kwargs,
            reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        ),
        api="responses",
        id="resp_" + (clean_request_id(shared.request_id) or request_id),
        field_names=FIELD_NAMES,
    )
    return question, fields


def _refuse_what_is_not_here(body: bytes):
    present = decode(body, dict[str, msgspec.Raw])
    for name in NOT_HERE.keys() & present.keys():
        value = decode(bytes(present[name]), object)
        if value is not None and value not in NOT_HERE[name]:
            advice = f"; {ADVICE}" if name in ("previous_response_id", "conversation") else ""
            raise RequestError(
                f"{name} is not supported here, where nothing is stored{advice}", param=name
            )


def _response_format(fields: ResponseFields, shared: SharedFields) -> JSON | None:
    """The form of the text as chat has it: a schema nested by one level more."""
    given = fields.format
    if given.get("type") == "text":
        return None
    if shared.structured_outputs is not None:
        raise RequestError(
            "structured_outputs and text.format exclude each other", param="structured_outputs"
        )
    if given.get("type") == "json_object":
        return {"type": "json_object"}
    if given.get("type") != "json_schema":
        raise RequestError("text.format must be text, json_object or json_schema", param="text")
    kept = ("name", "description", "schema", "strict")
    nested = {name: given[name] for name in kept if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": nested}


def _wants_logprobs(fields: ResponseFields) -> bool:
    for name in fields.include or ():
        if name not in INCLUDABLE:
            raise RequestError(
                f"include knows no {name[:100]!r}; it takes {', '.join(INCLUDABLE)}",
                param="include",
            )
    wanted = LOGPROBS in (fields.include or ())
    if fields.top_logprobs and not wanted:
        raise RequestError(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    return wanted


def _tools(fields: ResponseFields) -> tuple[list[JSON] | None, str | JSON | None]:
    """The tools and the choice among them as chat has them: nested by one level more."""
    tools: list[JSON] = []
    for index, tool in enumerate(fields.tools or ()):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{index}]: only tools of type function can be called here, not "
                f"{str(tool.get('type'))[:50]!r}",
                param="tools",
            )
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise RequestError(f"tools[{index}] needs a name", param="tools")
        kept = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in kept if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    choice = fields.tool_choice
    match choice:
        case {"type": "function", "name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            nested = [_named(tool) for tool in allowed]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}
        case dict():
            raise RequestError(
                'tool_choice must be none, auto, required, {"type": "function", "name": ...} or '
                '{"type": "allowed_tools", "mode": ..., "tools": [...]}',
                param="tool_choice",
            )
    if not tools and choice == "auto":
        choice = None
    return tools or None, choice


def _named(tool: object) -> JSON:
    match tool:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise RequestError("tool_choice.tools must be functions with a name", param="tool_choice")


def _messages(fields: ResponseFields) -> list[JSON]:
    """The instructions and the input as the messages of a chat."""
    messages: list[JSON] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    if not fields.input:
        raise RequestError("input must be a text or a list of at least one item", param="input")
    for index, item in enumerate(fields.input):
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in ITEMS:
            raise RequestError(
                f"input[{index}]: items of type {str(kind)[:50]!r} cannot be read here; "
                f"only {', '.join(ITEMS)}",
                param="input",
            )
        ITEMS[kind](f"input[{index}]", item, messages)
    return messages


def _turn(messages: list[JSON], *, begins: bool = False) -> JSON:
    """The assistant's turn that an item belongs to: items in a row are one answer."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant"
    # Two texts in a row with no call between them were two answers.
    if not is_open or (begins and last["content"] and "tool_calls" not in last):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _add_message(where: str, item: JSON, messages: list[JSON]):
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise RequestError(
            f"{where}.role must be user, assistant, system or developer", param="input"
        )
    if item.get("content") is None:
        raise RequestError(f"{where} needs content", param="input")
    text = plain_text(f"{where}.content", item["content"], param="input")
    if role == "assistant":
        turn = _turn(messages, begins=True)
        turn["content"] = f"{turn['content']}{text}"
    else:
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": text})


def _add_reasoning(where: str, item: JSON, messages: list[JSON]):
    texts = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise RequestError(f"{where}.{name} must be a list of parts", param="input")
        for at, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise RequestError(f"{where}.{name}[{at}] needs a text", param="input")
            texts.append(text)
        if texts:
            break
    if texts:
        turn = _turn(messages, begins=True)
        turn["reasoning"] = str(turn.get("reasoning", "")) + "\n".join(texts)


def _add_call(where: str, item: JSON, messages: list[JSON]):
    call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise RequestError(f"{where} needs a call_id and a name", param="input")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{where}.arguments must be the JSON of an object", param="input")
    function = {"name": name, "arguments": value}
    calls = _turn(messages).setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append({"id": call_id, "type": "function", "function": function})


def _add_output(where: str, item: JSON, messages: list[JSON]):
    if not isinstance(item.get("call_id"), str):
        raise RequestError(f"{where} needs a call_id", param="input")
    if item.get("output") is None:
        raise RequestError(f"{where} needs an output", param="input")
    content = plain_text(f"{where}.output", item["output"], param="input")
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


ITEMS: dict[str, Callable[[str, JSON, list[JSON]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}
