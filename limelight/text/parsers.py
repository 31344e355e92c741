"""What a parser makes of an answer as it comes: reasoning, content and calls of tools.

A parser is fed token by token and gives the same in sum however the tokens are grouped; a whole
answer is what its pieces add up to.
"""

from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from limelight.types import FinishReason


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of the `index`-th call: its name comes once and first, then its arguments.

    `arguments` is a piece of a JSON text; of one call the pieces make up a JSON object, whose last
    piece `ends` it. A call that has no such piece was cut short: a stream has told its beginning,
    a whole answer leaves it out.
    """

    index: int
    name: str | None = None
    arguments: str = ""
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """What is new in an answer, in this order. `num_reasoning` of the tokens were reasoning.

    At the end, `cut` is a call that was cut short, as far as it was written.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    num_reasoning: int = 0
    cut: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is the JSON of an object, and `id` is how a result names it."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex}")

    @property
    def message(self) -> dict[str, object]:
        """The call as the message of an answer has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def message_of(content: str, reasoning: str, calls: list[ToolCall]) -> dict[str, object]:
    """An answer as a message that can join its conversation."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [call.message for call in calls]
    return message


def whole_calls(pieces: list[CallPiece]) -> list[ToolCall]:
    """The calls that pieces add up to, without one that was cut short."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    ended = {piece.index for piece in pieces if piece.ends}
    for piece in pieces:
        if piece.name is not None:
            names[piece.index] = piece.name
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [
        ToolCall(index, name, "".join(arguments[index]))
        for index, name in names.items()
        if index in ended
    ]


def add_pieces(pieces: list[CallPiece], more: list[CallPiece]):
    """Put `more` behind `pieces`; what follows a piece of its own call is joined with it."""
    for piece in more:
        if pieces and pieces[-1].index == piece.index:
            before = pieces.pop()
            arguments = before.arguments + piece.arguments
            piece = CallPiece(piece.index, before.name, arguments, piece.ends)
        pieces.append(piece)


class AnswerParser(Protocol):
    """One answer; made with the text of its prompt (special tokens included) and its tools."""

    def feed(self, text: str, token_id: int) -> Said:
        """The next token and the whole characters that it completes, special tokens spelt out.

        `text` may be empty, and what may be the beginning of a marker is held back.
        """
        ...

    def finish(self, reason: FinishReason) -> Said:
        """The end: what was held back, and what is left of a call that was cut short."""
        ...
