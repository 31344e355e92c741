"""`serve -tp 2` and `-dp 2`: a server of a model in two halves, and of two whole ones."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_fakes import wait_until

from limelight import LLM, SamplingParams

FLAGS = ("--device", "cpu", "--max-model-len", "1024", "--max-num-seqs", "4")
PROMPT = "Once upon a time"


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "limelight", "serve", "flint-nano", "--port", str(port)]
    process = subprocess.Popen([*command, *FLAGS, *flags], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_until(lambda: answers(client, "/ready") == 200, seconds=60)
            yield process, client
    finally:
        process.kill()
        process.wait()


def answers(client: httpx.Client, path: str) -> int | None:
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        time.sleep(0.05)
        return None


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child: Path(f"/proc/{child}/cmdline").read_text()} | descendants(child)
    return found


@pytest.mark.slow
def test_a_divided_server_answers_as_one_and_ends_with_its_rank():
    with served("-tp", "2") as (process, client):
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with LLM("flint-nano", device="cpu", max_model_len=1024, max_num_seqs=4) as llm:
            params = SamplingParams(temperature=0, max_tokens=24)
            assert text == llm.generate(PROMPT, params)[0].outputs[0].text
        below = descendants(process.pid)
        (rank,) = [pid for pid, command in below.items() if "engine.worker" in command]
        long = body | {"max_tokens": 900, "stream": True, "ignore_eos": True}
        threading.Timer(0.5, os.kill, (rank, signal.SIGKILL)).start()
        with client.stream("POST", "/v1/completions", json=long) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert "the engine has died" in lines[-1]
        assert answers(client, "/health") == 503
        assert client.post("/v1/completions", json=body).status_code == 503
        assert process.wait(timeout=20) == 1
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), seconds=5)


@pytest.mark.slow
def test_two_engines_answer_as_one_and_one_that_is_killed_comes_back():
    with served("-dp", "2", "--restart-engine", "1") as (process, client):
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}

        def text(**headers: str) -> str:
            answer = client.post("/v1/completions", json=body, headers=headers)
            return answer.json()["choices"][0]["text"]

        both = [text(**{"X-data-parallel-rank": rank}) for rank in "01"]
        assert both[0] == both[1] == text() == text(**{"X-Session-ID": "s"})
        refused = client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "2"})
        assert refused.status_code == 400 and "from 0 to 1" in refused.text
        running = [line for line in client.get("/metrics").text.splitlines() if "running{" in line]
        assert ['engine="0"' in running[0], 'engine="1"' in running[1]] == [True, True]
        below = descendants(process.pid)
        engines = [pid for pid, command in below.items() if "engine.process" in command]
        os.kill(engines[0], signal.SIGKILL)
        assert text() == both[0]
        assert client.get("/health").status_code == 200
        wait_until(
            lambda: client.post(
                "/v1/completions", json=body, headers={"X-data-parallel-rank": "0"}
            ).status_code == 200,
            seconds=60,
        )  # fmt: skip
        os.kill(engines[1], signal.SIGKILL)
        assert process.wait(timeout=30) == 1


@pytest.mark.slow
def test_two_engines_that_share_experts_answer_as_one_and_end_together(tmp_path):
    load = str(tmp_path / "load.json")
    with served("-dp", "2", "-ep", "--expert-load-file", load) as (process, client):
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        both = [
            client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})
            for rank in "01"
        ]
        texts = [answer.json()["choices"][0]["text"] for answer in both]
        with LLM("flint-nano", device="cpu", max_model_len=1024, max_num_seqs=4) as llm:
            params = SamplingParams(temperature=0, max_tokens=24)
            assert texts == 2 * [llm.generate(PROMPT, params)[0].outputs[0].text]
        metrics = client.get("/metrics").text
        assert 'vllm:iteration_tokens_total_sum{engine="1"' in metrics
        below = descendants(process.pid)
        engines = [pid for pid, command in below.items() if "engine.process" in command]
        long = body | {"max_tokens": 900, "stream": True, "ignore_eos": True}
        threading.Timer(0.5, os.kill, (engines[0], signal.SIGKILL)).start()
        headers = {"X-data-parallel-rank": "1"}
        with client.stream("POST", "/v1/completions", json=long, headers=headers) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert "the engine has died" in lines[-1]
        assert process.wait(timeout=20) == 1
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), seconds=5)
