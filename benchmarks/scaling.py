"""Beam and Flint on machines that are not here: python benchmarks/scaling.py [--json FILE]

Prints the tables of `docs/scaling.md`: what `roofline.py` says of steps that were measured, that
others published, and that nobody has measured. With --model a step of one configuration:

    python benchmarks/scaling.py --model beam-nvfp4 --gpu H200 --ranks tp8 --batch 8 --context 8192
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any

from fleet import Fleet
from roofline import (
    FOUR,
    GPU,
    GPUS,
    KERNEL_S,
    Load,
    Op,
    Part,
    Setup,
    decode,
    forward,
    prefill_parts,
    seconds,
    shape,
)

RESULTS = Path(__file__).parent / "results"
Row = dict[str, object]

# One card's measurements, the newest of each; of the last file what was not measured again.
MEASURED = """
    decode-flint-1k-h200-bf16-2026-11-30-f17e9f2
    decode-flint-100k-h200-bf16-2026-11-29-5e9a46e
    decode-flint-1k-h200-nvfp4-2026-11-30-88bdbca
    decode-flint-100k-h200-nvfp4-2026-11-30-77e02c8
    decode-beam-slice8-100k-h200-bf16-2026-11-30-a343275
    decode-beam-slice8-100k-h200-nvfp4-2026-11-30-a343275
    prefill-flint-h200-bf16-2026-11-30-c19c192
    prefill-flint-32k-100k-h200-bf16-2026-11-30-5f25f3c
    prefill-flint-h200-nvfp4-2026-11-30-f7d5eb2
    prefill-flint-32k-100k-h200-nvfp4-2026-11-30-5f25f3c
    prefill-beam-slice8-h200-nvfp4-2026-11-30-c19c192
    prefill-flint-h200-bf16-2026-11-29-8b5ff91
""".split()
# Two cards', where ranks talk.
MEASURED_ON_TWO = """
    decode-flint-1k-tp2-2xh200-bf16-2026-11-30-c498cad
    decode-flint-1k-tp2-2xh200-nvfp4-2026-11-30-c498cad
    decode-flint-100k-tp2-2xh200-nvfp4-2026-11-30-c54ed03
    prefill-flint-tp2-2xh200-nvfp4-2026-11-30-c54ed03
    expert-parallel-beam-14-layers-2xh200-nvfp4-2026-11-30-c54ed03
