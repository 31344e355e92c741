"""`limelight bench prefill`: from submitting prompts until the last of them has a first token."""

import argparse
import random
import time
from contextlib import closing
from typing import TYPE_CHECKING

from limelight.bench import workload
from limelight.bench.workload import Steps
from limelight.flags import positive

if TYPE_CHECKING:
    from limelight.config import EngineConfig
    from limelight.engine.startup import Started


def add_flags(parser: argparse.ArgumentParser):
    """The flags of this benchmark alone."""
    flag = parser.add_argument
    flag("--batch", type=positive, nargs="+", default=[1, 8], help="prompts at once (default: 1 8)")
    flag(
        "--context", type=positive, nargs="+", default=[2048], help="prompt tokens (default: 2048)"
    )
    flag("--rounds", type=positive, default=5, help="timed rounds, after one untimed (default: 5)")
    workload.add_slice_flag(parser)
    flag("--breakdown", action="store_true", help="also profile a round: kernels, and attention")
    flag("--prompt-seed", type=int, default=0, help="seed of the random prompts (default: 0)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each batch and context."""
    started, config = workload.open_engine(args, alone=args.breakdown)
    with closing(started.engine):
        return _rows(args, started, config)


def _rows(
    args: argparse.Namespace, started: "Started", config: "EngineConfig"
) -> list[dict[str, object]]:
    from limelight.bench.record import spread

    rng = random.Random(args.prompt_seed)
    rows = []
    label = workload.labels(args, config, started.info.dtype, started.plan.kinds)
    for context in args.context:
        for batch in args.batch:
            seconds = []
            for _ in range(1 + args.rounds):
                prompts = workload.random_prompts(
                    rng, batch=batch, context=context, vocab=started.info.vocab_size
                )
                seconds.append(time_prefill(started.engine, prompts))
            row = {"batch": batch, "context": context, "engine": "limelight"}
            figures: dict[str, object] = {
                "ttft_ms": spread([1e3 * value for value in seconds[1:]]),
                "tokens_per_s": spread([batch * context / value for value in seconds[1:]]),
            }
            if started.on_gpu and args.breakdown:
                from limelight.bench import profiled

                share = args.tensor_parallel_slice
                figures |= profiled.prefill(started, prompts, slice_of=share)
            rows.append(label | row | figures)
    return rows


def time_prefill(engine: Steps, prompts: list[list[int]]) -> float:
    """Seconds from submitting all `prompts` until the last one has its token."""
    start = time.perf_counter()
    tokens = workload.submit(engine, prompts, max_tokens=1)
    while not all(tokens.values()):
        workload.collect(engine.step(), tokens)
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return seconds
