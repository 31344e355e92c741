"""What a parser makes of an answer as it comes: reasoning, content and calls of tools.

A parser is fed token by token and gives the same in sum however the tokens are grouped; a whole
answer is what its pieces add up to.
"""

from dataclasses import dataclass, field
from typing import Protocol

from limelight.types import FinishReason


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of the `index`-th call: its name comes once and first, then its arguments.

    `arguments` is a piece of a JSON text; of one call the pieces make up a JSON object.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What is new in an answer, in this order. `num_reasoning` of the tokens were reasoning."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    num_reasoning: int = 0


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
