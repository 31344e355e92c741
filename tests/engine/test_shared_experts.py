"""Engines that attend for their own requests and share their experts: the answers of one engine."""

import asyncio
import os
import random
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tiny import prompts, request, run, start, write_checkpoint

from limelight.config import EngineConfig
from limelight.engine.client import EngineDead
from limelight.engine.replicas import Replicas

SECONDS_TO_NOTICE = 10.0
NO_DRAFTS = {"num_speculative_tokens": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "flint")
    return folder


@asynccontextmanager
async def started(model, count=2, restarts=0, **config):
    settings = {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**22} | config
    settings |= {"device": "cpu", "dtype": "float32", "enable_expert_parallel": True}
    front = Replicas(EngineConfig(model=str(model), **settings), count=count, restarts=restarts)
    try:
        await front.start()
        await until(lambda: front.status.phase in ("ready", "dead"))
        assert front.status.phase == "ready", front.status
        yield front
    finally:
        await front.close()


async def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.05)


async def text(front, one):
    return [token async for output in front.submit(one) for token in output.token_ids]


async def texts(front, asked):
    return await asyncio.gather(*(text(front, one) for one in asked))


def workload():
    """Prompts of 1 to 500 tokens, greedy and drawn. One is the same token over and over: all of it
    goes to the same experts; one ends where the model does, when the others have ended."""
    asked = [request(p, max_tokens=7 + i) for i, p in enumerate(prompts(1, 7, 150, 30))]
    asked.append(request(*prompts(490), max_tokens=22))
    asked.append(request([5] * 64, max_tokens=6))
    asked.append(request([3, 4], max_tokens=9, temperature=0.8, seed=5))
    return asked


def expected(model, asked, **config):
    engine = start(model, max_num_seqs=8, **config)
    try:
        return [answer.token_ids for answer in run(engine, asked)]
    finally:
        engine.close()


def for_one(place, max_tokens):
    return replace(request([7, 8], max_tokens=max_tokens), replica=place)


async def answers_are_those_of_one(front, model, **config):
    asked = workload()
    alone = expected(model, asked, **config)
    assert await asyncio.wait_for(texts(front, asked), 120) == alone
    # With all but one idle, and the last request taken back: nobody waits for anybody.
    for place in range(len(front.clients)):
        one = replace(asked[0], id=f"again-{place}", replica=place)
        assert await asyncio.wait_for(text(front, one), 30) == alone[0]
        stream = front.submit(for_one(place, 400))
        await anext(stream)
        await stream.aclose()
    await until(lambda: not any(stats.running for stats in front.stats), 10)


def test_two_engines_with_shared_experts_answer_as_one_and_end_together(folder):
    async def main():
        async with started(folder) as front:
            await answers_are_those_of_one(front, folder)
            stream = front.submit(for_one(0, 400))
            await anext(stream)
            os.kill(front.clients[1]._process.pid, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(EngineDead, match="engine 1, which shares the experts, has ended"):
                async for _ in stream:
                    pass
            await until(lambda: {one.status.phase for one in front.clients} == {"dead"})
            assert time.monotonic() - killed < SECONDS_TO_NOTICE

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2all", "all2all_pipelined"])
@pytest.mark.parametrize("family", ["flint", "beam"])
def test_every_way_to_the_experts_gives_the_tokens_of_one_engine(tmp_path, family, backend):
    write_checkpoint(tmp_path, family)

    async def main():
        async with started(tmp_path, moe_backend=backend) as front:
            await answers_are_those_of_one(front, tmp_path)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("model", ["flint-nano", "beam-nano"])
def test_the_bundled_models_answer_as_one_engine_with_drafts_too(model, drafts):
    config = {} if drafts else {"speculative_config": NO_DRAFTS}

    async def main():
        async with started(model, kv_cache_memory_bytes=2**26, **config) as front:
            await answers_are_those_of_one(front, model, speculative_config=NO_DRAFTS)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flint", "beam"])
def test_two_engines_of_two_ranks_share_experts_among_four(tmp_path, family):
    shared = {"shared_expert_intermediate_size": 40} if family == "flint" else {}
    write_checkpoint(tmp_path, family, **shared)

    async def main():
        async with started(tmp_path, tensor_parallel_size=2) as front:
            await answers_are_those_of_one(front, tmp_path)

    asyncio.run(main())


@pytest.mark.slow
def test_a_recorded_load_places_experts_and_changes_no_answer(folder, tmp_path):
    record = tmp_path / "load.json"

    async def main():
        async with started(folder, expert_load_file=str(record)) as front:
            await answers_are_those_of_one(front, folder)
            files = [tmp_path / f"load.{place}.json" for place in range(2)]
            await until(lambda: all(file.exists() for file in files), 30)
            assert all(sum(stats.expert_tokens) > 0 for stats in front.stats)
        placement = {"expert_placement": [*map(str, files)], "num_redundant_experts": 4}
        async with started(folder, **placement) as front:
            await answers_are_those_of_one(front, folder)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_all_are_started_anew_when_one_is_lost(folder, how):
    async def main():
        async with started(folder, restarts=1) as front:
            stream = front.submit(for_one(0, 400))
            await anext(stream)
            lost = [client._process.pid for client in front.clients]
            os.kill(lost[1], how)
            killed = time.monotonic()
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
            assert time.monotonic() - killed < SECONDS_TO_NOTICE
            await until(lambda: len(front._alive) == 2)
            assert not {client._process.pid for client in front.clients} & set(lost)
            assert front.restarts == 0
            await answers_are_those_of_one(front, folder)

    asyncio.run(main())


async def soak(folder, seconds: float, requests: int) -> None:
    """Requests with pauses, a third of them taken back, and one engine killed half-way."""
    rng = random.Random(7)
    asked = [request(p, max_tokens=rng.randint(1, 12)) for p in prompts(*range(1, 60, 7))]
    alone = expected(folder, asked)
    end, kill_at, done, lost = time.monotonic() + seconds, requests // 2, 0, 0

    async def one(front, number):
        nonlocal done, lost
        index = rng.randrange(len(asked))
        stream = front.submit(replace(asked[index], id=f"soak-{number}"))
        tokens = []
        give_up = rng.randint(1, 4) if rng.random() < 0.33 else None
        try:
            async for output in stream:
                tokens += output.token_ids
                if give_up is not None and len(tokens) >= give_up:
                    break
            else:
                assert tokens == alone[index]
            done += 1
        except EngineDead:
            lost += 1
        finally:
            await stream.aclose()

    async with started(folder, restarts=1) as front:
        open_ones: set[asyncio.Task] = set()
        number = 0
        while number < requests or time.monotonic() < end:
            number += 1
            if number == kill_at:
                os.kill(front.clients[rng.randrange(2)]._process.pid, signal.SIGKILL)
                await until(lambda: front.restarts == 0 and len(front._alive) == 2)
            open_ones.add(asyncio.create_task(one(front, number)))
            await asyncio.sleep(rng.random() * 0.05)
            while len(open_ones) >= 8:
                finished, open_ones = await asyncio.wait(
                    open_ones, timeout=60, return_when=asyncio.FIRST_COMPLETED
                )
                assert finished, "no request has ended for a minute"
                for task in finished:
                    task.result()
        await asyncio.wait_for(asyncio.gather(*open_ones), 60)
        await until(lambda: not any(stats.running for stats in front.stats), 10)
    assert done + lost == number and lost <= 8, (done, lost)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 600.0], ids=["500 requests", "10 minutes"])
def test_hundreds_of_requests_come_and_go_and_one_engine_dies(folder, seconds):
    asyncio.run(soak(folder, seconds, requests=500))
