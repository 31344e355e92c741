"""What each kernel and each fusion brings to a decode step:

    python benchmarks/ablation.py benchmarks/configs/flint --load-format dummy --json FIGURES.json

Rows differ in `how` they were measured. "engine": the time between tokens. "graph": replays of a
captured step with one change, ten at a time, in turns with the step as it is (`base_ms`); "plain
NAME" has one operation as its reference. "launched": a step launched kernel by kernel, for what
cannot be captured: how long it takes and for how much of that the device works (`busy_ms`).
"alone": one operation, as `limelight bench ops --plain` has it. `same_tokens` is the share of the
sequences for which a step chooses the token that the step as it is chooses: a change of the order
of sums may change one.
"""

import argparse
import random
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from limelight.bench import floor, ops, record, workload
from limelight.bench.decode import time_decode
from limelight.config import EngineConfig
from limelight.engine.startup import Started
from limelight.flags import add_config_flags
from limelight.ops import (
    attention,
    decode,
    embed,
    experts,
    fp4,
    linear,
    norm,
    op,
    rope,
    router,
    thin,
    use_reference,
)
from limelight.ops.fp4 import FP4
from limelight.runner.inputs import ON_DEVICE, StepTensors
from limelight.runner.launched import Outcome
from limelight.runner.runner import ModelRunner

WARM_TURNS, TURNS = 2, 12
# One at a time, with the host between, differ by 50 us where so many differ by 5.
REPLAYS = 10
LAUNCHED_STEPS, PLAIN_STEPS = 5, 1
ENGINE_STEPS = 60
Change = Callable[[], AbstractContextManager[None]]
Step = Callable[[], Outcome]

# Operations whose references a graph can hold; those with a weight only while it is not NVFP4.
CAPTURABLE: dict[str, op] = {
    "embed": embed.embed,
    "rotation": rope.rotation,
    "norm_route": router.norm_route,
    "add_rmsnorm": norm.add_rmsnorm,
}
CAPTURABLE_PRODUCTS: dict[str, op] = {
    "norm_project": linear.norm_project,
    "norm_swiglu": linear.norm_swiglu,
    "project": linear.project,
    "lm_head": linear.lm_head,
}


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Within, `owner` has `value` as its attribute `name`."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def plain(operation: op) -> AbstractContextManager[None]:
    """Within, an operation is its reference."""
    return replaced(operation, "kernel", operation.reference)


@contextmanager
def dependent_launch_off() -> Iterator[None]:
    """Within, no kernel starts before its predecessor has ended."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("limelight.ops.") and hasattr(module, "pdl"):
                stack.enter_context(replaced(module, "pdl", lambda tensor: {"PDL": False}))
        yield


@contextmanager
def norms_apart() -> Iterator[None]:
    """Within, the norms before projections and routers are kernels of their own."""
    no_bias: dict[int, torch.Tensor] = {}  # made before the capture, so that no step fills it

    def project(h_TD, x_TD, norm_D, weight_ND, *, eps):
        h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
        return h_TD, linear.project.kernel(y_TD, weight_ND)

    def swiglu(h_TD, x_TD, norm_D, gate_up_GD, *, eps, fp32):
        h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
        return h_TD, linear.swiglu_project.kernel(y_TD, gate_up_GD, fp32=fp32)

    def route(h_TD, x_TD, norm_D, router_ED, *, eps, count, routed=None):
        h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
        if len(router_ED) not in no_bias:
            no_bias[len(router_ED)] = router_ED.new_zeros(len(router_ED))
        chosen = {"count": count, "groups": 1, "kept_groups": 1, "routed": routed}
        bias_E = no_bias[len(router_ED)]
        return h_TD, y_TD, *router.route.kernel(y_TD, router_ED, bias_E, **chosen)

    with (
        replaced(linear.norm_project, "kernel", project),
        replaced(linear.norm_swiglu, "kernel", swiglu),
        replaced(router.norm_route, "kernel", route),
    ):
        yield


def _normed(h_TD, x_TD, norm_D, eps):
    if x_TD is None:
        return h_TD, norm.rmsnorm.kernel(h_TD, norm_D, eps=eps)
    return norm.add_rmsnorm.kernel(h_TD, x_TD, norm_D, eps=eps)


@contextmanager
def heads_apart() -> Iterator[None]:
    """Within, norm, rotation and cache write of the heads are a kernel before attention's."""

    def attend(
        qkv_TN, weight_2C, cache, layout, *,
        heads, scale, turn=None, ssmax_T=None, sinks_H=None, gate_bias_H=None,
    ):  # fmt: skip
        q_THC = rope.prepare.kernel(
            qkv_TN, weight_2C, cache, layout.slots_T, heads=heads, turn=turn, ssmax_T=ssmax_T
        )
        out_THC = torch.empty_like(q_THC)
        gate_THC = None if gate_bias_H is None else attention.gate_of(qkv_TN, out_THC)
        end = decode.End(sinks_H, gate_THC, gate_bias_H)
        decode.launch(q_THC.flatten(1), cache, layout, out_THC, end, fresh=None, scale=scale)
        return out_THC

    with replaced(attention.paged_attention, "kernel", attend):
        yield


def experts_sorted() -> AbstractContextManager[None]:
    """Within, the pairs of a token and an expert are sorted however few the tokens."""
    return replaced(experts, "most_rows", lambda size, weight: 0)


def products_by_torch() -> AbstractContextManager[None]:
    """Within, a few rows are multiplied as many are: by torch, or NVFP4's tiles."""
    return replaced(thin, "MOST_COLUMNS", 0)


def always_decoded() -> AbstractContextManager[None]:
    """Within, NVFP4 projections are decoded for any number of rows of a decode step."""
    return replaced(fp4, "CACHED_ROWS", fp4.FUSED_ROWS)


