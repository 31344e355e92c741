"""`limelight draft eval`: what a drafter would get accepted of its target's greedy answers."""

from collections.abc import Iterable
from pathlib import Path

from limelight.checkpoint import locate
from limelight.config import EngineConfig
from limelight.engine.startup import resolve
from limelight.models.dflash2_loader import load_drafter, read_drafter_config
from limelight.progress import Progress
from limelight.training.acceptance import Acceptance, measure, total
from limelight.training.answers import collect, questions
from limelight.training.course import load_target, placement, read_lines

ALL = "all"


def evaluate(
    config: EngineConfig,
    name: str,
    data: str,
    *,
    drafts: int | None = None,
    max_tokens: int = 256,
    progress: Progress,
) -> dict[str, Acceptance]:
    """By task, of the lines that say that they are held out, or of all.

    `name` is a bundled drafter, a folder or a hub id; `drafts` at most its block allows, which is
    the default. `ValueError` for what a user can mend.
    """
    found = resolve(config)
    folder = locate(name)
    shape = read_drafter_config(folder)
    shape.check_target(found.shape)
    drafts = shape.block_size - 1 if drafts is None else drafts
    if not 1 <= drafts < shape.block_size:
        raise ValueError(f"{name} drafts 1 to {shape.block_size - 1} tokens at once; got {drafts}")
    lines = read_lines(config, found, Path(data).expanduser())
    lines = [line for line in lines if line.held_out] or lines
    documents = collect(
        questions(lines, [0.0]), None, config, max_tokens=max_tokens, seed=0, progress=progress
    )
    if all(len(one.tokens) - one.prompt_length < 2 for one in documents):
        raise ValueError(f"{data}: no answer has two tokens or more")
    target = load_target(found, progress)
    drafter = load_drafter(folder, placement(found), target, progress=progress)
    return measure(drafter, target, documents, drafts=drafts)


def rows(by_task: dict[str, Acceptance]) -> list[dict[str, object]]:
    """A row for each task, and one for all together."""
    tasks = sorted(by_task)
    each = [{"task": task} | by_task[task].report() for task in tasks if task]
    return [*each, {"task": ALL} | total(by_task).report()]


def show(report: Iterable[dict[str, object]]) -> None:
    """Print the rows as a table: of the shares by place, the first place's and the last's."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    listed = list(report)
    for column in listed[0]:
        table.add_column(column, justify="right")
    for row in listed:
        table.add_row(*map(_cell, row.values()))
    Console(highlight=False).print(table)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return f"{value[0]:.0%} to {value[-1]:.0%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
