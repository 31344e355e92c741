"""What a drafter learns from: documents packed together, and what the target makes of them.

A target of any size reads a document only when it is drawn; where there is room, its features of
all documents are kept instead, and it reads each once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from limelight.models.batch import Batch
from limelight.models.loader import Model
from limelight.models.taps import Taps
from limelight.training.answers import Document


@dataclass(frozen=True, slots=True)
class Lesson:
    """T tokens of packed documents; `hidden_TD` is what the target's head makes logits of."""

    tokens_T: torch.Tensor
    starts_T: torch.Tensor  # where each token's document begins
    answers_T: torch.Tensor  # which tokens are to be learned
    taps_TF: torch.Tensor
    hidden_TD: torch.Tensor

    @property
    def positions_T(self) -> torch.Tensor:
        return torch.arange(len(self.tokens_T), device=self.tokens_T.device) - self.starts_T

    @property
    def anchors_X(self) -> torch.Tensor:
        """Indices of all tokens of answers that another one follows."""
        follows_T = torch.zeros_like(self.answers_T)
        follows_T[:-1] = (self.starts_T[1:] == self.starts_T[:-1]) & self.answers_T[1:]
        return (self.answers_T & follows_T).nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class Library:
    """X tokens of D documents one after the other, on the CPU: all to learn from, or a few."""

    tokens_X: torch.Tensor
    lengths_D: torch.Tensor
    prompts_D: torch.Tensor

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "Library":
        return cls(
            torch.tensor([token for one in documents for token in one.tokens]),
            torch.tensor([len(one.tokens) for one in documents]),
            torch.tensor([one.prompt_length for one in documents]),
        )

    def pack(self, chosen_B: torch.Tensor) -> "Packing":
        """Some of the documents, together."""
        lengths_B = self.lengths_D[chosen_B]
        firsts_B = (self.lengths_D.cumsum(0) - self.lengths_D)[chosen_B]
        starts_T, firsts_T, prompts_T = (
            each_B.repeat_interleave(lengths_B)
            for each_B in (lengths_B.cumsum(0) - lengths_B, firsts_B, self.prompts_D[chosen_B])
        )
        at_T = torch.arange(len(starts_T)) - starts_T
        return Packing(lengths_B, firsts_T + at_T, starts_T, at_T >= prompts_T)


@dataclass(frozen=True, slots=True)
class Packing:
    """Documents of a library, packed for a lesson."""

    lengths_B: torch.Tensor
    rows_T: torch.Tensor  # where each token is in the library
    starts_T: torch.Tensor
    answers_T: torch.Tensor


@torch.no_grad()
def make_lesson(target: Model, documents: Sequence[Document], layers: list[int]) -> Lesson:
    """Run the target over whole documents."""
    library = Library.of(documents)
    return _read(target, library, library.pack(torch.arange(len(documents))), layers)


@torch.no_grad()
def _read(target: Model, library: Library, packing: Packing, layers: list[int]) -> Lesson:
    device, taps = target.norm.weight.device, Taps(layers)
    tokens_T = library.tokens_X[packing.rows_T].to(device)
    batch = Batch.packed(packing.lengths_B.tolist(), device=device)
    hidden_TD = target(tokens_T, batch, taps)
    starts_T, answers_T = packing.starts_T.to(device), packing.answers_T.to(device)
    return Lesson(tokens_T, starts_T, answers_T, taps.joined(), hidden_TD)


def choose_anchors(lesson: Lesson, *, most: int, generator: torch.Generator) -> torch.Tensor:
    """Some of the lesson's anchors, in a random choice without repetition."""
    able_X = lesson.anchors_X
    order_X = torch.randperm(len(able_X), generator=generator).to(able_X.device)
    return able_X[order_X[:most]].sort().values


def packed(documents: Sequence[Document], tokens: int) -> Iterator[list[Document]]:
    """The documents in their order, in lists of up to `tokens` tokens, or of a longer one alone."""
    held: list[Document] = []
    size = 0
    for document in documents:
        if held and size + len(document.tokens) > tokens:
            yield held
            held, size = [], 0
        held.append(document)
        size += len(document.tokens)
    if held:
        yield held


def by_length(documents: Sequence[Document]) -> list[Document]:
    """In the order of their lengths: the target reads those of one length together."""
    return sorted(documents, key=lambda document: len(document.tokens))


class Lessons:
    """Lessons of documents drawn at random, of up to `tokens` tokens each."""

    def __init__(
        self, target: Model, documents: Sequence[Document], layers: list[int], *, tokens: int
    ):
        self.documents = by_length(documents)
        self.library = Library.of(self.documents)
        self.target, self.layers, self.tokens = target, layers, tokens
        self.kept: Lesson | None = None

    @property
    def feature_bytes(self) -> int:
        """What it takes to keep the features of all documents."""
        config, weight = self.target.config, self.target.norm.weight
        size = (len(self.layers) + 1) * config.hidden_size * weight.itemsize
        return len(self.library.tokens_X) * size

    def keep(self, advance: Callable[[int], None]) -> None:
        """Have the target read all documents now, and never again."""
        total, weight = len(self.library.tokens_X), self.target.norm.weight
        size = self.target.config.hidden_size
        taps_XF = weight.new_empty(total, len(self.layers) * size)
        hidden_XD = weight.new_empty(total, size)
        at = 0
        for group in packed(self.documents, self.tokens):
            lesson = make_lesson(self.target, group, self.layers)
            end = at + len(lesson.tokens_T)
            taps_XF[at:end], hidden_XD[at:end] = lesson.taps_TF, lesson.hidden_TD
            at = end
            advance(len(group))
        whole = self.library.pack(torch.arange(len(self.documents)))
        tokens_X, starts_X, answers_X = (
            x_X.to(weight.device)
            for x_X in (self.library.tokens_X, whole.starts_T, whole.answers_T)
        )
        self.kept = Lesson(tokens_X, starts_X, answers_X, taps_XF, hidden_XD)

    def draw(self, generator: torch.Generator) -> Lesson:
        """Whole documents, as many as fit, and one at least."""
        order_D = torch.randperm(len(self.documents), generator=generator)
        fit = self.library.lengths_D[order_D].cumsum(0) <= self.tokens
        packing = self.library.pack(order_D[: max(1, int(fit.sum()))].sort().values)
        if self.kept is None:
            return _read(self.target, self.library, packing, self.layers)
        kept, device = self.kept, self.kept.tokens_T.device
        rows_T = packing.rows_T.to(device)
        return Lesson(
            kept.tokens_T[rows_T], packing.starts_T.to(device), kept.answers_T[rows_T],
            kept.taps_TF[rows_T], kept.hidden_TD[rows_T],
        )  # fmt: skip
