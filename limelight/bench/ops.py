"""`limelight bench ops`: each operation of a decode step alone, beside the memory's floor.

A step's calls are recorded and those of one operation, over all layers, replayed as one graph: the
weights of the layers follow each other as in a step, so no cache serves them.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from limelight.bench import workload
from limelight.flags import positive

if TYPE_CHECKING:
    from limelight.engine.startup import Started
    from limelight.ops import Call

REPLAYS = 50
WARM_REPLAYS = 5
# A plain form may launch thousands of kernels: so many of the calls are enough.
PLAIN_CALLS = 16


def add_flags(parser: argparse.ArgumentParser):
    """The flags of this benchmark alone."""
    flag = parser.add_argument
    flag(
        "--batch", type=positive, nargs="+", default=[1, 8], help="sequences at once (default: 1 8)"
    )
    flag(
        "--context", type=positive, nargs="+", default=[1024], help="prompt tokens (default: 1024)"
    )
    workload.add_slice_flag(parser)
    flag("--plain", action="store_true", help="also time each operation's plain torch form")
    flag("--prompt-seed", type=int, default=0, help="seed of the random prompts (default: 0)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each batch, context and operation."""
    started, config = workload.open_engine(args, alone=True)
    if not started.on_gpu:
        raise ValueError("bench ops times kernels, which need a GPU; a CPU runs the references")
    rng = random.Random(args.prompt_seed)
    label = workload.labels(args, config, started.info.dtype, started.plan.kinds)
    rows: list[dict[str, object]] = []
    for context in args.context:
        for batch in args.batch:
            prompts = workload.random_prompts(
                rng, batch=batch, context=context, vocab=started.info.vocab_size
            )
            shape = {"batch": batch, "context": context}
            rows += [label | shape | row for row in rows_of(started, prompts, plain=args.plain)]
    return rows


def rows_of(
    started: "Started", prompts: list[list[int]], *, plain: bool
) -> Iterator[dict[str, object]]:
    """A row for each operation of a decode step of these prompts."""
    from limelight.bench import floor

    bandwidth = floor.read_bandwidth(floor.runner_of(started).device)
    for name, same in _by_kind(floor.calls_of_a_step(started, prompts)).items():
        row = {"op": name, "calls": len(same)} | time_calls(same, len(prompts[0]), bandwidth)
        yield row | (time_plain(same) if plain else {})


def _by_kind(calls: "list[Call]") -> "dict[str, list[Call]]":
    """The calls by operation, and attention's by whether it has a window."""
    kinds: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        kinds[_kind(call)].append(call)
    return kinds


def _kind(call: "Call") -> str:
    from limelight.ops.paging import PagedLayout

    for value in call.args:
        if isinstance(value, PagedLayout):
            return f"{call.name}, {'full' if value.window is None else 'window'}"
    return call.name


def time_calls(calls: "list[Call]", context: int, bandwidth: float) -> dict[str, object]:
    """Microseconds a call, the bytes that one must read, and the share of the ceiling."""
    import torch

    from limelight.bench.floor import times_ms
    from limelight.bench.record import spread

    def repeat() -> None:
        for call in calls:
            call.kernel(*call.args, **call.kwargs)

    with torch.inference_mode():
        repeat()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeat()
        milliseconds = times_ms(graph.replay, WARM_REPLAYS + REPLAYS)[WARM_REPLAYS:]
    figures = spread([1e3 * value / len(calls) for value in milliseconds])
    nbytes = sum(bytes_of(call, context) for call in calls) / len(calls)
    return {
        "us": figures,
        "mb": round(nbytes / 1e6, 3),
        "gb_per_s": round(nbytes / figures["median"] / 1e3),
        "of_ceiling": round(nbytes / bandwidth / (1e-6 * figures["median"]), 3),
    }


def time_plain(calls: "list[Call]") -> dict[str, object]:
    """Microseconds that the device works for a call's plain form, without what lies between.

    The mean of at most PLAIN_CALLS calls, spread over all.
    """
    import torch

    from limelight.ops import use_reference

    calls = calls[:: -(-len(calls) // PLAIN_CALLS)]

    def repeat() -> None:
        for call in calls:
            call.reference(*call.args, **call.kwargs)

    with torch.inference_mode(), use_reference():
        repeat()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            repeat()
            torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    return {"plain_us": round(total / len(calls), 2)}


def bytes_of(call: "Call", context: int) -> int:
    """The bytes of a call's inputs: of experts those chosen, of a cache the keys that are seen."""
    import torch

    from limelight.ops.fp4 import FP4
    from limelight.ops.mxfp8 import MXFP8
    from limelight.ops.paging import LayerCache, PagedLayout

    values = [*call.args, *call.kwargs.values()]
    total = sum(value.nbytes for value in values if isinstance(value, torch.Tensor | FP4 | MXFP8))
    if call.name == "moe":
        gate_up_EGD, down_EDF, ids_TN = (call.args[i] for i in (1, 2, 4))
        assert isinstance(gate_up_EGD, torch.Tensor | FP4 | MXFP8)
        assert isinstance(down_EDF, torch.Tensor | FP4 | MXFP8) and isinstance(ids_TN, torch.Tensor)
        unread = len(gate_up_EGD) - len(ids_TN.unique())
        total -= unread * (gate_up_EGD[0].nbytes + down_EDF[0].nbytes)
    caches = [value for value in values if isinstance(value, LayerCache)]
    layouts = [value for value in values if isinstance(value, PagedLayout)]
    for cache, layout in zip(caches, layouts, strict=True):
        keys = context if layout.window is None else min(context, layout.window)
        total += keys * layout.few * cache.pairs_2KSC[:, :, 0].nbytes
    return total