""".split()
LAYOUTS = {
    "1": (1, 1), "TP4": (4, 1), "TP8": (8, 1), "DP4+EP4": (1, 4), "TP16": (16, 1),
    "DP16+EP16": (1, 16),
}  # fmt: skip
DRAFTS = 7
# Acceptance lengths published: of Beam's drafter, and of another pair where text is easy and hard.
LENGTHS = (3.68, 3.88, 2.65)
PROMPT, ANSWER = 2048, 256  # tokens of a fleet's requests


def setup(model: str, gpu: str, ranks: str, *, kv: str = "bf16", native: bool = False) -> Setup:
    tensor, expert = LAYOUTS[ranks]
    return Setup(GPUS[gpu], shape(model), tensor, expert, 1 if kv == "fp8" else 2, native)


def weight_bytes(at: Setup) -> float:
    """What one rank holds."""
    s = at.shape
    size = {part: FOUR if part in s.four else 2 for part in ("attention", "dense", "experts")}
    attended = ((2 + s.sandwich) * s.heads / at.tensor + 2 * at.kv_heads) * s.head_dim
    total = s.vocab * s.hidden * (2 + (FOUR if "head" in s.four else 2) / at.tensor)
    for sparse in s.sparse:
        total += size["attention"] * s.hidden * attended
        inner = s.expert_inner * s.experts / at.expert + s.shared_inner if sparse else s.inner
        total += size["experts" if sparse else "dense"] * 3 * s.hidden * inner / at.tensor
        total += 4 * s.experts * s.hidden if sparse else 0
    return total


def fits(at: Setup, batch: int, context: int) -> bool:
    """Whether weights and cache leave a tenth of the memory for everything else."""
    seen = sum(context if w is None else min(w, context) for w in at.shape.windows)
    cached = batch / at.expert * seen * 2 * at.kv_heads * at.shape.head_dim * at.kv_bytes
    return weight_bytes(at) + cached <= 0.9 * at.gpu.memory


def terms(at: Setup, parts: list[Part], most: int = 4) -> str:
    """The largest parts of a step, in ms."""
    spent: dict[str, float] = {}
    for part in parts:
        spent[part.name] = spent.get(part.name, 0.0) + part.seconds(at.gpu)
    largest = sorted(spent, key=spent.__getitem__, reverse=True)[:most]
    return ", ".join(f"{name} {cell(name, 1e3 * spent[name])}" for name in largest)


def kernel_us(parts: list[Part], took: float, found: float) -> float:
    """What a kernel must cost beside its bytes for the prediction to be what was found."""
    kernels = sum(part.kernels for part in parts if isinstance(part, Op))
    return 1e6 * (KERNEL_S + (found - took) / kernels)


def one_card(gathered: float | None = None) -> Iterator[Row]:
    """Predictions of what was measured on one H200."""
    for at, row, rest in measured(MEASURED, gathered):
        one = ", one rank of 8" if at.tensor == 8 else ""
        yield {"step": row["step"], "model": f"{row['model']}{one}"} | rest


def two_cards() -> Iterator[Row]:
    """Predictions of what was measured on two H200."""
    for _, row, rest in measured(MEASURED_ON_TWO):
        yield row | rest


def measured(names: list[str], gathered: float | None = None) -> Iterator[tuple[Setup, Row, Row]]:
    """Of each step in files: where it ran, what it was, and how far off its prediction is."""
    gpu = replace(GPUS["H200"], gathered=gathered or GPUS["H200"].gathered)
    seen = set()
    for name in names:
        kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for row in kept["rows"]:
            at, step = setup_of(row, gpu), kept["bench"]
            ranks = f"dp{at.expert}+ep{at.expert}" if at.expert > 1 else f"tp{at.tensor}"
            what: Row = {"step": step, "model": row["model"], "ranks": ranks}
            key = (step, row["model"], ranks, row["batch"], row["context"])
            if key not in seen:
                seen.add(key)
                yield at, what, compared(at, row, graph=step == "decode")


def setup_of(row: dict[str, Any], gpu: GPU) -> Setup:
    """Where a measured step ran, by its row: on the ranks of an engine, or one of a slice."""
    name, _, layers = row["model"].removesuffix("-layers").rpartition("-")
    whole = shape(name if layers.isdigit() else row["model"])
    count = int(layers) if layers.isdigit() else len(whole.windows)
    cut = replace(whole, windows=whole.windows[:count], sparse=whole.sparse[:count])
    ranks = row.get("ranks", row["slice"])
    if ranks == "dp2+ep2":
        return Setup(gpu, cut, expert=2)
    tensor = int(str(ranks).removeprefix("tp"))
    return Setup(gpu, cut, tensor=max(tensor, row["slice"]), messages=row["slice"] == 1)


def compared(at: Setup, row: dict[str, Any], *, graph: bool) -> Row:
    """A measured step beside its prediction."""
    made = decode if graph else prefill_parts
    parts = made(at, row["batch"], row["context"])
    found = row["step_ms" if graph else "ttft_ms"]["median"] / 1e3
    said = seconds(at, parts, graph=graph)
    return {
        "batch": row["batch"], "context": row["context"], "measured, ms": 1e3 * found,
        "predicted, ms": 1e3 * said, "error": said / found - 1,
        "us a kernel": kernel_us(parts, said, found) if graph else None,
    }  # fmt: skip


def fitted() -> float:
    """The share of gathered work at which one card's steps are met best, in hundredths."""

    def miss(hundredths: int) -> float:
        rows = one_card(hundredths / 100)
        return sum(log(1 + float(str(row["error"]))) ** 2 for row in rows)

    return min(range(30, 101), key=miss) / 100


@dataclass(frozen=True)
class Case:
    """A published figure: tokens/s of so many `tokens` a step, or ms of a step if that is 0."""

    what: str
    at: Setup
    parts: list[Part]
    figure: float
    tokens: float = 0.0
    graph: bool = True

    def row(self) -> Row:
        took = seconds(self.at, self.parts, graph=self.graph)
        said = self.tokens / took if self.tokens else 1e3 * took
        kernel = kernel_us(self.parts, took, self.figure / 1e3)
        return {
            "published": f"{self.what}, {self.at.gpu.name}", "figure": self.figure,
            "unit": "tok/s" if self.tokens else "ms", "predicted": said,
            "error": said / self.figure - 1,
            "us a kernel": kernel if self.graph and not self.tokens else None,
            "largest terms, ms": terms(self.at, self.parts),
        }  # fmt: skip


