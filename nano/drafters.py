"""Make the drafters of the bundled models: prompts, the models' own answers, training, scores.

`python -m nano.drafters flint-nano` writes into the folder that Limelight ships. Answers and
checkpoints are kept in the folder `--work`, from which a run that was killed goes on.
"""

import argparse
import json
import logging
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from limelight.checkpoint import BUNDLED_DRAFTERS
from limelight.config import EngineConfig
from limelight.models.dflash2_loader import load_drafter
from limelight.progress import Progress
from limelight.training.acceptance import total
from limelight.training.course import Course, placement, prepare, run
from limelight.training.loss import Loss, block_loss
from limelight.training.settings import DraftSettings
from limelight.training.trainer import Trainer
from limelight.training.trial import rows, show
from limelight.training.work import Work
from nano.chat import FAMILIES, SHIPPED
from nano.draft_lines import LOW_ENTROPY, lines
from nano.spoilers import SPOILERS

TAPS = {"flint-nano": [1, 3, 5, 6], "beam-nano": [1, 2, 4, 5]}
WINDOW, LAYERS, INNER, RANK = 64, 3, 608, 32
ANCHORS, TOKENS, RATE, MAX_TOKENS = 1024, 8192, 2e-3, 128
TIMED = 20  # steps
# A norm follows the projection of features, so their size is free; at this one it is plain to see
# where the norm is left out.
FEATURE_SIZE = 4.0


def settings(name: str, args: argparse.Namespace) -> DraftSettings:
    return DraftSettings(
        data=str(args.work / f"{name}.jsonl"), out=str(args.work / BUNDLED_DRAFTERS[name]),
        taps=TAPS[name], window=WINDOW, layers=LAYERS, inner_size=INNER, rank=RANK,
        max_tokens=MAX_TOKENS, steps=args.steps, anchors=args.anchors, tokens=args.tokens,
        rate=args.rate, save_every=args.save_every,
    )  # fmt: skip


def make(name: str, args: argparse.Namespace) -> None:
    chosen, progress = settings(name, args), Progress()
    data, out = Path(chosen.data or ""), Path(chosen.out or "")
    args.work.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        data.write_text("".join(f"{line}\n" for line in lines(FAMILIES[name], share=args.share)))
    work, config = Work(out), EngineConfig(model=name, device=args.device, max_num_seqs=128)
    course = prepare(config, chosen, work, progress=progress)
    if not out.exists():
        trainer = course.trainer(progress)
        if args.compile:
            trainer.loss = torch.compile(block_loss, dynamic=True)
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


def keep_time(trainer: Trainer, seconds: float) -> None:
    """Have the number of steps follow from the time that the last ones took."""
    began, plain = time.monotonic(), trainer.advance
    marks = [began]

    def advance() -> Loss:
        loss = plain()
        if trainer.step % TIMED == 0:
            marks.append(time.monotonic())
        # The first steps compile.
        if trainer.step % TIMED == 0 and len(marks) > 2:
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
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--minutes", type=float, help="as many steps as fit this time")
    parser.add_argument("--compile", action="store_true", help="by torch.compile; for a GPU")
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
