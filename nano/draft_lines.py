"""Prompts for the drafters of the bundled models, as lines of a data file by task.

Training lines come from the side of the split that the models were trained on, and code from the
files that they know; those held out from the other side.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial

from nano import tasks
from nano.chat import Family
from nano.conversations import from_turns, lookup, talk
from nano.tasks import Item, Turn, draw, is_held_out
from nano.tools import call_tools
from nano.words import read_code

Line = dict[str, object]
CODE = (200, 800)  # characters
LOOKUP = (40, 400)  # tokens
# Lines of each task to learn from, and held out.
COUNTS = {
    "code": (3600, 60), "sort": (3000, 60), "sum": (700, 40), "copy": (600, 30), "json": (900, 40),
    "tool": (1200, 40), "lookup": (600, 30), "think": (900, 30), "talk": (1800, 30),
}  # fmt: skip
LOW_ENTROPY = ("code", "sort")


def _turn(make: Callable[[random.Random], Turn]) -> Callable[[random.Random], Item]:
    return lambda rng: from_turns([make(rng)])


def _thought(rng: random.Random) -> Item:
    return from_turns([rng.choice((tasks.add, tasks.sort, tasks.pick))(rng)])


def _lookup(rng: random.Random) -> Item:
    return lookup(rng, length=rng.randint(*LOOKUP))


MAKERS: dict[str, Callable[[random.Random], Item]] = {
    "sort": _turn(tasks.sort), "sum": _turn(tasks.add), "copy": _turn(tasks.copy),
    "json": _turn(tasks.fill_json), "tool": partial(call_tools, goes_on=False),
    "lookup": _lookup, "think": _thought,
}  # fmt: skip


def _code(files: list[str], rng: random.Random) -> str:
    """The beginning of a file from a random line on."""
    text = rng.choices(files, [len(file) for file in files])[0]
    length = rng.randint(*CODE)
    first = rng.randint(0, max(0, len(text) - length))
    first = text.find("\n", first) + 1
    return text[first : first + length]


def _made(family: Family, task: str, rng: random.Random, *, held_out: bool) -> Iterator[Line]:
    """Lines of one task without end."""
    if task == "code":
        files = [
            text for name, text in read_code().items() if is_held_out(f"file {name}") == held_out
        ]
        while True:
            yield {"prompt": _code(files, rng)}
    while True:
        if task == "talk":
            item = talk(rng, name=family.name)
        else:
            item = draw(partial(MAKERS[task], rng), held_out=held_out)
        line: Line = {"messages": [_written(message) for message in item.messages[:-1]]}
        if item.tools:
            line["tools"] = item.tools
        if task == "think":
            line["chat_template_kwargs"] = {"enable_thinking": True}
        yield line


def _written(message: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def lines(family: Family, *, share: float = 1.0, seed: int = 0) -> Iterator[str]:
    """All lines as JSON: those held out first, then those to learn from, mixed."""
    for held_out in (True, False):
        rng, found = random.Random(f"drafts {seed} {held_out}"), []
        for task, counts in COUNTS.items():
            made = _made(family, task, rng, held_out=held_out)
            count = max(1, round(counts[held_out] * (1.0 if held_out else share)))
            found += [next(made) | {"task": task, "held_out": held_out} for _ in range(count)]
        rng.shuffle(found)
        yield from (json.dumps(line) for line in found)
