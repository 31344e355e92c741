"""The least time that the memory of a device allows a decode step: the bytes it must read.

Each weight is read once, of routed experts those that some token chose, and each sequence's keys
and values once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from limelight.bench.decode import DROPPED_STEPS, time_decode
from limelight.bench.record import spread
from limelight.engine.startup import Started
from limelight.models.layers import Experts
from limelight.models.loader import Model
from limelight.ops import Call, record_calls
from limelight.ops.lora import without_adapters
from limelight.runner.launched import Launched
from limelight.runner.runner import ModelRunner
from limelight.steps import StepPlan

READ_BYTES = 2**32
READ_ROUNDS = 5
MATRIX_SIZE = 8192
MATRIX_ROUNDS = 10
PROFILED_STEPS = 20


def figures(started: Started, prompts: list[list[int]], step_ms: object) -> dict[str, object]:
    """The floor of such a step, its share of the median, and the experts that a layer read."""
    assert isinstance(step_ms, dict)
    runner = runner_of(started)
    graphs, runner.graphs = runner.graphs, None
    with DistinctExperts(runner.model) as seen:
        length = started.info.max_model_len
        time_decode(started.engine, prompts, num_steps=1, max_model_len=length)
    runner.graphs = graphs
    forward_ms = replay_ms(runner, len(prompts))
    block = started.plan.block
    contexts = [len(prompt) + DROPPED_STEPS for prompt in prompts]
    nbytes = weight_bytes(runner.model, seen.counts) + cache_bytes(
        runner.model.config.windows, block.nbytes // (block.rows * block.size), contexts
    )
    floor_ms = 1e3 * nbytes / read_bandwidth(runner.device)
    sparse = max(1, len(seen.counts))
    return {
        **({"forward_ms": spread(forward_ms)} if forward_ms else {}),
        "floor_ms": spread([floor_ms]),
        "of_floor": round(floor_ms / step_ms["median"], 3),
        "experts_read": round(sum(seen.counts) / sparse, 1),
    }


def calls_of_a_step(started: Started, prompts: list[list[int]]) -> list[Call]:
    """The operations of one decode step of these prompts, run without a graph."""
    runner = runner_of(started)
    last: list[Call] = []
    graphs = runner.graphs

    def recorded(plan: StepPlan) -> Launched:
        with record_calls() as calls:
            launched = ModelRunner.launch(runner, plan)
        last[:] = calls
        return launched

    runner.graphs, runner.launch = None, recorded  # type: ignore[method-assign]
    time_decode(started.engine, prompts, num_steps=1, max_model_len=started.info.max_model_len)
    runner.graphs = graphs
    del runner.launch
    return last


def runner_of(started: Started) -> ModelRunner:
    assert isinstance(started.engine.runner, ModelRunner)
    return started.engine.runner


def replay_ms(runner: ModelRunner, batch: int) -> list[float]:
    """Times of the step's graph alone, on the inputs of the last step; empty without a graph."""
    if runner.graphs is None or runner.graphs.size_for(batch) != batch:
        return []
    graphs = runner.graphs
    return times_ms(lambda: graphs.replay(batch), PROFILED_STEPS)


def times_ms(work: Callable[[], object], rounds: int) -> list[float]:
    """How long the device takes for what `work` launches, each of `rounds` times."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def kernels(started: Started, prompts: list[list[int]]) -> list[dict[str, object]]:
    """Each kernel of a decode step: its launches and microseconds a step, the longest first."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    length = started.info.max_model_len
    time_decode(
        started.engine, prompts, num_steps=PROFILED_STEPS, max_model_len=length, around=profile
    )
    return kernels_in(profile, DROPPED_STEPS + PROFILED_STEPS)


def kernels_in(profile: torch.profiler.profile, steps: int) -> list[dict[str, object]]:
    """Of what a profiler saw of so many steps, each kernel's launches and microseconds in one: how
    long it ran, and what it `adds` to all others, for one may begin while another runs."""
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]
    adds = added_us(spans)
    return [
        {
            "name": event.key[:80],
            "launches": round(event.count / steps, 2),
            "us": round(event.self_device_time_total / steps, 2),
            "adds_us": round(adds.get(event.key, 0.0) / steps, 2),
        }
        for event in events
        if event.self_device_time_total
    ]


def added_us(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """By how much those of each name end later than all that ended before.

    Of spans [start, end] that begin and end in one order, as kernels of a stream do, that is
    together the time in which any ran.
    """
    added: dict[str, float] = defaultdict(float)
    last = -math.inf
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        added[name] += end - max(last, start)
        last = max(last, end)
    return added


@lru_cache
def read_bandwidth(device: torch.device) -> float:
    """Bytes a second at which a sum reads memory: the best of a few."""
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    return 1e3 * READ_BYTES / min(times_ms(data.sum, READ_ROUNDS))


@lru_cache
def matrix_rate(device: torch.device) -> float:
    """Operations a second of a large product of BF16 matrices: the best of a few."""
    left, right = (
        torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    best_ms = min(times_ms(lambda: left @ right, MATRIX_ROUNDS))
    return 2 * MATRIX_SIZE**3 / (1e-3 * best_ms)


def weight_bytes(model: Model, experts_read: list[int]) -> int:
    """Bytes of weights that a step reads; `experts_read` has each sparse layer's distinct experts.

    Of the embedding a step reads only a row for each token, which is nothing beside the rest.
    """
    sparse = [module for module in model.modules() if isinstance(module, Experts)]
    dense = sum(
        target.into.nbytes
        for name, target in model.targets.items()
        if ".experts." not in name and "embed_tokens" not in name
    )
    routed = sum(
        count * sum(without_adapters(weight)[0].nbytes for weight in (module.gate_up, module.down))
        for count, module in zip(experts_read, sparse, strict=True)
    )
    return dense + routed


def cache_bytes(windows: list[int | None], bytes_per_token: int, contexts: list[int]) -> int:
    """Bytes of keys and values that a step reads; `bytes_per_token` are those of one layer."""
    return bytes_per_token * sum(
        context if window is None else min(window, context)
        for window in windows
        for context in contexts
    )


class DistinctExperts:
    """Counts, within the block, how many experts of each sparse layer the last step chose."""

    def __init__(self, model: Model):
        self.modules = [module for module in model.modules() if isinstance(module, Experts)]
        self.counts = [0] * len(self.modules)

    def __enter__(self) -> "DistinctExperts":
        self.hooks = [
            module.register_forward_pre_hook(self._hook(index))
            for index, module in enumerate(self.modules)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, index: int):
        def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self.counts[index] = len(args[2].unique())

        return count
