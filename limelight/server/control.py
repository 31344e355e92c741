"""The routes by which a trainer controls the engine, with --enable-rl: its words are vLLM's.

Arguments come in the query or as a JSON object, or in both; answers are JSON of known length.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from limelight.config import EngineConfig, ServerConfig
from limelight.engine.client import OrderFailed, Served
from limelight.orders import (
    KV_CACHE,
    AbortRequests,
    Checksums,
    ClearWeights,
    EndTransfer,
    FinishUpdate,
    InitTransfer,
    NameVersion,
    Order,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartUpdate,
    UpdateWeights,
    WakeUp,
)
from limelight.server.http import Refused
from limelight.server.lifecycle import Lifecycle
from limelight.types import RequestError

Json = dict[str, object]
T = TypeVar("T")
# Announcements of all experts of a model one by one, with handles.
MAX_BODY = 2**28
SWITCH: dict[object, bool] = {"true": True, "1": True, "false": False, "0": False} | {
    True: True, False: False,
}  # fmt: skip
KINDS: dict[type, str] = {str: "a text", list: "a list of texts", dict: "a JSON object"}
# Of the engine's settings: the secret of the prefix cache, and where things lie on this machine.
UNTOLD = frozenset({
    "model", "tokenizer", "hf_config_path", "prefix_hash_seed", "lora_modules", "expert_load_file",
    "expert_placement", "speculative_config",
})  # fmt: skip
KINDS_OF_ANSWERS = ("", "chatcmpl-", "cmpl-", "gen-", "resp_", "msg_")
DRAFTS = (
    "start_draft_weight_update is not supported: drafters are DFlash2 models, trained by themselves"
)


class Arguments:
    """What a call brings in its query and its body, where null is as good as nothing."""

    def __init__(self, request: Request, body: Json):
        self.query, self.body = request.query_params, body

    def given(self, name: str, kind: type[T]) -> T | None:
        """A value of the body; `RequestError` for one of another kind."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, kind):
            raise RequestError(f"{name} must be {KINDS[kind]}", param=name)
        return value

    def text(self, name: str, default: str) -> str:
        value = self.query.get(name, self.body.get(name, default))
        return str(default if value is None else value)

    def switch(self, name: str, default: bool) -> bool:
        value = self.query.get(name, self.body.get(name, default))
        key = value.lower() if isinstance(value, str) else value
        if not isinstance(key, str | int) or key not in SWITCH:
            raise RequestError(f"{name} must be true or false; got {value!r:.50}", param=name)
        return SWITCH[key]

    def mode(self, default: PauseMode) -> PauseMode:
        value = self.text("mode", default)
        for mode in get_args(PauseMode):
            if value == mode:
                return mode
        known = ", ".join(get_args(PauseMode))
        raise RequestError(f"mode must be one of {known}; got {value!r:.50}", param="mode")

    def tags(self) -> list[str]:
        """As often as they are given."""
        return self.query.getlist("tags") or list(map(str, self.given("tags", list) or []))

    def version(self, name: str) -> str | None:
        value = self.body.get(name)
        if not isinstance(value, str | int | None) or value == "":
            raise RequestError(f"{name} must be a text or a number", param=name)
        return None if value is None else str(value)


Act = Callable[["ControlRoutes", Arguments], Awaitable[Json]]


