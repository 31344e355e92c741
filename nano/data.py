"""Rows of tokens to train on: whole documents packed one after the other, without end.

Themes are mixed by rows: code, look-ups in long texts, and short conversations. The longest
document grows during the first part of the training.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

import numpy as np
import tokenizers
import torch
from torch.utils.data import IterableDataset, get_worker_info

from nano.chat import BEAM, END, Family, Segment
from nano.conversations import any_lookup, far_lookup, talk
from nano.tasks import add, draw, fill_json, is_held_out, sort
from nano.words import WORDS, read_code

ROW = 2304  # tokens
SHORTEST, LONGEST = 160, 2100  # of the longest document: at the start, and once it has grown
GROWN_AT = 0.4  # of the training
THEMES = {"code": 0.25, "lookup": 0.32, "talk": 0.36, "plain": 0.07}
ANSWER_WEIGHT = 4.0  # of a token of an answer, against one of code


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and how much it counts to predict each of them from those before it."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of L tokens. `starts` has the column where the document of each token begins."""

    tokens_BL: torch.Tensor
    weights_BL: torch.Tensor
    starts_BL: torch.Tensor


def encode(tokenizer: tokenizers.Tokenizer, segments: list[Segment], scale: float) -> Document:
    ids: list[int] = []
    weights: list[float] = []
    for segment in segments:
        piece = tokenizer.encode(segment.text, add_special_tokens=False).ids
        ids += piece
        weights += [segment.weight * scale] * len(piece)
    return Document(ids, weights)


def encode_code(tokenizer: tokenizers.Tokenizer) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The standard library's files as token ids: those to train on, and those held out."""
    files = read_code()
    ids = [
        np.array(one.ids + [0], dtype=np.uint16)
        for one in tokenizer.encode_batch(list(files.values()), add_special_tokens=False)
    ]
    assert tokenizer.token_to_id(END) == 0
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for name, one in zip(files, ids, strict=True):
        sides[is_held_out(f"file {name}")].append(one)
    return sides


def plain(rng: random.Random) -> list[Segment]:
    """A document without a chat format: lines of one pattern, each with its answer."""
    kind = rng.randrange(4)
    segments = []
    words = rng.sample(WORDS, 12)
    table = {word: str(rng.randint(0, 999)) for word in words}
    if kind == 3:
        segments.append(
            Segment("".join(f"{word}: {value}\n" for word, value in table.items()), 0.0)
        )
    for _ in range(rng.randint(1, 12)):
        if kind == 0:
            turn = draw(lambda: add(rng), held_out=False)
            assert turn.key is not None
            _, a, b = turn.key.split()
            segments.append(Segment(f"{a} + {b} =", 0.05))
            segments.append(Segment(f" {turn.answer}\n", 1.0))
        elif kind == 1:
            turn = draw(lambda: sort(rng, count=rng.randint(2, 7)), held_out=False)
            assert turn.key is not None
            shuffled = turn.key.split()[1:]
            rng.shuffle(shuffled)
            segments.append(Segment(f"sort: {' '.join(shuffled)} ->", 0.05))
            segments.append(Segment(f" {turn.answer.replace(',', '')}\n", 1.0))
        elif kind == 2:
            turn = draw(lambda: fill_json(rng), held_out=False)
            segments += [Segment(f"{turn.question}\n", 0.05), Segment(f"{turn.answer}\n", 1.0)]
        else:
            word = rng.choice(words)
            segments += [Segment(f"{word}:", 0.0), Segment(f" {table[word]}\n", 1.0)]
    return [*segments, Segment(END, 0.1)]


class TrainingRows(IterableDataset[Rows]):
    """Batches of `rows` rows. `share` says how far the training is, from 0 to 1."""

    def __init__(
        self,
        family: Family,
        tokenizer: tokenizers.Tokenizer,
        code: list[np.ndarray],
        *,
        rows: int,
        share: "Synchronized[float]",
        seed: int,
    ):
        self.family, self.tokenizer, self.code = family, tokenizer, code
        self.sizes = np.cumsum([len(file) for file in code])
        self.rows, self.share, self.seed = rows, share, seed

    def __iter__(self) -> Iterator[Rows]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {worker.id if worker else 0}")
        while True:
            packed = [self._row(rng) for _ in range(self.rows)]
            yield Rows(*(torch.from_numpy(np.stack(part)) for part in zip(*packed, strict=True)))

    def _row(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Documents of one theme until the next one does not fit; a piece of code in the rest."""
        tokens, starts = np.zeros(ROW, np.int64), np.zeros(ROW, np.int64)
        weights = np.zeros(ROW, np.float32)
        theme = rng.choices(list(THEMES), list(THEMES.values()))[0]
        at = 0
        while at < ROW:
            document = self._document(rng, theme)
            if at + len(document.ids) > ROW:
                document = self._piece(rng, ROW - at, ROW - at)
            end = at + len(document.ids)
            tokens[at:end], weights[at:end], starts[at:end] = document.ids, document.weights, at
            weights[at] = 0.0  # nothing before it says how a document begins
            at = end
        return tokens, weights, starts

    def _document(self, rng: random.Random, theme: str) -> Document:
        longest = SHORTEST + (LONGEST - SHORTEST) * min(1.0, self.share.value / GROWN_AT)
        if theme == "code":
            return self._piece(rng, int(min(ROW, 2 * longest)), 64)
        if theme == "plain":
            return encode(self.tokenizer, plain(rng), ANSWER_WEIGHT)
        if theme == "lookup":
            item = self._lookup(rng, int(longest))
        else:
            item = talk(rng, name=self.family.name)
        # Where tools are offered, a prompt of Beam leaves it to the model whether to think.
        chosen = self.family is BEAM and item.tools is not None and rng.random() < 0.6
        thinking = rng.random() < (0.2 if theme == "talk" else 0.05)
        segments = self.family.segments(item, thinking=thinking, opened=not chosen)
        return encode(self.tokenizer, segments, ANSWER_WEIGHT)

    def _lookup(self, rng: random.Random, longest: int):
        length = (
            rng.randint(longest // 2, longest) if rng.random() < 0.4 else rng.randint(16, longest)
        )
        if rng.random() < 0.1:
            lines = max(2, min(length // 7, len(WORDS)))
            return draw(lambda: far_lookup(rng, lines=lines, at_most=lines), held_out=False)
        piece = self._piece(rng, length, length)
        return any_lookup(rng, length=length, filler=self.tokenizer.decode(piece.ids))

    def _piece(self, rng: random.Random, longest: int, shortest: int) -> Document:
        """A part of a file: `shortest` to `longest` tokens, fewer where the file is shorter."""
        file = self.code[
            int(np.searchsorted(self.sizes, rng.randrange(self.sizes[-1]), side="right"))
        ]
        length = min(len(file), rng.randint(min(shortest, longest), longest))
        first = rng.randint(0, len(file) - length)
        return Document(file[first : first + length].tolist(), [1.0] * length)
