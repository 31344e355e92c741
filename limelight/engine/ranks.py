"""The ranks above 0, seen from rank 0: started, agreed with, sent each plan, watched, ended.

Each is a process of `engine/worker.py` with a line in each direction (`engine/links.py`). When one
ends or falls silent, all are ended: a collective that waits for it then fails, and the engine is
lost.
"""

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import msgspec
import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from limelight.config import EngineConfig
from limelight.engine.door import Door
from limelight.engine.links import Child, Connection, Link
from limelight.engine.memory import MemoryPlan
from limelight.engine.pipes import Agreed, Facts, Start, Told, Word, receive
from limelight.orders import DeviceOrder
from limelight.parallel.group import abandon, have_come, join, leave, open_store, take_device
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.runner.control import DeviceControl
from limelight.runner.launched import Launched
from limelight.runner.runner import ModelRunner
from limelight.steps import StepPlan, StepResult
from limelight.types import DeviceLost

# A sign of life comes every second, but not while Python is busy with imports and compilers.
SECONDS_OF_SILENCE = 8.0
SECONDS_OF_SILENCE_AT_START = 60.0
# torchrun starts all at once, as soon as there are all machines.
SECONDS_TO_COME = 60.0
SECONDS_BETWEEN_LOOKS = 0.02
# An error of a collective and the news of the rank that ended come at almost the same time.
SECONDS_FOR_NEWS = 2.0


def facts_of(plan: MemoryPlan, identity: bytes) -> Facts:
    """What a rank tells the others before it loads."""
    from limelight import __version__

    versions = {
        "limelight": __version__, "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
    }  # fmt: skip
    return Facts(versions, identity, plan.num_blocks)


class Worker:
    """One rank: its process, and what it has told. `name` says where it is, if not here."""

    def __init__(self, name: str, link: Link):
        self.name, self.link = name, link
        self.facts: Facts | None = None
        self.is_compiled = self.is_ready = False

    def listen(self, news: threading.Condition) -> str:
        """Take what it tells until it is lost, with news of it; how it was."""
        poll = select.poll()
        poll.register(self.link.words, select.POLLIN)
        while True:
            silence = SECONDS_OF_SILENCE if self.is_ready else SECONDS_OF_SILENCE_AT_START
            if not poll.poll(1000 * silence):
                return f"has given no sign of life for {silence:g} s"
            try:
                word = receive(self.link.words, Word)
            except OSError:  # it had not read all that it was told
                word = None
            if word is None:
                return self.link.how_ended()
            if word.fault is not None:
                return word.fault
            with news:
                self.facts = word.facts or self.facts
                self.is_compiled |= word.is_compiled
                self.is_ready |= word.is_ready
                news.notify_all()


