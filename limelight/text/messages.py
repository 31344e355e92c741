"""Messages as OpenAI's API has them, brought into the one form that chat templates expect."""

import json
from collections.abc import Sequence

from limelight.types import RequestError

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

Message = dict[str, object]


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Each with its content as one text, and its tool calls with their arguments as objects.

    `RequestError` names the message that is wrong.
    """
    return [_message(f"messages[{index}]", given) for index, given in enumerate(messages)]


def _message(where: str, given: Message) -> Message:
    if not isinstance(given, dict):
        raise RequestError(f"{where} must be an object", param="messages")
    if not isinstance(given.get("role"), str) or not given["role"]:
        raise RequestError(f"{where} needs a role", param="messages")
    message = {**given, "content": plain_text(f"{where}.content", given.get("content"))}
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(where, message["tool_calls"])
    return message


def plain_text(where: str, content: object, *, param: str = "messages") -> str:
    """A content as one text; `RequestError` names the part of `where` that is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts", param=param)
    return "\n".join(_part(f"{where}[{at}]", part, param) for at, part in enumerate(content))


def _part(where: str, part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise RequestError(
            f"{where}: only parts of type text can be read; got {str(kind)[:50]!r}",
            param=param,
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{TEXT_PARTS[kind]} must be a text", param=param)
    return text


def _tool_calls(where: str, calls: object) -> list[Message]:
    """The calls of an earlier answer; templates expect their arguments as objects, not as JSON."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", param="messages")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls[{index}] needs a function with a name", param="messages"
            )
        arguments = _arguments(f"{where}.tool_calls[{index}]", function.get("arguments"))
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _arguments(where: str, arguments: object) -> Message:
    arguments = "{}" if arguments is None or arguments == "" else arguments
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: arguments must be a JSON object", param="messages")
    return value
