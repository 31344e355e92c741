"""What a trainer may ask of a running engine beside requests, and how the engine then stands.

Each order is msgpack that names its type; it is carried out between two steps. No torch.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from limelight.types import LoRARequest

PauseMode = Literal["abort", "keep", "wait"]
# Parts of an engine that sleep and wake by themselves.
WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
TAGS = (WEIGHTS, KV_CACHE, SCHEDULING)


class Pause(Struct, frozen=True, tag=True):
    """Make no more steps: `abort` ends what runs, `wait` lets it end, `keep` freezes it."""

    mode: PauseMode = "abort"
    clear_cache: bool = True


class Resume(Struct, frozen=True, tag=True):
    """Go on after a pause."""


class Sleep(Struct, frozen=True, tag=True):
    """Give the memory of `tags` back, or of all: at level 1 weights go to the host, at 2 nowhere.

    At level 0 only steps end. With `keeps_cache` the cache goes to the host too.
    """

    level: int = 1
    mode: PauseMode = "abort"
    tags: list[str] = []
    keeps_cache: bool = False


class WakeUp(Struct, frozen=True, tag=True):
    """Take the memory of `tags`, or of all, again."""

    tags: list[str] = []


class ResetPrefixCache(Struct, frozen=True, tag=True):
    """Let no one find what has been computed; with `running` that is computed again as well."""

    running: bool = False


class AbortRequests(Struct, frozen=True, tag=True):
    """End these requests, or all, with what they have."""

    ids: list[str] | None = None


class InitTransfer(Struct, frozen=True, tag=True):
    """Meet the trainer; this engine is the `replica`-th of those that do."""

    info: dict[str, object]
    replica: int = 0


class StartUpdate(Struct, frozen=True, tag=True):
    """New weights are about to come; steps wait until they have."""


class UpdateWeights(Struct, frozen=True, tag=True):
    """Take the tensors that `info` announces."""

    info: dict[str, object]


class FinishUpdate(Struct, frozen=True, tag=True):
    """All new weights have come; they are called `version`."""

    version: str | None = None


class EndTransfer(Struct, frozen=True, tag=True):
    """Part from the trainer."""


class NameVersion(Struct, frozen=True, tag=True):
    """Call the weights that are there `version`."""

    version: str


class Checksums(Struct, frozen=True, tag=True):
    """Tell a number for each tensor, which depends on its values alone."""


class ClearWeights(Struct, frozen=True, tag=True):
    """Overwrite all weights, so that a later update can be seen to bring all of them."""


class LoadAdapter(Struct, frozen=True, tag=True):
    """Read an adapter, so that requests can have it."""

    adapter: LoRARequest


class UnloadAdapter(Struct, frozen=True, tag=True):
    """Take no more requests for an adapter."""

    adapter_id: int


class Release(Struct, frozen=True, tag=True):
    """To the devices: give the memory of `tags` back, and keep what lay there as far as told."""

    tags: list[str]
    keeps_weights: bool
    keeps_cache: bool = False


class Restore(Struct, frozen=True, tag=True):
    """To the devices: take the memory of `tags` again."""

    tags: list[str]


class ReadAdapter(Struct, frozen=True, tag=True):
    """To the devices: take the adapter in a folder into host memory, in place of one of this id."""

    adapter_id: int
    folder: str


DeviceOrder: TypeAlias = (
    InitTransfer | StartUpdate | UpdateWeights | FinishUpdate | EndTransfer
    | Checksums | ClearWeights | Release | Restore | ReadAdapter
)  # fmt: skip
Order: TypeAlias = (
    Pause | Resume | Sleep | WakeUp | ResetPrefixCache | AbortRequests | NameVersion
    | InitTransfer | StartUpdate | UpdateWeights | FinishUpdate | EndTransfer
    | Checksums | ClearWeights | LoadAdapter | UnloadAdapter
)  # fmt: skip


class Asked(Struct, frozen=True):
    """An order, and the number that its reply has."""

    id: int
    order: Order


class Reply(Struct, frozen=True, kw_only=True):
    """What came of an order: a result, what was wrong with it, or what failed."""

    id: int
    result: dict[str, object] = {}
    refused: str | None = None
    failed: str | None = None


class EngineState(Struct, frozen=True, kw_only=True):
    """How an engine stands to orders. `incomplete` says why its weights can serve no one.

    With `draining` it lets end what runs, and then does what it was told.
    """

    paused: PauseMode | None = None
    draining: bool = False
    asleep: list[str] = []
    updating: bool = False
    incomplete: str | None = None
    weight_version: str = "0"

    @property
    def refusal(self) -> str | None:
        """Why new requests are not taken; during a pause that keeps, and an update, they queue."""
        if self.asleep:
            return f"the engine sleeps ({', '.join(self.asleep)}); wake it with POST /wake_up"
        if self.incomplete is not None:
            return self.incomplete
        if self.draining or self.paused in ("abort", "wait"):
            return "generation is paused; go on with POST /resume"
        return None
