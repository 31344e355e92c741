"""Answers taken apart as a response template says, while they come.

Text is held back only where more of it could still change what opens or closes a field, so that
what is given does not depend on how the answer is cut.
"""

import json
import logging
from collections import deque
from dataclasses import dataclass, field, replace

from limelight.text.casting import cast_arguments
from limelight.text.parsers import CallPiece, Said
from limelight.text.response_body import strict_json
from limelight.text.response_template import Delimiter, Field, ResponseTemplate
from limelight.types import FinishReason

log = logging.getLogger(__name__)

LONGEST_PAST = 4096  # characters that are kept though nothing will look at them again
LONGEST_MARK = 4096  # what has not become a delimiter after so many characters is none
PROMPT_PIECE = 1024  # a delimiter is looked for in so much of a prompt at a time
LOOK_BACK = 16  # characters before what is still to be read, for word borders and line starts


@dataclass(slots=True)
class Gathered:
    """What one step has given so far."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    num_reasoning: int = 0

    def said(self) -> Said:
        return Said("".join(self.reasoning), "".join(self.content), self.calls, self.num_reasoning)


@dataclass(frozen=True, slots=True)
class Found:
    """A delimiter in the text: of which field, and whether it opens or closes it."""

    opens: bool
    field: Field
    start: int
    end: int
    captures: dict[str, str]


class TemplateParser:
    """One answer, by a template; see `AnswerParser`.

    Without `reasoning` thinking is content; without `calls`, or without tools, calls are content
    as they are written. A call comes whole when its closer has come, or when the model ends
    without one; a call that is cut short, or makes no sense, is dropped, and so are all but the
    first unless they may be `parallel`.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        prompt: str,
        tools: list[dict[str, object]] | None,
        reasoning: bool,
        calls: bool,
        parallel: bool = True,
    ):
        self._template = template
        self._tools = {_name(tool): tool for tool in tools or []}
        self._reads = {"thinking": reasoning, "content": True, "tool_calls": calls and bool(tools)}
        fields = template.fields.values()
        self._keeps_all = any(d.looks_back for f in fields for d in (f.opener, f.closer) if d)
        said = template.after_anchor(prompt)
        self._text = ""
        self._at = 0  # how far the text is read
        self._past = 0  # characters of the message before it
        self._prompt = len(said)
        self._empty_at = -1  # where in the message an empty delimiter was found last
        self._num_calls = 0
        self._most_calls = None if parallel else 1
        self._tokens: deque[tuple[int, int]] = deque()  # where in the message each one stands
        self._open: Field | None = template.implicit
        self._captures: dict[str, str] = {}
        self._opener = ""  # as it was written
        self._body: list[str] = []
        self._out = Gathered()
        for start in range(0, len(said), PROMPT_PIECE):
            self._text += said[start : start + PROMPT_PIECE]
            self._read(final=False)
            self._forget()
        self._out, self._num_calls, self._opener = Gathered(), 0, ""
        self._num_given = len(self._body)  # pieces of an open call that are the prompt's

    @property
    def open_field(self) -> str | None:
        """The field that an opener has opened and nothing has closed yet."""
        is_open = self._open is not None and self._open is not self._template.implicit
        return self._open.name if self._open is not None and is_open else None

    def feed(self, text: str, token_id: int) -> Said:
        """The next token; one without text is a part of the character that comes next."""
        start = self._past + len(self._text)
        self._tokens.append((start, start + max(len(text), 1)))
        if text:
            self._text += text
            self._read(final=False)
            self._forget()
        return self._give()

    def finish(self, reason: FinishReason) -> Said:
        """The end: an open call counts if the model itself has stopped."""
        # The model stops at the mark that ends a part, before the start of the next message.
        for literal, stem in self._template.stems[self._open.name] if self._open else ():
            for length in range(len(literal) - 1, stem - 1, -1):
                if self._text.endswith(literal[:length], self._at):
                    self._text += literal[length:]
                    self._read(final=False)
                    break
        self._read(final=True)
        if reason == "stop":
            self._close()
        is_cut = self._open is not None and self._open.name == "tool_calls"
        cut = [self._opener, *self._body[self._num_given :]] if is_cut else []
        return replace(self._give(), cut="".join(cut))

    def _give(self) -> Said:
        said, self._out = self._out.said(), Gathered()
        return said

    def _read(self, *, final: bool):
        """Go on as far as the text is settled."""
        while True:
            found, settled = self._next(final)
            if found is None:
                self._take(settled, delimits=False)
                return
            self._take(found.start, delimits=False)
            if found.start == found.end:
                self._empty_at = self._past + found.end
            if found.opens:
                self._open, self._captures = found.field, found.captures
                self._opener, self._num_given = self._text[found.start : found.end], 0
                self._take(found.end, delimits=True)
            else:
                self._take(found.end, delimits=True)
                self._captures |= found.captures
                self._close()

    def _watched(self) -> list[tuple[bool, Field, Delimiter]]:
        """Inside a field only its closer counts; outside, all openers do."""
        implicit = self._template.implicit
        closing = [(False, f, f.closer) for f in (self._open,) if f is not None and f.closer]
        if self._open is not implicit:
            return closing
        fields = self._template.fields.values()
        return [(True, f, f.opener) for f in fields if f.opener] + closing

    def _next(self, final: bool) -> tuple[Found | None, int]:
        """The delimiter that comes next, if it is certain, and the end of the settled text."""
        settled, best, best_key = len(self._text), None, None
        for opens, of, delimiter in self._watched():
            match, hold = delimiter.find(self._text, self._at, final=final)
            if match and match.end() == self._at == self._empty_at - self._past:
                # Empty ones count once at each place, or reading would never end.
                settled = min(settled, hold)
                match = None
                if self._at < len(self._text):
                    match, hold = delimiter.find(self._text, self._at + 1, final=final)
            if match is not None and match.end() - match.start() > LONGEST_MARK:
                match = None
            if match is None and len(self._text) - hold > LONGEST_MARK:
                hold = len(self._text)
            settled = min(settled, hold)
            if match is None:
                continue
            key = (match.start(), -match.end(), not opens, of.name)
            if best_key is None or key < best_key:
                given = {k: v for k, v in match.groupdict().items() if v is not None}
                best, best_key = Found(opens, of, match.start(), match.end(), given), key
        if best is not None and (final or best.start < settled):
            return best, settled
        return None, settled

    def _take(self, end: int, *, delimits: bool):
        """Read on to `end`: a delimiter of the open field, or a piece of its body."""
        start, self._at = self._at, end
        if self._open is None or start >= end:
            return
        name = self._open.name
        if name == "tool_calls" and self._reads[name]:
            if not delimits:
                self._body.append(self._text[start:end])
            return
        start = max(start, self._prompt - self._past)
        text = self._text[start:end]
        if name == "tool_calls" or not delimits:
            thinks = name == "thinking" and self._reads[name]
            (self._out.reasoning if thinks else self._out.content).append(text)
            if thinks and text:
                self._count(self._past + start, self._past + end)

    def _count(self, start: int, end: int):
        """Count the tokens that are in this piece of the message, each once."""
        while self._tokens and self._tokens[0][0] < end:
            self._out.num_reasoning += self._tokens.popleft()[1] > start

    def _forget(self):
        """Let go of what is read."""
        while self._tokens and self._tokens[0][1] <= self._past + self._at:
            self._tokens.popleft()
        if self._at > LONGEST_PAST and not self._keeps_all:
            cut = self._at - LOOK_BACK
            self._text = self._text[cut:]
            self._at, self._past = LOOK_BACK, self._past + cut

    def _close(self):
        closed, body, captures = self._open, "".join(self._body), self._captures
        self._open, self._body, self._captures = self._template.implicit, [], {}
        if closed is None or closed.name != "tool_calls" or not self._reads["tool_calls"]:
            return
        try:
            value = closed.value(body, captures)
        except ValueError as error:
            log.warning("dropping a malformed call: %s", error)
            return
        for call in value if isinstance(value, list) else [value]:
            if self._num_calls == self._most_calls:
                return
            try:
                name, arguments = self._call(call, decoded=closed.decodes)
            except ValueError as error:
                log.warning("dropping a malformed call: %s", error)
                continue
            self._out.calls.append(CallPiece(self._num_calls, name, arguments, ends=True))
            self._num_calls += 1

    def _call(self, call: object, *, decoded: bool) -> tuple[str, str]:
        """Its name and the JSON of its arguments, cast to their types."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError("no function in it")
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ValueError("it has no name")
        if isinstance(arguments, str):
            arguments, decoded = _decoded(arguments or "{}"), True
        elif arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise ValueError("its arguments are no object")
        return name, _dumped(cast_arguments(arguments, self._tools.get(name), decoded=decoded))


def _name(tool: dict[str, object]) -> object:
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, dict) else None


def _decoded(text: str) -> object:
    try:
        return strict_json(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _dumped(value: dict[str, object]) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which only an escape can write.
        return json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return text
