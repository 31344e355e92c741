"""Tokens of an answer read as what they say: text, reasoning and calls, up to where it stops."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from limelight.text.parsers import AnswerParser, CallPiece, Said, add_pieces
from limelight.text.stream import StopTexts, TextStream
from limelight.text.tokenizer import Tokenizer
from limelight.types import FinishReason, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class Reading:
    """What tokens say; `num_tokens` of them count, up to the stop text that ended the answer.

    `reasons` tells what each of them, then the end, adds to: reasoning, the rest, or neither yet.
    """

    num_tokens: int
    text: str = ""
    stop: str | None = None
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    num_reasoning: int = 0
    reasons: list[bool | None] = field(default_factory=list)


class PlainReader:
    """Reads an answer as nothing but text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._stream = TextStream(
            tokenizer,
            stop=params.stop_texts,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def read(self, token_ids: list[int], *, num_said: int, reason: FinishReason | None) -> Reading:
        """The next tokens, of which the first `num_said` are text, and perhaps the end."""
        part = self._stream.push(token_ids[:num_said])
        if part.stop is not None:
            return Reading(part.num_tokens, part.text, part.stop)
        rest = self._stream.finish() if reason is not None else ""
        return Reading(len(token_ids), part.text + rest)


class ParsedReader:
    """Reads an answer by a parser; stop texts are looked for in its content.

    With `stop_in_reasoning` its reasoning is searched as well, as a text of its own. With
    `keep_cut` a call that was cut short ends the content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        parser: AnswerParser,
        *,
        stop_in_reasoning: bool = False,
        keep_cut: bool = False,
    ):
        self._stream = TextStream(
            tokenizer, stop=[], include_stop=False, skip_special_tokens=False, min_tokens=0
        )
        self._stops = StopTexts(params.stop_texts, include_stop=params.include_stop_str_in_output)
        reasoning_stops = params.stop_texts if stop_in_reasoning else []
        self._reasoning_stops = StopTexts(
            reasoning_stops, include_stop=params.include_stop_str_in_output
        )
        self._parser = parser
        self._keep_cut = keep_cut
        self._min_tokens = params.min_tokens
        self._num_tokens = self._num_reasoning = 0
        self._last = 0

    def read(self, token_ids: list[int], *, num_said: int, reason: FinishReason | None) -> Reading:
        """The next tokens, of which the first `num_said` are text, and perhaps the end."""
        reading = Reading(len(token_ids))
        for index, token_id in enumerate(token_ids[:num_said]):
            self._num_tokens += 1
            self._last = token_id
            self._add(reading, self._parser.feed(self._stream.push([token_id]).text, token_id))
            if reading.stop is not None:
                reading.num_tokens = index + 1
                return reading
        reading.reasons += [None] * (len(token_ids) - len(reading.reasons))
        if reason is not None:
            self._finish(reading, reason)
        return reading

    def _finish(self, reading: Reading, reason: FinishReason):
        if half := self._stream.finish():
            # The end of a character that never came belongs to the token that began it.
            self._add(reading, self._parser.feed(half, self._last))
        if reading.stop is not None:
            return
        said = self._parser.finish(reason)
        self._add(reading, said)
        if reading.stop is None:
            reading.reasoning += self._reasoning_stops.finish()
            reading.text += self._stops.finish() + (said.cut if self._keep_cut else "")

    def _add(self, reading: Reading, said: Said):
        counts = self._num_tokens > self._min_tokens
        reasoning, reading.stop = self._reasoning_stops.push(said.reasoning, counts=counts)
        reading.reasoning += reasoning
        num_reasoning = min(said.num_reasoning, self._num_tokens - self._num_reasoning)
        self._num_reasoning += num_reasoning
        reading.num_reasoning += num_reasoning
        reasons = bool(said.reasoning or said.num_reasoning)
        reading.reasons.append(reasons if reasons or said.content or said.calls else None)
        if reading.stop is not None:
            return
        if said.content or said.calls:
            reading.reasoning += self._reasoning_stops.finish()
        text, reading.stop = self._stops.push(said.content, counts=counts)
        reading.text += text
        # What follows a stop text is no part of the answer.
        add_pieces(reading.calls, said.calls if reading.stop is None else [])


class Veil:
    """Leaves out the tokens of reasoning. A token belongs to what is said first from it on."""

    def __init__(self):
        self._undecided: list[tuple[int, TokenLogprobs | None]] = []
        self._reasons = False

    def take(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        reasons: list[bool | None],
        *,
        ended: bool,
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Those of the tokens so far that are now known not to be reasoning."""
        reports: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        pairs = list(zip(token_ids, reports, strict=True))
        shown: list[tuple[int, TokenLogprobs | None]] = []
        for index, reason in enumerate(reasons):
            self._undecided += pairs[index : index + 1]
            if reason is not None:
                shown += self._decide(reason)
        if ended:
            shown += self._decide(self._reasons)
        told = [report for _, report in shown if report is not None]
        return [token_id for token_id, _ in shown], None if logprobs is None else told

    def _decide(self, reasons: bool) -> list[tuple[int, TokenLogprobs | None]]:
        decided, self._undecided, self._reasons = self._undecided, [], reasons
        return [] if reasons else decided
