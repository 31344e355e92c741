"""An answer as the items that some APIs tell it in: reasoning, texts and calls in a row."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from limelight.engine.front import Delta
from limelight.text.parsers import CallPiece

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an item; its first one has the name of a call, its last one `ends` it."""

    kind: Kind
    text: str
    call: int | None = None
    name: str | None = None
    ends: bool = False


@dataclass(slots=True)
class Item:
    """What has been said of an item so far. A call that is not `whole` was cut short."""

    kind: Kind
    id: str
    call: int | None = None
    name: str = ""
    texts: list[str] = field(default_factory=list)
    whole: bool = False

    @property
    def text(self) -> str:
        self.texts = ["".join(self.texts)]
        return self.texts[0]

    def goes_on(self, part: Part) -> bool:
        return (self.kind, self.call) == (part.kind, part.call)


def parts(delta: Delta, item: Item | None) -> Iterator[Part]:
    """What a delta says, in order; first what goes on with a call that `item` may be."""
    going_on = [piece for piece in delta.calls if item is not None and piece.index == item.call]
    yield from map(_part, going_on)
    if delta.reasoning:
        yield Part("reasoning", delta.reasoning)
    if delta.text:
        yield Part("text", delta.text)
    yield from (_part(piece) for piece in delta.calls if piece not in going_on)


def _part(piece: CallPiece) -> Part:
    return Part("call", piece.arguments, piece.index, piece.name, piece.ends)


def spelling(data: list[bytes], text: bytes, *, last: bool) -> list[int]:
    """Which of the tokens that `data` are spell `text`: at its `last` place, or its first.

    Where other things are said between, each next one that goes on with it; or else all.
    """
    joined = b"".join(data)
    at = joined.rfind(text) if last else joined.find(text)
    ends = list(accumulate(map(len, data)))
    if at >= 0:
        return list(range(bisect_right(ends, at), bisect_left(ends, at + len(text)) + 1))
    found, at = [], 0
    for index, token in enumerate(data):
        if token and text.startswith(token, at):
            found.append(index)
            at += len(token)
    return found or list(range(len(data)))
