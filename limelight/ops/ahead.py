"""Recorded launches, compiled by many processes into the cache in which Triton looks first.

No process needs a device, and those forked here must have none: kernels cannot be sent to another
process, but a fork has them already.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from limelight.ops.absent import AbsentDriver, Launch, replaced


def compile_launch(launch: Launch) -> Any:
    """What Triton makes of it, or has made of it before; whatever the compiler objects to."""
    from triton.runtime.driver import driver

    driver.set_active(AbsentDriver(launch.capability))
    return launch.kernel.run(*launch.args, grid=(1, 1, 1), warmup=True, **launch.options)


def make_stub(compiled: Any) -> None:
    """The C code that hands a kernel its arguments, which Triton compiles for each signature too;
    this takes the driver's library."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


def compile_all(launches: Sequence[Launch], each: Callable[[Launch], None], processes: int) -> None:
    """Call `each` for every launch, in so many processes, in order; one that dies takes its own
    launch along."""
    fork = multiprocessing.get_context("fork")
    following = fork.Value("i", 0)

    def work() -> None:
        while True:
            with following.get_lock():
                at = following.value
                following.value += 1
            if at >= len(launches):
                return
            each(launches[at])

    workers = [fork.Process(target=work) for _ in range(min(processes, len(launches)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of kernels that are compiled within, for they are not in the cache."""
    from triton import knobs

    names: list[str] = []
    other = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **about: object) -> None:
        if not cache_hit:
            names.append(src.name)
        if other is not None:
            other(src=src, cache_hit=cache_hit, **about)

    with replaced(knobs.compilation, {"listener": listen}):
        yield names
