"""Replicas on Ray Serve: `limelight serve --ray --replicas N`, or by Ray's own command

    serve run limelight.deploy:app model=flint-nano replicas=3

with the flags of `limelight serve` as arguments. Engines are one deployment, a process with its
GPUs each; the HTTP server, which needs none, is another. Requests go to the engine that knows
their beginning and has least to do.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import ASGIApp

from limelight.config import EngineConfig, ServerConfig
from limelight.engine.client import EngineClient, EngineDead, EngineStatus, OrderFailed
from limelight.engine.router import OPEN, Beginnings, draw, pieces_of
from limelight.orders import EngineState, Order
from limelight.server.http import REPLICA
from limelight.stats import EngineStats, ModelInfo
from limelight.types import Output, Request, RequestError

logger = logging.getLogger(__name__)
NAME = "limelight"
# A request that has had no word yet is given to so many engines: it may be what they die of.
TRIES = 3
SECONDS_BETWEEN_CHECKS, SECONDS_OF_A_CHECK, SECONDS_BETWEEN_LOOKS = 2.0, 10.0, 0.1
# More requests than one engine has room for wait in it, and more still in the fronts.
WAITING = 2
# What Ray books for a process without a GPU: however many there are, threads share the cores.
CPUS = 0.25
# Of the sequences that an engine has room for: above this share more engines are started.
FULL = 0.75


class Engine:
    """An engine for each replica, which ends with it: then Ray gives its requests to others."""

    async def __init__(self, config: EngineConfig):  # type: ignore[misc]
        self.client = EngineClient(config)
        await self.client.start()
        self.info = await self.client.wait_ready()
        self.watch = asyncio.create_task(self._end_with_engine())

    async def describe(self) -> ModelInfo:
        """The model."""
        return self.info

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """As `EngineClient.submit`."""
        # Another machine's clock says nothing here.
        request = replace(request, arrival=time.monotonic())
        async with aclosing(self.client.submit(request)) as outputs:
            async for output in outputs:
                yield output

    async def check_health(self) -> None:
        """`RuntimeError` while the engine is silent or stuck: Ray then replaces the replica."""
        if not (status := self.client.status).healthy:
            raise RuntimeError(status.detail)

    async def _end_with_engine(self) -> None:
        while self.client.status.phase != "dead":
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        # Not by an error: whatever still comes here before the next check would get one, too.
        os._exit(1)


class Engines:
    """All engines as the HTTP server sees them: as one `Replicas`."""

    def __init__(self, handle: DeploymentHandle):
        self.handle = handle
        self._info: ModelInfo | None = None
        self.stats: Sequence[EngineStats] = ()  # an engine tells its own to no one

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "no engine is ready yet"
        return self._info

    @property
    def status(self) -> EngineStatus:
        phase = "starting" if self._info is None else "ready"
        return EngineStatus(phase, 100.0 * (phase == "ready"), True, "")

    @property
    def state(self) -> EngineState:
        return EngineState()

    async def order(self, order: Order) -> list[dict[str, object]]:
        """None reaches the engines, which Ray starts and ends as it likes."""
        raise OrderFailed("engines of Ray Serve take no orders", refused=True)

    async def start(self) -> None:
        """Wait for the first engine."""
        self._info = await self.handle.describe.remote()

    async def close(self) -> None:
        """Engines end with their replicas."""

    def abort(self, request_id: str) -> None:
        """A request ends with its stream here, and what needs more is refused at the start."""
        raise NotImplementedError("no engine can be told by its request's id")

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The outputs of a request. While it has had none, an engine that goes is made good by
        another; then it is `EngineDead`."""
        if request.replica is not None:
            raise RequestError("Ray chooses the replica; X-Session-ID keeps to one", param=REPLICA)
        said, name = False, request.id
        for left in reversed(range(TRIES)):
            # An engine that was only out of reach may still have it.
            request = replace(request, id=f"{name}-{left}")
            stream = self.handle.options(stream=True).generate.remote(request)
            done = False
            try:
                async for output in stream:
                    said = True
                    yield replace(output, request_id=name)
                done = True
                return
            except (RayActorError, EngineDead) as error:
                if said or not left:
                    raise EngineDead(f"the engine has gone: {error}"[:300]) from error
                logger.warning("%s goes to another engine: %s", name, error)
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            finally:
                if not done:
                    stream.cancel()


@serve.ingress()
class Front:
    """The HTTP server, without an engine of its own."""

    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, server: ServerConfig, engines: DeploymentHandle
    ):
        self.engine, self.server = engine, server
        self.engines = Engines(engines)
        await self.engines.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from limelight.server.app import create_app
        from limelight.server.startup import load_texts

        texts = load_texts(self.engine, self.server)
        return create_app(
            self.engines, texts.tokenizer, texts.template, self.server,
            model=self.engine.model, defaults=texts.defaults, form=texts.form,
            engine=self.engine,
        )  # fmt: skip


