"""The engine across a process border: outputs, aborts, faults, and no process left behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from tiny import request, write_checkpoint

from limelight.config import EngineConfig
from limelight.engine.client import EngineClient, EngineDead
from limelight.engine.process import heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flint")
    write_checkpoint(path, "flint")
    return path


@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.05])
def test_an_idle_engine_waits_for_a_command_only_as_long_as_it_may(seconds):
    idle = SimpleNamespace(peers=None, has_work=False)
    with zmq.Context() as context, context.socket(zmq.PULL) as commands:
        commands.bind("inproc://commands")
        began = time.monotonic()
        assert not heard(commands, idle, seconds)
        assert seconds <= time.monotonic() - began < 5


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int, *, within: float) -> bool:
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return not alive(pid)


@asynccontextmanager
async def ready(folder):
    """A client of an engine that is ready, and closed afterwards."""
    client = EngineClient(EngineConfig(model=str(folder), device="cpu", max_num_seqs=8))
    await client.start()
    pid = client._process.pid
    try:
        await asyncio.wait_for(client.wait_ready(), 60)
        yield client
    finally:
        await client.close()
    assert not alive(pid) and not client._folder.exists()


def with_client(folder, scenario):
    """Run `scenario(client, pid)` against an engine of its own."""

    async def main():
        async with ready(folder) as client:
            await scenario(client, client._process.pid)

    asyncio.run(main())


@pytest.fixture(scope="module")
def shared(folder):
    """Runs scenarios against one engine, which all of them leave as they found it."""
    with asyncio.Runner() as runner:
        opened = ready(folder)
        client = runner.run(opened.__aenter__())
        yield lambda scenario: runner.run(scenario(client))
        runner.run(opened.__aexit__(None, None, None))


async def collect(client, one, *, leave_after=None):
    """The tokens of a request and its finish reason; None if we left early."""
    tokens = []
    outputs = client.submit(one)
    async for output in outputs:
        tokens += output.token_ids
        if leave_after is not None and len(tokens) >= leave_after:
            await outputs.aclose()
            return tokens, None
        reason = output.finish_reason
    return tokens, reason


async def until(condition, *, within=2.0):
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert condition()


def test_many_that_leave_at_once_are_forgotten_within_a_step(shared):
    async def scenario(client):
        jobs = [
            asyncio.create_task(collect(client, request([i + 1], max_tokens=400)))
            for i in range(60)
        ]
        await until(lambda: client.stats.running + client.stats.waiting == 60)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        before = client.stats.steps
        await until(lambda: client.stats.running + client.stats.waiting == 0)
        # One may be under way, and one begin when not all have told.
        assert client.stats.steps - before < 10

    shared(scenario)


def test_requests_are_served_together_and_leavers_are_forgotten(shared):
    async def scenario(client):
        asked = [request([5, 6, 7 + i], max_tokens=20 + i) for i in range(5)]
        jobs = [
            collect(client, one, leave_after=3 if i == 2 else None) for i, one in enumerate(asked)
        ]
        results = await asyncio.gather(*jobs)
        lengths = [len(tokens) for tokens, _ in results]
        assert lengths[:2] + lengths[3:] == [20, 21, 23, 24] and 3 <= lengths[2] < 22
        await until(lambda: client.stats.running == 0 and client.stats.cache_usage == 0.0)
        assert client.status.phase == "ready" and client.status.healthy

    shared(scenario)


def test_an_abort_reaches_the_one_who_listens(shared):
    async def scenario(client):
        one = request([1, 2], max_tokens=400)
        job = asyncio.create_task(collect(client, one))
        await until(lambda: client.stats.running == 1)
        client.abort(one.id)
        tokens, reason = await asyncio.wait_for(job, 2)
        assert reason == "abort" and len(tokens) < 400

    shared(scenario)


def test_a_killed_engine_fails_everyone_at_once(folder):
    async def scenario(client, pid):
        jobs = [
            asyncio.create_task(collect(client, request([i + 1], max_tokens=500))) for i in range(4)
        ]
        await until(lambda: client.stats.running == 4)
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 2)
        assert all(isinstance(result, EngineDead) for result in results)
        assert not client.status.healthy and "signal 9" in client.status.detail
        with pytest.raises(EngineDead):
            await collect(client, request([1]))

    with_client(folder, scenario)


LOST = """
import gc, sys
from limelight.engine import process
from limelight.runner.runner import ModelRunner
from limelight.types import DeviceLost

launch = ModelRunner.launch

def launch_or_lose(self, plan):
    if any(admission.request.seed == 13 for admission in plan.admissions):
        raise DeviceLost(f"an illegal access, {gc.get_freeze_count()} objects frozen")
    return launch(self, plan)