class ControlRoutes:
    """Turns calls into orders to the engine, and what came of them into answers."""

    def __init__(
        self, client: Served, lifecycle: Lifecycle, engine: EngineConfig, server: ServerConfig
    ):
        self.client, self.lifecycle, self.engine, self.server = client, lifecycle, engine, server

    def routes(self) -> list[Route]:
        """All of them; a foreign page in a browser gets none to be called."""
        gets = [Route(path, self._endpoint(act), methods=["GET"]) for path, act in GETS.items()]
        posts = [Route(path, self._endpoint(act), methods=["POST"]) for path, act in POSTS.items()]
        return gets + posts

    def _endpoint(self, act: Act) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            # Calls without a body ask for no preflight, but a browser tells whose page makes them.
            origin, known = request.headers.get("origin"), self.server.allowed_origins or ()
            if origin is not None and origin not in known:
                raise Refused(403, f"pages of {origin[:100]} may not control this server")
            self.lifecycle.admit()
            arguments = Arguments(request, await _read(request))
            try:
                return JSONResponse(await act(self, arguments))
            except OrderFailed as error:
                raise Refused(400 if error.refused else 500, str(error)) from error

        return endpoint

    async def _order(self, order: Order) -> list[Json]:
        return await self.client.order(order)

    async def pause(self, arguments: Arguments) -> Json:
        mode = arguments.mode("abort")
        if arguments.switch("wait_for_inflight_requests", False):
            mode = "wait"
        await self._order(Pause(mode, arguments.switch("clear_cache", True)))
        return {"status": "paused"}

    async def resume(self, arguments: Arguments) -> Json:
        await self._order(Resume())
        return {"status": "resumed"}

    async def is_paused(self, arguments: Arguments) -> Json:
        return {"is_paused": self.client.state.paused is not None}

    async def abort_requests(self, arguments: Arguments) -> Json:
        ids = arguments.given("request_ids", list)
        names = None
        if ids is not None:
            # An answer's id has the kind of the answer before the request's own.
            names = [f"{kind}{id}" for id in ids for kind in KINDS_OF_ANSWERS]
        results = await self._order(AbortRequests(names))
        return {"status": "aborted", "aborted": sum(int(str(r["aborted"])) for r in results)}

    async def sleep(self, arguments: Arguments) -> Json:
        level = arguments.text("level", "2")
        if level not in ("0", "1", "2"):
            raise RequestError(f"level must be 0, 1 or 2; got {level!r:.50}", param="level")
        order = Sleep(int(level), arguments.mode("abort"), arguments.tags())
        results = await self._order(order)
        # Weights that sleep already stay at their level.
        return {"status": "sleeping", "level": results[0]["level"]}

    async def release_kv_cache_memory(self, arguments: Arguments) -> Json:
        await self._order(Sleep(1, arguments.mode("abort"), [KV_CACHE]))
        return {"status": "sleeping", "tags": [KV_CACHE]}

    async def wake_up(self, arguments: Arguments) -> Json:
        tags = arguments.tags()
        await self._order(WakeUp(tags))
        asleep = self.client.state.asleep
        return {"status": "sleeping" if asleep else "awake", "tags": tags}

    async def is_sleeping(self, arguments: Arguments) -> Json:
        return {"is_sleeping": bool(self.client.state.asleep)}

    async def reset_prefix_cache(self, arguments: Arguments) -> Json:
        await self._order(ResetPrefixCache(arguments.switch("reset_running_requests", False)))
        return {"success": True}

    async def get_world_size(self, arguments: Arguments) -> Json:
        engines = self.server.data_parallel_size if arguments.switch("include_dp", True) else 1
        return {"world_size": self.engine.tensor_parallel_size * engines}

    async def server_info(self, arguments: Arguments) -> Json:
        """What is read of it is what trainers read; the rest are our own settings."""
        info, engine = self.client.info, self.engine
        engine_values = asdict(engine).items()
        room = {"max_lora_rank": engine.max_lora_rank, "max_loras": engine.max_loras}
        config: Json = {
            "model_config": {
                "model": self.engine.model,
                "dtype": f"torch.{info.dtype}",
                "max_model_len": info.max_model_len,
                "logprobs_mode": engine.logprobs_mode,
            },
            "parallel_config": {
                "tensor_parallel_size": self.engine.tensor_parallel_size,
                "pipeline_parallel_size": 1,
                "data_parallel_size": self.server.data_parallel_size,
            },
            "cache_config": {"block_size": info.block_size, "num_gpu_blocks": info.num_blocks},
            "weight_transfer_config": self.engine.weight_transfer_config,
            "lora_config": room if engine.enable_lora else None,
            "quantization": info.quantized,
            "engine": {name: value for name, value in engine_values if name not in UNTOLD},
        }
        as_text = arguments.text("config_format", "text") == "text"
        return {"vllm_config": str(config) if as_text else config}

    async def init_transfer(self, arguments: Arguments) -> Json:
        await self._order(InitTransfer(_needed(arguments, "init_info")))
        return {"message": "Weight transfer initialized"}

    async def end_transfer(self, arguments: Arguments) -> Json:
        await self._order(EndTransfer())
        return {"message": "Weight transfer shut down"}

    async def start_update(self, arguments: Arguments) -> Json:
        await self._order(StartUpdate())
        return {"message": "Weight update started"}

    async def start_draft_update(self, arguments: Arguments) -> Json:
        raise RequestError(DRAFTS)

    async def update_weights(self, arguments: Arguments) -> Json:
        await self._order(UpdateWeights(_needed(arguments, "update_info")))
        return {"message": "Weights updated"}

    async def finish_update(self, arguments: Arguments) -> Json:
        results = await self._order(FinishUpdate(arguments.version("weight_version")))
        return {"message": "Weight update finished", "num_missing": results[0]["missing"]}

    async def fetch_weights(self, arguments: Arguments) -> Json:
        raise RequestError("fetch_weights is not supported: the trainer sends whole tensors")

    async def update_version(self, arguments: Arguments) -> Json:
        version = arguments.version("new_version")
        if version is None:
            raise RequestError("new_version is missing", param="new_version")
        await self._order(NameVersion(version))
        return {"success": True, "new_version": version}

    async def weight_info(self, arguments: Arguments) -> Json:
        state = self.client.state
        return {
            "weight_version": state.weight_version,
            "updating": state.updating,
            "incomplete": state.incomplete,
        }

    async def weight_checker(self, arguments: Arguments) -> Json:
        action = arguments.text("action", "checksum")
        if action == "reset":
            await self._order(ClearWeights())
            return {"action": action, "success": True}
        if action not in ("checksum", "compare"):
            raise RequestError("action must be checksum, compare or reset", param="action")
        baseline = arguments.given("baseline", dict)
        if action == "compare" and baseline is None:
            raise RequestError("compare needs the baseline that checksum told", param="baseline")
        known = None if baseline is None else baseline.get("tensors", baseline)
        if baseline is not None and not isinstance(known, dict):
            raise RequestError("baseline.tensors must be a JSON object", param="baseline")
        results = await self._order(Checksums())
        tensors = msgspec.convert(results[0]["tensors"], dict[str, str])
        alike = all(result == results[0] for result in results)
        if known is None:
            total = sum(int(value, 16) for value in tensors.values()) % 2**64
            whole = {"action": action, "checksum": f"{total:016x}", "tensors": tensors}
            return {**whole, "success": alike}
        names = sorted(tensors.keys() | known.keys())
        different = [name for name in names if tensors.get(name) != known.get(name)]
        return {"action": action, "success": alike and not different, "different": different}

    async def collective_rpc(self, arguments: Arguments) -> Json:
        """Of all methods that an engine might have, three by name."""
        method = arguments.given("method", str)
        given = arguments.given("kwargs", dict) or {}
        if method == "skyrl_sleep_for_weight_sync":
            await self._order(Sleep(1, "keep", [], keeps_cache=given.get("offload_kv") is True))
        elif method == "skyrl_wake_for_weight_sync":
            tags = given.get("tags") or []
            if not isinstance(tags, list):
                raise RequestError("kwargs.tags must be a list of texts", param="kwargs")
            await self._order(WakeUp(list(map(str, tags))))
        elif method != "skyrl_discard_in_memory_lora":
            # That one SkyRL calls whenever it unloads; here no adapter comes but from a folder.
            raise RequestError(f"there is no method {method!r:.100} to call", param="method")
        world = self.engine.tensor_parallel_size * self.server.data_parallel_size
        return {"results": [None] * world}


