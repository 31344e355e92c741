"""`serve --ray`: replicas under load lose no request when one is killed or all are replaced."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from limelight import LLM, SamplingParams, cli
from limelight.types import Request

PROMPTS = [f"Once upon a time, {name} went" for name in ("Ann", "Bob", "Cy", "Di", "Ed", "Flo")]
FLAGS = ["--device", "cpu", "--max-model-len", "512", "--max-num-seqs", "4"]
TOKENS = 40


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "limelight.deploy", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    sys.modules.pop("limelight.deploy", None)
    assert cli.main(["serve", "flint-nano", "--ray", "--replicas", "2"]) == 2
    assert "limelight-serve[ray]" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--replicas", "2"], ["--max-replicas", "2"]])
def test_replicas_of_ray_need_ray(capsys, flags):
    assert cli.main(["serve", "flint-nano", *flags]) == 2
    assert "need --ray" in capsys.readouterr().err


def test_the_builder_takes_the_flags_of_serve(monkeypatch):
    pytest.importorskip("ray")
    from limelight import deploy

    monkeypatch.setattr(deploy, "application", lambda engine, server: (engine, server))
    args = {"model": "beam-nano", "replicas": 3, "enable_prefix_caching": False, "device": "cpu"}
    engine, server = deploy.app(args)
    assert (engine.model, engine.device, engine.enable_prefix_caching) == (
        "beam-nano",
        "cpu",
        False,
    )
    assert server.ray and server.replicas == 3


def test_a_request_goes_to_the_replica_that_knows_its_beginning_or_has_its_session(monkeypatch):
    pytest.importorskip("ray")
    from limelight.deploy import KnownBeginnings

    replicas = [SimpleNamespace(replica_id=SimpleHash(f"replica {i}")) for i in range(3)]
    router = KnownBeginnings.__new__(KnownBeginnings)
    router.initialize_state()
    lengths = dict.fromkeys([one.replica_id for one in replicas], 0)
    monkeypatch.setattr(KnownBeginnings, "replica_queue_len_cache", lengths)

    def chosen(length: int = 256, **fields):
        request = Request(
            id="r", prompt_token_ids=list(range(length)), params=SamplingParams(), max_tokens=5,
            seed=0, **fields,
        )  # fmt: skip
        pending = SimpleNamespace(args=[request])
        ranks = asyncio.run(router.choose_replicas(replicas, pending))
        assert sorted(map(len, ranks)) == [1, 1, 1]
        router.on_request_routed(pending, ranks[0][0].replica_id, None)
        return replicas.index(ranks[0][0])

    lengths[replicas[0].replica_id] = 1
    assert chosen() == 1
    lengths[replicas[1].replica_id] = 2
    assert chosen(400) == 1
    lengths[replicas[1].replica_id] = 9
    assert chosen(400) == 2
    lengths |= dict(zip(lengths, (1, 0, 0), strict=True))
    assert chosen(400, adapter_id=7) == 1
    lengths[replicas[1].replica_id] = 1
    # Neither an adapter's beginnings nor those of another salt are the base model's.
    assert chosen(400, adapter_id=7) == 1
    assert chosen(400, adapter_id=8) == chosen(400, cache_salt="salt") == 2
    assert len({chosen(session="a session") for _ in range(5)}) == 1
    assert len({chosen(session=f"session {i}") for i in range(40)}) == 3
    assert asyncio.run(router.choose_replicas(replicas, None)) == [replicas]


@dataclass(frozen=True)
class SimpleHash:
    """An id as Ray's."""

    unique_id: str


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with LLM("flint-nano", device="cpu", max_model_len=512, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        return [answer.outputs[0].text for answer in llm.generate(PROMPTS, params)]


@pytest.fixture
def served(tmp_path: Path):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "limelight", "serve", "flint-nano", "--port", str(port)]
    # Names of sockets may not be long.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    env = os.environ | {"RAY_TMPDIR": folder}
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [*command, *FLAGS, "--ray", "--replicas", "3"],
        stdout=log, stderr=log, env=env, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not ready(url):
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()[-3000:]
            time.sleep(1)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready").status_code == 200
    except httpx.TransportError:
        return False


