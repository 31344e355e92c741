"""`limelight serve` as its user starts it: a process, its address, and how to talk to it."""

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

SECONDS_TO_START = 90


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process, self.url, self.log = process, url, log
        self.http = httpx.Client(base_url=url, timeout=60)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def gauge(self, name: str) -> float:
        """The value of a metric without its labels."""
        text = self.http.get("/metrics").text
        return float(re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)[1])

    def resident_bytes(self) -> int:
        """Memory of the server and of the processes it has started."""
        pids = [self.process.pid, *children(self.process.pid)]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1]) for text in status)

    def idle(self, within: float = 2.0) -> bool:
        """Whether nothing runs or waits and every block is back, at the latest after `within`."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + within
        while busy := any(self.gauge(name) for name in names):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return not busy


def children(pid: int) -> list[int]:
    """All processes below this one."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    direct = [int(child) for child in text.split()]
    return direct + [below for child in direct for below in children(child)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "limelight", "serve", *arguments]


@contextmanager
def serve(folder: Path, *arguments: str):
    """A server on a free port that is ready; it is killed if the block leaves it running."""
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command(*arguments, "--port", "0"), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not (found := re.search(r"http://[\d.]+:\d+", log.read_text())):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.05)
        server = Served(process, found[0], log)
        server.wait_ready()
        yield server
    finally:
        process.kill()
        process.wait()


def ask(client, messages, **fields):
    """The message of a whole answer and its finish reason, which a stream gives as well."""
    fields = {
        "model": client.models.list().data[0].id,
        "temperature": 0,
        "max_tokens": 300,
    } | fields
    whole = client.chat.completions.create(messages=messages, **fields).choices[0]
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in client.chat.completions.create(messages=messages, stream=True, **fields):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            name += call.function.name or ""
            calls[call.index] = name, arguments + (call.function.arguments or "")
        reason = choice.finish_reason
    message = whole.message
    told = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert list(calls.values()) == told
    assert (content, reasoning) == (message.content or "", message.reasoning or "")
    assert reason == whole.finish_reason
    return message, whole.finish_reason
