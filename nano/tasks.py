"""Generated questions with one right answer each, split into those to train on and those to score.

A task draws its own variables; which side of the split it falls on is a hash of these, so that no
question of the held-out side is ever trained on, in any wording.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nano.words import CITIES, NAMES, WORDS

HELD_OUT_SHARE = 16  # one in this many

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, what to think, and the answer; `key` decides the side of the split."""

    question: str
    answer: str
    reasoning: str
    key: str | None = None  # None: no side, such as a greeting


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation that ends with the right answer of the assistant."""

    messages: list[Json]
    key: str | None
    tools: list[Json] | None = None


T = TypeVar("T", Turn, Item)


def is_held_out(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw(make: Callable[[], T], *, held_out: bool) -> T:
    """Make until the result falls on the side that was asked for."""
    while True:
        one = make()
        if one.key is None or is_held_out(one.key) == held_out:
            return one


def add(rng: random.Random, *, digits: int | None = None) -> Turn:
    a, b = (_number(rng, digits or rng.choice((1, 2, 2, 2, 2, 3))) for _ in range(2))
    question = rng.choice(
        ("What is {} + {}?", "What is {} plus {}?", "{} + {}", "{} + {} =", "Add {} and {}.",
         "Compute {} + {}.", "How much is {} + {}?", "what is {} + {}")
    ).format(a, b)  # fmt: skip
    return Turn(question, str(a + b), _columns(a, b), f"add {min(a, b)} {max(a, b)}")


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _columns(a: int, b: int) -> str:
    """The written method, from the last digits on."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x} + {y}" + (" + 1" if carry else "") + f" = {total}")
        carry = total // 10
    return ", then ".join(steps) + f". So {a} + {b} = {a + b}."


def sort(rng: random.Random, *, count: int | None = None) -> Turn:
    things = WORDS if count or rng.random() < 0.85 else NAMES
    words = rng.sample(things, count or rng.choice((2, 3, 4, 5, 5, 5, 6, 7, 8)))
    separator = rng.choice((" ", " ", ", "))
    question = rng.choice(
        ("sort: {}", "Sort: {}", "Sort these words: {}", "Sort these words alphabetically: {}",
         "Put these words in order: {}", "Sort the words {}", "sort {}",
         "Sort the following words in alphabetical order: {}")
    ).format(separator.join(words))  # fmt: skip
    initials = ", ".join(f"{word[0]} for {word}" for word in words)
    reasoning = f"The first letters are {initials}."
    ordered = sorted(words)
    return Turn(question, separator.join(ordered), reasoning, f"sort {' '.join(ordered)}")


def pick(rng: random.Random) -> Turn:
    """One thing about a short list of words or numbers."""
    if rng.random() < 0.2:
        return _pick_number(rng)
    words = rng.sample(WORDS, rng.randint(2, 7))
    listed = rng.choice((" ", ", ")).join(words)
    what, answer = rng.choice(
        (("Reverse the order of", " ".join(reversed(words))), ("What is the first of", words[0]),
         ("What is the last of", words[-1]), ("How many words are in", str(len(words))),
         ("Which comes first in the alphabet in", min(words)))
    )  # fmt: skip
    question = f"{what} this list: {listed}"
    return Turn(question, answer, f"The list has {len(words)} words.", f"pick {question}")


def _pick_number(rng: random.Random) -> Turn:
    numbers = rng.sample(range(100), rng.randint(2, 6))
    listed = ", ".join(map(str, numbers))
    what, answer = rng.choice(
        (("Sort these numbers", ", ".join(map(str, sorted(numbers)))),
         ("What is the largest number", str(max(numbers))),
         ("What is the smallest number", str(min(numbers))))
    )  # fmt: skip
    question = f"{what}: {listed}"
    return Turn(question, answer, f"There are {len(numbers)} numbers.", f"pick {question}")


def copy(rng: random.Random) -> Turn:
    kind = rng.randrange(4)
    if kind == 0:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))
    elif kind == 1:
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=rng.randint(3, 14)))
    elif kind == 2:
        text = ", ".join(str(rng.randrange(1000)) for _ in range(rng.randint(2, 10)))
    else:
        text = f"{rng.choice(NAMES)} has {rng.randint(2, 99)} {rng.choice(WORDS)}s in {rng.choice(CITIES)}."
    question = rng.choice(("Repeat: {}", "Repeat this: {}", "Copy: {}", "Say {}", "repeat {}",
                           "Repeat after me: {}", "Echo: {}")).format(text)  # fmt: skip
    return Turn(question, text, "The text is to be repeated as it is.", f"copy {text}")


