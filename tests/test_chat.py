import io
import signal
import sys
import threading
from contextlib import nullcontext

import pytest

from limelight import chat
from limelight.chat import Chat, read_typed
from limelight.config import EngineConfig
from limelight.engine.front import Delta
from limelight.text.parsers import CallPiece
from limelight.types import RequestError, SamplingParams

SUM = '{"expression": "17 + 25"}'


class ScriptedLLM:
    """Says what `script` lists, an answer a round, each a list of deltas; then "one two three"."""

    def __init__(self, *script, forever=None):
        self.script, self.forever = list(script), forever
        self.seen, self.asked, self.closed = [], [], 0

    def stream_chat(self, messages, params, *, tools, chat_template_kwargs):
        self.seen.append(list(messages))
        self.asked.append((tools, chat_template_kwargs))
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt is too long")
        answer = [Delta(text=text, num_tokens=1) for text in ("one ", "two ", "three")]
        answer = self.forever or (self.script.pop(0) if self.script else answer)
        try:
            yield from answer
            if messages[-1]["content"] == "too much":
                raise RuntimeError("no memory for it")
        finally:
            self.closed += 1


def calling(name="calculate", arguments=SUM, **more):
    pieces = [CallPiece(0, name), CallPiece(0, None, arguments, ends=True)]
    return [*(Delta(calls=[piece]) for piece in pieces), Delta(finish_reason="stop", **more)]


def ask(talk, text, stopped=None):
    return list(talk.answer(text, stopped or threading.Event()))


def said(news, kind="content"):
    return "".join(one.text for one in news if one.kind == kind)


def test_a_conversation_grows_by_question_and_answer():
    llm = ScriptedLLM([Delta(reasoning="hm"), Delta(text="yes", num_tokens=3, num_reasoning=2)])
    talk = Chat(llm, SamplingParams(), system="Be brief.")
    news = ask(talk, "a")
    assert (said(news, "reasoning"), said(news)) == ("hm", "yes")
    assert said(ask(talk, "b")) == "one two three"
    assert llm.seen[-1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "yes", "reasoning": "hm"},
        {"role": "user", "content": "b"},
    ]
    assert "3 tokens of answer, 0 of them reasoning" in talk.stats


def test_a_reset_keeps_the_system_message_unless_another_is_given():
    talk = Chat(ScriptedLLM(), SamplingParams(), system="Be brief.")
    ask(talk, "a")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.reset(system="Rhyme.")
    assert talk.messages == [{"role": "system", "content": "Rhyme."}]
    talk.reset(system="")
    assert talk.messages == []


@pytest.mark.parametrize(("text", "kind"), [("too long", RequestError), ("too much", RuntimeError)])
def test_a_question_without_an_answer_leaves_the_conversation_as_it_was(text, kind):
    talk = Chat(ScriptedLLM(), SamplingParams())
    ask(talk, "a")
    before = list(talk.messages)
    with pytest.raises(kind):
        ask(talk, text)
    assert talk.messages == before


def test_a_stopped_answer_ends_its_request_and_is_remembered_as_far_as_it_came():
    llm, stopped = ScriptedLLM(), threading.Event()
    talk = Chat(llm, SamplingParams())
    pieces = []
    for news in talk.answer("a", stopped):
        pieces.append(news.text)
        stopped.set()
    assert pieces == ["one "]
    assert llm.closed == 1
    assert talk.messages[-1] == {"role": "assistant", "content": "one "}


def test_tools_are_run_and_the_answer_goes_on_with_their_results():
    llm = ScriptedLLM(calling(reasoning="hm"))
    talk = Chat(llm, SamplingParams())
    talk.has_tools = True
    news = ask(talk, "17 + 25?")
    assert said(news, "call") == f"calculate {SUM}\n"
    assert said(news, "result") == "calculate: 42\n"
    assert said(news) == "one two three"
    _, answer, result = llm.seen[-1]
    [call] = answer["tool_calls"]
    assert call["function"] == {"name": "calculate", "arguments": SUM}
    assert answer["reasoning"] == "hm"
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    assert [message["role"] for message in talk.messages] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_rounds_of_calls_come_to_an_end():
    llm = ScriptedLLM(forever=calling())
    talk = Chat(llm, SamplingParams())
    assert said(ask(talk, "a"), "note") == "no answer after 10 rounds of calls\n"
    assert len(llm.seen) == 10 and talk.messages[-1]["role"] == "tool"


@pytest.mark.parametrize("ends", [False, True])
def test_a_call_that_was_cut_or_stopped_is_not_run(ends):
    stopped = threading.Event()
    pieces = [CallPiece(0, "calculate"), CallPiece(0, None, '{"expr', ends)]
    llm = ScriptedLLM([Delta(calls=pieces), Delta(finish_reason="length")])
    talk = Chat(llm, SamplingParams())
    if ends:
        stopped.set()
    news = ask(talk, "a", stopped)
    assert said(news, "result") == "" and len(llm.seen) == 1
    assert ("cut short" in said(news, "note")) == (not ends)
    assert talk.messages[-1] == {"role": "assistant", "content": ""}


def test_tools_and_thinking_are_switched_by_commands():
    llm = ScriptedLLM()
    talk = Chat(llm, SamplingParams())
    told = []
    for text in ("/tools", "/think", "", "/tools", "/think", ""):
        told += [chat.command(talk, text)] if text else []
        if not text:
            ask(talk, "a")
    assert told == [
        "Tools: calculate, get_time.", "Thinking is on.", "Tools: none.", "Thinking is off.",
    ]  # fmt: skip
    first, second = llm.asked
    assert (bool(first[0]), first[1]) == (True, {"enable_thinking": True})
    assert second == (None, {"enable_thinking": False})


