"""The answers of GLM 4.7's format, which Flint writes: reasoning, content, calls of tools.

`<think>REASONING</think>CONTENT<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...
</tool_call>...`; marks are told from typed text by their token ids, the tags of arguments are text.

A call of a known tool is sent from its first argument on: texts as they come, other values when
they close. In thoughts it is sent when its closer comes, as it may be only spoken of. What cannot
be a call, although it began as one, is the text that it was found in, so that a `<tool_call>` which
is only spoken of swallows nothing. An argument that comes twice is sent twice; readers of JSON take
the last.
"""

import codecs
import json
import logging
from dataclasses import dataclass, field, replace
from typing import Literal

from limelight.text.glm_casting import Argument
from limelight.text.marks import Marks, Piece
from limelight.text.parsers import CallPiece, Said
from limelight.text.tokenizer import Tokenizer
from limelight.types import FinishReason

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
ASSISTANT = "<|assistant|>"
TURNS = ("<|system|>", "<|user|>", ASSISTANT, "<|observation|>")
# A name that is longer, and than all names of tools, is none.
LONGEST_NAME = 256

logger = logging.getLogger(__name__)


class Call:
    """A call as it is written: `raw` is its text so far, `take_json` gives that of its arguments.

    `tools` are the parameters of the known ones by name.
    """

    def __init__(self, tools: dict[str, object], num_tokens: int):
        self.raw = [CALL]
        self.num_tokens = num_tokens
        self.part: Literal["name", "key", "between", "value", "after"] = "name"
        self.is_possible = True
        self.is_sent = False  # whether its name was
        self._tools = tools
        self._longest = max([LONGEST_NAME, *map(len, tools)])
        self._name = ""
        self._text: list[str] = []  # of the key or value that is being written
        self._argument = Argument("", None)
        self._key = ""
        self._has_arguments = False
        self._json: list[str] = []
        self._tags = Marks(ids={}, texts=(KEY, KEY_END, VALUE, VALUE_END), dropped={})

    @property
    def name(self) -> str:
        return self._name.strip()

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing but the closer."""
        if self._tags.held:
            return False
        return self.part == "after" or (self.part == "name" and self.name in self._tools)

    def feed(self, text: str):
        self.raw.append(text)
        for piece in self._tags.feed(text, None):
            self._take(piece)

    def close(self):
        """The closer: it ends a value that is open as well."""
        for piece in self._tags.flush():
            self._take(piece)
        if self.part == "value":
            self._end_value()
        self._json.append("}" if self._has_arguments else "{}")

    def take_json(self) -> str:
        """What is new of the JSON of the arguments."""
        text, self._json = "".join(self._json), []
        return text

    def _take(self, piece: Piece):
        text = piece.text
        if self.part == "name":
            if piece.is_mark and text == KEY:
                self.part = "key"
            else:
                self._name += text
                self.is_possible = not piece.is_mark and self._may_be_name()
        elif self.part == "key":
            if piece.is_mark and text == KEY_END:
                self._key = "".join(self._text).strip()
                self.part, self._text = "between", []
            else:
                self._text.append(text)
        elif self.part == "value":
            if piece.is_mark and text == VALUE_END:
                self._end_value()
            elif self._argument.is_text:
                self._json.append(_dumped(text)[1:-1])
            else:
                self._text.append(text)
        elif piece.is_mark and text == KEY:
            self.part = "key"
        elif piece.is_mark and text == VALUE and self.part == "between":
            self._begin_value()

    def _begin_value(self):
        self.part = "value"
        self._argument = Argument(self._key, self._tools.get(self.name))
        self._json += [", " if self._has_arguments else "{", _dumped(self._key), ": "]
        self._json += ['"'] if self._argument.is_text else []
        self._has_arguments = True

    def _end_value(self):
        value = self._argument.cast("".join(self._text))
        self._json.append('"' if self._argument.is_text else _dumped(value))
        self.part, self._text = "after", []

    def _may_be_name(self) -> bool:
        """Whether the text begins a name, of a tool that may be unknown."""
        if len(self._name) > self._longest:
            return False
        one_word = len(self.name.split()) <= 1 and "<" not in self.name
        begun = self._name.lstrip()
        named = self.name in self._tools or any(n.startswith(begun) for n in self._tools)
        return one_word or named


@dataclass(slots=True)
class Trimmed:
    """A text whose last blanks are held back until something follows them."""

    blanks: list[str] = field(default_factory=list)

    def add(self, text: str) -> str:
        kept = text.rstrip()
        if not kept:
            self.blanks.append(text)
            return ""
        said = "".join([*self.blanks, kept])
        self.blanks = [text[len(kept) :]]
        return said


class Glm47Parser:
    """One answer; where it starts follows from the last turn of its prompt.

    Without `reasoning` thoughts are content, without their marks; without `calls` a call is text.
    `thinking=False`: the request switched thoughts off, so their marks are text, unless its prompt
    opens them all the same. Calls of tools that are not among `tools` are left out (in thoughts, if
    they have arguments), and so are all but the first unless they may be `parallel`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: list[int],
        tools: list[dict[str, object]] | None,
        reasoning: bool,
        calls: bool,
        thinking: bool | None,
        parallel: bool = True,
    ):
        self._tools = dict(_name_and_parameters(tool) for tool in tools or [])
        self._splits = reasoning
        self._calls_tools = calls
        self._parallel = parallel
        self._is_reasoning = True
        self._call: Call | None = None
        self._begin()
        self._marks = _marks(tokenizer, [THINK, THOUGHT, CALL, CALLED, *TURNS], plain=[])
        opened = self._read_prompt(tokenizer, prompt_token_ids)
        if thinking is False and opened:
            logger.warning("the chat template opens thoughts although the request turns them off")
        elif thinking is False:
            self._is_reasoning = False
            self._marks = _marks(tokenizer, [CALL, CALLED, *TURNS], plain=[THINK, THOUGHT])

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning; before the answer, as its prompt leaves it."""
        return self._is_reasoning

    def feed(self, text: str, token_id: int) -> Said:
        for piece in self._marks.feed(text, token_id):
            self._take(piece)
        return self._said()

    def finish(self, reason: FinishReason) -> Said:
        cut = ""
        for piece in self._marks.flush():
            self._take(piece)
        if (call := self._call) is not None:
            is_spoken_of = call.part == "name" and reason == "stop"
            if call.is_whole and reason == "stop":
                self._close(call, closer="")
            elif is_spoken_of or not self._calls_tools:
                self._give_back(call)
            else:
                self._has_called, cut = True, "".join(call.raw)
        if not self._has_called:
            self._content += self._content_end.blanks
        return replace(self._said(), cut=cut)

    def _begin(self):
        """Nothing has been said yet."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []
        self._num_reasoning = 0
        self._reasoning_end = Trimmed()
        self._content_end = Trimmed()
        self._has_content = False
        self._has_called = False
        self._num_calls = 0
        self._quotes_call = False  # a `<tool_call>` was text, so its closer is, too

    def _read_prompt(self, tokenizer: Tokenizer, token_ids: list[int]) -> bool:
        """Take the last turn of the prompt as begun; whether it opened thoughts by their mark."""
        turns = {_token_of(tokenizer, turn) for turn in TURNS}
        last = next((i for i in reversed(range(len(token_ids))) if token_ids[i] in turns), 0)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        is_ours, opened = True, False
        pieces: list[Piece] = []
        for token_id in token_ids[last:]:
            text = decoder.decode(tokenizer.token_bytes(token_id))
            pieces += self._marks.feed(text, token_id)
        for piece in [*pieces, *self._marks.flush()]:
            mark = piece.text if piece.is_mark else ""
            if mark in TURNS:
                self._is_reasoning, self._call = True, None
                is_ours, opened = mark == ASSISTANT, False
            elif is_ours:
                self._take(piece)
                opened = mark == THINK or (opened and mark != THOUGHT)
        self._begin()
        if self._call is not None:
            self._call.raw, self._call.num_tokens = [], 0
        return opened and self._is_reasoning

    def _said(self) -> Said:
        call = self._call
        if call is not None and call.part != "name" and not self._is_reasoning:
            self._send(call)
        said = Said(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            calls=self._pieces,
            num_reasoning=self._num_reasoning,
        )
        self._reasoning, self._content, self._pieces, self._num_reasoning = [], [], [], 0
        return said

    def _take(self, piece: Piece):
        if self._call is not None:
            self._take_in_call(piece, self._call)
        elif not piece.is_mark:
            self._say(piece.text, piece.num_tokens)
        elif piece.text == THINK:
            self._is_reasoning = True
        elif piece.text == THOUGHT:
            self._end_reasoning()
        elif piece.text == CALL:
            if self._calls_tools or self._is_reasoning:
                self._call = Call(self._tools, piece.num_tokens)
            else:
                self._say(CALL, 0)
        elif piece.text == CALLED and (self._quotes_call or not self._calls_tools):
            self._quotes_call = False
            self._say(CALLED, piece.num_tokens)

    def _take_in_call(self, piece: Piece, call: Call):
        if piece.is_mark and piece.text in TURNS:
            return
        call.num_tokens += piece.num_tokens
        if piece.is_mark and piece.text == CALLED:
            self._close(call, closer=CALLED)
        elif piece.is_mark and piece.text == CALL and call.is_whole:
            self._close(call, closer="")
            self._take(piece)
        elif piece.is_mark and (
            call.part == "name" or (piece.text == THOUGHT and self._is_reasoning)
        ):
            call.num_tokens -= piece.num_tokens
            self._give_back(call)
            self._take(piece)
        else:
            call.feed(piece.text)
            if not call.is_possible:
                self._give_back(call)

    def _close(self, call: Call, *, closer: str):
        call.close()
        is_known = call.name in self._tools
        is_spoken_of = self._is_reasoning and call.part == "name"
        if not call.is_possible or not (is_known or (self._calls_tools and not is_spoken_of)):
            self._give_back(call)
            self._take(Piece(closer, bool(closer), 0))
            return
        self._call = None
        if is_known:
            # A call ends thoughts that were not closed; one that is left out is part of them.
            self._end_reasoning()
        if not self._calls_tools:
            self._say("".join([*call.raw, closer]), 0)
            return
        self._has_called = self._has_called or not self._is_reasoning
        self._send(call, ends=True)

    def _send(self, call: Call, *, ends: bool = False):
        """What is new of a call, if it is one that counts."""
        is_one_too_many = self._num_calls > 0 and not self._parallel
        if not self._calls_tools or call.name not in self._tools or is_one_too_many:
            return
        name, text = None if call.is_sent else call.name, call.take_json()
        if name or text:
            self._pieces.append(CallPiece(self._num_calls, name, text, ends))
            call.is_sent = True
        self._num_calls += ends

    def _give_back(self, call: Call):
        """What began as a call is text after all."""
        self._call, self._quotes_call = None, True
        self._say("".join(call.raw), call.num_tokens)

    def _end_reasoning(self):
        self._is_reasoning = False
        self._reasoning_end.blanks = []

    def _say(self, text: str, num_tokens: int):
        if self._is_reasoning and self._splits:
            self._num_reasoning += num_tokens
            self._reasoning.append(self._reasoning_end.add(text))
            return
        if said := self._content_end.add(text):
            # Blanks around calls are not part of the answer.
            is_after_call = self._has_called and not self._has_content
            self._content.append(said.lstrip() if is_after_call else said)
            self._has_content = True


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _name_and_parameters(tool: dict[str, object]) -> tuple[str, object]:
    function = tool.get("function", tool)
    known = function if isinstance(function, dict) else {}
    return str(known.get("name", "")), known.get("parameters")


def _token_of(tokenizer: Tokenizer, mark: str) -> int | None:
    """The one token that is this mark, if the vocabulary has one."""
    token_ids = tokenizer.encode(mark, add_special_tokens=False)
    is_one = len(token_ids) == 1 and tokenizer.token_bytes(token_ids[0]) == mark.encode()
    return token_ids[0] if is_one else None


def _marks(tokenizer: Tokenizer, marks: list[str], *, plain: list[str]) -> Marks:
    """What this vocabulary writes: `plain` marks are text, other special tokens are dropped."""
    found = {mark: _token_of(tokenizer, mark) for mark in marks}
    ids = {token_id: mark for mark, token_id in found.items() if token_id is not None}
    kept = {_token_of(tokenizer, mark) for mark in plain} | set(ids)
    return Marks(
        ids=ids,
        texts=[mark for mark, token_id in found.items() if token_id is None],
        dropped={
            token_id: tokenizer.token_bytes(token_id).decode(errors="replace")
            for token_id in tokenizer.special_ids - kept
        },
    )
