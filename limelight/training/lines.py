"""The data file: lines of JSON, each a prompt for the target to answer, or one with its answer.

    {"prompt": TEXT or [IDS]}  or  {"messages": [...], "tools": [...], "chat_template_kwargs": {}}

with, if wanted, `answer` (text or ids; then the target is not asked), `task` (a label to report by)
and `held_out` (true: to be judged by, never learned). Where no line says so, every 20th is. A last
message of the assistant is left off, as the target is to answer itself.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from limelight.text.messages import Message, plain_messages
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer

KEYS = ("prompt", "messages", "tools", "chat_template_kwargs", "answer", "task", "held_out")
OF_MESSAGES = ("tools", "chat_template_kwargs")
HELD_OUT_EVERY = 20


@dataclass(frozen=True, slots=True)
class Line:
    """Token ids of a prompt, and of its answer where the file has one."""

    number: int
    prompt: list[int]
    answer: list[int] | None
    task: str
    held_out: bool


def split(lines: list[Line]) -> list[Line]:
    """The lines with some held out, if none says that it is."""
    if any(line.held_out for line in lines):
        return lines
    every = HELD_OUT_EVERY
    return [replace(line, held_out=i % every == every - 1) for i, line in enumerate(lines)]


@dataclass(frozen=True, slots=True)
class Reader:
    """What lines are read with: a target may lack tokenizer and template."""

    model: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    vocab_size: int
    longest: int  # tokens of prompt and answer together

    @classmethod
    @contextmanager
    def open(cls, folder: Path, *, model: str, vocab_size: int, longest: int) -> Iterator["Reader"]:
        """With tokenizer and template of the model in `folder`, that people call `model`."""
        has_tokenizer = (folder / "tokenizer.json").exists()
        tokenizer = Tokenizer.load(folder) if has_tokenizer else None
        template = ChatTemplate.load(folder, override=None) if has_tokenizer else None
        try:
            yield cls(model, tokenizer, template, vocab_size, longest)
        finally:
            if template is not None:
                template.close()

    def read(self, path: Path) -> list[Line]:
        """The lines of a file; `ValueError` names the file, the line and the fault."""
        lines = []
        try:
            with path.open(encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        lines.append(self._line(path, number, text))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{path}: {reason}") from error
        if not lines:
            raise ValueError(f"{path}: no lines")
        return lines

    def _line(self, path: Path, number: int, text: str) -> Line:
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError("expected a JSON object")
            return self._parsed(number, value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error

    def _parsed(self, number: int, value: dict[str, object]) -> Line:
        for key in value:
            if key not in KEYS:
                raise ValueError(f"no key {key!r} is known, only {', '.join(KEYS)}")
        if ("prompt" in value) == ("messages" in value):
            raise ValueError("give prompt or messages, one of them")
        if "prompt" in value:
            if named := [key for key in OF_MESSAGES if key in value]:
                raise ValueError(f"{named[0]} goes with messages")
            prompt = self._ids("prompt", value["prompt"], special=True)
        else:
            prompt = self._rendered(value)
        given = value.get("answer")
        answer = None if given is None else self._ids("answer", given, special=False)
        task, held_out = value.get("task", ""), value.get("held_out", False)
        if not isinstance(task, str) or not isinstance(held_out, bool):
            raise ValueError("task must be a text, and held_out true or false")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if (length := len(prompt) + len(answer or [0])) > self.longest:
            raise ValueError(
                f"{length} tokens of prompt and answer; the target takes {self.longest}"
            )
        return Line(number, prompt, answer, task, held_out)

    def _ids(self, key: str, value: object, *, special: bool) -> list[int]:
        """A text or token ids, as token ids."""
        if isinstance(value, str):
            if self.tokenizer is None:
                raise ValueError(f"{self.model} has no tokenizer: give {key} as token ids")
            return self.tokenizer.encode(value, add_special_tokens=special)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise ValueError(f"{key} must be a text or a list of token ids")
        if bad := [item for item in value if not 0 <= item < self.vocab_size]:
            raise ValueError(f"{key} has {bad[0]}; token ids are 0 to {self.vocab_size - 1}")
        return value

    def _rendered(self, value: dict[str, object]) -> list[int]:
        if self.tokenizer is None or self.template is None:
            raise ValueError(f"{self.model} has no chat template: give prompt instead of messages")
        messages, tools = value["messages"], value.get("tools")
        kwargs = value.get("chat_template_kwargs", {})
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of messages")
        if tools is not None and not isinstance(tools, list):
            raise ValueError("tools must be a list")
        if not isinstance(kwargs, dict):
            raise ValueError("chat_template_kwargs must be an object")
        plain: list[Message] = plain_messages(messages)
        if plain[-1]["role"] == "assistant":
            plain = plain[:-1]
        text = self.template.render(plain, tools=tools, **kwargs)
        return self.tokenizer.encode(text, add_special_tokens=False)