def decode_cases() -> Iterator[Case]:
    """Batch 1 at 100,000 tokens; the first ones without LM head and sampling."""
    for model, figure in (("flint-nvfp4", 1.78), ("flint", 2.34)):
        at = setup(model, "GB200", "1")
        yield Case(f"{model}, 100K, forward", at, forward(at, Load(1, 1, 100_000, 1)), figure)
    at = setup("flint-nvfp4", "GB200", "1")
    yield Case("flint-nvfp4, 100K, end to end", at, decode(at, 1, 100_000), 2.06)
    for model in ("beam-nvfp4", "beam"):
        at = setup(model, "GB200", "TP8")
        yield Case(f"{model} TP8, 100K", at, decode(at, 1, 100_000), 3.30)


def prefill_cases() -> Iterator[Case]:
    for model in ("beam-nvfp4", "beam"):
        at = setup(model, "GB200", "TP8")
        what = f"{model} TP8, prefill 8 x 2048"
        yield Case(what, at, prefill_parts(at, 8, 2048), 176, graph=False)
    for ranks, figure in (("TP4", 98_700), ("DP4+EP4", 168_800)):
        for native in (False, True):
            at = setup("beam-nvfp4", "GB300", ranks, native=native)
            what = f"beam-nvfp4 {ranks}, 32K in, 1 out{', native experts' * native}"
            parts = prefill_parts(at, 4, 32_768)
            yield Case(what, at, parts, figure, tokens=4 * 32_768, graph=False)


def drafted_cases() -> Iterator[Case]:
    at = setup("beam-nvfp4", "GB200", "TP8")
    for batch, length, figure in ((1, 3.71, 708), (8, 3.67, 3232), (32, 3.68, 7744),
                                  (128, 3.68, 15012)):  # fmt: skip
        parts = decode(at, batch, 2048, drafts=DRAFTS)
        what = f"beam-nvfp4 TP8, DFlash2, {batch} at once"
        yield Case(what, at, parts, figure, tokens=batch * length)


def published() -> Iterator[Row]:
    """Predictions of what others published."""
    for case in (*decode_cases(), *prefill_cases(), *drafted_cases()):
        yield case.row()


def step_ms(at: Setup, batch: int, context: int) -> float | str:
    """Of a decode step, if all of it fits."""
    return 1e3 * seconds(at, decode(at, batch, context)) if fits(at, batch, context) else "no room"


def prompt_rate(at: Setup) -> float:
    """Prompt tokens a second at 32,768 in and 1 out."""
    took = seconds(at, prefill_parts(at, at.expert, 32_768), graph=False)
    return at.expert * 32_768 / took


def beam_steps() -> Iterator[Row]:
    """Decoding and prefill of Beam."""
    layouts = [(gpu, ranks) for gpu in GPUS for ranks in ("TP4", "TP8", "DP4+EP4")]
    for gpu, ranks in [*layouts, ("H200", "TP16"), ("H200", "DP16+EP16")]:
        for model in ("beam-nvfp4", "beam"):
            at, half = setup(model, gpu, ranks), setup(model, gpu, ranks, kv="fp8")
            if not fits(half, 1, 8192):
                continue
            full = step_ms(half, 128, 8192)
            rate = 128e3 / float(full) / at.ranks if full != "no room" else None
            yield {
                "GPU": gpu, "ranks": ranks, "weights": "BF16" if model == "beam" else "NVFP4",
                "1 at 8K, ms": step_ms(half, 1, 8192), "16 at 8K, ms": step_ms(half, 16, 8192),
                "128 at 8K, ms": full, "tok/s a GPU": rate,
                "16 at 100K, ms": step_ms(half, 16, 100_000),
                "the same, KV BF16": step_ms(at, 16, 100_000),
                "prompt tok/s": prompt_rate(half),
            }  # fmt: skip


def flint_steps() -> Iterator[Row]:
    """Decoding and prefill of Flint on one card."""
    points = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 100_000), (8, 100_000))
    for gpu in ("H200", "GB200"):
        for model in ("flint-nvfp4", "flint"):
            for kv in ("bf16", "fp8"):
                at = setup(model, gpu, "1", kv=kv)
                row: Row = {"GPU": gpu, "weights": "BF16" if model == "flint" else "NVFP4",
                            "KV": kv.upper()}  # fmt: skip
                for batch, context in points:
                    row[f"{batch} at {context // 1000}K, ms"] = step_ms(at, batch, context)
                yield row | {"prompt tok/s": prompt_rate(at)}


