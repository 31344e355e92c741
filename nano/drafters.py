"""Make the drafters of the bundled models: prompts, the models' own answers, training, scores.

`python -m nano.drafters flint-nano` writes into the folder that Limelight ships. Answers and
checkpoints are kept in the folder `--work`, from which a run that was killed goes on.
"""

import argparse
import json
import logging
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from limelight.checkpoint import BUNDLED_DRAFTERS
from limelight.config import EngineConfig
from limelight.engine.startup import Resolved, resolve
from limelight.models.dflash2_loader import load_drafter
from limelight.models.loader import Model
from limelight.progress import Progress
from limelight.training.acceptance import total
from limelight.training.answers import Document
from limelight.training.course import Course, load_target, placement, read_lines, run
from limelight.training.loss import Loss
from limelight.training.settings import DraftSettings
from limelight.training.shape import config_json
from limelight.training.trainer import Trainer
from limelight.training.trial import rows, show
from limelight.training.work import Work
from nano.chat import FAMILIES, SHIPPED
from nano.draft_answers import answers
from nano.draft_lines import LOW_ENTROPY, MOST_OF_OTHERS, MOST_TOKENS, lines
from nano.spoilers import SPOILERS

TAPS = {"flint-nano": [1, 3, 5, 6], "beam-nano": [1, 2, 4, 5]}
# The window reaches back over the loops that small models fall into.
WINDOW, LAYERS, INNER, RANK = 256, 3, 608, 32
ANCHORS, TOKENS, RATE = 1024, 21_000, 2e-3
MASK_TOKEN = 0
TIMED = 50  # steps
# A norm follows the projection of features, so their size is free; at this one it is plain to see
# where the norm is left out.
FEATURE_SIZE = 4.0


def settings(name: str, args: argparse.Namespace) -> DraftSettings:
    return DraftSettings(
        data=str(args.work / f"{name}.jsonl"), out=str(args.work / BUNDLED_DRAFTERS[name]),
        taps=TAPS[name], window=WINDOW, layers=LAYERS, inner_size=INNER, rank=RANK,
        mask_token=MASK_TOKEN, steps=args.steps, anchors=args.anchors, tokens=args.tokens,
        rate=args.rate, save_every=args.save_every, features="keep",
    )  # fmt: skip


def make(name: str, args: argparse.Namespace) -> None:
    progress = Progress()
    args.work.mkdir(parents=True, exist_ok=True)
    course = begin(name, args, progress=progress)
    out = Path(course.settings.out or "")
    if not out.exists():
        work, trainer = Work(out), course.trainer(progress)
        work.open({"model": name, "share": args.share, "rate": args.rate})
        if args.minutes:
            keep_time(trainer, 60 * args.minutes)
        run(trainer, course, work, progress=progress, told=partial(print, name, flush=True))
        with torch.no_grad():
            trainer.drafter.fc.mul_(FEATURE_SIZE)
        work.finish(trainer.drafter, course.shape)
    shipped = SHIPPED / BUNDLED_DRAFTERS[name]
    shipped.mkdir(exist_ok=True)
    for file in out.iterdir():
        shutil.copy(file, shipped)
    judge(name, course, out, args.work / f"{name}.json")


def begin(name: str, args: argparse.Namespace, *, progress: Progress) -> Course:
    """The target and what it says to all prompts."""
    chosen, config = settings(name, args), EngineConfig(model=name, device=args.device)
    found = resolve(config)
    target, shape = load_target(found, progress), config_json(chosen, found.shape, pad_token=None)
    data = Path(chosen.data or "")
    if not data.exists():
        documents = answered(name, config, found, target, share=args.share, progress=progress)
        partial_ = data.with_name(data.name + ".partial")
        partial_.write_text("".join(map(_written, documents)))
        partial_.replace(data)
    documents = [_read(line) for line in data.read_text().splitlines()]
    learned, held_out = (
        [one for one in documents if one.held_out is side] for side in (False, True)
    )
    return Course(found, target, shape, learned, held_out, chosen)


def answered(
    name: str, config: EngineConfig, found: Resolved, target: Model, *, share: float,
    progress: Progress,
) -> list[Document]:  # fmt: skip
    """What the target says to the lines of each task."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines.jsonl"
        file.write_text("".join(f"{line}\n" for line in lines(FAMILIES[name], share=share)))
        asked = read_lines(config, found, file)
    ends = json.loads((FAMILIES[name].folder / "config.json").read_text())["eos_token_id"]
    ends = [ends] if isinstance(ends, int) else ends
    documents = []
    with progress.phase("writing answers", len(asked), unit="answers") as advance:
        for most in sorted({*MOST_TOKENS.values(), MOST_OF_OTHERS}):
            some = [one for one in asked if MOST_TOKENS.get(one.task, MOST_OF_OTHERS) == most]
            prompts = [one.prompt for one in some]
            texts = answers(target, prompts, most=most, ends=ends, advance=advance)
            documents += [
                Document(one.prompt + text, len(one.prompt), one.task, one.held_out)
                for one, text in zip(some, texts, strict=True)
            ]
    return documents


def _written(document: Document) -> str:
    prompt, answer = (
        document.tokens[: document.prompt_length],
        document.tokens[document.prompt_length :],
    )
    value: dict[str, object] = {"prompt": prompt, "answer": answer, "task": document.task}
    value["held_out"] = document.held_out
    return json.dumps(value, separators=(",", ":")) + "\n"


def _read(line: str) -> Document:
    value = json.loads(line)
    prompt = value["prompt"]
    return Document(prompt + value["answer"], len(prompt), value["task"], value["held_out"])


def keep_time(trainer: Trainer, seconds: float) -> None:
    """Have the number of steps follow from the time that the last ones took."""
    began, plain = time.monotonic(), trainer.advance
    marks = [began]

    def advance() -> Loss:
        loss = plain()
        if trainer.step % TIMED:
            return loss
        loss.total.item()  # a GPU may be behind
        marks.append(time.monotonic())
        # In the first steps kernels are made.
        if len(marks) > 2:
            each = (marks[-1] - marks[-2]) / TIMED
            left = max(0, int((began + seconds - marks[-1]) / each))
            trainer.settings = replace(trainer.settings, steps=trainer.step + left)
        return loss

    trainer.advance = advance  # type: ignore[method-assign]


def judge(name: str, course: Course, folder: Path, file: Path) -> None:
    """Print and write what the drafter gets accepted, as it is and with each fault."""
    drafter = load_drafter(
        folder, placement(course.found), course.target, progress=Progress(quiet=True)
    )
    found = course.measure(drafter, course.held_out)
    print(name)
    show(rows(found))
    lengths = {"low entropy": total(found, LOW_ENTROPY).length}
    for fault, spoiled in SPOILERS.items():
        with spoiled(drafter, course.target):
            low = [one for one in course.held_out if one.task in LOW_ENTROPY]
            lengths[fault] = total(course.measure(drafter, low)).length
    for what, length in lengths.items():
        print(f"{name}: {what}: {length:.2f} tokens a step", flush=True)
    file.write_text(json.dumps({"rows": rows(found), "lengths": lengths}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(TAPS), metavar="MODEL")
    parser.add_argument("--work", type=Path, default=Path("build/drafters"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--minutes", type=float, help="as many steps as fit this time")
    parser.add_argument("--share", type=float, default=1.0, help="of the lines to learn from")
    parser.add_argument("--anchors", type=int, default=ANCHORS, help="most blocks of a step")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of documents, a step")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--save-every", type=int, default=1000)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_float32_matmul_precision("high")
    for name in args.models:
        make(name, args)


if __name__ == "__main__":
    main()
