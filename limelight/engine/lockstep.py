"""Steps of engines that share experts: each is agreed on by all before any of them makes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from limelight.engine.peers import Load, Peers
from limelight.engine.pipes import Facts
from limelight.engine.ranks import compare
from limelight.orders import DeviceOrder
from limelight.parallel.group import open_store, store_at
from limelight.runner.runner import ModelRunner
from limelight.steps import StepPlan, StepResult, Together
from limelight.types import DeviceLost


class Launched(Protocol):
    def result(self) -> StepResult: ...


class Nothing:
    """A step that no engine had anything to do in."""

    def result(self) -> StepResult:
        return StepResult([])


def meet(peers: Peers, facts: Facts) -> TCPStore:
    """Find the other engines; the store over which all ranks of all of them join. `ValueError` if
    this one is unlike rank 0's."""
    store = open_store() if peers.circle.rank == 0 else None
    others = peers.meet(facts, 0 if store is None else store.port)
    if store is not None:
        return store
    compare(others[0].facts, facts, f"engine {peers.circle.rank}")
    return store_at(others[0].port)


class FixedDevices:
    """Stands for devices whose memory and weights stay as they are."""

    def carry_out(self, order: DeviceOrder) -> dict[str, object]:
        self.check(order)
        return {}

    def check(self, order: DeviceOrder) -> None:
        """`ValueError`, always."""
        raise ValueError(
            f"{type(order).__name__}: memory and weights stay as they are with "
            f"--enable-expert-parallel, for other ranks need this one's experts"
        )


class JoinedRunner:
    """Runs each plan at the same time as the other engines run theirs; a plan without grants lends
    this rank's experts to them.

    A step that fails in one engine leaves the others waiting in it, so that no later one can work.
    """

    def __init__(self, runner: ModelRunner, launch: Callable[[StepPlan], Launched], peers: Peers):
        """`launch` starts a plan on all ranks of this engine, of which `runner` is rank 0's."""
        self.runner, self.start, self.peers = runner, launch, peers

    def launch(self, plan: StepPlan) -> Launched:
        loads = self.peers.agree(Load(plan.num_rows, self.runner.can_replay(plan), plan.decodes))
        most = max(load.rows for load in loads)
        if not most:
            return Nothing()
        graph, decodes = None, all(load.decodes for load in loads)
        if all(load.graph or not load.rows for load in loads):
            graph = self.runner.graph_size(most, decodes=decodes)
        together = Together([load.rows for load in loads], graph, decodes)
        try:
            return self.start(replace(plan, together=together))
        except DeviceLost:
            raise
        except Exception as error:
            raise DeviceLost(
                self.peers.lost or f"engine {self.peers.circle.rank}: {error}"
            ) from error