def drafted_steps() -> Iterator[Row]:
    """Steps with 7 drafts a sequence, and the acceptance length from which they pay."""
    places = (("beam-nvfp4", "TP8"), ("flint-nvfp4", "1"))
    for model, ranks, gpu in ((*place, gpu) for place in places for gpu in ("H200", "GB200")):
        at = setup(model, gpu, ranks)
        for batch in (1, 8, 32, 128):
            plain = seconds(at, decode(at, batch, 2048))
            step = seconds(at, decode(at, batch, 2048, drafts=DRAFTS))
            row: Row = {
                "model": model, "where": f"{gpu}, {ranks}", "batch": batch,
                "step, ms": 1e3 * plain, "with drafts, ms": 1e3 * step,
                "pays from": step / plain, "tok/s without": batch / plain,
            }  # fmt: skip
            yield row | {f"tok/s at {length}": batch * length / step for length in LENGTHS}


def decode_s(at: Setup, running: float) -> float:
    """A step of sequences that are half way through an answer of a fleet's requests."""
    return seconds(at, decode(at, running, PROMPT + ANSWER // 2))


def fleets() -> Iterator[Row]:
    """Replicas with 64 places each, at three shares of what they can serve."""
    for count, model, gpu, ranks in (
        (8, "flint-nvfp4", "H200", "1"),
        (4, "beam-nvfp4", "H200", "TP8"),
        (4, "beam-nvfp4", "GB300", "TP4"),
    ):
        at = setup(model, gpu, ranks, kv="fp8")
        prompt_s = seconds(at, prefill_parts(at, 8, PROMPT), graph=False) / 8
        fleet = Fleet(count, 64, prompt_s, ANSWER, partial(decode_s, at))
        for share in (0.5, 0.8, 0.95):
            rate = share * fleet.capacity()
            found = fleet.at(rate)
            yield {
                "fleet": f"{count} of {model}, {gpu}, {ranks}", "requests/s": rate,
                "utilization": found["utilization"], "running in each": found["running"],
                "wait, ms": 1e3 * found["wait_s"], "first token, ms": 1e3 * found["first_token_s"],
                "between tokens, ms": 1e3 * found["step_s"],
            }  # fmt: skip


TABLES = {
    "one card, measured": one_card,
    "two cards, measured": two_cards,
    "published": published,
    "Beam": beam_steps,
    "Flint": flint_steps,
    "drafts": drafted_steps,
    "fleets": fleets,
}


def cell(key: str, value: object) -> str:
    if not isinstance(value, float | int):
        return "" if value is None else str(value)
    if key == "error":
        return f"{value:+.0%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: list[Row]) -> str:
    """As Markdown."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(column, row[column]) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def one(args: argparse.Namespace) -> None:
    """A step of one configuration by its parts."""
    at = setup(args.model, args.gpu, args.ranks, kv=args.kv)
    if args.prefill:
        parts = prefill_parts(at, args.batch, args.context)
        took, tokens = seconds(at, parts, graph=False), float(args.batch * args.context)
    else:
        parts = decode(at, args.batch, args.context, drafts=args.drafts)
        took, tokens = seconds(at, parts), args.batch * args.acceptance
    room = "" if fits(at, args.batch, args.context) else "; it does not fit into memory"
    print(f"{1e3 * took:.3f} ms, {tokens / took:,.0f} tokens/s{room}: {terms(at, parts, 20)}")


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reader.add_argument("--json", metavar="FILE", help="write the rows of all tables there")
    reader.add_argument("--model", choices=["flint", "flint-nvfp4", "beam", "beam-nvfp4"])
    reader.add_argument("--gpu", choices=list(GPUS), default="H200")
    reader.add_argument("--ranks", choices=list(LAYOUTS), default="1", type=str.upper)
    reader.add_argument("--kv", choices=["bf16", "fp8"], default="bf16")
    reader.add_argument("--batch", type=int, default=1)
    reader.add_argument("--context", type=int, default=1024)
    reader.add_argument("--drafts", type=int, default=0, help="of each sequence in a step")
    reader.add_argument("--acceptance", type=float, default=1.0, help="tokens a step brings")
    reader.add_argument("--prefill", action="store_true", help="take in prompts instead")
    args = reader.parse_args()
    if args.model:
        return one(args)
    found = {name: list(rows()) for name, rows in TABLES.items()}
    for name, rows in found.items():
        print(f"### {name}\n\n{table(rows)}\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
