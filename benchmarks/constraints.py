"""What a JSON schema costs: a step of a batch with it and without, in turns, and its first compile.

python benchmarks/constraints.py --json constraints.json
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from limelight.bench import record
from limelight.config import EngineConfig
from limelight.engine.engine import Engine
from limelight.engine.front import make_requests
from limelight.engine.startup import start_engine
from limelight.progress import Progress
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint, ModelInfo, Output, SamplingParams

PROMPT, DROPPED_STEPS = 128, 8
# So long that no answer ends while it is timed.
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "number"},
        "kind": {"enum": ["big", "small", None]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 40}


def tag_of(schema: dict[str, object]) -> str:
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return json.dumps({"type": "structural_tag", "format": form})


def wide(name: str) -> dict[str, object]:
    """A schema of 100 properties, of four kinds by turns; no two names give the same."""
    kinds = [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "b", 1]}]
    properties = {f"{name}_{i}": kinds[i % 4] for i in range(100)}
    return {"type": "object", "properties": properties, "required": list(properties)}


# Small to write, and nothing that ends to compile or to follow.
HOSTILE = [r"((.{1,1000}){1,1000}){1,1000}", r"(.*.*.*.*)*x", r"(.?){5000}"]


class Bench:
    def __init__(self, model: str, batch: int):
        config = EngineConfig(
            model=model, max_num_seqs=batch, max_model_len=1024, enable_prefix_caching=False
        )
        started = start_engine(config, Progress(quiet=True))
        self.engine: Engine = started.engine
        self.info: ModelInfo = started.info
        self.tokenizer = Tokenizer.load(started.folder)
        self.batch, self.count = batch, 0

    def add(self, schema: dict[str, object] | None, pattern: str | None = None) -> str:
        self.count += 1
        tag = None if schema is None else tag_of(schema)
        if pattern is not None:
            form = {"type": "regex", "pattern": pattern}
            tag = json.dumps({"type": "structural_tag", "format": form})
        constraint = None if tag is None else Constraint(tag=tag)
        prompt = [(self.count * 131 + i * 97) % self.info.vocab_size for i in range(PROMPT)]
        [request] = make_requests(
            f"bench-{self.count}", prompt,
            SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True, seed=self.count),
            info=self.info, tokenizer=self.tokenizer, constraint=constraint,
        )  # fmt: skip
        self.engine.add(request)
        return request.id

    def step_ms(self, schema: dict[str, object] | None, steps: int) -> list[float]:
        """Times of steps in which the whole batch decodes."""
        ids = {self.add(schema) for _ in range(self.batch)}
        begun: set[str] = set()
        while begun < ids:
            begun |= {output.request_id for output in self.step() if output.token_ids}
        times = []
        for _ in range(DROPPED_STEPS + steps):
            start = time.perf_counter()
            outputs = self.step()
            times.append(1e3 * (time.perf_counter() - start))
            assert len(outputs) == self.batch
        self.abort(ids)
        return times[DROPPED_STEPS:]

    def ready_ms(self, schema: dict[str, object]) -> float:
        """From the request until its first token is there: its form is tried and compiled first."""
        start = time.perf_counter()
        name = self.add(schema)
        while not any(output.token_ids for output in self.step()):
            pass
        seconds = time.perf_counter() - start
        self.abort({name})
        return 1e3 * seconds

    def refused_ms(self, pattern: str) -> float:
        """Until such a form is refused, while nothing else is asked."""
        start = time.perf_counter()
        name = self.add(None, pattern)
        outputs: list[Output] = []
        while not outputs:
            outputs = self.engine.step()
        assert outputs[0].request_id == name and outputs[0].refused
        return 1e3 * (time.perf_counter() - start)

    def step(self) -> list[Output]:
        """One step, in which nothing may end."""
        outputs = self.engine.step()
        for output in outputs:
            if output.finish_reason is not None:
                raise SystemExit(
                    f"ended by {output.finish_reason}: {output.refused or output.error}"
                )
        return outputs

    def abort(self, ids: set[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="flint-nano")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    bench = Bench(args.model, args.batch)
    bench.ready_ms(LIST)  # the process that tries tags has started
    plain, bound = [], []
    for _ in range(args.rounds):
        plain += bench.step_ms(None, args.steps)
        bound += bench.step_ms(LIST, args.steps)
    ready = [bench.ready_ms(wide(f"round{i}")) for i in range(2 * args.rounds)]
    free = [bench.ready_ms({"type": "integer"}) for _ in range(2 * args.rounds)]
    refused = [bench.refused_ms(pattern) for pattern in HOSTILE]
    bench.engine.close()
    row = {
        "model": args.model,
        "batch": args.batch,
        "context": PROMPT,
        "step_ms": record.spread(plain),
        "constrained_step_ms": record.spread(bound),
        "ratio": round(record.spread(bound)["median"] / record.spread(plain)["median"], 3),
        "first_token_100_properties_ms": record.spread(ready),
        "first_token_known_schema_ms": record.spread(free),
        "hostile_refused_ms": record.spread(refused),
    }
    command = shlex.join(["python", *sys.argv])
    record.save(args.json, record.record("constraints", [], [row]) | {"command": command})
    print(json.dumps(row))


if __name__ == "__main__":
    main()
