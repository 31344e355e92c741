"""A rank above 0: loads its share of the model and makes the steps that rank 0 plans.

Rank 0 speaks over standard input, and when that closes this process ends; what it tells goes over
what was standard output. See `engine/pipes.py`.
"""

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from io import FileIO
from typing import TYPE_CHECKING

import msgspec

from limelight.engine.pipes import Agreed, Sender, Start, Told, Word, receive_bytes
from limelight.orders import DeviceOrder

if TYPE_CHECKING:
    from limelight.runner.control import DeviceControl

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_BEATS = 1.0


def read_all(pipe: FileIO, messages: "queue.SimpleQueue[bytes]") -> None:
    """Pass on what rank 0 sends; when it is gone, leave at once, whatever is under way."""
    try:
        while (data := receive_bytes(pipe)) is not None:
            messages.put(data)
    finally:
        os._exit(1)


def beat(words: Sender) -> None:
    """Give a sign of life every second, as long as someone listens."""
    with suppress(OSError):
        while True:
            time.sleep(SECONDS_BETWEEN_BEATS)
            words.send(Word())
    os._exit(1)


def work(start: Start, messages: "queue.SimpleQueue[bytes]", words: Sender) -> None:
    """Start up beside the other ranks, then make step after step until the process is ended."""
    from limelight.engine.experts import expert_mesh, joined
    from limelight.engine.ranks import device_control, facts_of
    from limelight.engine.startup import plan_memory, resolve, start_runner
    from limelight.parallel.group import join, store_at, take_device
    from limelight.parallel.mesh import Mesh
    from limelight.progress import Progress

    config, seat = start.config, start.seat
    found = resolve(config)
    take_device(found.device, seat.rank, seat.size)
    experts = expert_mesh(config, found, seat)
    plan = plan_memory(config, found, Mesh(seat.rank, seat.size), experts)
    plan.check()
    words.send(Word(facts=facts_of(plan, found.identity)))
    agreed = msgspec.msgpack.decode(messages.get(), type=Agreed)
    mesh = join(
        store_at(start.port), found.device, seat,
        width=found.shape.hidden_size, dtype=found.dtype,
    )  # fmt: skip
    plan = plan.with_blocks(agreed.num_blocks)
    experts = joined(experts, mesh)
    runner, _ = start_runner(
        config, found, plan, mesh, Progress(quiet=True), experts=experts, compiled=messages.get
    )
    devices = device_control(config, runner)
    words.send(Word(is_ready=True))
    decoder = msgspec.msgpack.Decoder(Told)
    gc.collect()
    gc.freeze()
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
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for target, arguments in ((read_all, (FileIO(0), messages)), (beat, (words,))):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    start = msgspec.msgpack.decode(messages.get(), type=Start)
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s rank {start.seat.world_rank}: %(message)s",
    )
    try:
        work(start, messages, words)
    except ValueError as error:
        words.send(Word(fault=str(error)))
    except Exception as error:
        logger.exception("the rank failed")
        words.send(Word(fault=f"{type(error).__name__}: {error}"))
    return 1


if __name__ == "__main__":
    sys.exit(main())
