"""Engines of the same model, each a process of its own, seen as one; also one that is restarted."""

import asyncio
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from limelight.config import EngineConfig
from limelight.engine.client import AdapterLost, EngineClient, EngineDead, EngineStatus
from limelight.engine.peers import Circle
from limelight.engine.router import Router
from limelight.orders import (
    SCHEDULING,
    WEIGHTS,
    ClearWeights,
    EngineState,
    InitTransfer,
    LoadAdapter,
    NameVersion,
    Order,
    Pause,
    Sleep,
    UnloadAdapter,
)
from limelight.parallel.torchrun import Torchrun
from limelight.stats import EngineStats, ModelInfo
from limelight.types import Output, Request, RequestError

logger = logging.getLogger(__name__)
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU = re.compile(r"\d+|(GPU|MIG)-\S+")
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_STARTS = 2.0  # of one engine, and twice as many each time until it is ready


class Replicas:
    """Starts `count` engines and gives each request to one of them.

    An engine that dies, or hangs, after it was ready is started anew, up to `restarts` times in
    all; one that is not counts as the death of all. Engines that share experts live and die
    together: all are started anew, which counts once. `ValueError` for GPUs that are too few.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        count: int = 1,
        restarts: int = 0,
        torchrun: Torchrun | None = None,
    ):
        """`torchrun` is what has started the other ranks of the one engine, if it has."""
        self.restarts, self.torchrun = restarts, torchrun
        self.places = _places(config, count)
        self.router: Router[int] = Router()
        self.shares_experts = count > 1 and config.enable_expert_parallel
        self._meeting: Path | None = None  # where engines that share experts find each other
        self._move()
        self.clients = [self._client(place) for place in range(count)]
        self.began = [False] * count  # whether each has been ready
        self.restarting: set[int] = set()
        # How adapters came since the start, which an engine that is started anew needs too.
        self.adapters: dict[int, LoadAdapter] = {}
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def info(self) -> ModelInfo:
        return next((one for one in self.clients if one.is_loaded), self.clients[0]).info

    @property
    def stats(self) -> list[EngineStats]:
        """Of each engine."""
        return [client.stats for client in self.clients]

    @property
    def status(self) -> EngineStatus:
        """Of the engine that is furthest behind; but once all were ready, one that is will do."""
        each = [client.status for client in self.clients]
        for place, one in enumerate(each):
            if one.phase == "dead" and not self._may_restart(place):
                return one
        behind = [one for one in each if one.phase != "ready"]
        if not behind:
            return min(each, key=lambda one: one.healthy)
        if all(self.began) and len(behind) < len(each):
            return EngineStatus("ready", 100.0, True, f"{len(behind)} of {len(each)} are starting")
        first = min(behind, key=lambda one: one.percent)
        return (
            EngineStatus("restarting", 0.0, True, first.detail) if first.phase == "dead" else first
        )

    async def start(self) -> None:
        """Spawn the processes; each loads the model by itself."""
        await asyncio.gather(*(client.start() for client in self.clients))
        groups = [[i] for i in range(len(self.clients))]
        if self.shares_experts:
            groups = [list(range(len(self.clients)))]
        self._keepers = [asyncio.create_task(self._keep(group)) for group in groups]

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """As `EngineClient.submit`; a request whose engine dies before it says a word is given to
        another, if there is one, but once: it may be what the engine died of. `RequestError` for a
        replica that is not there."""
        said = False
        for last in (request.replica is not None, True):
            engines = self._choice(request)
            with self.router.errand(request, engines) as errand:
                try:
                    stream = self.clients[errand.engine].submit(request)
                    async with aclosing(stream) as outputs:
                        async for output in outputs:
                            self.router.answered(errand)
                            said = True
                            yield output
                        return
                except EngineDead:
                    if said or last or not self._alive:
                        raise

    def abort(self, request_id: str) -> None:
        """As `EngineClient.abort`; an engine that does not have the request pays it no heed."""
        for client in self.clients:
            client.abort(request_id)

    @property
    def state(self) -> EngineState:
        """Of the first engine that takes no requests, or else of the first."""
        states = [client.state for client in self.clients]
        return next((one for one in states if one.refusal is not None), states[0])

    async def order(self, order: Order) -> list[dict[str, object]]:
        """Have all engines carry out an order at once; what came of it in each."""
        orders: list[Order] = [order] * len(self.clients)
        if isinstance(order, InitTransfer):
            orders = [InitTransfer(order.info, replica=place) for place in range(len(orders))]
        pairs = zip(self.clients, orders, strict=True)
        came = await asyncio.gather(
            *(client.order(one) for client, one in pairs), return_exceptions=True
        )
        if isinstance(order, LoadAdapter | UnloadAdapter):
            await self._remember(order, came)
        done = not all(isinstance(one, BaseException) for one in came)
        if done and self.restarts and _changes_weights(order):
            logger.warning(
                "from here on no engine is started anew, for it would have the weights of the "
                "checkpoint"
            )
            self.restarts = 0
        for one in came:
            if isinstance(one, BaseException):
                raise one
        return [result for one in came if not isinstance(one, BaseException) for result in one]

    async def _remember(self, order: LoadAdapter | UnloadAdapter, came: Sequence[object]) -> None:
        """Keep what adapters there are; one that is not the same in all engines is in none.

        `AdapterLost` if that was so before.
        """
        if isinstance(order, UnloadAdapter):
            self.adapters.pop(order.adapter_id, None)
            return
        adapter, pairs = order.adapter, zip(self.clients, came, strict=True)
        loaded = [client for client, one in pairs if not isinstance(one, BaseException)]
        if len(loaded) == len(self.clients):
            self.adapters[adapter.lora_int_id] = order
        elif loaded:
            self.adapters.pop(adapter.lora_int_id, None)
            orders = (client.order(UnloadAdapter(adapter.lora_int_id)) for client in self.clients)
            await asyncio.gather(*orders, return_exceptions=True)
            if adapter.load_inplace:
                fault = next(one for one in came if isinstance(one, BaseException))
                raise AdapterLost(
                    f"{fault}; other engines have read the adapter {adapter.lora_name!r}, so it "
                    f"was unloaded from all: load it again"
                )

    async def close(self) -> None:
        """End all processes and what belongs to them."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self.clients))
        self._leave()

    @property
    def _alive(self) -> list[int]:
        """Those that take requests; of a hanging one it may take them in vain."""
        each = [(i, client.status) for i, client in enumerate(self.clients)]
        ready = [(i, one) for i, one in each if one.phase == "ready" and i not in self.restarting]
        return [i for i, one in ready if one.healthy] or [i for i, _ in ready]

    def _may_restart(self, place: int) -> bool:
        return self.began[place] and (self.restarts > 0 or place in self.restarting)

    def _choice(self, request: Request) -> list[int]:
        """The engines that may get a request."""
        if request.replica is None:
            # With none alive the first one says why.
            return self._alive or [0]
        if not 0 <= request.replica < len(self.clients):
            raise RequestError(
                f"there is no replica {request.replica}; they go from 0 to {len(self.clients) - 1}",
                param="X-data-parallel-rank",
            )
        return [request.replica]

    async def _keep(self, group: list[int]) -> None:
        """Start the engines at these places anew when one has died or hangs, as long as may be."""
        pause = 0.0
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            each = [(place, self.clients[place], self.clients[place].status) for place in group]
            for place, client, _ in each:
                self.began[place] |= client.is_loaded
            if all(status.phase == "ready" for _, _, status in each):
                pause = 0.0
            # While it starts, it may be silent for long.
            lost = [
                (place, status.detail)
                for place, client, status in each
                if status.phase == "dead" or (client.is_loaded and not status.healthy)
            ]
            if not lost or not all(self._may_restart(place) for place in group):
                continue
            self.restarts -= 1
            logger.error("engine %d is started anew: %s", *lost[0])
            self.restarting.update(group)
            try:
                await asyncio.sleep(pause)
                await self._restart(group)
            except OSError as error:
                logger.error("engine %d could not be started anew: %s", lost[0][0], error)
            finally:
                self.restarting.difference_update(group)
            pause = 2 * pause + SECONDS_BETWEEN_STARTS

    async def _restart(self, group: list[int]) -> None:
        for place in group:
            self.router.beginnings.forget(place)
        await asyncio.gather(*(self.clients[place].close() for place in group))
        self._move()
        clients = [self._client(place) for place in group]
        try:
            for client in clients:
                await client.start()
        except OSError:
            await asyncio.gather(*(client.close() for client in clients))
            raise
        for place, client in zip(group, clients, strict=True):
            client.state = self.clients[place].state
            self.clients[place] = client
            # Before any request comes; what cannot be read any more the engine refuses later.
            for order in self.adapters.values():
                client.tell(LoadAdapter(replace(order.adapter, load_inplace=True)))
            for standing in _standing(client.state):
                client.tell(standing)

    def _client(self, place: int) -> EngineClient:
        config, env = self.places[place]
        circle = None
        if self._meeting is not None:
            circle = Circle(place, len(self.places), str(self._meeting))
        return EngineClient(config, env, circle, self.torchrun)

    def _move(self) -> None:
        """Have engines that share experts meet in a folder where no one has been."""
        self._leave()
        if self.shares_experts:
            self._meeting = Path(tempfile.mkdtemp(prefix="limelight-"))

    def _leave(self) -> None:
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)


