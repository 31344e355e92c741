"""Marks in a text as it comes, by the ids of their tokens or by how they are spelt."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, or a mark; `num_tokens` of the tokens begin in it."""

    text: str
    is_mark: bool
    num_tokens: int


class Marks:
    """Finds marks in a text as it comes: some by their token ids, the others by their texts.

    `dropped` are the ids of tokens that are left out, with their texts.
    """

    def __init__(self, *, ids: dict[int, str], texts: Iterable[str], dropped: dict[int, str]):
        self._ids = ids
        self._texts = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self._dropped = dropped
        self.held = ""  # the end of the text, which may become a mark
        self._starts: list[int] = []  # where in it the tokens begin

    def feed(self, text: str, token_id: int | None) -> list[Piece]:
        if token_id in self._ids:
            mark = self._ids[token_id]
            before = self._search(text.removesuffix(mark), counts=False)
            return [*before, *self.flush(), Piece(mark, True, 1)]
        if token_id in self._dropped:
            return self._search(text.removesuffix(self._dropped[token_id]), counts=False)
        return self._search(text, counts=True)

    def flush(self) -> list[Piece]:
        """The end: what was held back is text."""
        if not self.held:
            return []
        piece = Piece(self.held, False, len(self._starts))
        self.held, self._starts = "", []
        return [piece]

    def _search(self, text: str, *, counts: bool) -> list[Piece]:
        if self._pattern is None or (not self.held and "<" not in text):
            return [Piece(text, False, int(counts))] if text or counts else []
        if counts:
            self._starts.append(len(self.held))
        text, end = self.held + text, 0
        pieces: list[Piece] = []
        for match in self._pattern.finditer(text):
            pieces += [self._cut(text[end : match.start()], match.start(), is_mark=False)]
            end = match.end()
            pieces += [self._cut(match[0], end, is_mark=True)]
        # A mark has its only "<" at its start.
        start = max(text.rfind("<"), end)
        if not any(mark.startswith(text[start:]) for mark in self._texts):
            start = len(text)
        pieces += [self._cut(text[end:start], start, is_mark=False)]
        self.held = text[start:]
        self._starts = [at - start for at in self._starts]
        return [piece for piece in pieces if piece.text or piece.num_tokens]

    def _cut(self, text: str, end: int, *, is_mark: bool) -> Piece:
        count = sum(at < end for at in self._starts)
        self._starts = self._starts[count:]
        return Piece(text, is_mark, count)
