"""What the decode and the prefill benchmark share: an engine, random prompts, and row labels."""

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from limelight.config import EngineConfig
from limelight.flags import config_from, positive
from limelight.speculative import NO_DRAFTS
from limelight.types import Output, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from limelight.engine.memory import WeightKind
    from limelight.engine.startup import Started

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
SHORT = {"bfloat16": "bf16", "float32": "fp32", "fp8": "fp8", "fp8_e4m3": "fp8"}


class Steps(Protocol):
    """What a benchmark needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> Output | None: ...
    def step(self) -> list[Output]: ...


def add_slice_flag(parser: argparse.ArgumentParser):
    """The flag of benchmarks that can run one rank's share of a model alone."""
    parser.add_argument(
        "--tensor-parallel-slice", type=positive, default=1, metavar="N",
        help="run the share of one of N devices, without the others (default: 1, the whole model)",
    )  # fmt: skip


def open_engine(args: argparse.Namespace, *, alone: bool = False) -> "tuple[Started, EngineConfig]":
    """The engine in process, with room for the largest batch and without prefix caching.

    With `alone`, what is measured needs the whole model in this process.
    """
    config = config_from(
        args, EngineConfig, enable_prefix_caching=False, max_num_seqs=max(args.batch),
        speculative_config=NO_DRAFTS,
    )  # fmt: skip
    if config.speculative is not None:
        raise ValueError("steps are timed without drafts here; limelight bench spec has them")
    if alone:
        check_alone(config)
    check_ranks(args, config)
    from limelight.engine.startup import start_engine
    from limelight.parallel.mesh import Mesh
    from limelight.progress import Progress

    mesh = Mesh.slice_of(args.tensor_parallel_slice)
    return start_engine(config, Progress(quiet=False), mesh), config


def check_ranks(args: argparse.Namespace, config: EngineConfig) -> None:
    """Refuse all ranks and one of them at once."""
    if config.tensor_parallel_size > 1 and args.tensor_parallel_slice > 1:
        raise ValueError("-tp N runs all ranks, --tensor-parallel-slice N one of them: choose one")


def check_alone(config: EngineConfig) -> None:
    """Refuse more ranks than this process."""
    if config.tensor_parallel_size > 1:
        raise ValueError(
            "this looks into one process: --tensor-parallel-slice N takes one rank's share; "
            "limelight bench decode, prefill, spec and serve time all ranks of -tp N"
        )


def labels(
    args: argparse.Namespace, config: EngineConfig, dtype: str, kinds: "Sequence[WeightKind]"
) -> dict[str, object]:
    """The columns that say what ran: model, weights, KV cache, and how many share the model."""
    kv = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    model = Path(config.model).name.lower()
    slice_of = args.tensor_parallel_slice
    formats = ", ".join(kind.format for kind in kinds)
    weights = next((form for form in ("nvfp4", "mxfp8") if form in formats), SHORT[dtype])
    ranks = config.tensor_parallel_size
    return {"model": model, "weights": weights, "kv": SHORT[kv], "slice": slice_of} | (
        {"ranks": ranks} if ranks > 1 else {}
    )


def random_prompts(rng: random.Random, *, batch: int, context: int, vocab: int) -> list[list[int]]:
    """`batch` prompts of `context` uniformly random token ids."""
    return [rng.choices(range(vocab), k=context) for _ in range(batch)]


def submit(
    engine: Steps, prompts: list[list[int]], *, max_tokens: int, logprobs: int | None = None
) -> dict[str, list[int]]:
    """Add a greedy request for each prompt; where the tokens of each are to be collected."""
    for index, prompt in enumerate(prompts):
        engine.add(
            Request(
                id=f"bench-{index}",
                prompt_token_ids=prompt,
                params=replace(GREEDY, logprobs=logprobs),
                max_tokens=max_tokens,
                seed=0,
                arrival=time.monotonic(),
            )
        )
    return {f"bench-{index}": [] for index in range(len(prompts))}


def collect(outputs: list[Output], tokens: dict[str, list[int]]):
    """Put new tokens to their requests; `ValueError` if one ended before its length."""
    for output in outputs:
        if output.error is not None or output.finish_reason not in (None, "length"):
            raise ValueError(f"a request ended by {output.finish_reason}: {output.error}")
        tokens[output.request_id] += output.token_ids
