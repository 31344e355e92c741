"""`limelight bench spec`: how fast a steady load is served without drafts and with them.

The load is a closed loop: so many clients, each of which asks anew once it is answered. An engine
that drafts takes turns between verifying all drafts and as many as pay; one without drafts stands
beside it where both fit into memory, else it comes before.
"""

import argparse
import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from limelight.bench import workload
from limelight.config import EngineConfig
from limelight.flags import config_from, positive
from limelight.speculative import NO_DRAFTS
from limelight.types import SamplingParams

if TYPE_CHECKING:
    from limelight.bench.closed_loop import Window
    from limelight.bench.contestants import Contestant, Entry
    from limelight.bench.questions import Questions

logger = logging.getLogger(__name__)

WAYS = ("none", "fixed", "adaptive")
KINDS = ("mixed", "code", "sort", "random")
Windows = dict[tuple[int, str], "list[Window]"]  # of each round, by clients and way


def add_flags(parser: argparse.ArgumentParser):
    """The flags of this benchmark alone."""
    flag = parser.add_argument
    flag(
        "--concurrency", type=positive, nargs="+", default=[1, 8, 32, 128],
        help="clients at once (default: 1 8 32 128)",
    )  # fmt: skip
    flag(
        "--drafts", nargs="+", choices=WAYS, default=list(WAYS),
        help="none; fixed: all are verified; adaptive: those that pay (default: all three)",
    )  # fmt: skip
    flag(
        "--tasks", choices=KINDS,
        help="prompts: code and words to sort, or random ids (default: mixed, but random for "
        "dummy weights and models without a tokenizer)",
    )  # fmt: skip
    flag("--prompt-len", type=positive, help="prompt tokens (default: 1024; bundled models: 256)")
    flag("--output-len", type=positive, help="most tokens out (default: 4096; bundled models: 128)")
    flag(
        "--num-requests", type=positive,
        help="answers in a round after the first of each client (default: 2 a client, at least 8)",
    )  # fmt: skip
    flag("--rounds", type=positive, default=1, help="rounds, ways in turn (default: 1)")
    flag("--temperature", type=float, default=0.0, help="default: 0, the likeliest")
    workload.add_slice_flag(parser)
    flag("--prompt-seed", type=int, default=0, help="seed of the prompts (default: 0)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each number of clients and way to draft."""
    _check(args)
    config = config_from(
        args, EngineConfig, enable_prefix_caching=False, max_num_seqs=max(args.concurrency)
    )
    workload.check_ranks(args, config)
    from limelight.bench.contestants import Contestant, free, turns
    from limelight.bench.questions import Asking, Questions
    from limelight.parallel.mesh import Mesh

    mesh = Mesh.slice_of(args.tensor_parallel_slice)
    entries = _entries(args, config)
    asking = Asking(
        args.tasks, args.prompt_len, args.output_len, args.temperature, args.prompt_seed
    )
    questions = Questions.of(asking, config, max(args.concurrency))
    windows: Windows = {}
    label: dict[str, object] = {}
    for turn in turns(entries, mesh):
        contestants = [Contestant.start(entry, mesh) for entry in turn]
        _measure(args, contestants, questions, windows)
        info, plan = contestants[-1].started.info, contestants[-1].started.plan
        label = workload.labels(args, config, info.dtype, plan.kinds)
        for one in contestants:
            one.started.engine.close()
        del contestants, one
        free()
    return _rows(args, label | questions.label, windows)


def _measure(
    args: argparse.Namespace,
    contestants: "list[Contestant]",
    questions: "Questions",
    windows: Windows,
) -> None:
    """All loads, in each of which the ways take turns."""
    for one in contestants:
        one.check(
            prompt=questions.longest, answer=questions.output_len, clients=max(args.concurrency)
        )
    turns = [(one, way) for one in contestants for way in one.ways]
    from limelight.bench.acceptance import rate

    for clients in args.concurrency:
        count = args.num_requests or max(2 * clients, 8)
        for round_ in range(args.rounds):
            for one, way in turns:
                requests = questions.requests(clients, round_)
                window = one.watch(way, requests, clients, count)
                windows.setdefault((clients, way), []).append(window)
                logger.info("%d clients, %s: %.0f tokens a second", clients, way, rate(window))


def _check(args: argparse.Namespace) -> None:
    for name in ("concurrency", "rounds", "prompt_len", "output_len", "num_requests"):
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    SamplingParams(temperature=args.temperature)


def _entries(args: argparse.Namespace, config: EngineConfig) -> "list[Entry]":
    """One without drafts, and one with them whose steps the adaptive way can time."""
    from limelight.bench.contestants import Entry

    found = []
    if "none" in args.drafts:
        plain = replace(config, speculative_config=NO_DRAFTS)
        found.append(Entry(plain, ["none"]))
    ways = [way for way in WAYS[1:] if way in args.drafts]
    if not ways:
        return found
    chosen = config.speculative
    if chosen is None:
        raise ValueError(
            "--drafts fixed and adaptive need --speculative-config with a drafter as model; or "
            "give --drafts none"
        )
    if chosen.synthetic_acceptance_rates is not None and args.temperature > 0:
        raise ValueError("synthetic acceptance knows no --temperature; leave it out")
    given = {key: value for key, value in asdict(chosen).items() if value is not None}
    given["enable_adaptive_verification"] = "adaptive" in ways
    return [*found, Entry(replace(config, speculative_config=given), ways)]


def _rows(
    args: argparse.Namespace, label: dict[str, object], windows: Windows
) -> list[dict[str, object]]:
    """Figures of all rounds, by clients and way; speed also against that without drafts."""
    from limelight.bench.acceptance import figures, rate
    from limelight.bench.record import spread

    found = []
    for clients in args.concurrency:
        plain = windows.get((clients, "none"), [])
        for way in [way for way in WAYS if way in args.drafts]:
            own = windows[clients, way]
            row = label | {"batch": clients, "drafts": way} | figures(own)
            if plain and way != "none":
                pairs = zip(own, plain, strict=True)
                row["speedup"] = spread([rate(one) / rate(other) for one, other in pairs])
            found.append(row)
    return found
