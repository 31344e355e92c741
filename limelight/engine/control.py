"""Orders to a running engine, carried out between two steps: pause, sleep, new weights.

Steps are made only while the engine is not paused, all of it is awake, and its weights are whole.
On several ranks, what concerns the devices is done by all of them.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
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

    def check(self, order: DeviceOrder) -> None:
        """`ValueError` for what these devices never do; nothing has been done yet."""

    def carry_out(self, order: DeviceOrder) -> Result: ...


class Control:
    """Takes orders and requests for one engine, and tells how it stands.

    An open update may wait `seconds` for the trainer's next call.
    """

    def __init__(self, engine: Engine, devices: Devices, *, seconds: float = math.inf):
        self.engine, self.devices, self.seconds = engine, devices, seconds
        self.paused: PauseMode | None = None
        self.asleep: set[str] = set()
        self.level = 0  # at which the weights sleep, if they do
        self.updating = False
        self._last_call = 0.0  # of the trainer whose update is open
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
        self._attempt(asked.id, asked.order, lambda: self._begin(asked, outputs))
        return outputs

    def replies(self) -> list[Reply]:
        """Those since the last call; also to orders that waited until nothing ran any more."""
        if self.draining and not self.engine.has_requests:
            waited, self.draining = self.draining, []
            for id, order in waited:
                self._attempt(id, order, partial(self._finish, id, order))
        replies, self._replies = self._replies, []
        return replies

    @property
    def seconds_left(self) -> float:
        """Until an open update counts as failed, unless its trainer calls."""
        if not self.updating:
            return math.inf
        return max(0.0, self._last_call + self.seconds - time.monotonic())

    def expire(self) -> None:
        """Part from a trainer that has left its update open and fallen silent."""
        if self.seconds_left > 0:
            return
        logger.error("the trainer has not finished its update for %g s", self.seconds)
        self.updating, self.incomplete = False, FAILED
        try:
            self.devices.carry_out(EndTransfer())
        except DeviceLost:
            raise
        except Exception as error:
            logger.error("the trainer could not be parted from", exc_info=error)
        self._hold()

    def _attempt(self, id: int, order: Order, act: Callable[[], None]) -> None:
        """Carry out an order, or reply why not; only a lost device ends the engine."""
        try:
            act()
        except ValueError as error:
            self._replies.append(Reply(id=id, refused=str(error)))
        except DeviceLost:
            raise
        except Exception as error:
            logger.error("an order failed: %s", type(order).__name__, exc_info=error)
            self._replies.append(Reply(id=id, failed=str(error)))
        self._hold()

    def _hold(self) -> None:
        stops = bool(self.asleep) or self.updating or self.incomplete is not None
        self.engine.held = stops or (self.paused is not None and not self.draining)

    def _begin(self, asked: Asked, outputs: list[Output]) -> None:
        """Carry out an order, or let it wait; what it ends is told by `outputs`, also if it fails.

        What can be refused is refused before anything ends.
        """
        order, aborted = asked.order, []
        if isinstance(order, Pause | Sleep):
            if isinstance(order, Sleep):
                self._check_sleep(order)
            if order.mode == "abort":
                aborted = self.engine.abort_all()
            elif order.mode == "keep":
                self._end_waiting("paused again, with mode=keep,")
            elif self._runs:
                self.draining.append((asked.id, order))
                self.paused = "wait" if isinstance(order, Pause) else self.paused
                return
        elif isinstance(order, AbortRequests):
            aborted = self.engine.abort_all(order.ids)
        elif isinstance(order, StartUpdate | ClearWeights) and self.draining:
            raise ValueError("running requests are to end first, for which a pause or sleep waits")
        outputs += aborted
        self._finish(asked.id, order, count=len(aborted))

    @property
    def _runs(self) -> bool:
        """Whether there is something that can end by itself."""
        is_stuck = bool(self.asleep) or self.updating or self.incomplete is not None
        return not is_stuck and self.engine.has_requests

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
        self._end_waiting("resumed")
        return {}

    def _end_waiting(self, why: str) -> None:
        """Refuse what waits until nothing runs."""
        for id, waiting in self.draining:
            name = type(waiting).__name__.lower()
            refused = f"{why} before all requests had ended, for which the {name} waited"
            self._replies.append(Reply(id=id, refused=refused))
        self.draining = []

    def _check_sleep(self, order: Sleep) -> None:
        if order.level not in (0, 1, 2):
            raise ValueError(f"level must be 0, 1 or 2; got {order.level}")
        for tag in order.tags:
            if tag not in (WEIGHTS, KV_CACHE):
                raise ValueError(f"there is no tag {tag!r}; there is {WEIGHTS}, {KV_CACHE}")
        if order.level == 0:
            return
        release = self._release(order)
        if WEIGHTS in release.tags and self.updating:
            raise ValueError(
                "a weight update is open: finish it before the weights sleep, or end it with "
                "POST /shutdown_weight_transfer_engine"
            )
        self.devices.check(release)

    def _release(self, order: Sleep) -> Release:
        """What of a sleep concerns the devices."""
        tags = [tag for tag in order.tags or (WEIGHTS, KV_CACHE) if tag not in self.asleep]
        return Release(tags, order.level == 1, order.keeps_cache)

    def _sleep(self, order: Sleep) -> Result:
        if order.level == 0:
            self.asleep.add(SCHEDULING)
            return {"level": 0}
        release = self._release(order)
        if KV_CACHE in release.tags and not order.keeps_cache:
            self.engine.scheduler.preempt_all()
            self._renew()
        # What fails half-way has taken some memory: it is asleep until it is woken.
        self.asleep.update(release.tags)
        if WEIGHTS in release.tags:
            self.level = order.level
            self.incomplete = DISCARDED if order.level == 2 else self.incomplete
        self.devices.carry_out(release)
        names_weights = not order.tags or WEIGHTS in order.tags
        return {"level": self.level if names_weights else order.level}

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
        if isinstance(order, Checksums):
            self._check_awake()
        if self.updating and not isinstance(order, Checksums):
            # The trainer of that update is gone, or it would have finished it.
            self.updating, self.incomplete = False, FAILED
        return self.devices.carry_out(order)

    def _start_update(self, order: StartUpdate) -> Result:
        self._check_awake()
        result = self.devices.carry_out(order)
        self.updating, self._last_call = True, time.monotonic()
        return result

    def _check_awake(self) -> None:
        if WEIGHTS in self.asleep:
            raise ValueError("the weights sleep; wake them with POST /wake_up?tags=weights")

    def _update_weights(self, order: UpdateWeights) -> Result:
        self._check_awake()
        result = self._go_on(order)
        self._last_call = time.monotonic()
        return result

    def _go_on(self, order: UpdateWeights | FinishUpdate) -> Result:
        """What fails of an open update ends it."""
        was_updating = self.updating
        try:
            return self.devices.carry_out(order)
        except Exception:
            if was_updating:
                self.updating, self.incomplete = False, FAILED
            raise

    def _finish_update(self, order: FinishUpdate) -> Result:
        result = self._go_on(order)
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
        self.devices.check(order)
        result = self.devices.carry_out(order)
        self.incomplete = DISCARDED
        self._renew()
        return result


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