def read_all(text):
    """All that is typed, and whether each line that was asked for goes on with the one before."""
    lines, asked = iter(text.split("\n")), []

    def next_line(goes_on):
        asked.append(goes_on)
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    typed = list(iter(lambda: read_typed(next_line), None))
    return [(one.text, one.is_command) for one in typed], asked


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("a\n/b c", [("a", False), ("/b c", True)]),
        ("a\\\nb\\\n\nc", [("a\nb\n", False), ("c", False)]),
        ('"""a\n\n/b\\\n"""\nc', [("a\n\n/b\\\n", False), ("c", False)]),
        ('"""/help"""', [("/help", False)]),
        ('""""""', [("", False)]),
        ('a"""b', [('a"""b', False)]),
        ("a\\", [("a", False)]),
        ('"""a', [("a", False)]),
        ("/sys\\\ntem", [("/sys\ntem", True)]),
        ("", [("", False)]),
    ],
)
def test_a_question_may_have_several_lines(text, typed):
    assert read_all(text)[0] == typed


def test_a_line_that_goes_on_is_asked_for_as_such():
    assert read_all('a\\\nb\n"""\n"""')[1] == [False, True, False, True, False]


def piped(monkeypatch, capsys, text, llm=None):
    """What comes out for these lines, the errors, and the exit code."""
    monkeypatch.setattr(chat, "LLM", lambda **_: nullcontext(llm or ScriptedLLM()))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = chat.run(EngineConfig(), SamplingParams(), system=None)
    return *capsys.readouterr(), code


def test_each_line_of_a_pipe_gets_its_answer_as_plain_text(monkeypatch, capsys):
    llm = ScriptedLLM([Delta(reasoning="hm"), Delta(text="a \x1b[1m[b]\nc")], calling())
    out, errors, code = piped(monkeypatch, capsys, "x\n\n \n17 + 25?\n", llm)
    assert (out, errors, code) == ("a \x1b[1m[b]\nc\none two three\n", "", 0)


def test_a_line_without_an_answer_is_an_error_and_the_others_go_on(monkeypatch, capsys):
    out, errors, code = piped(monkeypatch, capsys, "too long\na\ntoo much\nb")
    assert out == "one two three\n" * 2 and code == 1
    assert errors.splitlines() == [
        "limelight: error: the prompt is too long", "limelight: error: no memory for it",
    ]  # fmt: skip


def test_a_pipe_knows_the_commands(monkeypatch, capsys):
    lines = "/help\n/system Rhyme.\na\n/stats\n/what\n/reset\n/exit\nunread\n"
    out, _, code = piped(monkeypatch, capsys, lines, llm := ScriptedLLM())
    assert code == 0 and len(llm.seen) == 1
    assert llm.seen[0][0] == {"role": "system", "content": "Rhyme."}
    assert out.startswith(chat.HELP)
    for words in ("one two three\n", "3 tokens of answer", "no /what;", "is forgotten"):
        assert words in out


def terminal(monkeypatch, capsys, typed, llm=None):
    """What the terminal shows for these lines, of which None is Ctrl-C; and the exit code."""
    lines = iter(typed)

    def line(prompt):
        text = next(lines, "")
        if text is None:
            raise KeyboardInterrupt
        if text == "":
            raise EOFError
        return text

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(chat, "LLM", lambda **_: nullcontext(llm or ScriptedLLM()))
    monkeypatch.setattr(sys, "stdin", type("Tty", (), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "200")
    code = chat.run(EngineConfig(), SamplingParams(), system=None)
    return capsys.readouterr().out, code


def test_a_terminal_shows_thoughts_calls_results_and_errors(monkeypatch, capsys):
    llm = ScriptedLLM([Delta(reasoning="hm"), *calling()])
    out, code = terminal(monkeypatch, capsys, ["a", "too long", "too much"], llm)
    assert code == 0
    assert f"hm\ncalculate {SUM}\ncalculate: 42\none two three\n" in out
    assert "the prompt is too long (/reset starts anew)\n" in out
    assert "three\nno memory for it (/reset starts anew)\n" in out


def test_what_a_model_writes_cannot_steer_the_terminal(monkeypatch, capsys):
    llm = ScriptedLLM([Delta(text="a\x1b]0;x\x07\r\x9b1m[bold]:smile:\tb\n")])
    out, _ = terminal(monkeypatch, capsys, ["a"], llm)
    assert "a\ufffd]0;x\ufffd\ufffd\ufffd1m[bold]:smile:" in out
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(out)


def test_two_ctrl_c_in_a_row_leave_and_one_does_not(monkeypatch, capsys):
    llm = ScriptedLLM()
    typed = [None, "a", None, "b", None, None, "unread"]
    out, code = terminal(monkeypatch, capsys, typed, llm)
    assert (code, len(llm.seen), out.count("Ctrl-C again leaves")) == (0, 2, 3)


def test_ctrl_c_is_given_back_after_an_answer(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    out, code = terminal(monkeypatch, capsys, ["hello"])
    assert (code, "one two three" in out) == (0, True)
    assert signal.getsignal(signal.SIGINT) is before
