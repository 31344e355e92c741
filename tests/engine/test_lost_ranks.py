"""Ranks that are unlike the others, that end or hang: all end with them, and nothing is left."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_client import alive, collect, fault_of, gone, until
from test_ranks import OTHER, write
from tiny import request, run, start, write_checkpoint

from limelight.config import EngineConfig
from limelight.engine import links
from limelight.engine.client import EngineClient, EngineDead
from limelight.types import DeviceLost

SECONDS_TO_NOTICE = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("flint"), "flint")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("limelight.__version__ = '0.0.7'", "rank 1 has limelight 0.0.7, and rank 0"),
        (
            "import limelight.engine.startup as s; find = s.find_tensors\n"
            "s.find_tensors = lambda path: find(path)[1:]",
            "rank 1 has found another checkpoint",
        ),
        ("sys.exit(3)", "rank 1: has ended with exit code 3"),
        (
            "import limelight.engine.startup as s\n"
            "def no(*a): raise ValueError('no such weights')\ns.resolve = no",
            "rank 1: no such weights",
        ),
    ],
    ids=["version", "checkpoint", "end", "fault"],
)
def test_a_rank_that_is_unlike_the_others_is_named(folder, monkeypatch, change, message):
    text = OTHER.format(change=change)
    monkeypatch.setattr(links, "PROGRAM", (sys.executable, "-c", text))
    with pytest.raises(ValueError, match=message):
        start(folder, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("limelight.parallel.group as s", marks=pytest.mark.slow),
        "limelight.engine.ready as s",
    ],
    ids=["before it joins", "while it loads"],
)
def test_a_rank_that_ends_at_its_start_ends_the_whole_start(folder, monkeypatch, where):
    change = (
        f"import {where}\ndef no(*a, **k): raise OSError('no disk')\ns.join = s.load_model = no"
    )
    monkeypatch.setattr(links, "PROGRAM", (sys.executable, "-c", OTHER.format(change=change)))
    with pytest.raises(DeviceLost, match="rank 1: OSError: no disk"):
        start(folder, tensor_parallel_size=2)


def test_a_lost_rank_ends_the_engine_in_process_and_another_can_start(folder):
    engine = start(folder, tensor_parallel_size=2)
    (worker,) = engine.runner.ranks.workers
    engine.add(request([1, 2, 3], max_tokens=400))
    for _ in range(5):
        engine.step()
    worker.link.process.kill()
    with pytest.raises(DeviceLost, match="rank 1"):
        for _ in range(400):
            engine.step()
    engine.close()
    assert not alive(worker.link.process.pid)
    again = start(folder, tensor_parallel_size=2)
    assert len(run(again, [request([1, 2, 3])])[0].token_ids) == 8
    pid = again.runner.ranks.workers[0].link.process.pid
    again.close()
    assert not alive(pid)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_of(pid: int) -> int:
    """The one rank above 0 that the engine `pid` has started."""
    commands = {one: Path(f"/proc/{one}/cmdline").read_text() for one in children(pid)}
    (worker,) = [one for one, command in commands.items() if "engine.worker" in command]
    return worker


@pytest.mark.parametrize(
    ("how", "busy"),
    [
        (signal.SIGKILL, True),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.slow),
    ],
    ids=["killed", "killed while idle", "hung"],
)
def test_a_lost_rank_is_noticed_and_nothing_is_left(folder, how, busy):
    async def main():
        config = EngineConfig(
            model=str(folder), device="cpu", max_num_seqs=4, tensor_parallel_size=2
        )
        client = EngineClient(config)
        await client.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 60)
            pid = client._process.pid
            worker = worker_of(pid)
            jobs = [
                asyncio.create_task(collect(client, request([i + 1], max_tokens=500)))
                for i in range(3 if busy else 0)
            ]
            if busy:
                await until(lambda: client.stats.running == 3)
            os.kill(worker, how)
            lost = time.monotonic()
            results = await asyncio.wait_for(
                asyncio.gather(*jobs, return_exceptions=True), SECONDS_TO_NOTICE
            )
            assert all(isinstance(result, EngineDead) for result in results)
            await until(
                lambda: client.status.phase == "dead",
                within=SECONDS_TO_NOTICE - (time.monotonic() - lost),
            )
            assert "rank 1" in client.status.detail
            assert await gone(pid, within=5) and await gone(worker, within=5)
        finally:
            await client.close()

    asyncio.run(main())


def test_a_killed_engine_takes_its_ranks_with_it(folder):
    async def main():
        client = EngineClient(
            EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, tensor_parallel_size=2)
        )
        await client.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 60)
            worker = worker_of(client._process.pid)
            os.kill(client._process.pid, signal.SIGKILL)
            assert await gone(worker, within=5)
        finally:
            await client.close()

    asyncio.run(main())


def test_a_rank_at_fault_is_named_to_the_server(tmp_path):
    write_checkpoint(tmp_path, "flint")
    config = EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel_size=8)
    assert "4 query heads cannot be divided among 8 ranks" in asyncio.run(fault_of(config))