class Load:
    """Clients that ask again and again, in a thread, and what they got."""

    def __init__(self, url: str, texts: list[str], clients: int = 4):
        self.url, self.texts, self.clients = url, texts, clients
        self.right, self.faults = 0, []
        self.over = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            await asyncio.gather(*(self._ask(client, i) for i in range(self.clients)))

    async def _ask(self, client: httpx.AsyncClient, index: int) -> None:
        while not self.over.is_set():
            index = (index + 1) % len(PROMPTS)
            body = {"prompt": PROMPTS[index], "temperature": 0, "max_tokens": TOKENS}
            # Half of them as streams, which may be cut, but with an error and never in silence.
            if index % 2:
                text, error = await self._stream(client, body)
            else:
                answer = await client.post("/v1/completions", json=body)
                told = answer.json()
                error = "told: " + told["error"]["message"] if "error" in told else None
                text = "" if error else told["choices"][0]["text"]
            if error is None and text == self.texts[index]:
                self.right += 1
            else:
                self.faults.append((index, text, error))

    async def _stream(self, client: httpx.AsyncClient, body: dict) -> tuple[str, str | None]:
        text = ""
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                return text, f"refused: {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text, None
                if line.startswith("data: "):
                    told = json.loads(line[6:])
                    if "error" in told:
                        return text, "told: " + told["error"]["message"]
                    text += told["choices"][0]["text"]
        return text, "cut in silence"

    def end(self) -> None:
        self.over.set()
        self.thread.join()


def engines(server: subprocess.Popen) -> list[int]:
    """Processes of the server's engines, which are not its children but have its environment."""
    folder = environment(server.pid)["RAY_TMPDIR"]
    found = subprocess.run(["pgrep", "-f", "limelight.engine.process"], capture_output=True)
    pids = map(int, found.stdout.split())
    return [pid for pid in pids if environment(pid).get("RAY_TMPDIR") == folder]


def environment(pid: int) -> dict[str, str]:
    """Empty for a process that has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.partition("=")[::2] for entry in entries if entry)


@pytest.mark.slow
def test_no_request_is_lost_when_an_engine_is_killed_and_all_are_replaced(served, texts):
    url, process = served
    load = Load(url, texts)
    try:
        until(lambda: load.right > 10)
        assert not load.faults
        before = engines(process)
        assert len(before) == 3
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(engines(process)) == 3 and before[0] not in engines(process), seconds=180)
        count = load.right
        until(lambda: load.right > count + 10)
        # Whoever had a word already was told; all others got their text.
        silent = [fault for fault in load.faults if not (fault[2] or "").startswith("told: ")]
        assert not silent
        assert len(load.faults) <= load.clients
        load.faults.clear()
        before = engines(process)
        update = [sys.executable, "-c", UPDATE]
        subprocess.run(update, check=True, timeout=300)
        until(lambda: not set(before) & set(engines(process)), seconds=240)
        count = load.right
        until(lambda: load.right > count + 10)
        assert not load.faults
    finally:
        load.end()
    # What is open at the end may end.
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        last = pool.submit(httpx.post, url + "/v1/completions", json=body, timeout=60)
        time.sleep(0.5)
        last_engines = engines(process)
        process.send_signal(signal.SIGTERM)
        assert last.result().json()["usage"]["completion_tokens"] == 300
    assert process.wait(60) == 0 and not any(map(environment, last_engines))


UPDATE = """
import ray
from ray import serve
from limelight import deploy
from limelight.config import EngineConfig, ServerConfig
ray.init(address="auto", log_to_driver=False)
engine = EngineConfig(model="flint-nano", device="cpu", max_model_len=512, max_num_seqs=5)
serve.run(
    deploy.application(engine, ServerConfig(ray=True, replicas=3)), name=deploy.NAME,
    route_prefix="/",
)
"""


def until(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
