"""Recorded launches, compiled by many processes into the cache in which Triton looks first.

No process needs a device, and those forked here must have none: kernels cannot be sent to another
process, but a fork has them already.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from limelight.ops.absent import AbsentDriver, Launch, replaced


def settle_keys() -> None:
    """Give the kernels of all loaded modules the keys that they have in every process.

    Triton puts constants of the functions that a kernel calls into its key only if these have keys
    already, so it would depend on what was launched before. Here callers come after what they call.
    """
    from triton.runtime.jit import JITCallable

    settled: set[int] = set()

    def settle(function: Any) -> None:
        if id(function) in settled:
            return
        settled.add(id(function))
        called = function.fn.__globals__
        for name in function.fn.__code__.co_names:
            if isinstance(called.get(name), JITCallable):
                settle(called[name])
        _ = function.cache_key

    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            for value in list(vars(module).values()):
                if isinstance(value, JITCallable):
                    settle(value)


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
    settle_keys()
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
