"""`limelight bench decode`: the time of a step in which every sequence gets one token."""

import argparse
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from limelight.bench import workload
from limelight.bench.workload import Steps
from limelight.flags import positive

if TYPE_CHECKING:
    from limelight.config import EngineConfig
    from limelight.engine.startup import Started

# The first steps after a prefill still warm caches and clocks; they are not counted.
DROPPED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Decoded:
    """Seconds of each counted step, and all tokens that each prompt got."""

    seconds: list[float]
    token_ids: list[list[int]]


def add_flags(parser: argparse.ArgumentParser):
    """The flags of this benchmark alone."""
    flag = parser.add_argument
    flag(
        "--batch", type=positive, nargs="+", default=[1, 8], help="sequences at once (default: 1 8)"
    )
    flag(
        "--context", type=positive, nargs="+", default=[1024], help="prompt tokens (default: 1024)"
    )
    flag("--num-tokens", type=positive, default=150, help="steps to time in a round (default: 150)")
    flag("--rounds", type=positive, default=1, help="rounds, contestants in turn (default: 1)")
    flag("--compare", choices=["transformers"], help="time its generate too, in turn")
    workload.add_slice_flag(parser)
    flag("--logprobs", type=int, help="tell so many log-probabilities with each token")
    flag("--breakdown", action="store_true", help="also tell each kernel's share of the step")
    flag("--prompt-seed", type=int, default=0, help="seed of the random prompts (default: 0)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each batch, context and contestant."""
    if args.compare and getattr(args, "load_format", "auto") == "dummy":
        raise ValueError("--compare needs real weights; leave out --load-format dummy")
    started, config = workload.open_engine(args, alone=args.breakdown)
    with closing(started.engine):
        return _rows(args, started, config)


def _rows(
    args: argparse.Namespace, started: "Started", config: "EngineConfig"
) -> list[dict[str, object]]:
    engine, info = started.engine, started.info
    contestants = {"limelight": lambda prompts: time_decode(
        engine, prompts, num_steps=args.num_tokens, max_model_len=info.max_model_len,
        logprobs=args.logprobs,
    )}  # fmt: skip
    if args.compare:
        from limelight.bench.peer import Transformers

        peer = Transformers(config, dtype=info.dtype)
        contestants[args.compare] = lambda prompts: peer.time_decode(
            prompts, num_steps=args.num_tokens
        )
    rng, rows = random.Random(args.prompt_seed), []
    label = workload.labels(args, config, started.info.dtype, started.plan.kinds)
    for context in args.context:
        for batch in args.batch:
            prompts = workload.random_prompts(
                rng, batch=batch, context=context, vocab=info.vocab_size
            )
            found = compare(contestants, prompts, rounds=args.rounds)
            # The other ranks take no part in what looks into this one.
            if started.on_gpu and config.tensor_parallel_size == 1:
                from limelight.bench import floor

                found[0] |= floor.figures(started, prompts, found[0]["step_ms"])
                if args.breakdown:
                    found[0]["kernels"] = floor.kernels(started, prompts)
            where = {"batch": batch, "context": context}
            if args.logprobs is not None:
                where["logprobs"] = args.logprobs
            rows += [label | where | row for row in found]
    return rows


def compare(
    contestants: dict[str, Callable[[list[list[int]]], Decoded]],
    prompts: list[list[int]],
    *,
    rounds: int,
) -> list[dict[str, object]]:
    """Let all decode the same prompts in turn, `rounds` times; a row of figures for each."""
    from limelight.bench.record import spread

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(rounds):
        for name, time_one in contestants.items():
            decoded = time_one(prompts)
            seconds[name] += decoded.seconds
            tokens[name] = decoded.token_ids
    first, *others = tokens.values()
    rows = []
    for name, values in seconds.items():
        row: dict[str, object] = {
            "engine": name,
            "step_ms": spread([1e3 * value for value in values]),
            "tokens_per_s": spread([len(prompts) / value for value in values]),
        }
        if others:
            row["same_tokens"] = agreement(first, tokens[name])
        rows.append(row)
    return rows


def agreement(left: list[list[int]], right: list[list[int]]) -> float:
    """The share of positions before the first difference, over all sequences; 1 if all agree."""
    same = total = 0
    for ours, theirs in zip(left, right, strict=True):
        pairs = list(zip(ours, theirs, strict=False))
        differs = [index for index, (a, b) in enumerate(pairs) if a != b]
        same += differs[0] if differs else len(pairs)
        total += len(pairs)
    return round(same / total, 4)


def time_decode(
    engine: Steps,
    prompts: list[list[int]],
    *,
    num_steps: int,
    max_model_len: int,
    around: AbstractContextManager[object] | None = None,
    logprobs: int | None = None,
) -> Decoded:
    """Time `num_steps` steps in which all `prompts` decode at once, `around` about them all, each
    token with so many `logprobs`.

    Raises `ValueError` if they cannot: too little cache for all, or too short a model.
    """
    context = max(map(len, prompts))
    if context + DROPPED_STEPS + num_steps > max_model_len:
        raise ValueError(
            f"a context of {context} and {DROPPED_STEPS + num_steps} decode steps "
            f"do not fit the model's length of {max_model_len}"
        )
    most = max_model_len - context
    tokens = workload.submit(engine, prompts, max_tokens=most, logprobs=logprobs)
    try:
        while not all(tokens.values()):
            workload.collect(engine.step(), tokens)
        with around or nullcontext():
            seconds = _time_steps(engine, tokens, num_steps)
    finally:
        for request_id in tokens:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
    return Decoded(seconds, list(tokens.values()))


def _time_steps(engine: Steps, tokens: dict[str, list[int]], num_steps: int) -> list[float]:
    seconds = []
    for index in range(DROPPED_STEPS + num_steps):
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        workload.collect(outputs, tokens)
        if index >= DROPPED_STEPS and len(outputs) != len(tokens):
            raise ValueError(
                f"only {len(outputs)} of {len(tokens)} sequences decoded in one step: the KV cache "
                f"or --max-num-seqs is too small, or the model's length is used up"
            )
    return seconds[DROPPED_STEPS:]