class Ranks:
    """All ranks above 0. `lost` is None as long as none is, and then how the first one was."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        on_loss: Callable[[str], None] | None,
        seat: Seat,
        store: Store | None = None,
    ):
        """`store` is that of the world, where there is more of it than these ranks."""
        self.seat, self.size, self.device, self.on_loss = seat, seat.size, device, on_loss
        self.lost: str | None = None
        self.is_closing = False
        self.mesh = Mesh(size=self.size)
        self.release: Callable[[], None] = lambda: None  # of what holds on to the group
        self._news = threading.Condition()
        open_interfaces(config)
        take_device(device, 0, seat.local_size)
        self._store = open_store() if store is None else store
        self.workers: list[Worker] = []

    @classmethod
    @contextmanager
    def started(
        cls,
        config: EngineConfig,
        device: torch.device,
        on_loss: Callable[[str], None] | None,
        seat: Seat,
        store: Store | None = None,
        host: str | None = None,
    ) -> Iterator["Ranks"]:
        """They are ended if the block fails, which tells of a lost rank as what it was.

        Where torchrun has started them, `host` is where they find this one; `ValueError` if they do
        not come.
        """
        ranks = cls(config, device, on_loss, seat, store)
        try:
            if host is not None:
                ranks._let_in(config, host)
            else:
                for rank in range(1, ranks.size):
                    ranks._add(config, rank, f"rank {rank}", Child())
            yield ranks
        except BaseException as error:
            lost = ranks.news() if isinstance(error, RuntimeError) else None
            ranks.close()
            if lost is not None:
                raise DeviceLost(lost) from error
            raise

    def agree(self, plan: MemoryPlan, identity: bytes) -> MemoryPlan:
        """The plan with the least cache of all ranks; `ValueError` names a rank that is unlike."""
        own = facts_of(plan, identity)
        with self._news:
            self._news.wait_for(lambda: self.lost or all(w.facts for w in self.workers))
        if self.lost is not None:
            raise ValueError(self.lost)
        blocks = [own.num_blocks]
        for worker in self.workers:
            assert worker.facts is not None
            compare(own, worker.facts, worker.name)
            blocks.append(worker.facts.num_blocks)
        plan = plan.with_blocks(min(blocks))
        plan.check()
        self.send(Agreed(plan.num_blocks))
        return plan

    def join(self, width: int, dtype: torch.dtype) -> Mesh:
        """Rank 0's place among them, who sum rows of that width and type.

        `DeviceLost` if one ends before it joins, for which the group itself would wait.
        """
        while not have_come(self._store, self.seat):
            if self.lost is not None:
                raise DeviceLost(self.lost)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self.mesh = join(self._store, self.device, self.seat, width=width, dtype=dtype)
        return self.mesh

    def go_on(self) -> None:
        """Have all start steps, once each machine has its kernels; `DeviceLost` if a rank is."""
        with self._news:
            self._news.wait_for(lambda: self.lost or all(w.is_compiled for w in self.workers))
        if self.lost is not None:
            raise DeviceLost(self.lost)
        self.send(Told())

    def send(self, message: object) -> None:
        """The same to all."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, data: bytes) -> None:
        for worker in self.workers:
            self._send(worker, data)

    def news(self) -> str | None:
        """How a rank was lost, if one is or is just found to be."""
        with self._news:
            self._news.wait_for(lambda: self.lost, SECONDS_FOR_NEWS)
        return self.lost

    def close(self) -> None:
        """End them all, and leave the group."""
        self.is_closing = True
        for worker in self.workers:
            worker.link.ask_to_end()
        for worker in self.workers:
            worker.link.wait()
        self.release()
        leave()

    def _let_in(self, config: EngineConfig, host: str) -> None:
        def welcome(rank: int, where: str, connection: socket.socket) -> None:
            with suppress(DeviceLost):  # whoever watches it tells
                self._add(config, rank, f"rank {rank} at {where}", Connection(connection))

        door = Door(self._store, host, self.size, welcome)
        self._store = door.store
        try:
            with self._news:
                self._news.wait_for(
                    lambda: self.lost or len(self.workers) == self.size - 1, SECONDS_TO_COME
                )
        finally:
            door.close()
        if self.lost is not None:
            raise ValueError(self.lost)
        if door.awaited:
            raise ValueError(f"ranks {sorted(door.awaited)} have not come in {SECONDS_TO_COME:g} s")

    def _add(self, config: EngineConfig, rank: int, name: str, link: Link) -> None:
        worker = Worker(name, link)
        with self._news:
            self.workers.append(worker)
            self._news.notify_all()
        watch = threading.Thread(target=self._watch, args=(worker,), name=name, daemon=True)
        watch.start()
        # Prefixes are hashed by rank 0 alone, so the others need no key.
        config = replace(config, prefix_hash_seed=None)
        port = self._store.port if isinstance(self._store, TCPStore) else 0
        start = Start(config, replace(self.seat, rank=rank), port)
        self._send(worker, msgspec.msgpack.encode(start))

    def _send(self, worker: Worker, data: bytes) -> None:
        try:
            worker.link.commands.send_bytes(data)
        except OSError as error:
            raise DeviceLost(self.news() or f"{worker.name}: {error}") from error

    def _watch(self, worker: Worker) -> None:
        try:
            how = f"{worker.name}: {worker.listen(self._news)}"
        except Exception as error:
            how = f"{worker.name}: what it tells cannot be read: {error}"
        with self._news:
            first = self.lost is None and not self.is_closing
            if first:
                self.lost = how
        if first:
            for other in self.workers:
                other.link.kill()
        with self._news:
            self._news.notify_all()
        if first and self.on_loss is not None:
            self.on_loss(how)
        if first:
            # In the process of others nobody ends it: a step that waits must not do so for ever.
            abandon(self.mesh)
        worker.link.wait()


