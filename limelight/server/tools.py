"""The tools of a chat: which of them the model sees, and which its answer may or must call."""

from collections.abc import Collection
from dataclasses import dataclass

from limelight.config import ServerConfig
from limelight.types import RequestError

Tool = dict[str, object]
CHOICES = ("none", "auto", "required")
FORCED = ("required", "named")


@dataclass(frozen=True, slots=True)
class Tools:
    """`shown` are those in the prompt, `callable` those that the answer may call.

    `choice` is auto, none, required or named; with named, `callable` is the one that is to be
    called. Without tools it is auto.
    """

    shown: list[Tool] | None = None
    callable: list[Tool] | None = None
    choice: str = "auto"

    @property
    def forced(self) -> bool:
        """Whether a call there must be."""
        return self.choice in FORCED

    @property
    def functions(self) -> list[Tool]:
        """What may be called, each with its name, parameters and strictness."""
        functions = [tool["function"] for tool in self.callable or ()]
        return [function for function in functions if isinstance(function, dict)]


def read_tools(given: list[Tool] | None, choice: str | Tool | None, config: ServerConfig) -> Tools:
    """The tools and the choice among them of a chat body; `RequestError` says what is wrong."""
    tools = _by_name(given or [])
    if not given:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return Tools()
    choice, allowed = _choice(choice, tools)
    callable = [tool for name, tool in tools.items() if name in allowed]
    if choice == "none":
        return Tools(None if config.exclude_tools_when_tool_choice_none else given, None, "none")
    if config.reads_calls:
        return Tools(given, callable, choice or "auto")
    if choice is not None:
        raise RequestError(
            f"tool_choice {choice} needs a server with --enable-auto-tool-choice and "
            "--tool-call-parser",
            param="tool_choice",
        )
    return Tools(given, None)


def _by_name(tools: list[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}]", tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(f"{where} must be of type function", param="tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.function needs a name", param="tools")
        if name in named:
            raise RequestError(f"{where}: there are two tools {name[:100]!r}", param="tools")
        if not isinstance(parameters, dict | None):
            raise RequestError(f"{where}.function.parameters must be an object", param="tools")
        if not isinstance(function.get("strict"), bool | None):
            raise RequestError(f"{where}.function.strict must be true or false", param="tools")
        named[name] = tool
    return named


def _choice(
    choice: str | Tool | None, names: Collection[str]
) -> tuple[str | None, Collection[str]]:
    """The choice by its name, and the names of the tools that it leaves."""
    if choice is None or choice in CHOICES:
        assert not isinstance(choice, dict)
        return choice, names
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", {_known(name, names)}
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
            if mode not in ("auto", "required") or not tools:
                raise RequestError(
                    "tool_choice.allowed_tools needs tools and a mode, auto or required",
                    param="tool_choice",
                )
            return mode, {_known(_function_name(tool), names) for tool in tools}
    raise RequestError(
        f"tool_choice must be one of {', '.join(CHOICES)}, or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _function_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise RequestError(
        "tool_choice.allowed_tools.tools must be functions with their names", param="tool_choice"
    )


def _known(name: str, names: Collection[str]) -> str:
    if name not in names:
        raise RequestError(
            f"tool_choice names {name[:100]!r}, which is not among the tools", param="tool_choice"
        )
    return name
