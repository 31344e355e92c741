"""A rank above 0: loads its share of the model and makes the steps that rank 0 plans.

Rank 0 speaks over standard input, and when that closes this process ends; what it tells goes over
what was standard output. Where torchrun has started the rank, both are one socket. See
`engine/pipes.py`.
"""

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from io import FileIO
from typing import TYPE_CHECKING

import msgspec

from limelight.config import EngineConfig
from limelight.engine.pipes import Agreed, Sender, Start, Told, Word, receive_bytes
from limelight.orders import DeviceOrder
from limelight.parallel.torchrun import Torchrun

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from limelight.runner.control import DeviceControl
    from limelight.runner.runner import ModelRunner

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_BEATS = 1.0


def read_all(pipe: FileIO, messages: "queue.SimpleQueue[bytes]", last_words: str = "") -> None:
    """Pass on what rank 0 sends; when it is gone, leave at once, whatever is under way."""
    try:
        while (data := receive_bytes(pipe)) is not None:
            messages.put(data)
    finally:
        if last_words:
            logger.warning("%s", last_words)
        os._exit(1)


def beat(words: Sender) -> None:
    """Give a sign of life every second, as long as someone listens."""
    with suppress(OSError):
        while True:
            time.sleep(SECONDS_BETWEEN_BEATS)
            words.send(Word())
    os._exit(1)


def work(
    start: Start,
    messages: "queue.SimpleQueue[bytes]",
    words: Sender,
    store: "Store | None" = None,
) -> None:
    """Start up beside the other ranks, then make step after step until the process is ended.

    `store` is where all ranks meet, if not that of rank 0.
    """
    from limelight.engine.experts import expert_mesh, joined
    from limelight.engine.ranks import device_control, facts_of, open_interfaces
    from limelight.engine.startup import plan_memory, resolve, start_runner
    from limelight.parallel.group import join, store_at, take_device
    from limelight.parallel.mesh import Mesh
    from limelight.progress import Progress

    config, seat = start.config, start.seat
    found = resolve(config)
    open_interfaces(config)
    take_device(found.device, seat.local_rank, seat.local_size)
    experts = expert_mesh(config, found, seat)
    plan = plan_memory(config, found, Mesh(seat.rank, seat.size), experts)
    plan.check()
    words.send(Word(facts=facts_of(plan, found.identity)))
    agreed = msgspec.msgpack.decode(messages.get(), type=Agreed)
    store = store_at(start.port) if store is None else store
    mesh = join(store, found.device, seat, width=found.shape.hidden_size, dtype=found.dtype)
    plan = plan.with_blocks(agreed.num_blocks)
    experts = joined(experts, mesh)

    def compiled() -> None:
        words.send(Word(is_compiled=True))
        messages.get()

    compiles = seat.local_rank == 0
    runner, _ = start_runner(
        config, found, plan, mesh, Progress(quiet=True), experts=experts,
        compiles=compiles, compiled=compiled,
    )  # fmt: skip
    devices = device_control(config, runner)
    words.send(Word(is_ready=True))
    gc.collect()
    gc.freeze()
    obey(runner, devices, messages)


def obey(
    runner: "ModelRunner", devices: "DeviceControl", messages: "queue.SimpleQueue[bytes]"
) -> None:
    """Make every step and carry out every order that comes, until the process is ended."""
    decoder = msgspec.msgpack.Decoder(Told)
    while True:
        told = decoder.decode(messages.get())
        if told.plan is not None:
            runner.launch(told.plan)
        if told.order is not None:
            carry_out(devices, told.order)


def carry_out(devices: "DeviceControl", order: DeviceOrder) -> None:
    """Do as rank 0 does; it hears of what fails, and tells whoever has ordered it."""
    try:
        devices.carry_out(order)
    except Exception as error:
        logger.warning("%s was not carried out: %s", type(order).__name__, error)


def main() -> int:
    """Entry of the process."""
    # Rank 0 decides when to end, also when a terminal sends its interrupt to all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    words = Sender(FileIO(os.dup(1), "w"))
    # Whatever a library prints must not come among the words.
    os.dup2(2, 1)
    messages = attend(FileIO(0), words)
    start = msgspec.msgpack.decode(messages.get(), type=Start)
    log_as(start.seat.world_rank)
    return until_lost(lambda: work(start, messages, words), words)


def follow(config: EngineConfig, torchrun: Torchrun) -> int:
    """Be a rank above 0 that torchrun has started, until rank 0 ends; `OSError` if there is none.

    `config` must be that of rank 0.
    """
    log_as(torchrun.rank)
    from limelight.engine.door import knock

    reads, words, store = knock(torchrun.store(), torchrun.rank)
    # torchrun passes signals on to all its processes, but rank 0 still has requests to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Whoever looks at this machine has seen nothing of rank 0.
    messages = attend(reads, words, "rank 0 has ended, or ended this rank; its log says why")
    start = msgspec.msgpack.decode(messages.get(), type=Start)

    def work_alike() -> None:
        compare_flags(config, start.config)
        work(replace(start, seat=torchrun.seat), messages, words, store)

    return until_lost(work_alike, words)


def compare_flags(config: EngineConfig, leading: EngineConfig) -> None:
    """`ValueError` if rank 0 has been started otherwise; only that one has the key of prefixes."""
    config = replace(config, prefix_hash_seed=None)
    for item in fields(EngineConfig):
        if getattr(config, item.name) != getattr(leading, item.name):
            raise ValueError(
                f"it has another {item.name} than rank 0: give all machines the same flags"
            )


def attend(pipe: FileIO, words: Sender, last_words: str = "") -> "queue.SimpleQueue[bytes]":
    """What rank 0 sends from now on, while it gets signs of life; `last_words` are logged when it
    is gone."""
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for target, arguments in ((read_all, (pipe, messages, last_words)), (beat, (words,))):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    return messages


def log_as(rank: int) -> None:
    """Say in each line whose it is."""
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s"
    )


def until_lost(work: Callable[[], None], words: Sender) -> int:
    """Tell rank 0 what ends the work; the exit code."""
    try:
        work()
    except ValueError as error:
        words.send(Word(fault=str(error)))
    except Exception as error:
        logger.exception("the rank failed")
        words.send(Word(fault=f"{type(error).__name__}: {error}"))
    return 1


if __name__ == "__main__":
    sys.exit(main())