def changes_of(model: torch.nn.Module) -> dict[str, Change]:
    """What a graph can hold, by name."""
    packed = any(type(w) is FP4 for module in model.modules() for w in vars(module).values())
    found: dict[str, Change] = {
        "no dependent launch": dependent_launch_off,
        "norms apart": norms_apart,
        "preparation of heads apart": heads_apart,
        "experts always sorted": experts_sorted,
        "products of few rows as of many": products_by_torch,
    }
    if packed:
        found["no product of unpacked weights"] = always_decoded
    operations = CAPTURABLE if packed else CAPTURABLE | CAPTURABLE_PRODUCTS
    return found | {f"plain {name}": partial(plain, one) for name, one in operations.items()}


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The step as a graph, and the tokens that it chooses."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_R = step().judged.tokens_BQ[:, 0]
    graph.replay()
    return graph, tokens_R


def turns(
    step: Step, base: torch.cuda.CUDAGraph, base_tokens_R: torch.Tensor, change: Change
) -> dict[str, object]:
    """Replays of the step with a change and without, in turns: figures of both."""
    with change():
        graph, tokens_R = captured(step)
    same = (tokens_R == base_tokens_R).float().mean().item()
    pair = (base, graph)
    times = [[replayed_ms(one) for one in pair] for _ in range(WARM_TURNS + TURNS)]
    without, changed = zip(*times[WARM_TURNS:], strict=True)
    figures = {"how": "graph", "step_ms": record.spread(list(changed))}
    return figures | {"base_ms": record.spread(list(without)), "same_tokens": round(same, 3)}


def replayed_ms(graph: torch.cuda.CUDAGraph) -> float:
    """How long one of some replays takes."""

    def replays() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return floor.times_ms(replays, 1)[0] / REPLAYS


def launched(step: Step, base_tokens_R: torch.Tensor, steps: int) -> dict[str, object]:
    """The step without a graph: how long it takes, and how long the device works for it."""
    tokens_R = step().judged.tokens_BQ[:, 0]
    same = (tokens_R == base_tokens_R).float().mean().item()
    times = floor.times_ms(step, steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    busy_us = sum(event.self_device_time_total for event in events)
    kernels = sum(event.count for event in events if event.self_device_time_total)
    figures: dict[str, object] = {"how": "launched", "step_ms": record.spread(times)}
    figures |= {"busy_ms": round(busy_us / 1e3, 3), "kernels": kernels}
    return figures | {"same_tokens": round(same, 3)}


def engine_steps(started: Started, prompts: list[list[int]]) -> dict[str, object]:
    length = started.info.max_model_len
    decoded = time_decode(started.engine, prompts, num_steps=ENGINE_STEPS, max_model_len=length)
    return {"how": "engine", "step_ms": record.spread([1e3 * s for s in decoded.seconds])}


def engine_rows(
    started: Started, runner: ModelRunner, prompts: list[list[int]]
) -> Iterator[dict[str, object]]:
    """Time between tokens: as it is, without the next step's early launch, and without graphs."""
    yield {"change": "as it is"} | engine_steps(started, prompts)
    with replaced(started.engine, "overlap", False):
        yield {"change": "no step ahead"} | engine_steps(started, prompts)
    with replaced(runner, "graphs", None):
        yield {"change": "no graph"} | engine_steps(started, prompts)


def step_rows(runner: ModelRunner, tensors: StepTensors) -> Iterator[dict[str, object]]:
    """The step on these inputs, with one thing changed at a time."""
    # Ids, where the step would read the tokens of its last replay: all replays are of one step.
    tensors.tokens_T.copy_(torch.arange(len(tensors.tokens_T), device=runner.device))
    step = partial(runner.decode, tensors)
    base, tokens_R = captured(step)
    base_tokens_R = tokens_R.clone()
    for name, change in {"as it is": nullcontext, **changes_of(runner.model)}.items():
        yield {"change": name} | turns(step, base, base_tokens_R, change)
        torch.cuda.empty_cache()
    yield {"change": "as it is"} | launched(step, base_tokens_R, LAUNCHED_STEPS)
    with use_reference():
        yield {"change": "all plain"} | launched(step, base_tokens_R, PLAIN_STEPS)


def rows_of(started: Started, prompts: list[list[int]]) -> Iterator[dict[str, object]]:
    runner = floor.runner_of(started)
    yield from engine_rows(started, runner, prompts)
    # The inputs of the last step that the engine ran are still on the device.
    engine_steps(started, prompts)
    tensors, _ = runner.inputs.carved[ON_DEVICE, (len(prompts),) * 3]
    with torch.inference_mode():
        yield from step_rows(runner, tensors)
    for row in ops.rows_of(started, prompts, plain=True):
        yield {"change": row.pop("op"), "how": "alone"} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with config.json, and weights unless they are dummy")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--json", required=True, metavar="FILE")
    workload.add_slice_flag(parser)
    add_config_flags(parser, EngineConfig, title="engine")
    args = parser.parse_args()
    started, config = workload.open_engine(args)
    label = workload.labels(args, config, started.info.dtype, started.plan.kinds)
    rng, rows = random.Random(0), []
    for context in args.context:
        for batch in args.batch:
            prompts = workload.random_prompts(
                rng, batch=batch, context=context, vocab=started.info.vocab_size
            )
            for row in rows_of(started, prompts):
                rows.append(label | {"batch": batch, "context": context} | row)
                print(rows[-1], flush=True)
                command = shlex.join(["python", *sys.argv])
                record.save(args.json, record.record("ablation", [], rows) | {"command": command})


if __name__ == "__main__":
    main()
