"""What LoRA adapters cost a decode step:

    python benchmarks/adapters.py benchmarks/configs/flint --load-format dummy \\
        --batch 1 8 64 --rank 16 --adapters 2 --json FIGURES.json

Rows differ in `how`: "none" (a server without --enable-lora), "room" (with it, and no request names
an adapter), "adapted" (all requests do, in turn), "merged" (one, with --merge-lora-experts). The
adapters are random, of all that can be adapted; they are written to a temporary folder.
"""

import argparse
import random
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from limelight.bench import record, workload
from limelight.bench.decode import time_decode
from limelight.config import EngineConfig
from limelight.engine.engine import Engine
from limelight.engine.startup import Started
from limelight.flags import add_config_flags
from limelight.models.adapters import AdapterRoom
from limelight.runner.runner import ModelRunner
from limelight.types import LoRARequest, Output, Request

HOWS: dict[str, dict[str, object]] = {
    "none": {},
    "room": {"enable_lora": True},
    "adapted": {"enable_lora": True},
    "merged": {"enable_lora": True, "merge_lora_experts": True, "max_loras": 1},
}
CONFIG = """{"peft_type": "LORA", "r": %d, "lora_alpha": %d, "peft_version": "0.21.2",
 "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}"""


class Adapted:
    """An engine whose requests have the adapters 1 to `count` in turn."""

    def __init__(self, engine: Engine, count: int):
        self.engine, self.count, self.turn = engine, count, 0

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(self, request: Request) -> None:
        self.turn += 1
        adapter_id = 1 + self.turn % self.count if self.count else 0
        self.engine.add(replace(request, adapter_id=adapter_id))

    def abort(self, request_id: str) -> Output | None:
        return self.engine.abort(request_id)

    def step(self) -> list[Output]:
        return self.engine.step()


def write_random(room: AdapterRoom, folder: Path, rank: int, seed: int) -> None:
    """An adapter of every site, experts as PEFT's parameters of all of them."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(path: str, a: tuple[int, int], b: tuple[int, int]) -> None:
        for side, shape in (("A", a), ("B", b)):
            value = torch.randn(shape, generator=generator).mul_(0.01).bfloat16()
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = value

    for path, site in room.sites.items():
        experts, _, kind = path.rpartition(".")
        flat = rank * (site.experts or 1)
        if site.experts is None:
            add(path, (rank, site.inputs), (site.outputs, rank))
        elif kind == "gate_proj":
            add(f"{experts}.base_layer", (flat, site.inputs), (2 * site.outputs, flat))
        elif kind == "down_proj":
            add(experts, (flat, site.inputs), (site.outputs, flat))
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(CONFIG % (rank, rank))


def measured(
    args: argparse.Namespace, how: str, started: Started, config: EngineConfig, folder: Path
) -> list[dict[str, object]]:
    """A row for each batch."""
    engine, count = started.engine, args.adapters if how == "adapted" else int(how == "merged")
    if count:
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        for number in range(1, count + 1):
            own = folder / str(number)
            if not own.exists():
                write_random(runner.adapters.bank.room, own, args.rank, number)
            engine.load_adapter(LoRARequest(f"{number}", number, str(own)))
    rng, rows = random.Random(0), []
    label = workload.labels(args, config, started.info.dtype, started.plan.kinds)
    for batch in args.batch:
        prompts = workload.random_prompts(
            rng, batch=batch, context=args.context, vocab=started.info.vocab_size
        )
        decoded = time_decode(
            Adapted(engine, count), prompts,
            num_steps=args.num_tokens, max_model_len=started.info.max_model_len,
        )  # fmt: skip
        step_ms = record.spread([1e3 * value for value in decoded.seconds])
        row = {"how": how, "batch": batch, "context": args.context, "step_ms": step_ms}
        print(f"{how:8} batch {batch:3}: {step_ms['median']:.3f} ms", flush=True)
        rows.append(label | row | {"rank": args.rank, "adapters": count})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--num-tokens", type=int, default=100, help="steps to time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=2, help="adapters of requests, in turn")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=list(HOWS))
    parser.add_argument("--json", metavar="FILE")
    workload.add_slice_flag(parser)
    add_config_flags(parser, EngineConfig, title="engine")
    args, rows = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        for how in args.how:
            given = argparse.Namespace(**vars(args))
            given.max_loras, given.max_lora_rank = args.adapters, args.rank
            for name, value in HOWS[how].items():
                setattr(given, name, value)
            started, config = workload.open_engine(given)
            try:
                rows += measured(args, how, started, config, Path(folder) / "adapters")
            finally:
                started.engine.close()
                del started
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    if args.json:
        command = shlex.join(["python", *sys.argv])
        record.save(args.json, record.record("adapters", [], rows) | {"command": command})


if __name__ == "__main__":
    main()
