"""Orders to a running engine, carried out between two steps: pause, sleep, new weights.

Steps are made only while the engine is not paused, all of it is awake, and its weights are whole.
On several ranks, what concerns the devices is done by all of them.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from limelight.engine.engine import Engine
from limelight.orders import (
    KV_CACHE,
    SCHEDULING,
    TAGS,
    WEIGHTS,
    AbortRequests,
    Asked,
    Checksums,
    ClearWeights,
    DeviceOrder,
    EndTransfer,
    EngineState,
    FinishUpdate,
    InitTransfer,
    LoadAdapter,
    NameVersion,
    Order,
    Pause,
    PauseMode,
    Release,
    Reply,
    ResetPrefixCache,
    Restore,
    Resume,
    Sleep,
    StartUpdate,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from limelight.types import DeviceLost, Output, Request

logger = logging.getLogger(__name__)
FAILED = (
    "a weight update failed: the engine takes requests again once an update of all weights finishes"
)
DISCARDED = (
    "the weights were discarded: the engine takes requests again once an update brings all of them"
)
Result = dict[str, object]


class Devices(Protocol):
    """What carries out on all ranks what concerns their devices."""

    def carry_out(self, order: DeviceOrder) -> Result: ...


class Control:
    """Takes orders and requests for one engine, and tells how it stands."""

    def __init__(self, engine: Engine, devices: Devices):
        self.engine, self.devices = engine, devices
        self.paused: PauseMode | None = None
        self.asleep: set[str] = set()
        self.updating = False
        self.incomplete: str | None = None
        self.num_updates = 0
        self.draining: list[tuple[int, Order]] = []  # what waits until nothing runs
        self._replies: list[Reply] = []

    @property
    def state(self) -> EngineState:
        return EngineState(
            paused=self.paused,
            draining=bool(self.draining),
            asleep=[tag for tag in TAGS if tag in self.asleep],
            updating=self.updating,
            incomplete=self.incomplete,
            weight_version=self.engine.weight_version,
        )

    def add(self, request: Request) -> list[Output]:
        """Queue a request; its end, if it came while none are taken."""
        if self.state.refusal is None:
            self.engine.add(request)
            return []
        return [Output(request_id=request.id, token_ids=[], finish_reason="abort")]

    def take(self, asked: Asked) -> list[Output]:
        """Settle the step under way and carry out an order; what that brings for requests.

        Its reply comes with `replies`, later for one that waits.
        """
        outputs = self.engine.settle()
        try:
            outputs += self._begin(asked)
        except ValueError as error:
            self._replies.append(Reply(id=asked.id, refused=str(error)))
        except DeviceLost:
            raise
        except Exception as error:
            logger.error("an order failed: %s", type(asked.order).__name__, exc_info=error)
            self._replies.append(Reply(id=asked.id, failed=str(error)))
        self._hold()
        return outputs

    def replies(self) -> list[Reply]:
        """Those since the last call; also to orders that waited until nothing ran any more."""
        if self.draining and not self.engine.has_work:
            waited, self.draining = self.draining, []
            for id, order in waited:
                self._finish(id, order)
            self._hold()
        replies, self._replies = self._replies, []
        return replies

    def _hold(self) -> None:
        stops = bool(self.asleep) or self.updating or self.incomplete is not None
        self.engine.held = stops or (self.paused is not None and not self.draining)

    def _begin(self, asked: Asked) -> list[Output]:
        """Carry out an order, or let it wait; what it ends."""
        order, outputs = asked.order, []
        if isinstance(order, Pause | Sleep):
            if isinstance(order, Sleep):
                _check_sleep(order)
            if order.mode == "abort":
                outputs = self.engine.abort_all()
            elif order.mode == "wait" and self._runs:
                self.draining.append((asked.id, order))
                self.paused = "wait" if isinstance(order, Pause) else self.paused
                return outputs
        elif isinstance(order, AbortRequests):
            outputs = self.engine.abort_all(order.ids)
        self._finish(asked.id, order, count=len(outputs))
        return outputs

    @property
    def _runs(self) -> bool:
        """Whether there is something that can end by itself."""
        is_stuck = bool(self.asleep) or self.updating or self.incomplete is not None
        return not is_stuck and (self.engine.scheduler.has_work or bool(self.engine.compiling))

    def _finish(self, id: int, order: Order, *, count: int = 0) -> None:
        if isinstance(order, AbortRequests):
            result: Result = {"aborted": count}
        else:
            act: Callable[[Order], Result] = ACTS[type(order)].__get__(self)
            result = act(order)
        self._replies.append(Reply(id=id, result=result))

    def _pause(self, order: Pause) -> Result:
        self.paused = order.mode
        if order.clear_cache:
            self._renew()
        return {}

    def _resume(self, order: Resume) -> Result:
        self.paused = None
        for id, waiting in self.draining:
            name = type(waiting).__name__.lower()
            refused = f"resumed before all requests had ended, for which the {name} waited"
            self._replies.append(Reply(id=id, refused=refused))
        self.draining = []
        return {}

    def _sleep(self, order: Sleep) -> Result:
        if order.level == 0:
            self.asleep.add(SCHEDULING)
            return {}
        tags = [tag for tag in order.tags or (WEIGHTS, KV_CACHE) if tag not in self.asleep]
        if KV_CACHE in tags and not order.keeps_cache:
            self.engine.scheduler.preempt_all()
            self._renew()
        self.devices.carry_out(Release(tags, order.level == 1, order.keeps_cache))
        self.asleep.update(tags)
        if order.level == 2 and WEIGHTS in tags:
            self.incomplete = DISCARDED
        return {}

    def _wake_up(self, order: WakeUp) -> Result:
        for tag in order.tags:
            if tag not in TAGS:
                raise ValueError(f"there is no tag {tag!r}; there is {', '.join(TAGS)}")
        tags = [tag for tag in TAGS if tag in self.asleep and tag in (order.tags or TAGS)]
        for tag in tags:
            if tag != SCHEDULING:
                self.devices.carry_out(Restore([tag]))
            self.asleep.discard(tag)
        return {}

    def _reset_prefix_cache(self, order: ResetPrefixCache) -> Result:
        if order.running:
            self.engine.scheduler.preempt_all()
        self._renew()
        return {}

    def _renew(self) -> None:
        self.engine.scheduler.renew_prefixes()
        if self.engine.routing is not None:
            self.engine.routing.renew()

    def _name_version(self, order: NameVersion) -> Result:
        self.engine.weight_version = order.version
        return {}

    def _load_adapter(self, order: LoadAdapter) -> Result:
        self.engine.load_adapter(order.adapter)
        return {}

    def _unload_adapter(self, order: UnloadAdapter) -> Result:
        self.engine.adapters.unload(order.adapter_id)
        return {}

    def _on_devices(self, order: InitTransfer | EndTransfer | Checksums) -> Result:
        if isinstance(order, Checksums) and WEIGHTS in self.asleep:
            raise ValueError("the weights sleep; wake them with POST /wake_up?tags=weights")
        if self.updating and not isinstance(order, Checksums):
            # The trainer of that update is gone, or it would have finished it.
            self.updating, self.incomplete = False, FAILED
        return self.devices.carry_out(order)

    def _start_update(self, order: StartUpdate) -> Result:
        if WEIGHTS in self.asleep:
            raise ValueError("the weights sleep; wake them with POST /wake_up?tags=weights")
        result = self.devices.carry_out(order)
        self.updating = True
        return result

    def _update_weights(self, order: UpdateWeights) -> Result:
        was_updating = self.updating
        try:
            return self.devices.carry_out(order)
        except Exception:
            if was_updating:
                self.updating, self.incomplete = False, FAILED
            raise

    def _finish_update(self, order: FinishUpdate) -> Result:
        result = self.devices.carry_out(order)
        self.updating = False
        self.num_updates += 1
        self.engine.weight_version = order.version or str(self.num_updates)
        self._renew()
        if missing := result["stale"]:
            self.incomplete = self.incomplete or FAILED
            raise ValueError(f"{missing} of the weights that are to be replaced have not come")
        self.incomplete = None
        return result

    def _clear_weights(self, order: ClearWeights) -> Result:
        if WEIGHTS in self.asleep or self.updating:
            raise ValueError("weights that sleep or are being updated cannot be cleared")
        result = self.devices.carry_out(order)
        self.incomplete = DISCARDED
        self._renew()
        return result


def _check_sleep(order: Sleep) -> None:
    if order.level not in (0, 1, 2):
        raise ValueError(f"level must be 0, 1 or 2; got {order.level}")
    for tag in order.tags:
        if tag not in (WEIGHTS, KV_CACHE):
            raise ValueError(f"there is no tag {tag!r}; there is {WEIGHTS}, {KV_CACHE}")


ACTS: dict[type, Callable[..., Result]] = {
    Pause: Control._pause,
    Resume: Control._resume,
    Sleep: Control._sleep,
    WakeUp: Control._wake_up,
    ResetPrefixCache: Control._reset_prefix_cache,
    NameVersion: Control._name_version,
    LoadAdapter: Control._load_adapter,
    UnloadAdapter: Control._unload_adapter,
    InitTransfer: Control._on_devices,
    EndTransfer: Control._on_devices,
    Checksums: Control._on_devices,
    StartUpdate: Control._start_update,
    UpdateWeights: Control._update_weights,
    FinishUpdate: Control._finish_update,
    ClearWeights: Control._clear_weights,
}
