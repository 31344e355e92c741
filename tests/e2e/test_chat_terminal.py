"""`limelight chat` as a program: on a pseudo-terminal with Ctrl-C, and in a pipe."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

COMMAND = [sys.executable, "-m", "limelight", "chat"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "NO_COLOR": "1"}
SECONDS = 60  # for a start, or for any answer, while others use the machine
CTRL_C, CTRL_D = "\x03", "\x04"


class Screen:
    """A program on a terminal: what it has shown, and keys for it."""

    def __init__(self, process, terminal):
        self.process, self.terminal, self.shown = process, terminal, ""

    def type(self, keys):
        if self.shown.endswith("> "):
            # A prompt is shown a moment before a signal interrupts what waits behind it.
            time.sleep(0.5)
        self.shown = ""
        os.write(self.terminal, keys.encode())

    def wait_for(self, pattern):
        """What is shown up to this pattern."""
        until = time.monotonic() + SECONDS
        while not re.search(pattern, self.shown, re.DOTALL):
            assert time.monotonic() < until, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        return self.shown

    def wait_for_end(self):
        until = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < until, "it goes on"
            # What is not read could hold the program up.
            with suppress(OSError):
                if select.select([self.terminal], [], [], 0.1)[0]:
                    os.read(self.terminal, 4096)
        return self.process.returncode


@contextmanager
def opened(*arguments):
    """The program on a terminal of its own, which Ctrl-C reaches as it would a user's."""
    ours, theirs = pty.openpty()

    def log_in():
        os.login_tty(theirs)
        # As a shell on a terminal has it; tests that run in the background inherit a deaf ear.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT,
        preexec_fn=log_in,
    )  # fmt: skip
    os.close(theirs)
    try:
        screen = Screen(process, ours)
        screen.wait_for(r"/help lists the commands.*> $")
        yield screen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_ctrl_c_ends_the_answer_and_at_the_prompt_only_the_second_one_leaves():
    endless = ["--sampling.ignore_eos", "true", "--max-tokens", "3000", "--max-model-len", "4096"]
    with opened("flint-nano", "--device", "cpu", *endless) as screen:
        for _ in range(2):
            screen.type("Repeat: a b c\r")
            screen.wait_for("\n.*[a-z]{2}")
            screen.type(CTRL_C)
            screen.wait_for(r"\n> $")
        screen.type("/stats\r")
        made = re.search(r"(\d+) tokens of answer", screen.wait_for(r"cached.*> $"))
        assert 0 < int(made[1]) < 3000
        screen.type(CTRL_C)
        screen.wait_for(r"Ctrl-C again leaves.*> $")
        screen.type("/tools\r")
        screen.wait_for(r"Tools: calculate.*> $")
        screen.type(CTRL_C)
        screen.wait_for(r"Ctrl-C again leaves.*> $")
        screen.type(CTRL_C)
        assert screen.wait_for_end() == 0


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_told_on_a_terminal():
    with opened("beam-nano", "--device", "cpu") as screen:
        screen.type("/tools\r")
        screen.wait_for("get_time.*> $")
        screen.type("/think\r")
        screen.wait_for("Thinking is on.*> $")
        screen.type("What time is it\\\r")
        screen.wait_for(r"\.\.\. $")
        screen.type(" in Oslo?\r")
        shown = screen.wait_for(r"get_time: .*\n> $")
        called = r'get_time \{"city": "Oslo"\}\r?\nget_time: \{"time": "(\d\d:\d\d)"\}\r?\n'
        told = called + r"The tool has answered\.\r?\nIt is \1\."
        assert re.search(told, shown)
        screen.type(CTRL_D)
        assert screen.wait_for_end() == 0


@pytest.mark.slow
def test_each_line_of_a_pipe_gets_its_answer_on_a_line():
    done = subprocess.run(
        [*COMMAND, "flint-nano", "--device", "cpu"], input="What is 17 + 25?\nWhat is 2 + 2?\n",
        capture_output=True, text=True, timeout=2 * SECONDS, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "42\n4\n"), done.stderr
