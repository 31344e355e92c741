"""`limelight draft train`: a drafter for a target, of what the target answers to lines of a file.

The target answers first, then the drafter learns. Both go on where a run was killed, from the
folder OUT.work. When the training has ended that has the answers alone, and OUT is the drafter.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from limelight.checkpoint import locate, read_json
from limelight.config import EngineConfig
from limelight.engine.memory import device_memory
from limelight.engine.startup import Resolved, resolve
from limelight.models.dflash2 import DFlash2, Ends
from limelight.models.dflash2_config import DFlash2Config
from limelight.models.dflash2_loader import load_drafter
from limelight.models.layers import Placement
from limelight.models.loader import Model, load_model
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.training.acceptance import Acceptance, measure, total
from limelight.training.answers import Document, collect, questions
from limelight.training.lessons import Lessons
from limelight.training.lines import Line, Reader, split
from limelight.training.settings import DraftSettings
from limelight.training.shape import config_json
from limelight.training.trainer import Trainer, initialize
from limelight.training.work import Json, Work

FEWEST_TOKENS = 500  # of answers to learn from
KEPT_SHARE = 4  # of the free memory, a share of this may hold features
WATCHED = 64  # held-out documents that each checkpoint is judged by
FREE = ("data", "out", "save_every", "features")  # may differ where a training goes on

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Course:
    """A target, documents to learn from and to be judged by, and the shape of the drafter."""

    found: Resolved
    target: Model
    shape: Json
    learned: list[Document]
    held_out: list[Document]
    settings: DraftSettings

    def trainer(self, progress: Progress) -> Trainer:
        """Of a new drafter."""
        config = DFlash2Config.from_dict(self.shape)
        drafter = DFlash2(config, placement(self.found), Ends(self.target.embed, self.target.head))
        initialize(drafter, torch.Generator().manual_seed(self.settings.training_seed))
        lessons = Lessons(
            self.target, self.learned, config.taps, windows=config.windows,
            rows=config.block_size - 1, tokens=self.settings.tokens, anchors=self.settings.anchors,
        )  # fmt: skip
        if self._keeps(lessons):
            count = len(self.learned)
            with progress.phase("reading documents", count, unit="documents") as advance:
                lessons.keep(advance)
        return Trainer(drafter, self.target, lessons, self.settings)

    def _keeps(self, lessons: Lessons) -> bool:
        if self.settings.features == "auto":
            free, _ = device_memory(self.found.device)
            return lessons.feature_bytes <= free // KEPT_SHARE
        return self.settings.features == "keep"

    def measure(self, drafter: DFlash2, documents: Sequence[Document]) -> dict[str, Acceptance]:
        drafts = self.settings.num_speculative_tokens
        return measure(drafter, self.target, documents, drafts=drafts)


def placement(found: Resolved) -> Placement:
    return Placement(Mesh.single(), found.dtype, found.device)


def train(
    config: EngineConfig, settings: DraftSettings, *, progress: Progress, told: Told = print
) -> dict[str, Acceptance]:
    """Make the folder `settings.out`; what it would get accepted of held-out lines, by task.

    Raises `ValueError` for what a user can mend.
    """
    if not settings.data or not settings.out:
        raise ValueError("give --data FILE and --out FOLDER")
    work = Work(Path(settings.out).expanduser())
    work.check()
    course = prepare(config, settings, work, progress=progress)
    trainer = course.trainer(progress)
    run(trainer, course, work, progress=progress, told=told)
    work.finish(trainer.drafter, course.shape)
    drafter = load_drafter(work.out, placement(course.found), course.target, progress=progress)
    return course.measure(drafter, course.held_out)


def prepare(
    config: EngineConfig, settings: DraftSettings, work: Work, *, progress: Progress
) -> Course:
    """Read the lines, have them answered, and load the target."""
    found = resolve(config)
    shape = config_json(settings, found.shape, pad_token=_pad_token(found))
    lines = split(read_lines(config, found, Path(settings.data or "").expanduser()))
    chosen = asdict(settings) | {"model": config.model, "lines": len(lines)}
    work.open({key: value for key, value in chosen.items() if key not in FREE})
    documents = collect(
        questions(lines, settings.temperatures), work.answers, config,
        max_tokens=settings.max_tokens, seed=settings.training_seed, progress=progress,
    )  # fmt: skip
    learned, held_out = (
        [one for one in documents if one.held_out is side] for side in (False, True)
    )
    _check_enough(settings.data or "", learned, held_out)
    return Course(found, load_target(found, progress), shape, learned, held_out, settings)


def read_lines(config: EngineConfig, found: Resolved, path: Path) -> list[Line]:
    """The lines of a data file, in the words of the target."""
    source = config.text_source
    folder = found.weights if source == config.model else locate(source, weights=False)
    vocab, longest = found.shape.vocab_size, found.max_model_len
    with Reader.open(folder, model=config.model, vocab_size=vocab, longest=longest) as reader:
        return reader.read(path)


def load_target(found: Resolved, progress: Progress) -> Model:
    return load_model(
        found.weights, placement(found),
        config_folder=found.config, stored=found.stored, progress=progress,
    )  # fmt: skip


def _pad_token(found: Resolved) -> int | None:
    value = read_json(found.config / "config.json").get("pad_token_id")
    return value if type(value) is int else None


def _check_enough(data: str, learned: list[Document], held_out: list[Document]) -> None:
    """Enough to learn from, and something to be judged by."""
    count = sum(len(one.tokens) - one.prompt_length for one in learned)
    if count < FEWEST_TOKENS:
        raise ValueError(
            f"{data}: answers of {count} tokens in all to learn from; {FEWEST_TOKENS} is the least"
        )
    if not any(len(one.tokens) - one.prompt_length > 1 for one in held_out):
        raise ValueError(f"{data}: no line is held out whose answer has two tokens or more")


def run(trainer: Trainer, course: Course, work: Work, *, progress: Progress, told: Told) -> None:
    """All steps that are left; each checkpoint is told with what it would get accepted."""
    if work.state.exists():
        trainer.restore(work.state)
    with progress.phase("training", trainer.settings.steps, unit="steps") as advance:
        advance(trainer.step)
        began, first = time.monotonic(), trainer.step
        while trainer.step < trainer.settings.steps:
            loss = trainer.advance()
            advance(1)
            settings = trainer.settings
            if trainer.step % settings.save_every and trainer.step < settings.steps:
                continue
            unary, selector = loss.unary.item(), loss.selector.item()
            if not math.isfinite(unary + selector):
                raise ValueError(
                    f"the loss is no number at step {trainer.step}: try a lower --rate"
                )
            speed = (trainer.step - first) / (time.monotonic() - began)
            trainer.save(work.state)
            some = course.held_out[:WATCHED]
            length = total(course.measure(trainer.drafter, some)).length
            told(
                f"step {trainer.step} of {settings.steps}: loss {unary:.3f} + {selector:.3f}, "
                f"{length:.2f} tokens a step on {len(some)} held-out lines ({speed:.1f} steps/s)"
            )
