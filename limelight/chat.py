"""`limelight chat`: a conversation in the terminal with a model in this process.

On a terminal thoughts are dim and calls of tools are shown; where the input is a pipe, each line
gets its answer, as plain text.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from limelight.config import EngineConfig
from limelight.demo_tools import PROGRAMS, TOOLS, run_tool
from limelight.engine.front import Delta
from limelight.engine.llm import LLM
from limelight.text.messages import Message
from limelight.text.parsers import ToolCall, message_of, whole_calls
from limelight.types import RequestError, SamplingParams

HELP = """\
/reset         forget the conversation
/system TEXT   forget it and set the system message; without a text there is none
/tools         let the model use a calculator and a clock, or no longer
/think         let the model think first, or no longer
/stats         figures of the last answer
/help          this list
/exit          leave; so does Ctrl-D
A line that ends in \\ goes on in the next one, and so does all between two \"\"\".
Ctrl-C ends an answer."""
BLOCK = '"""'
HARMLESS = "\n\t\u200c\u200d"  # joiners are part of emoji and of some scripts
MOST_ROUNDS = 10  # of calls, before an answer must have come
STYLES = {"content": "", "reasoning": "dim", "call": "cyan", "result": "green", "note": "yellow"}


@dataclass(frozen=True, slots=True)
class News:
    """A piece of what an answer says, or of what is done for it."""

    kind: Literal["content", "reasoning", "call", "result", "note"]
    text: str


@dataclass(frozen=True, slots=True)
class Typed:
    """A question, or a command."""

    text: str
    is_command: bool


def run(
    config: EngineConfig,
    params: SamplingParams,
    *,
    system: str | None,
    reasoning_parser: str | None = "auto",
    tool_call_parser: str | None = "auto",
) -> int:
    """Talk until /exit or the end of the input; the exit code is 1 if a piped line failed."""
    shell: Terminal | Pipe = Terminal() if sys.stdin.isatty() else Pipe()
    with LLM(
        **asdict(config), quiet=False,
        reasoning_parser=reasoning_parser, tool_call_parser=tool_call_parser,
    ) as llm:  # fmt: skip
        shell.greet(config.model)
        chat = Chat(llm, params, system=system)
        while (typed := shell.read()) is not None:
            if not typed.is_command:
                shell.answer(chat, typed.text)
            elif (told := command(chat, typed.text)) is None:
                break
            else:
                shell.tell(told)
    return shell.exit_code


def command(chat: "Chat", text: str) -> str | None:
    """What a command has to tell after it is done; None for the one that leaves."""
    name, _, rest = text.partition(" ")
    match name:
        case "/exit":
            return None
        case "/reset":
            chat.reset()
            return "The conversation is forgotten."
        case "/system":
            chat.reset(system=rest.strip())
            return "The conversation starts anew."
        case "/tools":
            chat.has_tools = not chat.has_tools
            names = ", ".join(PROGRAMS)
            return f"Tools: {names}." if chat.has_tools else "Tools: none."
        case "/think":
            chat.thinks = not chat.thinks
            return f"Thinking is {'on' if chat.thinks else 'off'}."
        case "/stats":
            return chat.stats
        case "/help":
            return HELP
    return f"There is no {name}; /help lists the commands."


def read_typed(next_line: Callable[[bool], str]) -> Typed | None:
    """The next question or command; None at the end. `next_line` is told whether it goes on."""
    lines: list[str] = []
    in_block = False
    try:
        while True:
            line = next_line(bool(lines))
            if not lines and line.startswith(BLOCK):
                in_block, line = True, line.removeprefix(BLOCK)
            if in_block and line.endswith(BLOCK):
                return Typed("\n".join([*lines, line.removesuffix(BLOCK)]), False)
            goes_on = in_block or line.endswith("\\")
            lines.append(line if in_block else line.removesuffix("\\"))
            if not goes_on:
                break
    except EOFError:
        if not lines:
            return None
    text = "\n".join(lines)
    return Typed(text, not in_block and text.startswith("/"))


class Terminal:
    """Where someone types."""

    exit_code = 0

    def __init__(self):
        with suppress(ImportError):
            import readline  # noqa: F401  lines can be edited, and earlier ones come back
        self._console = Console(highlight=False, emoji=False)
        self._warned = False

    def greet(self, model: str):
        self.tell(f"{model}. /help lists the commands, Ctrl-C ends an answer, Ctrl-D leaves.")

    def tell(self, text: str):
        self._print(News("note", text + "\n"))

    def read(self) -> Typed | None:
        """The next question or command; None at the end, or after a second Ctrl-C."""
        while True:
            try:
                typed = read_typed(lambda goes_on: input("... " if goes_on else "> "))
            except KeyboardInterrupt:
                print()
                if self._warned:
                    return None
                self._warned = True
                self.tell("Ctrl-C again leaves, and so does Ctrl-D.")
                continue
            self._warned = False
            if typed is None or typed.text.strip():
                return typed

    def answer(self, chat: "Chat", text: str):
        """Show the answer while it comes; Ctrl-C ends it."""
        kind, ends_line = "", True
        try:
            with stopping() as stopped:
                for news in chat.answer(text, stopped):
                    if news.kind != kind and not ends_line:
                        print()
                    self._print(news)
                    kind, ends_line = news.kind, news.text.endswith("\n")
        except (RequestError, RuntimeError) as error:
            self.tell(f"{'' if ends_line else chr(10)}{error} (/reset starts anew)")
            return
        if not ends_line:
            print()

    def _print(self, news: News):
        # What a model writes must not move the cursor or set the title of the window.
        shown = "".join(c if c.isprintable() or c in HARMLESS else "\ufffd" for c in news.text)
        self._console.print(Text(shown, STYLES[news.kind]), end="", soft_wrap=True)


