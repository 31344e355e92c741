"""`run` as a process: the port, the signals, the exit codes and what is printed."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from server_fakes import wait_until

from limelight.config import EngineConfig, ServerConfig
from limelight.server.app import run

PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from server_fakes import FakeEngine, ids
import limelight.server.app as app
from limelight.config import EngineConfig, ServerConfig

engine = FakeEngine(lambda request: ids("x" * 50), slow=0.02, phase={phase!r})
app.Replicas = lambda config, count, restarts, torchrun: engine
code = app.run(EngineConfig(model={model!r}), ServerConfig(port={port}, api_key={keys!r}))
assert engine.closed and "torch" not in sys.modules
sys.exit(code)
"""


class Process:
    def __init__(self, folder: Path, model: Path, *, phase: str = "ready", keys=None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
        text = PROGRAM.format(paths=paths, phase=phase, model=str(model), port=self.port, keys=keys)
        (folder / "serve.py").write_text(text)
        self.process = subprocess.Popen(
            [sys.executable, folder / "serve.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def wait_ready(self):
        wait_until(self._answers, seconds=20)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200
        except httpx.TransportError:
            time.sleep(0.05)
            return False


@pytest.fixture
def start(tmp_path: Path, model_folder: Path):
    started = []

    def make(**fields) -> Process:
        started.append(Process(tmp_path, model_folder, **fields))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_sigterm_lets_a_stream_end_and_exits_with_0(start):
    server = start()
    server.wait_ready()
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    with httpx.stream(
        "POST", url, json={"prompt": "a", "max_tokens": 40, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    out, err = server.process.communicate(timeout=5)
    assert server.process.returncode == 0
    assert f"http://127.0.0.1:{server.port}" in out
    assert "Traceback" not in err


def test_the_printed_curl_line_works(start):
    server = start()
    server.wait_ready()
    lines = iter(server.process.stdout.readline, "")
    command = next(line.strip() for line in lines if line.strip().startswith("curl "))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=10)
    assert '"chat.completion"' in done.stdout
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=5) == 0


def test_the_printed_line_does_not_show_the_key(start):
    server = start(keys=["secret"])
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    out, err = server.process.communicate(timeout=5)
    assert "Authorization: Bearer $LIMELIGHT_API_KEY" in out
    assert "secret" not in out + err


def test_a_signal_while_the_model_loads_ends_at_once(start):
    server = start(phase="loading")
    url = f"http://127.0.0.1:{server.port}"

    def loads() -> bool:
        try:
            return httpx.get(f"{url}/ready").json()["phase"] == "loading"
        except httpx.TransportError:
            time.sleep(0.05)
            return False

    wait_until(loads, seconds=20)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=3) == 0


def test_an_engine_that_does_not_start_is_told_and_exits_with_1(start):
    server = start(phase="dead")
    _, err = server.process.communicate(timeout=20)
    assert server.process.returncode == 1
    assert "the engine did not start: scripted" in err
    assert "Traceback" not in err


def test_a_taken_port_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}: .*in use; choose another --port"):
            run(EngineConfig(model="/nowhere"), ServerConfig(port=port))


@pytest.mark.parametrize("host", ["256.0.0.1", "nowhere.invalid"])
def test_an_impossible_host_is_told(host):
    with pytest.raises(ValueError, match=host):
        run(EngineConfig(), ServerConfig(host=host, port=0))
