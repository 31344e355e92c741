"""Functions run by several ranks at once, joined by gloo: forks of the test's process."""

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 60


def run_ranks(size: int, work: Callable[..., object], *args: object) -> list[object]:
    """What `work(rank, *args)` returns in each rank; the first error of any is the test's."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=_rank, args=(rank, size, folder, results, work, args), daemon=True)
            for rank in range(size)
        ]
        for one in ranks:
            one.start()
        try:
            found = dict(_result(results) for _ in ranks)
        finally:
            for one in ranks:
                one.kill()
            for one in ranks:
                one.join()
    return [found[rank] for rank in range(size)]


def _result(results) -> tuple[int, object]:
    try:
        rank, error, value = results.get(timeout=SECONDS)
    except queue.Empty:
        raise AssertionError(f"a rank has not ended within {SECONDS} s") from None
    assert error is None, f"rank {rank}: {error}"
    return rank, value


def _rank(rank: int, size: int, folder: str, results, work, args) -> None:
    # A fork has none of the threads that OpenMP believes it has.
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
        )
        with torch.inference_mode():
            value = work(rank, *args)
        results.put((rank, None, value))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    # Others may still need this one; all are ended together.
    time.sleep(SECONDS)
