"""Long prompts through engines that share experts, against a model divided among the same GPUs:

    python benchmarks/expert_parallel.py benchmarks/configs/beam-nvfp4 --layers 12 \\
        --ranks tp2 dp2+ep2 --batch 8 --context 32768 --max-num-batched-tokens 16384 \\
        --load-format dummy --json expert-parallel.json

`dp2+ep2` is two engines with half of the experts each, `tp2` one engine on two GPUs, `tp2+ep2` the
same with whole experts, `tp2+dp2+ep4` two such. `--layers` keeps the first so many layers of the
model, whose mix of attention is then a little different. Each is started alone; every round has
other prompts, spread evenly over the engines, and ends with the last one's first token.
"""

import argparse
import asyncio
import json
import random
import re
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from limelight.bench import record
from limelight.bench.workload import GREEDY, SHORT, random_prompts
from limelight.config import EngineConfig
from limelight.engine.replicas import Replicas
from limelight.flags import add_config_flags, config_from, spell
from limelight.speculative import NO_DRAFTS
from limelight.types import Request

RANKS = re.compile(r"(tp|dp|ep)(\d+)")


def sizes_of(ranks: str) -> dict[str, int]:
    """Of `tp2+dp2+ep4` the three numbers, 1 for what is not named; `ValueError` if it is not so."""
    parts = [RANKS.fullmatch(part) for part in ranks.split("+")]
    found = {"tp": 1, "dp": 1, "ep": 1} | {m[1]: int(m[2]) for m in parts if m is not None}
    if None in parts or found["ep"] not in (1, found["tp"] * found["dp"]):
        raise ValueError(f"{ranks!r} must be like tp2, dp2+ep2 or tp2+dp2+ep4, with ep = tp * dp")
    return found


def shortened(model: str, layers: int | None, into: Path) -> str:
    """The folder of a model of the same shape with the first `layers` layers alone."""
    if layers is None:
        return model
    config = json.loads((Path(model) / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types"):
        if name in config:
            config[name] = config[name][:layers]
    config["num_hidden_layers"] = layers
    folder = into / f"{Path(model).name}-{layers}-layers"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def until_ready(front: Replicas) -> None:
    while front.status.phase != "ready":
        if front.status.phase == "dead":
            raise ValueError(front.status.detail)
        await asyncio.sleep(0.2)


async def round_of(front: Replicas, prompts: list[list[int]], number: int) -> float:
    """Seconds until every prompt has its token."""

    async def one(index: int, prompt: list[int]) -> None:
        request = Request(
            id=f"bench-{number}-{index}", prompt_token_ids=prompt, params=GREEDY, max_tokens=1,
            seed=0, arrival=time.monotonic(), replica=index % len(front.clients),
        )  # fmt: skip
        async for output in front.submit(request):
            if output.finish_reason != "length":
                raise ValueError(f"a request ended by {output.finish_reason}: {output.error}")

    start = time.perf_counter()
    await asyncio.gather(*(one(*pair) for pair in enumerate(prompts)))
    return time.perf_counter() - start


async def measure(args: argparse.Namespace, config: EngineConfig, ranks: str) -> dict[str, object]:
    """The row of one way to divide the model."""
    sizes, rng = sizes_of(ranks), random.Random(0)
    config = replace(
        config, tensor_parallel_size=sizes["tp"], enable_expert_parallel=sizes["ep"] > 1
    )
    front = Replicas(config, count=sizes["dp"])
    seconds = []
    try:
        await front.start()
        await until_ready(front)
        for number in range(1 + args.rounds):
            prompts = random_prompts(
                rng, batch=args.batch, context=args.context, vocab=front.info.vocab_size
            )
            seconds.append(await round_of(front, prompts, number))
            print(f"{ranks}: {seconds[-1]:.3f} s", file=sys.stderr)
        dtype = front.info.dtype
    finally:
        await front.close()
    kv = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    tokens = args.batch * args.context
    return {
        "model": Path(config.model).name, "ranks": ranks, "moe_backend": config.moe_backend,
        "dispatch": config.expert_dispatch_dtype,
        "weights": "nvfp4" if "nvfp4" in config.model else SHORT[dtype], "kv": SHORT[kv],
        "slice": 1, "batch": args.batch, "context": args.context,
        "ttft_ms": record.spread([1e3 * value for value in seconds[1:]]),
        "tokens_per_s": record.spread([tokens / value for value in seconds[1:]]),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="local folder, bundled model or hub id")
    parser.add_argument("--ranks", nargs="+", default=["tp2", "dp2+ep2"])
    parser.add_argument("--layers", type=int, help="with --load-format dummy and a local folder")
    parser.add_argument("--batch", type=int, default=8, help="prompts at once")
    parser.add_argument("--context", type=int, default=32768, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="timed, after one that is not")
    parser.add_argument("--json", type=Path)
    add_config_flags(parser, EngineConfig, title="engine")
    args = parser.parse_args(spell(argv))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        args.model = shortened(args.model, args.layers, Path(folder))
        config = config_from(
            args, EngineConfig, enable_prefix_caching=False, max_num_seqs=args.batch,
            max_model_len=args.context + 1, speculative_config=NO_DRAFTS,
        )  # fmt: skip
        for ranks in args.ranks:
            rows.append(asyncio.run(measure(args, config, ranks)))
            print(json.dumps(rows[-1]))
    if args.json:
        found = record.record("prefill", argv, rows)
        found["command"] = shlex.join(["python", "benchmarks/expert_parallel.py", *argv])
        record.save(str(args.json), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
