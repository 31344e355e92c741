"""`limelight bench startup`: the time of each phase of a start, to the first token of a request.

A process starts once, so this has one row. With `--cold` there are no compiled kernels yet, as on a
fresh machine.
"""

import argparse
import logging
import os
import tempfile
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from limelight.bench import workload
from limelight.config import EngineConfig
from limelight.flags import config_from, positive

if TYPE_CHECKING:
    from limelight.engine.startup import Started

logger = logging.getLogger(__name__)
CACHE = "TRITON_CACHE_DIR"
# What the names of phases begin with, and the columns that they are summed in.
COLUMNS = {
    "loading": "weights_s", "making": "weights_s", "finding": "compiling_s",
    "compiling": "compiling_s", "warming": "warm_up_s", "capturing": "graphs_s",
    "timing": "timing_s",
}  # fmt: skip


class Watch:
    """Seconds since it was made, and of each phase since the last one ended."""

    def __init__(self) -> None:
        self.start = self.begun = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What went by since the last phase was `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.begun
        self.begun = now

    def hear(self, phase: str, share: float) -> None:
        """A listener of `Progress`: what is between two phases is of neither."""
        if share == 0.0:
            self.mark("other_s")
        elif share == 1.0:
            self.mark(COLUMNS.get(phase.split()[0], "other_s"))

    @property
    def total(self) -> float:
        return time.perf_counter() - self.start


def add_flags(parser: argparse.ArgumentParser):
    """The flags of this benchmark alone."""
    flag = parser.add_argument
    flag("--context", type=positive, default=128, help="tokens of the first prompt (default: 128)")
    flag("--cold", action="store_true", help="start without any compiled kernels")
    workload.add_slice_flag(parser)


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """One row."""
    watch = Watch()
    config = config_from(args, EngineConfig)
    with ExitStack() as left:
        if args.cold:
            before = os.environ.get(CACHE)
            os.environ[CACHE] = left.enter_context(tempfile.TemporaryDirectory())
            left.callback(_restore, before)
        return [_row(args, config, watch)]


def _restore(before: str | None) -> None:
    del os.environ[CACHE]
    if before is not None:
        os.environ[CACHE] = before


def _row(args: argparse.Namespace, config: EngineConfig, watch: Watch) -> dict[str, object]:
    from limelight.bench.record import spread
    from limelight.engine.startup import start_engine
    from limelight.ops.ahead import compilations
    from limelight.parallel.mesh import Mesh
    from limelight.progress import Progress

    watch.mark("imports_s")
    mesh = Mesh.slice_of(args.tensor_parallel_slice)
    with compilations() as met:
        started = start_engine(config, Progress(watch.hear), mesh)
        with closing(started.engine):
            watch.mark("other_s")
            _first_request(started, args.context)
            watch.mark("first_request_s")
            total = watch.total
            label = workload.labels(args, config, started.info.dtype, started.plan.kinds)
    if met:
        logger.info("compiled when they were met: %s", ", ".join(sorted(set(met))))
    figures = {"startup_s": total} | watch.seconds
    return (
        label
        | {"context": args.context, "cold": args.cold, "kernels_met": len(met)}
        | {name: spread([seconds]) for name, seconds in figures.items()}
    )


def _first_request(started: "Started", context: int) -> None:
    """From a prompt to its first token."""
    import random

    from limelight.bench.prefill import time_prefill

    prompts = workload.random_prompts(
        random.Random(0), batch=1, context=context, vocab=started.info.vocab_size
    )
    time_prefill(started.engine, prompts)
