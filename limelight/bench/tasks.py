"""Prompts of low entropy for benchmarks of drafting: code to go on with, words to sort.

Made of the sources of Python's standard library, so that every machine has them. Their shape is
that of published sets: about a thousand tokens, and answers whose text can mostly be foreseen.
"""

import random
import re
import sysconfig
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer

TOLD = "Sort these words alphabetically: "
NAME = re.compile(r"^\s*(?:def|class) ([A-Za-z]\w+)", re.MULTILINE)
# A token is hardly ever longer.
CHARACTERS = 12
SAMPLE = 64  # words by which the tokens of a word are counted
TRIES = 100


class Tasks:
    """Prompts of one kind, each of about `length` tokens, for a model that can read them."""

    def __init__(
        self, kind: str, *, length: int, tokenizer: Tokenizer, template: ChatTemplate | None
    ):
        self.kind, self.length = kind, length
        self.tokenizer, self.template = tokenizer, template

    @cached_property
    def sources(self) -> list[str]:
        """The files of the standard library that are long enough."""
        root = Path(sysconfig.get_path("stdlib"))
        texts = [
            path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.glob("*.py"))
        ]
        texts = [text for text in texts if len(text) > 4 * self.length]
        if not texts:
            raise ValueError(
                f"{root} has no source of {self.length} tokens: give a shorter --prompt-len, or "
                f"--tasks random"
            )
        return texts

    @cached_property
    def words(self) -> list[str]:
        """Names of functions and classes in these files, in lower case."""
        return sorted({name.lower() for text in self.sources for name in NAME.findall(text)})

    def prompt(self, rng: random.Random) -> list[int]:
        """Token ids; a mixed set has as many of one kind as of the other."""
        makers: dict[str, Callable[[random.Random], list[int]]] = {
            "code": self._code,
            "sort": self._sort,
        }
        return makers[rng.choice(("code", "sort")) if self.kind == "mixed" else self.kind](rng)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _code(self, rng: random.Random) -> list[int]:
        """A part of a file, cut off anywhere, as an editor sends it: without a chat around it."""
        for _ in range(TRIES):
            text = rng.choice(self.sources)
            first = text.rfind("\n", 0, rng.randrange(len(text) - 3 * self.length)) + 1
            ids = self._encode(text[first : first + CHARACTERS * self.length])
            if len(ids) >= self.length:
                return ids[: self.length]
        raise ValueError(f"no source of {self.length} tokens: give a shorter --prompt-len")

    def _sort(self, rng: random.Random) -> list[int]:
        """A list of words, as a question in a chat where the model has a template for one."""
        sample = rng.sample(self.words, min(SAMPLE, len(self.words)))
        each = len(self._encode(" ".join(sample))) / len(sample)
        around = len(self._asked(TOLD))
        count = max(2, min(round((self.length - around) / each), len(self.words)))
        return self._asked(TOLD + " ".join(rng.sample(self.words, count)))

    def _asked(self, text: str) -> list[int]:
        if self.template is not None:
            text = self.template.render([{"role": "user", "content": text}])
        return self._encode(text)