class KnownBeginnings(RequestRouter):
    """Ray's choice of a replica, by what it was given before and how many requests it has open."""

    def initialize_state(self, **kwargs: object) -> None:
        self.beginnings: Beginnings[ReplicaID] = Beginnings()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best first; the next one where that has no room."""
        request = _request_of(pending_request)
        if request is None:
            return [candidate_replicas]
        if (session := request.session) is not None:
            ranked = sorted(
                candidate_replicas, key=lambda one: draw(session, one.replica_id.unique_id)
            )
            return [[one] for one in reversed(ranked)]
        known = self.beginnings.known(pieces_of(request))

        def cost(replica: RunningReplica) -> int:
            open_ = self.replica_queue_len_cache.get(replica.replica_id) or 0
            return OPEN * open_ - known[replica.replica_id]

        return [[one] for one in sorted(candidate_replicas, key=cost)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        if (request := _request_of(pending_request)) is not None:
            self.beginnings.learn(pieces_of(request), replica_id)


def _request_of(pending: PendingRequest | None) -> Request | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Request) else None


def application(engine: EngineConfig, server: ServerConfig) -> serve.Application:
    """Both deployments of a model; `ValueError` for what Ray is to do itself."""
    if server.data_parallel_size > 1 or server.restart_engine:
        raise ValueError(
            "with --ray, --replicas says how many engines there are, and Ray starts dead ones "
            "anew: leave --data-parallel-size and --restart-engine out"
        )
    if engine.enable_return_routed_experts:
        raise ValueError("--enable-return-routed-experts is not supported with --ray")
    ranks, room = engine.tensor_parallel_size, engine.max_num_seqs
    gpus = ranks if engine.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    most = server.max_replicas or server.replicas
    count: dict[str, object] = {"num_replicas": server.replicas}
    if most > server.replicas:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=server.replicas, max_replicas=most, target_ongoing_requests=FULL * room
            )
        }
    engines = serve.deployment(Engine).options(
        name="engine", max_ongoing_requests=WAITING * room,
        # All ranks of an engine are on one machine.
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1 if gpus else CPUS * ranks},
        health_check_period_s=SECONDS_BETWEEN_CHECKS, health_check_timeout_s=SECONDS_OF_A_CHECK,
        graceful_shutdown_timeout_s=server.shutdown_timeout, graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class="limelight.deploy:KnownBeginnings"
        ),
        **count,
    )  # fmt: skip
    front = serve.deployment(Front).options(
        name="front", max_ongoing_requests=server.max_num_queued_reqs + WAITING * room * most,
        ray_actor_options={"num_cpus": CPUS}, graceful_shutdown_timeout_s=server.shutdown_timeout,
    )  # fmt: skip
    return front.bind(engine, server, engines.bind(engine))


def app(args: dict[str, object]) -> serve.Application:
    """For `serve run limelight.deploy:app NAME=VALUE ...`: the flags of `limelight serve`."""
    from limelight.cli import configs_of, parse

    flags = ["--ray"]
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if (text := str(value)).lower() in ("true", "false"):
            flags.append(flag if text.lower() == "true" else "--no-" + flag[2:])
        else:
            flags += [flag, text]
    return application(*configs_of(parse(["serve", *flags])))


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve on a cluster of Ray's, or on one of this machine alone, until a signal."""
    if not ray.is_initialized():
        ray.init(log_to_driver=True, include_dashboard=False)
    stopping = threading.Event()
    # Ray has handlers of its own, which end a process at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    where = f"http://{server.host}:{server.port}"
    if serve.status().proxies:
        where = "the address of Ray Serve, which was there before"
    ready = False
    serve.start(http_options=HTTPOptions(host=server.host, port=server.port))
    try:
        made = application(engine, server)
        start = threading.Thread(target=_start, args=(made, stopping), daemon=True)
        start.start()
        # For as long as there is no room for all replicas it does not end.
        while start.is_alive() and not stopping.is_set():
            start.join(SECONDS_BETWEEN_CHECKS)
        ready = not stopping.is_set()
        if ready:
            print(f"limelight: ready at {where}, by Ray Serve", flush=True)
        stopping.wait()
    finally:
        # What is open may end, within --shutdown-timeout.
        serve.delete(NAME)
        if not serve.status().applications:
            serve.shutdown()
        ray.shutdown()
    return 0 if ready else 1


def _start(made: serve.Application, stopping: threading.Event) -> None:
    """Wait until all replicas are there; where they cannot be, that is the end."""
    try:
        serve.run(made, name=NAME, route_prefix="/")
    except Exception:
        logger.exception("Ray Serve could not start the model")
        stopping.set()
