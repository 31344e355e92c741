"""What a drafter learns from: documents packed together, and what the target makes of them.

A target of any size reads a document only when it is drawn; where there is room, its features of
all documents are kept instead, and it reads each once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from limelight.drafting.answers import Document
from limelight.models.batch import Batch
from limelight.models.loader import Model
from limelight.models.taps import Taps


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
class Packing:
    """The tokens of a lesson, before the target has read them."""

    lengths: list[int]
    tokens_T: torch.Tensor
    starts_T: torch.Tensor
    answers_T: torch.Tensor

    @classmethod
    def of(cls, documents: Sequence[Document], device: torch.device) -> "Packing":
        lengths = [len(document.tokens) for document in documents]
        tokens_T = torch.tensor([token for one in documents for token in one.tokens])
        lengths_X = torch.tensor(lengths)
        starts_T = (lengths_X.cumsum(0) - lengths_X).repeat_interleave(lengths_X)
        prompts_X = torch.tensor([document.prompt_length for document in documents])
        at_T = torch.arange(len(tokens_T)) - starts_T
        answers_T = at_T >= prompts_X.repeat_interleave(lengths_X)
        return cls(lengths, tokens_T.to(device), starts_T.to(device), answers_T.to(device))

    def lesson(self, taps_TF: torch.Tensor, hidden_TD: torch.Tensor) -> Lesson:
        return Lesson(self.tokens_T, self.starts_T, self.answers_T, taps_TF, hidden_TD)


@torch.no_grad()
def make_lesson(target: Model, documents: Sequence[Document], layers: list[int]) -> Lesson:
    """Run the target over whole documents."""
    device = target.norm.weight.device
    packing, taps = Packing.of(documents, device), Taps(layers)
    batch = Batch.packed(packing.lengths, device=device)
    hidden_TD = target(packing.tokens_T, batch, taps)
    return packing.lesson(taps.joined(), hidden_TD)


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


class Lessons:
    """Lessons of documents drawn at random, of up to `tokens` tokens each."""

    def __init__(
        self, target: Model, documents: Sequence[Document], layers: list[int], *, tokens: int
    ):
        self.target, self.documents, self.layers, self.tokens = target, documents, layers, tokens
        self.kept: _Features | None = None

    @property
    def feature_bytes(self) -> int:
        """What it takes to keep the features of all documents."""
        config, weight = self.target.config, self.target.norm.weight
        count = sum(len(document.tokens) for document in self.documents)
        return count * (len(self.layers) + 1) * config.hidden_size * weight.itemsize

    def keep(self, advance: Callable[[int], None]) -> None:
        """Have the target read all documents now, and never again."""
        lengths = [len(document.tokens) for document in self.documents]
        total, (size, weight) = (
            sum(lengths),
            (self.target.config.hidden_size, self.target.norm.weight),
        )
        taps_XF = weight.new_empty(total, len(self.layers) * size)
        hidden_XD = weight.new_empty(total, size)
        at = 0
        for group in packed(self.documents, self.tokens):
            lesson = make_lesson(self.target, group, self.layers)
            end = at + len(lesson.tokens_T)
            taps_XF[at:end], hidden_XD[at:end] = lesson.taps_TF, lesson.hidden_TD
            at = end
            advance(len(group))
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = [torch.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        self.kept = _Features(taps_XF, hidden_XD, spans)

    def draw(self, generator: torch.Generator) -> Lesson:
        """Whole documents, as many as fit, and one at least."""
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        chosen: list[int] = []
        left = self.tokens
        for i in order:
            left -= len(self.documents[i].tokens)
            if chosen and left < 0:
                break
            chosen.append(i)
        documents = [self.documents[i] for i in chosen]
        if self.kept is None:
            return make_lesson(self.target, documents, self.layers)
        packing = Packing.of(documents, self.target.norm.weight.device)
        return packing.lesson(*self.kept.of(chosen))


@dataclass(frozen=True, slots=True)
class _Features:
    """Of X tokens of all documents, and which of them are of each."""

    taps_XF: torch.Tensor
    hidden_XD: torch.Tensor
    spans: list[torch.Tensor]

    def of(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows_T = torch.cat([self.spans[i] for i in chosen]).to(self.taps_XF.device)
        return self.taps_XF[rows_T], self.hidden_XD[rows_T]
