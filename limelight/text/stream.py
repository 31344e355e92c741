"""Token ids in, text out, as it comes: whole characters, and never a piece of a stop text."""

import codecs
from dataclasses import dataclass

from limelight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that will not change any more, and the stop text that ended it.

    `num_tokens` of the pushed tokens count: up to the one that completed the stop text.
    """

    text: str
    num_tokens: int
    stop: str | None


class StopSearch:
    """Where the text may be inside one stop text: Knuth, Morris and Pratt's search, as it goes.

    `borders[k]` is the length of the longest proper beginning of stop[:k] that also ends it; the
    table grows only as far as the text has ever followed the stop text.
    """

    def __init__(self, stop: str):
        self.stop = stop
        self.borders = [0, 0]
        self.matched = 0  # characters of the stop text that the text ends with

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become a stop text."""
        return self.borders[self.matched] if self.matched == len(self.stop) else self.matched

    def step(self, character: str) -> bool:
        """Take the next character of the text; whether it completes the stop text."""
        self.matched = self._extend(self.held, character)
        if self.matched == len(self.borders):
            border = self.borders[self.matched - 1]
            self.borders.append(self._extend(border, character))
        return self.matched == len(self.stop)

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self.borders[matched]
        return matched + (self.stop[matched] == character)


class StopTexts:
    """Searches a text for stop texts as it comes, and holds back what may become one.

    Of several, the one that starts first counts, then the longest.
    """

    def __init__(self, stop: list[str], *, include_stop: bool):
        assert all(stop), "a stop text is empty"
        self._include_stop = include_stop
        self._searches = [StopSearch(text) for text in stop]
        self._first_characters = {text[0] for text in stop}
        self._held = ""  # the end of the text, which may become a stop text

    def __bool__(self) -> bool:
        return bool(self._searches)

    def push(self, piece: str, *, counts: bool = True) -> tuple[str, str | None]:
        """The text that is certain after `piece`, and the stop text that ended it.

        A piece that does not count completes none. After a stop text there is to be no more.
        """
        if not self._held and self._first_characters.isdisjoint(piece):
            return piece, None
        text = self._held + piece
        found = self._search(piece, len(self._held), counts)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop)] if self._include_stop else text[:start], stop
        keep = len(text) - max(search.held for search in self._searches)
        self._held = text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """What was held back, where no stop text ended the text; another text may follow."""
        held, self._held = self._held, ""
        for search in self._searches:
            search.matched = 0
        return held

    def _search(self, piece: str, offset: int, counts: bool) -> tuple[int, str] | None:
        """The (start, stop text) that `piece`, the text from `offset` on, completes, if any."""
        best = None
        for search in self._searches:
            for end, character in enumerate(piece, offset + 1):
                if search.step(character) and counts:
                    start = end - len(search.stop)
                    if best is None or (start, -len(search.stop)) < (best[0], -len(best[1])):
                        best = start, search.stop
                    break
        return best


class TextStream:
    """The text of one answer while it is made; what `push` and `finish` give, joined, is all of it.

    Without a stop text that is `Tokenizer.decode` of all the tokens, however they are pushed. The
    text ends with the first token that completes a stop text. The first `min_tokens` tokens
    complete none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: list[str],
        include_stop: bool,
        skip_special_tokens: bool,
        min_tokens: int,
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._stops = StopTexts(stop, include_stop=include_stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_blank = tokenizer.drops_first_blank
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: list[int]) -> TextDelta:
        """Take the next tokens. After a stop text nothing counts any more."""
        if self._ended:
            return TextDelta("", 0, None)
        if not self._stops:
            return TextDelta(self._decode(token_ids), len(token_ids), None)
        sent: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            counts = self._num_tokens > self._min_tokens
            text, stop = self._stops.push(self._decode([token_id]), counts=counts)
            sent.append(text)
            if stop is not None:
                self._ended = True
                return TextDelta("".join(sent), index + 1, stop)
        return TextDelta("".join(sent), len(token_ids), None)

    def finish(self) -> str:
        """The end of the text, if no stop text ended it: half a character shows as U+FFFD."""
        if self._ended:
            return ""
        self._ended = True
        return self._stops.finish() + self._decode([], final=True)

    def _decode(self, token_ids: list[int], *, final: bool = False) -> str:
        bytes_of, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([bytes_of(i) for i in token_ids if i not in skipped])
        text = self._decoder.decode(data, final)
        if self._drop_blank and text:
            self._drop_blank = False
            text = text.removeprefix(" ")
        return text
