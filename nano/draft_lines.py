"""Prompts for the drafters of the bundled models, as lines of a data file by task.

Training lines come from the side of the split that the models were trained on, and code from the
files that they know; those held out from the other side.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import cache, partial

from limelight.bench.tasks import NAME, TOLD
from nano import tasks
from nano.chat import Family
from nano.conversations import from_turns, lookup, talk
from nano.tasks import Item, Turn, draw, is_held_out
from nano.tools import call_tools
from nano.words import read_code

Line = dict[str, object]
CODE, LONG_CODE = (200, 800), (200, 4000)  # characters
LOOKUP = (40, 400)  # tokens
LIST = (10, 150)  # words, more than the models can sort
# Lines of each task to learn from, and held out.
COUNTS = {
    "code": (16000, 60), "sort": (12000, 60), "sum": (2000, 40), "copy": (3000, 30),
    "json": (3000, 40), "tool": (4000, 40), "lookup": (2000, 30), "think": (3000, 30),
    "talk": (5000, 30), "file": (2048, 15), "list": (2048, 15),
}  # fmt: skip
# The longest answers, in tokens. Models this small fall into loops, and a drafter has to know them.
MOST_TOKENS = {"code": 256, "file": 2048, "list": 512}
MOST_OF_OTHERS = 128
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


def _code(files: list[str], rng: random.Random, lengths: tuple[int, int]) -> str:
    """The beginning of a file from a random line on."""
    text = rng.choices(files, [len(file) for file in files])[0]
    length = rng.randint(*lengths)
    first = rng.randint(0, max(0, len(text) - length))
    first = text.find("\n", first) + 1
    return text[first : first + length]


def _list(names: list[str], rng: random.Random) -> Item:
    """Many words to sort, as benchmarks ask."""
    asked = TOLD + " ".join(rng.sample(names, rng.randint(*LIST)))
    return from_turns([Turn(asked, "", "")])


@cache
def _files(held_out: bool) -> list[str]:
    return [text for name, text in read_code().items() if is_held_out(f"file {name}") == held_out]


def _made(family: Family, task: str, rng: random.Random, *, held_out: bool) -> Iterator[Line]:
    """Lines of one task without end."""
    if task in ("code", "file"):
        files, lengths = _files(held_out), CODE if task == "code" else LONG_CODE
        while True:
            yield {"prompt": _code(files, rng, lengths)}
    make = partial(talk, rng, name=family.name)
    if task == "list":
        found = (NAME.findall(text) for text in _files(held_out))
        make = partial(_list, sorted({name.lower() for names in found for name in names}), rng)
    elif task != "talk":
        make = partial(draw, partial(MAKERS[task], rng), held_out=held_out)
    while True:
        item = make()
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
