"""`limelight chat`: a conversation in the terminal with a model in this process."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console

from limelight.config import EngineConfig
from limelight.engine.llm import LLM
from limelight.text.messages import Message
from limelight.types import RequestError, SamplingParams

COMMANDS = "/reset forgets the conversation, /system TEXT sets the system message, /stats, /exit"


def run(config: EngineConfig, params: SamplingParams, *, system: str | None) -> int:
    """Talk until /exit or the end of the input; returns the exit code."""
    console = Console(highlight=False)
    with LLM(**asdict(config), quiet=False) as llm:
        console.print(f"{config.model}. {COMMANDS}. Ctrl-C ends an answer.", markup=False)
        chat = Chat(llm, params, system=system)
        while (line := _line(console)) is not None:
            word, _, rest = line.partition(" ")
            match word:
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    chat.reset()
                case "/system":
                    chat.reset(system=rest.strip())
                case "/stats":
                    console.print(chat.stats, markup=False)
                case _ if word.startswith("/"):
                    console.print(COMMANDS, markup=False)
                case _:
                    _show(console, chat, line)
    return 0


def _line(console: Console) -> str | None:
    """What the user types; None at the end of the input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return None


def _show(console: Console, chat: "Chat", text: str) -> None:
    try:
        with _stopping() as stopped:
            for piece in chat.answer(text, stopped):
                console.print(piece, end="", markup=False, soft_wrap=True)
        console.print()
    except (RequestError, RuntimeError) as error:
        console.print(f"{error} (/reset starts anew)", markup=False)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into the middle of a step."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """One conversation: its messages, and figures of the last answer."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None):
        self.llm, self.params, self.system = llm, params, system
        self.reset()

    def reset(self, *, system: str | None = None) -> None:
        """Forget all messages but the system message, which `system` replaces; "" removes it."""
        self.system = self.system if system is None else system
        self.messages: list[Message] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.stats = "nothing asked yet"

    def answer(self, text: str, stopped: threading.Event) -> Iterator[str]:
        """The answer to `text`, piece by piece; it and `text` join the conversation.

        A text that is refused by `RequestError` leaves the conversation as it was.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.render(messages)
        before, start, first, pieces = self.llm.engine.stats(), time.perf_counter(), None, []
        # Leaving the loop closes the stream, and that aborts the request.
        for piece in self.llm.stream(prompt, self.params):
            first = first or time.perf_counter() - start
            pieces.append(piece)
            yield piece
            if stopped.is_set():
                break
        seconds, after = time.perf_counter() - start, self.llm.engine.stats()
        cached = after.prefix_hits - before.prefix_hits
        # Every token is computed once but the cached ones and the last one of the answer.
        tokens = after.step_tokens - before.step_tokens - (len(prompt) - cached) + 1
        self.stats = (
            f"{len(prompt)} prompt tokens ({cached} cached), {tokens} tokens of answer, "
            f"first after {first or seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        )
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
