"""From a conversation to the text of a prompt: the model's chat template, run in a sandbox."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from limelight.checkpoint import read_json
from limelight.text.messages import Message
from limelight.text.tokenizer import special_tokens
from limelight.types import RequestError

SECONDS = 1.5
MOST_MEMORY = 512 * 2**20
MOST_CHARACTERS = 16 * 2**20
# What belongs to the renderer, to the environment of templates, or to a template of one's own.
RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "cycler", "dict", "documents", "joiner", "lipsum", "messages", "namespace",
        "raise_exception", "range", "return_dict", "return_tensors", "self", "strftime_now",
        "tokenize", "tools",
    }
)  # fmt: skip
# Templates read the reasoning of an earlier answer under one of these names.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """The chat template of a model, by name where it has several, run in a process of its own.

    A rendering that takes more than `SECONDS`, `MOST_MEMORY` or `MOST_CHARACTERS` fails alone.
    """

    def __init__(self, sources: dict[str, str], *, special_tokens: dict[str, str], origin: Path):
        if "default" not in sources:
            raise ValueError(f"{origin}: no template is named default, only {sorted(sources)}")
        self.sources = sources
        self.special_tokens = special_tokens
        self.origin = origin
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = self._start()

    @classmethod
    def load(cls, folder: Path, *, override: Path | None) -> "ChatTemplate | None":
        """The template of a model folder, or of the file `override`; None if there is none.

        Raises `ValueError`, with the file's name, for one that is broken, reaches Python's
        internals, or already breaks the limits while it is compiled.
        """
        if override is not None:
            sources, origin = {"default": _read(override)}, override
        elif (origin := folder / "chat_template.jinja").is_file():
            sources = {"default": _read(origin)}
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                sources[path.stem] = _read(path)
        else:
            origin = folder / "tokenizer_config.json"
            sources = _listed(origin)
        if not sources:
            return None
        return cls(sources, special_tokens=special_tokens(folder), origin=origin)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: list[Message] | None = None,
        documents: list[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """The prompt's text; `kwargs` are further names that the template sees.

        With `continue_final_message` it ends with the content of the last message. Blocks for
        `SECONDS` at most, so it is for a thread. Raises `RequestError` for what the template
        refuses, and for kwargs that would replace what is not theirs.
        """
        for name in kwargs:
            if name in RESERVED or name in self.special_tokens or name.startswith("_"):
                raise RequestError(
                    f"{name[:100]!r} cannot be set for a chat template",
                    param="chat_template_kwargs",
                )
        conversation = [_message(message) for message in messages]
        mark = f"{uuid4().hex} " if continue_final_message else ""
        if mark:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message excludes add_generation_prompt",
                    param="continue_final_message",
                )
            conversation = _marked(conversation, mark)
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        values = self.special_tokens | kwargs
        values |= {"messages": conversation, "tools": tools, "documents": documents}
        values["add_generation_prompt"] = add_generation_prompt
        text = self._ask({"name": name, "values": values})
        return _cut(text, mark) if mark else text

    def close(self):
        """End the process; a later rendering would start a new one."""
        with self._lock:
            if self._sandbox is not None:
                self._sandbox.close()
                self._sandbox = None

    def _start(self) -> "Sandbox":
        sandbox = Sandbox()
        limits = {"seconds": SECONDS, "memory": MOST_MEMORY, "characters": MOST_CHARACTERS}
        answer = sandbox.ask(json.dumps({"templates": self.sources, **limits}))
        if "error" in answer:
            sandbox.close()
            raise ValueError(f"{self.origin}: the chat template cannot be used: {answer['error']}")
        return sandbox

    def _ask(self, question: dict[str, object]) -> str:
        try:
            line = json.dumps(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"not plain JSON: {error}", param="messages") from error
        with self._lock:
            if self._sandbox is None or self._sandbox.ended:
                self._sandbox = self._start()
            answer = self._sandbox.ask(line)
        if "error" in answer:
            raise RequestError(
                f"the chat template cannot show these messages: {answer['error']}", param="messages"
            )
        return answer["text"]


class Sandbox:
    """A process that runs `sandbox.py`; it ends with this object, or when this process ends."""

    def __init__(self):
        program = Path(__file__).with_name("sandbox.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, line: str) -> dict[str, str]:
        """Its answer to a line of JSON: what was asked for, or {"error": why not}."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None and answers is not None
        try:
            questions.write(line.encode() + b"\n")
            questions.flush()
            reply = answers.readline()
        except BrokenPipeError:
            reply = b""
        if reply:
            return json.loads(reply)
        code = self._process.wait()
        if code == -signal.SIGALRM:
            return {"error": f"it takes longer than {SECONDS} s"}
        return {"error": f"its process ended with status {code}"}


def _end(process: subprocess.Popen[bytes]):
    # Closing the pipe fails where a question for a process that had died is still in its buffer.
    with contextlib.suppress(BrokenPipeError), process:
        process.kill()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read the chat template: {error}") from error


def _listed(path: Path) -> dict[str, str]:
    """The templates in tokenizer_config.json: one text, or a list of named ones."""
    value = read_json(path).get("chat_template") if path.is_file() else None
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list() if all(
            isinstance(item, dict)
            and isinstance(item.get("name"), str)
            and isinstance(item.get("template"), str)
            for item in value
        ):
            return {item["name"]: item["template"] for item in value}
    raise ValueError(f"{path}: chat_template must be a text or a list of name and template")


def _message(message: Message) -> Message:
    """A message as templates expect it: no empty fields, the reasoning under each of its names."""
    if not isinstance(message, dict):
        raise RequestError(
            f"a message must be an object, got {type(message).__name__}", param="messages"
        )
    message = {key: value for key, value in message.items() if value is not None}
    given = [message[name] for name in REASONING_NAMES if name in message]
    return dict.fromkeys(REASONING_NAMES, given[0]) | message if given else message


def _marked(conversation: list[Message], mark: str) -> list[Message]:
    """The conversation with `mark` at the end of its last text."""
    if conversation:
        *earlier, last = conversation
        match last.get("content"):
            case str(text):
                return [*earlier, last | {"content": text + mark}]
            case [*parts, {"text": str(text), **rest}]:
                return [*earlier, last | {"content": [*parts, rest | {"text": text + mark}]}]
    raise RequestError("the last message has no text to continue", param="messages")


def _cut(text: str, mark: str) -> str:
    """The text before `mark`; its blank at the end shows whether the template keeps blanks."""
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued",
            param="messages",
        )
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()