def _changes_weights(order: Order) -> bool:
    """Whether weights are from here on, or soon, others than those of the checkpoint."""
    if isinstance(order, Sleep):
        return order.level == 2 and (not order.tags or WEIGHTS in order.tags)
    return isinstance(order, InitTransfer | ClearWeights)


def _standing(state: EngineState) -> list[Order]:
    """What has an engine that starts stand as one that was lost did."""
    orders: list[Order] = []
    if state.paused is not None:
        orders.append(Pause(state.paused))
    if tags := [tag for tag in state.asleep if tag != SCHEDULING]:
        orders.append(Sleep(1, tags=tags))
    if SCHEDULING in state.asleep:
        orders.append(Sleep(0))
    if state.weight_version != EngineState().weight_version:
        orders.append(NameVersion(state.weight_version))
    return orders


def _places(config: EngineConfig, count: int) -> list[tuple[EngineConfig, dict[str, str]]]:
    """The config of each engine, and the environment that gives it GPUs of its own."""
    if count == 1:
        return [(config, {})]
    gpus = [] if config.device == "cpu" else _gpus()
    if not gpus and config.device == "cuda":
        raise ValueError(f"--data-parallel-size finds no GPUs; name them in {VISIBLE}")
    if not gpus:
        threads = max(1, (os.cpu_count() or 1) // count)
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        share = config.gpu_memory_utilization / count
        return [(replace(config, device="cpu", gpu_memory_utilization=share), env)] * count
    each = config.tensor_parallel_size
    if count * each > len(gpus):
        raise ValueError(
            f"--data-parallel-size {count} with {each} GPUs an engine needs {count * each} GPUs; "
            f"this machine shows {len(gpus)}"
        )
    return [(config, {VISIBLE: ",".join(gpus[i * each : (i + 1) * each])}) for i in range(count)]


def _gpus() -> list[str]:
    """Names of the GPUs that a process may use, as CUDA takes them."""
    if VISIBLE in os.environ:
        # What is no GPU hides all behind it.
        names = (name.strip() for name in os.environ[VISIBLE].split(","))
        return list(takewhile(GPU.fullmatch, names))
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()