class Pipe:
    """Where lines come from a program or a file: only the contents of the answers go out."""

    def __init__(self):
        self.exit_code = 0

    def greet(self, model: str):
        pass

    def tell(self, text: str):
        print(text, flush=True)

    def read(self) -> Typed | None:
        typed = read_typed(_next_line)
        while typed is not None and not typed.text.strip():
            typed = read_typed(_next_line)
        return typed

    def answer(self, chat: "Chat", text: str):
        """Write the answer once it is whole, or why there is none."""
        try:
            news = list(chat.answer(text, threading.Event()))
        except (RequestError, RuntimeError) as error:
            self.exit_code = 1
            print(f"limelight: error: {error}", file=sys.stderr)
            return
        print("".join(one.text for one in news if one.kind == "content"), flush=True)


def _next_line(goes_on: bool) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into the middle of a step."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """One conversation: its messages, what it may use, and figures of the last answer."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None):
        self.llm, self.params, self.system = llm, params, system
        self.has_tools = False
        self.thinks: bool | None = None  # None: as the model does by itself
        self.reset()

    def reset(self, *, system: str | None = None) -> None:
        """Forget all messages but the system message, which `system` replaces; "" removes it."""
        self.system = self.system if system is None else system
        self.messages: list[Message] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.stats = "nothing asked yet"

    def answer(self, text: str, stopped: threading.Event) -> Iterator[News]:
        """The answer to `text`, piece by piece; it and `text` join the conversation.

        The tools that it calls are run, and it goes on with their results. A text that is refused
        by `RequestError` leaves the conversation as it was.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        figures = Figures()
        for _ in range(MOST_ROUNDS):
            calls = yield from self._round(messages, figures, stopped)
            if not calls:
                break
            for call in calls:
                result = run_tool(call.name, call.arguments)
                yield News("result", f"{call.name}: {result}\n")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        else:
            yield News("note", f"no answer after {MOST_ROUNDS} rounds of calls\n")
        self.messages, self.stats = messages, figures.told()

    def _round(
        self, messages: list[Message], figures: "Figures", stopped: threading.Event
    ) -> Generator[News, None, list[ToolCall]]:
        """One answer of the model, put behind `messages`; the calls that it makes."""
        deltas: list[Delta] = []
        stream = self.llm.stream_chat(
            messages, self.params,
            tools=TOOLS if self.has_tools else None,
            chat_template_kwargs={} if self.thinks is None else {"enable_thinking": self.thinks},
        )  # fmt: skip
        # Leaving the loop closes the stream, and that aborts the request.
        for delta in stream:
            deltas.append(delta)
            figures.add(delta)
            yield from _news(delta)
            if stopped.is_set():
                break
        else:
            if deltas and deltas[-1].finish_reason == "length":
                yield News("note", "(cut short: --max-tokens allows no more)\n")
        # A call whose result will not come is no part of the conversation.
        pieces = [] if stopped.is_set() else [piece for delta in deltas for piece in delta.calls]
        calls = whole_calls(pieces)
        content = "".join(delta.text for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        messages.append(message_of(content, reasoning, calls))
        return calls


def _news(delta: Delta) -> Iterator[News]:
    if delta.reasoning:
        yield News("reasoning", delta.reasoning)
    if delta.text:
        yield News("content", delta.text)
    for piece in delta.calls:
        name = "" if piece.name is None else f"{piece.name} "
        yield News("call", name + piece.arguments + ("\n" if piece.ends else ""))


class Figures:
    """What an answer took, over all of its rounds."""

    def __init__(self):
        self._start = time.perf_counter()
        self._first: float | None = None
        self._num_tokens = self._num_reasoning = self._num_cached = 0

    def add(self, delta: Delta) -> None:
        self._first = self._first or self._seconds
        self._num_tokens += delta.num_tokens
        self._num_reasoning += delta.num_reasoning
        self._num_cached = max(self._num_cached, delta.num_cached)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def told(self) -> str:
        seconds = self._seconds
        return (
            f"{self._num_tokens} tokens of answer, {self._num_reasoning} of them reasoning, first "
            f"after {self._first or seconds:.2f} s, {self._num_tokens / seconds:.1f} tokens/s, "
            f"{self._num_cached} prompt tokens cached"
        )
