"""Several engines behind one front: each request is served by one, and a lost one is replaced."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tiny import prompts, request, run, start, write_checkpoint

from limelight.config import EngineConfig
from limelight.engine import replicas
from limelight.engine.client import AdapterLost, EngineDead, EngineStatus, OrderFailed
from limelight.engine.replicas import Replicas
from limelight.orders import (
    ClearWeights,
    EngineState,
    FinishUpdate,
    InitTransfer,
    LoadAdapter,
    NameVersion,
    Pause,
    Sleep,
    UnloadAdapter,
)
from limelight.types import LoRARequest, RequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "flint")
    return folder


@asynccontextmanager
async def started(folder, **given):
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_seqs=8, kv_cache_memory_bytes=2**22
    )
    front = Replicas(config, **given)
    try:
        await front.start()
        await until(lambda: front.status.phase in ("ready", "dead"))
        assert front.status.phase == "ready", front.status
        yield front
    finally:
        await front.close()


async def until(condition, seconds=60):
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not happen")


async def text(front, one):
    return [token async for output in front.submit(one) for token in output.token_ids]


def for_one(place, max_tokens=5):
    """A request that names the engine it is for."""
    return replace(request([7, 8], max_tokens=max_tokens), replica=place)


def kill(front, place):
    os.kill(front.clients[place]._process.pid, signal.SIGKILL)


def test_requests_spread_over_engines_and_get_what_one_gives(folder):
    async def main():
        asked = [request(p, max_tokens=12) for p in prompts(*range(3, 15))]
        alone = [answer.token_ids for answer in run(start(folder), asked)]
        async with started(folder, count=2) as front:
            assert await asyncio.gather(*(text(front, one) for one in asked)) == alone
            assert all(stats.steps > 0 for stats in front.stats)
            before = front.stats[0].steps
            await text(front, for_one(1))
            assert front.stats[0].steps == before
            with pytest.raises(RequestError, match="no replica 2"):
                await text(front, for_one(2))
            assert [front.router.work[i] for i in range(2)] == [0, 0]

    asyncio.run(main())


@pytest.mark.slow
def test_uneven_and_lonely_requests_get_what_one_engine_gives_and_never_wait_long(folder):
    async def main():
        uneven = [request(p, max_tokens=8) for p in prompts(1, 7, 400)]
        alike = [request([i % 97] * 30, max_tokens=4) for i in range(64)]
        async with started(folder, count=1) as front:
            alone = [await text(front, one) for one in uneven + alike]
        async with started(folder, count=2) as front:
            found = await asyncio.gather(*(text(front, one) for one in uneven))
            found += await asyncio.gather(*(text(front, one) for one in alike))
            assert found == alone
            assert all(stats.step_tokens > 0 for stats in front.stats)
            # One as far as a sequence can, while the other engine idles; and one that leaves.
            longest = asyncio.create_task(text(front, request([3], max_tokens=510)))
            for i in range(200):
                count = 1 + i % 5
                told = asyncio.wait_for(text(front, request([i % 97, 4], max_tokens=count)), 5)
                assert len(await told) == count
                await asyncio.sleep(0.05 * (i % 7) / 7)
            assert len(await asyncio.wait_for(longest, 60)) == 510
            gone = asyncio.create_task(text(front, request([5, 6], max_tokens=400)))
            await asyncio.sleep(0.2)
            gone.cancel()
            await until(lambda: all(stats.running == 0 for stats in front.stats), seconds=5)
            assert len(await asyncio.wait_for(text(front, for_one(0)), 5)) == 5

    asyncio.run(main())


def test_an_engine_that_is_killed_is_started_anew_and_the_other_serves_on(folder):
    async def main():
        async with started(folder, count=2, restarts=1) as front:
            pid = front.clients[0]._process.pid
            stream = front.submit(for_one(0, max_tokens=400))
            await anext(stream)
            kill(front, 0)
            with pytest.raises(EngineDead, match="signal 9"):
                async for _ in stream:
                    pass
            # Who names it fails; who has not had a word yet is served by the other one.
            with pytest.raises(EngineDead):
                await text(front, for_one(0))
            assert await text(front, request([7, 8], max_tokens=5))
            assert front.status.phase == "ready" and front.status.healthy
            # What can be asked of all can be asked while one starts.
            assert front.info.vocab_size and len(front.stats) == 2
            await until(lambda: len(front._alive) == 2)
            assert front.clients[0]._process.pid != pid
            assert await text(front, for_one(0))
            # No start is left.
            kill(front, 1)
            await until(lambda: front.status.phase == "dead")
            assert not front.status.healthy and front.info.vocab_size

    asyncio.run(main())


@pytest.mark.slow
def test_a_hanging_engine_gets_no_more_requests_and_its_last_start_is_one(folder, monkeypatch):
    monkeypatch.setattr("limelight.engine.client.SECONDS_OF_SILENCE", 2.5)

    async def main():
        async with started(folder, count=2) as front:
            os.kill(front.clients[0]._process.pid, signal.SIGSTOP)
            await until(lambda: not front.clients[0].status.healthy)
            for _ in range(3):
                assert await text(front, request([7, 8], max_tokens=5))
            os.kill(front.clients[0]._process.pid, signal.SIGCONT)
        async with started(folder, count=2, restarts=1) as front:
            os.kill(front.clients[1]._process.pid, signal.SIGSTOP)
            phases = set()

            def again() -> bool:
                phases.add(front.status.phase)
                return front.restarts == 0 and len(front._alive) == 2

            await until(again)
            assert phases == {"ready"}

    asyncio.run(main())


def test_a_request_that_kills_engines_ends_two_of_them_at_most():
    class Dying:
        def __init__(self, front, place):
            self.front, self.place, self.dead = front, place, False

        @property
        def status(self):
            return EngineStatus("dead" if self.dead else "ready", 100.0, not self.dead, "")

        async def submit(self, one):
            self.dead = True
            raise EngineDead("it was too much")
            yield

    async def main():
        front = Replicas(EngineConfig(device="cpu"), count=4)
        closing = [client.close() for client in front.clients]
        front.clients = [Dying(front, i) for i in range(4)]
        with pytest.raises(EngineDead):
            await text(front, request([1, 2]))
        assert [client.dead for client in front.clients].count(True) == 2
        await asyncio.gather(*closing)

    asyncio.run(main())


class Obedient:
    """An engine that keeps the orders it gets, and refuses those for `broken` folders."""

    def __init__(self, broken=()):
        self.broken, self.orders, self.state = broken, [], EngineState()

    async def order(self, order):
        self.orders.append(order)
        if isinstance(order, LoadAdapter) and order.adapter.lora_path in self.broken:
            raise OrderFailed("it cannot be read", refused=True)
        return [{}]

    def tell(self, order):
        self.orders.append(order)

    async def start(self):
        pass

    async def close(self):
        pass


@asynccontextmanager
async def obeying(*engines, restarts=0):
    front = Replicas(EngineConfig(device="cpu"), count=len(engines), restarts=restarts)
    await asyncio.gather(*(client.close() for client in front.clients))
    front.clients = list(engines)
    yield front


def test_an_engine_started_anew_stands_as_the_lost_one_did(monkeypatch):
    async def main():
        lost, new = Obedient(), Obedient()
        lost.state = EngineState(
            paused="keep", asleep=["weights", "scheduling"], weight_version="7"
        )  # fmt: skip
        async with obeying(lost) as front:
            monkeypatch.setattr(front, "_client", lambda place: new)
            await front._restart([0])
            assert front.state.refusal is not None
        again = [Pause("keep"), Sleep(1, tags=["weights"]), Sleep(0), NameVersion("7")]
        assert new.orders == again

    asyncio.run(main())


@pytest.mark.parametrize(
    ("order", "left"),
    [
        (InitTransfer({}), 0), (Sleep(2), 0), (Sleep(2, tags=["weights"]), 0), (ClearWeights(), 0),
        (FinishUpdate(), 1), (Sleep(1), 1), (Sleep(2, tags=["kv_cache"]), 1), (Pause(), 1),
    ],
    ids=repr,
)  # fmt: skip
def test_once_weights_are_not_the_checkpoints_no_engine_is_started_anew(order, left, caplog):
    async def main():
        async with obeying(Obedient(), restarts=1) as front:
            await front.order(order)
            assert front.restarts == left

    asyncio.run(main())
    assert ("no engine is started anew" in caplog.text) == (left == 0)


def test_an_adapter_is_the_same_in_all_engines_or_in_none():
    def load(folder, *, in_place=True):
        return LoadAdapter(LoRARequest("one", 1, folder, load_inplace=in_place))

    async def main():
        first, second = Obedient(), Obedient(broken=["new", "gone"])
        third = Obedient(broken=["gone"])
        async with obeying(first, second, third) as front:
            await front.order(load("old", in_place=False))
            # Where none has read it, all keep what they had.
            first.broken = ["gone"]
            with pytest.raises(OrderFailed):
                await front.order(load("gone"))
            assert front.adapters == {1: load("old", in_place=False)}
            with pytest.raises(AdapterLost, match="unloaded from all"):
                await front.order(load("new"))
            assert front.adapters == {}
            assert all(one.orders[-1] == UnloadAdapter(1) for one in (first, second, third))

    asyncio.run(main())


@pytest.mark.slow
def test_one_engine_alone_is_started_anew_too_and_a_hanging_one_as_well(folder, monkeypatch):
    monkeypatch.setattr("limelight.engine.client.SECONDS_OF_SILENCE", 2.5)

    async def main():
        async with started(folder, restarts=2) as front:
            kill(front, 0)
            await until(lambda: front.status.phase != "ready")
            assert front.status.phase != "dead"
            await until(lambda: front.status.phase == "ready")
            hanging = front.clients[0]
            os.kill(hanging._process.pid, signal.SIGSTOP)
            await until(lambda: front.clients[0] is not hanging)
            await until(lambda: front.status.phase == "ready")
            assert await text(front, request([7, 8], max_tokens=5)) and front.restarts == 0

    asyncio.run(main())


def test_a_start_that_fails_is_not_tried_again(folder, tmp_path):
    async def main():
        front = Replicas(
            EngineConfig(model=str(folder), device="cpu", max_model_len=10**7), restarts=3
        )
        await front.start()
        await until(lambda: front.status.phase == "dead")
        await asyncio.sleep(3 * replicas.SECONDS_BETWEEN_LOOKS)
        assert front.restarts == 3 and "10000000" in front.status.detail
        await front.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "visible, expected", [("0,1,2,3", ["0,1", "2,3"]), ("5,GPU-ab,7,8", ["5,GPU-ab", "7,8"])]
)
def test_each_engine_sees_gpus_of_its_own(monkeypatch, visible, expected):
    monkeypatch.setenv(replicas.VISIBLE, visible)
    config = EngineConfig(tensor_parallel_size=2)
    places = replicas._places(config, 2)
    assert [env[replicas.VISIBLE] for _, env in places] == expected
    assert all(one == config for one, _ in places)
    with pytest.raises(ValueError, match="needs 6 GPUs; this machine shows 4"):
        replicas._places(config, 3)


@pytest.mark.parametrize("visible", ["", "-1", "none", "NoDevFiles", "-1,0"])
def test_where_no_gpu_is_visible_engines_share_the_cpu(monkeypatch, visible):
    monkeypatch.setenv(replicas.VISIBLE, visible)
    assert [one.device for one, _ in replicas._places(EngineConfig(), 2)] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="no GPUs"):
        replicas._places(EngineConfig(device="cuda"), 2)
    monkeypatch.setenv(replicas.VISIBLE, "0, 3,-1,1")
    assert replicas._gpus() == ["0", "3"]


def test_on_a_cpu_engines_share_cores_and_memory(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for config, env in replicas._places(EngineConfig(device="cpu"), 4):
        assert env == {"OMP_NUM_THREADS": "2"} and config.gpu_memory_utilization == 0.9 / 4
