"""What a request demands of the form of its answer, before any model's own format is known."""

from dataclasses import dataclass, field

# A format of xgrammar's structural tags, as the object that its JSON text is.
Format = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Which calls and which content an answer may have.

    `tools` are the function objects of those that may be called (name, parameters, strict).
    `choice` is auto, required or none, or "named" where `tools` holds the one that must be called.
    `content` is what the content must be, if anything; `thinking` is what the request says of it.
    """

    tools: list[dict[str, object]] = field(default_factory=list)
    choice: str = "auto"
    parallel: bool = True
    content: Format | None = None
    thinking: bool | None = None
