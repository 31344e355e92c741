"""Whole conversations: several turns in one, and questions about a long text."""

import random

from nano.tasks import Item, Turn, any_turn, draw
from nano.tools import any_tools
from nano.words import NAMES, WORDS

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant", "Be brief.", "Answer in one line.",
    "You are a small model.", "Answer the question.", "Be kind and exact.",
)  # fmt: skip
TOKENS_A_LINE = 8  # of a table, roughly


def from_turns(turns: list[Turn], *, system: str | None = None) -> Item:
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer, "reasoning_content": turn.reasoning},
        ]
    return Item(messages, turns[-1].key)


def _system(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(SYSTEM)
    return f"You are {rng.choice(NAMES)}. {' '.join(rng.sample(WORDS, rng.randint(1, 12)))}."


def talk(rng: random.Random, *, name: str) -> Item:
    """One to four turns on anything, with tools in a third of all cases."""
    system = _system(rng) if rng.random() < 0.3 else None
    if rng.random() < 0.35:
        item = any_tools(rng, turn=any_turn(rng, name=name))
        if rng.random() < 0.15:
            item.messages[:0] = from_turns([any_turn(rng, name=name)]).messages
        if system:
            item.messages.insert(0, {"role": "system", "content": system})
        return item
    turns = [any_turn(rng, name=name) for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 4)))]
    return from_turns(turns, system=system)


def _value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return str(rng.randint(100, 999))
    return rng.choice(WORDS) if kind < 0.8 else f"{rng.choice(NAMES)}-{rng.randint(10, 99)}"


QUESTIONS = (
    "What is {}?", "What is the value of {}?", "{}?", "Look up {}.", "Which value has {}?",
    "What does it say for {}?",
)  # fmt: skip
LINES = ("{}: {}", "{}: {}", "{} = {}", "The code of {} is {}.", '    "{}": "{}",', "- {} has {}")


def lookup(rng: random.Random, *, length: int, filler: str = "") -> Item:
    """Questions about a table of roughly `length` tokens, or about lines hidden in `filler`."""
    count = max(2, min(length // TOKENS_A_LINE, len(WORDS)))
    line = rng.choice(LINES)
    keys = rng.sample(WORDS, count)
    if rng.random() < 0.4:
        keys = list(dict.fromkeys(f"{rng.choice(WORDS)} {rng.choice(WORDS)}" for _ in keys))
    table = {key: _value(rng) for key in keys}
    if filler:
        table = dict(list(table.items())[: rng.randint(2, 8)])
        line = rng.choice(("# {} is {}", "The code of {} is {}.", "{}: {}"))
    lines = [line.format(key, value) for key, value in table.items()]
    if filler:
        kept = filler.split("\n")
        for one in lines:
            kept.insert(rng.randrange(len(kept)), one)
        lines = kept
    asked = rng.sample(list(table), min(len(table), rng.choice((1, 4, 8, 12))))
    turns = [Turn(rng.choice(QUESTIONS).format(key), table[key], f"The text says {key}: {table[key]}.")
             for key in asked]  # fmt: skip
    item = from_turns(turns)
    first = item.messages[0]
    told = "\n".join(lines)
    glue = rng.choice(("\n", "\n\n"))
    if rng.random() < 0.2:
        item.messages.insert(0, {"role": "system", "content": told})
    elif rng.random() < 0.15:
        item.messages[0] = first | {"content": f"{first['content']}{glue}{told}"}
    else:
        item.messages[0] = first | {"content": f"{told}{glue}{first['content']}"}
    return Item(item.messages, f"lookup {keys[0]} {table.get(keys[0])}")


def far_lookup(rng: random.Random, *, lines: int, at_most: int) -> Item:
    """One question about a table of words and numbers, for one of its first `at_most` lines."""
    keys = rng.sample(WORDS, lines)
    table = {key: str(rng.randint(100, 999)) for key in keys}
    told = "\n".join(f"{key}: {value}" for key, value in table.items())
    key = keys[rng.randrange(at_most)]
    thought = f"The text says {key}: {table[key]}."
    side = f"lookup {keys[0]} {table[keys[0]]}"
    return from_turns([Turn(f"{told}\nWhat is the value of {key}?", table[key], thought, side)])


def any_lookup(rng: random.Random, *, length: int, filler: str) -> Item:
    """A look-up of the training side, through code in one of five cases."""
    hidden = filler if rng.random() < 0.2 else ""
    return draw(lambda: lookup(rng, length=length, filler=hidden), held_out=False)
