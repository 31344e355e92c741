"""LoRA adapters by name: which ones requests may ask for, and the routes that change that.

The engine knows adapters by numbers. A name is taken away at once, and what is asked by it then is
a 404; requests that are open keep the adapter until they end.
"""

import asyncio
import itertools
import os
from collections.abc import Coroutine, Sequence

import msgspec
from starlette.types import Send

from limelight.engine.client import AdapterLost, OrderFailed, Served
from limelight.orders import LoadAdapter, Order, UnloadAdapter
from limelight.server.bodies import MAX_TEXT, decode
from limelight.server.http import Call, Refused, send_bytes, send_json
from limelight.types import LoRARequest, RequestError

TEXT = "text/plain; charset=utf-8"
# What SkyRL calls the one adapter that it trains.
SKYRL_NAME = "skyrl-lora"


class LoadFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/load_lora_adapter. The layout of a file tells itself, whatever
    `is_3d_lora_weight` says."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None


class UnloadFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class ReplaceFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /skyrl/v1/load_lora_adapter."""

    lora_name: str = SKYRL_NAME
    lora_path: str | None = None
    in_memory: bool | None = None


class NamedAdapters:
    """The adapters that are served beside the models of `base_names`.

    Loads and unloads come one after the other, and end even if their client does not wait.
    """

    def __init__(
        self, client: Served, base_names: list[str], adapters: Sequence[LoRARequest], *, may: bool
    ):
        """`adapters` are those that the engine starts with; `may` says if they may change."""
        self.client, self.base_names, self.may = client, base_names, may
        self.by_name = {adapter.lora_name: adapter for adapter in adapters}
        first = 1 + max((adapter.lora_int_id for adapter in adapters), default=0)
        self._ids = itertools.count(first)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[LoRARequest]] = set()

    async def load(self, call: Call, send: Send):
        """/v1/load_lora_adapter"""
        self._check_may()
        fields = decode(call.body, LoadFields)
        in_place = bool(fields.load_inplace)
        await self._to_its_end(self._load(fields.lora_name, fields.lora_path, in_place=in_place))
        await self._tell(send, fields.lora_name, "added")

    async def unload(self, call: Call, send: Send):
        """/v1/unload_lora_adapter"""
        self._check_may()
        fields = decode(call.body, UnloadFields)
        await self._to_its_end(self._unload(fields.lora_name, fields.lora_int_id))
        await self._tell(send, fields.lora_name, "removed")

    async def replace(self, call: Call, send: Send):
        """/skyrl/v1/load_lora_adapter: load, or take the place of the one of that name."""
        self._check_may()
        fields = decode(call.body, ReplaceFields)
        if fields.in_memory or fields.lora_path is None:
            raise RequestError(
                "an adapter is read from lora_path, a folder that this server can see; "
                "in_memory is not supported",
                param="in_memory" if fields.in_memory else "lora_path",
            )
        adapter = await self._to_its_end(
            self._load(fields.lora_name, fields.lora_path, in_place=True)
        )
        answer = {
            "status": "success", "lora_name": adapter.lora_name,
            "lora_int_id": adapter.lora_int_id,
        }  # fmt: skip
        await send_json(send, answer)

    async def _to_its_end(self, work: Coroutine[object, object, LoRARequest]) -> LoRARequest:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _check_may(self) -> None:
        if not self.may:
            raise Refused(
                403, "adapters may not be changed here: start the server with "
                "--allow-runtime-lora-updating, or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                code="lora_updating_disabled",
            )  # fmt: skip

    async def _load(self, name: str, path: str, *, in_place: bool) -> LoRARequest:
        if not 0 < len(name) <= MAX_TEXT:
            raise RequestError(f"lora_name must have 1 to {MAX_TEXT} characters", param="lora_name")
        async with self._turn:
            known = self.by_name.get(name)
            if name in self.base_names:
                raise RequestError(f"{name!r} is the name of the model", param="lora_name")
            if known is not None and not in_place:
                raise RequestError(
                    f"the adapter {name!r} has already been loaded; load_inplace: true replaces it",
                    param="lora_name",
                )
            # Not by `Path`, which fails at a name that is too long.
            if not os.path.isdir(path):
                raise Refused(
                    404, f"there is no adapter at {path[:200]!r}",
                    param="lora_path", code="adapter_not_found",
                )  # fmt: skip
            adapter_id = next(self._ids) if known is None else known.lora_int_id
            adapter = LoRARequest(name, adapter_id, path, load_inplace=in_place)
            try:
                await self._order(LoadAdapter(adapter))
            except AdapterLost as error:
                self.by_name.pop(name, None)
                raise Refused(500, str(error), code="adapter_lost") from error
            self.by_name[name] = adapter
            return adapter

    async def _unload(self, name: str, adapter_id: int | None) -> LoRARequest:
        async with self._turn:
            adapter = self.by_name.get(name)
            if adapter is None or adapter_id not in (None, adapter.lora_int_id):
                raise Refused(
                    404, f"there is no adapter {name[:100]!r} here",
                    param="lora_name", code="adapter_not_found",
                )  # fmt: skip
            # From here on it is a 404; whatever was asked before is on its way to the engine.
            del self.by_name[name]
            await self._order(UnloadAdapter(adapter.lora_int_id))
            return adapter

    async def _order(self, order: Order) -> None:
        """`RequestError` for what the engine refuses."""
        try:
            await self.client.order(order)
        except OrderFailed as error:
            if error.refused:
                raise RequestError(str(error), param="lora_path") from error
            raise

    async def _tell(self, send: Send, name: str, what: str) -> None:
        text = f"Success: LoRA adapter '{name}' {what} successfully."
        await send_bytes(send, 200, text.encode(), media=TEXT)