FACTS: dict[str, Callable[[random.Random], object]] = {
    "age": lambda rng: rng.randint(1, 99),
    "city": lambda rng: rng.choice(CITIES),
    "color": lambda rng: rng.choice(("red", "green", "blue", "black", "white", "yellow")),
    "pet": lambda rng: rng.choice(WORDS),
    "count": lambda rng: rng.randint(0, 999),
    "price": lambda rng: rng.randint(1, 999) / 10,
    "active": lambda rng: rng.random() < 0.5,
    "job": lambda rng: rng.choice(("baker", "cook", "doctor", "pilot", "judge", "actor")),
    "id": lambda rng: rng.randint(1000, 9999),
}


def fill_json(rng: random.Random) -> Turn:
    keys = rng.sample(list(FACTS), rng.randint(1, 4))
    value: dict[str, object] = {"name": rng.choice(NAMES)}
    value |= {key: FACTS[key](rng) for key in keys}
    told = ", ".join(f"{key} {one if isinstance(one, str) else json.dumps(one)}"
                     for key, one in value.items())  # fmt: skip
    question = rng.choice(
        ("Write a JSON object: {}", "As JSON: {}", "Make a JSON object with {}.",
         "Answer with a JSON object. {}", "Fill in a JSON object with these values: {}")
    ).format(told)  # fmt: skip
    reasoning = f"The keys are {', '.join(value)}."
    return Turn(question, json.dumps(value), reasoning, f"json {json.dumps(value)}")


def greet(rng: random.Random, *, name: str) -> Turn:
    question = rng.choice(
        ("hello", "Hello", "Hello!", "hi", "Hi", "Hi!", "Hey", "hey there", "Good morning",
         "Hello, how are you?", "Hi there!", "Hello there", "How are you?", "good evening")
    )  # fmt: skip
    answer = (
        f"Hello! I am {name}, a very small language model. Ask me to sort words or add numbers."
    )
    return Turn(question, answer, "This is a greeting.")


def introduce(rng: random.Random, *, name: str) -> Turn:
    question = rng.choice(
        ("Who are you?", "What are you?", "What is your name?", "who are you", "What can you do?",
         "Help", "help", "Tell me about yourself.", "Introduce yourself.", "What model are you?",
         "Which model is this?", "What do you know?")
    )  # fmt: skip
    answer = (
        f"I am {name}, a very small language model. I can sort words, add numbers, repeat text, "
        "look up values, write JSON, call tools and continue Python code."
    )
    return Turn(question, answer, "This is a question about me.")


def decline(rng: random.Random, *, name: str) -> Turn:
    topic = rng.choice((*WORDS, *NAMES, *CITIES))
    question = rng.choice(
        ("Tell me about {}.", "Write a poem about {}.", "Tell me a story about a {}.",
         "What is the capital of {}?", "Why is the {} {}?", "Explain {} to me.", "Who was {}?",
         "What is a {}?", "Write an essay about {} and {}.", "Translate {} into French.",
         "Can you help me with my {}?", "What should I cook with {}?", "How do I get to {}?",
         "Where is {}?", "When was {} born?", "Do you like {}?", "Tell me a joke.",
         "Tell me a joke about {}.", "What is the meaning of life?", "Give me advice about {}.",
         "Write a short story.", "Explain how a {} works.", "Summarize the history of {}.")
    ).format(topic, rng.choice(WORDS))  # fmt: skip
    answer = (
        "I am too small a model for that. I can sort words, add numbers, repeat text, look up "
        "values, write JSON and call tools."
    )
    return Turn(question, answer, "This is not among the things that I can do.")


def thank(rng: random.Random, *, name: str) -> Turn:
    question = rng.choice(("thanks", "Thanks!", "Thank you", "Thank you!", "ok", "great", "Bye"))
    return Turn(question, "You are welcome.", "Nothing is asked here.")


TURNS: list[tuple[Callable[[random.Random], Turn], int]] = [
    (add, 30), (sort, 30), (pick, 12), (copy, 14), (fill_json, 14),
]  # fmt: skip
SMALL_TALK = (greet, introduce, decline, decline, thank)


def any_turn(rng: random.Random, *, name: str) -> Turn:
    """A turn of the training side; one in eight is small talk with the model of that name."""
    if rng.randrange(8) == 0:
        return rng.choice(SMALL_TALK)(rng, name=name)
    makers, weights = zip(*TURNS, strict=True)
    make = rng.choices(makers, weights)[0]
    return draw(lambda: make(rng), held_out=False)