def open_interfaces(config: EngineConfig) -> None:
    """Before ranks start: a trainer may be on another machine, where loopback does not lead."""
    if config.weight_transfer.backend == "nccl":
        # Empty, NCCL chooses by itself.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "")


def compare(own: Facts, other: Facts, who: str) -> None:
    """`ValueError` if another rank has not what this one has."""
    for name, version in own.versions.items():
        if other.versions.get(name) != version:
            raise ValueError(
                f"{who} has {name} {other.versions.get(name)}, and rank 0 {version}; "
                f"all ranks must run the same"
            )
    if other.model != own.model:
        raise ValueError(
            f"{who} has found another checkpoint or configuration than rank 0: its shape, "
            f"types or tensors differ"
        )


def device_control(config: EngineConfig, runner: ModelRunner) -> DeviceControl:
    """What carries out on this rank what is ordered of its weights and memory."""
    transfer = config.weight_transfer
    return DeviceControl(runner, backend=transfer.backend, seconds=transfer.seconds)


class LeadingRunner:
    """Rank 0's runner: every plan goes to all ranks first.

    A step that fails on one rank leaves the others waiting in it, so that no later one can work.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks):
        self.runner, self.ranks = runner, ranks
        ranks.release = runner.drop_graphs

    def launch(self, plan: StepPlan) -> "Followed":
        if self.ranks.lost is not None:
            raise DeviceLost(self.ranks.lost)
        data = msgspec.msgpack.encode(Told(plan=plan))
        try:
            self.ranks.send_bytes(data)
            return Followed(self.runner.launch(plan), self.ranks)
        except Exception as error:
            raise DeviceLost(self.ranks.news() or f"rank 0: {error}") from error
        except BaseException:
            # An interrupt: the others are in a step that rank 0 has left.
            self.ranks.lost = self.ranks.lost or "rank 0 was interrupted in a step"
            raise


@dataclass(frozen=True, slots=True)
class Followed:
    """A step that all ranks make."""

    launched: Launched
    ranks: Ranks

    def result(self) -> StepResult:
        """`DeviceLost` if one of them is lost, without which it has come to nothing."""
        try:
            result = self.launched.result()
        except Exception as error:
            if (lost := self.ranks.news()) is not None:
                raise DeviceLost(lost) from error
            raise
        if self.ranks.lost is not None:
            raise DeviceLost(self.ranks.lost)
        return result


class LeadingControl:
    """Rank 0's part of what is ordered of all devices: every order goes to all ranks first."""

    def __init__(self, devices: DeviceControl, ranks: Ranks):
        self.devices, self.ranks = devices, ranks

    def check(self, order: DeviceOrder) -> None:
        """As `DeviceControl`'s, which is the same on all ranks."""
        self.devices.check(order)

    def carry_out(self, order: DeviceOrder) -> dict[str, object]:
        """As `DeviceControl`'s; `DeviceLost` if a rank is."""
        self.ranks.send(Told(order=order))
        try:
            return self.devices.carry_out(order)
        except Exception as error:
            if self.ranks.lost is not None:
                raise DeviceLost(self.ranks.lost) from error
            raise


def all_devices(
    config: EngineConfig, runner: ModelRunner, ranks: Ranks | None
) -> DeviceControl | LeadingControl:
    """What carries out orders on the devices of all ranks, where there are others."""
    devices = device_control(config, runner)
    return devices if ranks is None else LeadingControl(devices, ranks)
