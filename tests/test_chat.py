import io
import signal
import threading
from contextlib import nullcontext

import pytest
from rich.console import Console

from limelight import chat
from limelight.chat import Chat
from limelight.config import EngineConfig
from limelight.types import EngineStats, RequestError, SamplingParams


class ScriptedLLM:
    """Answers "one two three"; a prompt has a token for each message, all but the last cached."""

    def __init__(self):
        self.engine = self
        self.seen, self.computed, self.hits, self.closed = [], 0, 0, 0

    def stats(self):
        return EngineStats(step_tokens=self.computed, prefix_hits=self.hits)

    def render(self, messages):
        self.seen.append(messages)
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt is too long")
        if messages[-1]["content"] == "too much":
            raise RuntimeError("no memory for it")
        return list(range(len(messages)))

    def stream(self, prompt, params):
        try:
            self.hits += len(prompt) - 1
            for piece in ("one ", "two ", "three"):
                self.computed += 1
                yield piece
        finally:
            self.closed += 1


def ask(talk, text, stopped=None):
    return "".join(talk.answer(text, stopped or threading.Event()))


def test_a_conversation_grows_by_question_and_answer():
    llm = ScriptedLLM()
    talk = Chat(llm, SamplingParams(), system="Be brief.")
    assert ask(talk, "a") == "one two three"
    ask(talk, "b")
    assert [(message["role"], message["content"]) for message in llm.seen[-1]] == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "one two three"),
        ("user", "b"),
    ]
    assert "4 prompt tokens (3 cached), 3 tokens of answer" in talk.stats


def test_a_reset_keeps_the_system_message_unless_another_is_given():
    talk = Chat(ScriptedLLM(), SamplingParams(), system="Be brief.")
    ask(talk, "a")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.reset(system="Rhyme.")
    assert talk.messages == [{"role": "system", "content": "Rhyme."}]
    talk.reset(system="")
    assert talk.messages == []


def test_a_refused_question_leaves_the_conversation_as_it_was():
    talk = Chat(ScriptedLLM(), SamplingParams())
    ask(talk, "a")
    before = list(talk.messages)
    with pytest.raises(RequestError):
        ask(talk, "too long")
    assert talk.messages == before


def test_a_stopped_answer_ends_its_request_and_is_remembered_as_far_as_it_came():
    llm, stopped = ScriptedLLM(), threading.Event()
    talk = Chat(llm, SamplingParams())
    pieces = []
    for piece in talk.answer("a", stopped):
        pieces.append(piece)
        stopped.set()
    assert pieces == ["one "]
    assert llm.closed == 1
    assert talk.messages[-1] == {"role": "assistant", "content": "one "}


def shell(monkeypatch, typed):
    """What the shell prints for these lines, and its exit code."""
    lines = iter(typed)
    out = io.StringIO()
    console = Console(file=out, width=200)
    monkeypatch.setattr(console, "input", lambda prompt: next(lines, None) or _end())
    monkeypatch.setattr(chat, "Console", lambda **_: console)
    monkeypatch.setattr(chat, "LLM", lambda **_: nullcontext(ScriptedLLM()))
    code = chat.run(EngineConfig(), SamplingParams(), system=None)
    return out.getvalue(), code


def _end():
    raise EOFError


def test_the_shell_streams_answers_and_knows_its_commands(monkeypatch):
    typed = ["hello", "/stats", "too long", "too much", "/what", "/system Rhyme.", "again"]
    typed += ["/exit", "unread"]
    out, code = shell(monkeypatch, typed)
    assert code == 0
    assert out.count("one two three") == 2
    assert "1 prompt tokens (0 cached)" in out
    assert "the prompt is too long (/reset starts anew)" in out
    assert "no memory for it (/reset starts anew)" in out
    assert out.count("/system TEXT") == 2


def test_the_shell_ends_with_the_input_and_gives_ctrl_c_back(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    out, code = shell(monkeypatch, ["hello"])
    assert (code, "one two three" in out) == (0, True)
    assert signal.getsignal(signal.SIGINT) is before