def _needed(arguments: Arguments, name: str) -> Json:
    value = arguments.given(name, dict)
    if value is None:
        raise RequestError(f"{name} is missing", param=name)
    return value


async def _read(request: Request) -> Json:
    """The JSON object in the body, or an empty one where there is none."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Refused(413, f"the body is larger than {MAX_BODY} bytes")
    if not body.strip():
        return {}
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict | None):
        raise RequestError("the body must be a JSON object")
    return value or {}


GETS: dict[str, Act] = {
    "/is_paused": ControlRoutes.is_paused,
    "/is_sleeping": ControlRoutes.is_sleeping,
    "/get_world_size": ControlRoutes.get_world_size,
    "/server_info": ControlRoutes.server_info,
    "/weight_info": ControlRoutes.weight_info,
}
POSTS: dict[str, Act] = {
    "/pause": ControlRoutes.pause,
    "/resume": ControlRoutes.resume,
    "/abort_requests": ControlRoutes.abort_requests,
    "/sleep": ControlRoutes.sleep,
    "/wake_up": ControlRoutes.wake_up,
    "/release_kv_cache_memory": ControlRoutes.release_kv_cache_memory,
    "/reset_prefix_cache": ControlRoutes.reset_prefix_cache,
    "/init_weight_transfer_engine": ControlRoutes.init_transfer,
    "/shutdown_weight_transfer_engine": ControlRoutes.end_transfer,
    "/start_weight_update": ControlRoutes.start_update,
    "/start_draft_weight_update": ControlRoutes.start_draft_update,
    "/update_weights": ControlRoutes.update_weights,
    "/finish_weight_update": ControlRoutes.finish_update,
    "/fetch_weights": ControlRoutes.fetch_weights,
    "/update_weight_version": ControlRoutes.update_version,
    "/weight_checker": ControlRoutes.weight_checker,
    "/collective_rpc": ControlRoutes.collective_rpc,
}