ModelRunner.launch = launch_or_lose
sys.exit(process.main(sys.argv[1:]))
"""


def test_a_lost_device_ends_the_engine_and_all_who_wait_hear_why(folder, monkeypatch):
    monkeypatch.setattr("limelight.engine.client.PROGRAM", (sys.executable, "-c", LOST))

    async def scenario(client, pid):
        jobs = [
            asyncio.create_task(collect(client, request([i + 1], max_tokens=500))) for i in range(4)
        ]
        await until(lambda: client.stats.running == 4)
        jobs.append(asyncio.create_task(collect(client, request([9], seed=13))))
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5)
        for result in results:
            assert isinstance(result, EngineDead)
            assert re.search(r"an illegal access, \d{4,} objects frozen", str(result))
        assert client.status.phase == "dead" and not client.status.healthy
        assert await gone(pid, within=5)

    with_client(folder, scenario)


def test_a_silent_engine_is_not_healthy_until_it_speaks_again(folder, monkeypatch):
    monkeypatch.setattr("limelight.engine.client.SECONDS_OF_SILENCE", 2.0)

    async def scenario(client, pid):
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: not client.status.healthy, within=4)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.status.healthy, within=2)

    with_client(folder, scenario)


async def fault_of(config):
    """Why the engine of this config does not start."""
    client = EngineClient(config)
    await client.start()
    try:
        with pytest.raises(EngineDead) as dead:
            await asyncio.wait_for(client.wait_ready(), 60)
    finally:
        await client.close()
    return str(dead.value)


def test_a_fault_at_the_start_is_told_in_the_engines_own_words(tmp_path):
    config = EngineConfig(model=str(tmp_path), device="cpu")
    assert "config.json: no such file" in asyncio.run(fault_of(config))


LAST_WORDS = """
import os, sys, time
import msgspec, zmq
from limelight.engine.process import Report

if os.fork():
    os._exit(1)
time.sleep(0.5)
socket = zmq.Context().socket(zmq.PUSH)
socket.connect(f"ipc://{sys.argv[1]}/reports")
socket.send(msgspec.msgpack.encode(Report(phase="dead", fault="no such weights")))
socket.context.destroy(linger=1000)
"""


def test_last_words_that_come_after_the_end_are_heard_before_the_exit_code(monkeypatch):
    monkeypatch.setattr("limelight.engine.client.PROGRAM", (sys.executable, "-c", LAST_WORDS))
    monkeypatch.setattr("limelight.engine.client.MILLISECONDS_OF_LAST_WORDS", 5000)
    assert asyncio.run(fault_of(EngineConfig(device="cpu"))) == "no such weights"


def test_an_id_in_use_is_refused_and_its_first_request_goes_on(shared):
    async def scenario(client):
        one = request([1, 2], max_tokens=100)
        job = asyncio.create_task(collect(client, one))
        await until(lambda: client.stats.running == 1)
        with pytest.raises(ValueError, match="already being served"):
            await collect(client, one)
        tokens, reason = await asyncio.wait_for(job, 10)
        assert reason == "length" and len(tokens) == 100
        assert len((await collect(client, one))[0]) == 100

    shared(scenario)


def test_the_arguments_of_the_process_do_not_tell_the_config(folder):
    async def main():
        client = EngineClient(EngineConfig(model=str(folder), prefix_hash_seed="secret"))
        await client.start()
        arguments = Path(f"/proc/{client._process.pid}/cmdline")
        await until(lambda: arguments.read_text())
        shown = arguments.read_text()
        await client.close()
        assert "limelight.engine.process" in shown
        assert "secret" not in shown and str(folder) not in shown

    asyncio.run(main())


def test_an_interrupt_during_the_start_leaves_no_process(folder):
    async def main():
        for seconds in (0.0, 1.0):
            client = EngineClient(EngineConfig(model=str(folder), device="cpu"))
            await client.start()
            pid = client._process.pid
            await asyncio.sleep(seconds)
            await client.close()
            assert await gone(pid, within=5)

    asyncio.run(main())


PARENT = """
import asyncio, sys
from limelight.config import EngineConfig
from limelight.engine.client import EngineClient

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1], device="cpu"))
    await client.start()
    await client.wait_ready()
    print(client._process.pid, client._folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_parent_takes_the_engine_with_it(folder):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        pid, sockets = parent.stdout.readline().split()
        assert alive(int(pid))
        parent.kill()
    assert asyncio.run(gone(int(pid), within=5))
    assert not Path(sockets).exists()
