"""What a drafter learns from: excerpts of documents, and what the target makes of them.

A target of any size reads a document only when it is drawn; where there is room, its features of
all documents are kept instead, and it reads each once.

Every lesson of a training has the same shape, and drawing one never waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from limelight.models.batch import Batch
from limelight.models.loader import Model
from limelight.models.taps import Taps
from limelight.training.answers import Document

# Anchors of an excerpt lie this near, or within this share of the tokens that a drafter looks back.
NEAR, NEAR_SHARE = 64, 4
# An anchor of a document of many is drawn less often: it goes on as it began.
MOST_EXCERPTS = 32
# Of attention's scores, and of what else a forward of the target holds at once.
READ_BYTES = {"cuda": 2**30, "cpu": 2**28}
HELD_SIZES = 16  # tensors of a row for each token, about
# Lengths that documents are filled up to: few, so that kernels meet few shapes.
STEPS_AN_OCTAVE, SHORTEST = 4, 16


@dataclass(frozen=True)
class Lesson:
    """E excerpts of documents, L tokens and A anchors each; a short document's is filled up.

    An anchor is a place in its excerpt, a token of an answer that another one follows; -1 is none.
    `hidden_ELD` is what the target's head makes logits of. N tokens behind an anchor are inside.
    """

    tokens_EL: torch.Tensor
    firsts_E: torch.Tensor  # the first token's position in its document
    lengths_E: torch.Tensor  # tokens of the document
    anchors_EA: torch.Tensor
    taps_ELF: torch.Tensor
    hidden_ELD: torch.Tensor

    @property
    def positions_EL(self) -> torch.Tensor:
        return self.firsts_E[:, None] + torch.arange(
            self.tokens_EL.shape[1], device=self.tokens_EL.device
        )

    @property
    def places_EA(self) -> torch.Tensor:
        """Where anchors are; that of none is the first place."""
        return self.anchors_EA.clamp(min=0)

    @property
    def anchor_tokens_B(self) -> torch.Tensor:
        """The tokens at all anchors, those of an excerpt side by side."""
        return self.tokens_EL.gather(1, self.places_EA).flatten()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def split(self, excerpts: int) -> Iterator["Lesson"]:
        """In parts of up to so many excerpts."""
        parts = [tensor.split(excerpts) for tensor in self.tensors]
        return (Lesson(*part) for part in zip(*parts, strict=True))


@dataclass(frozen=True)
class Library:
    """X tokens of D documents one after the other, on the CPU."""

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

    @cached_property
    def firsts_D(self) -> torch.Tensor:
        return self.lengths_D.cumsum(0) - self.lengths_D

    @cached_property
    def anchors_D(self) -> torch.Tensor:
        """How many tokens of each answer another one follows."""
        return (self.lengths_D - 1 - self.prompts_D).clamp(min=0)


@dataclass(frozen=True, slots=True)
class Features:
    """What the target makes of documents one after the other, on its device."""

    tokens_X: torch.Tensor
    taps_XF: torch.Tensor
    hidden_XD: torch.Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """How long an excerpt is: A anchors, each among `span` tokens, and all that concerns them."""

    reach: int  # tokens that the drafter looks back
    span: int
    anchors: int
    rows: int  # learned behind an anchor

    @property
    def tokens(self) -> int:
        """The attention of a GPU asks for a multiple of 8."""
        return -(-(self.reach + self.span + self.rows) // 8) * 8

    @classmethod
    def reaching(cls, windows: Sequence[int | None], longest: int, *, rows: int) -> "Extent":
        """With all tokens of a span as anchors; `longest` is the longest document."""
        reach = min(longest, max(longest if one is None else one - 1 for one in windows))
        span = max(NEAR, reach // NEAR_SHARE)
        return cls(reach, span, span, rows)


def lesson_of(
    library: Library,
    features: Features,
    documents_E: torch.Tensor,
    anchors_EA: torch.Tensor,
    extent: Extent,
) -> Lesson:
    """Excerpts of documents of a library, around anchors at these positions, in rising order.

    Both are on the CPU. -1 is no anchor, and the first of an excerpt is one.
    """
    device = features.tokens_X.device
    starts_E = (anchors_EA[:, 0] - extent.reach).clamp(min=0)
    places_EA = torch.where(anchors_EA < 0, -1, anchors_EA - starts_E[:, None])
    firsts_E, lengths_E = library.firsts_D[documents_E], library.lengths_D[documents_E]
    plan = torch.cat([torch.stack([starts_E, firsts_E, lengths_E], dim=1), places_EA], dim=1)
    if device.type == "cuda":
        plan = plan.pin_memory()
    plan = plan.to(device, non_blocking=True)
    starts_E, firsts_E, lengths_E = plan[:, :3].unbind(1)
    rows_EL = (firsts_E + starts_E)[:, None] + torch.arange(extent.tokens, device=device)
    rows_EL = rows_EL.clamp(max=len(features.tokens_X) - 1)
    return Lesson(
        features.tokens_X[rows_EL], starts_E, lengths_E, plan[:, 3:],
        features.taps_XF[rows_EL], features.hidden_XD[rows_EL],
    )  # fmt: skip


@torch.no_grad()
def read(
    target: Model,
    library: Library,
    layers: list[int],
    advance: Callable[[int], None] = lambda documents: None,
) -> Features:
    """Run the target over whole documents, those of about one length at once."""
    weight, size = target.norm.weight, target.config.hidden_size
    tokens_X = library.tokens_X.to(weight.device)
    taps_XF = weight.new_empty(len(tokens_X), len(layers) * size)
    hidden_XD = weight.new_empty(len(tokens_X), size)
    for chosen_B, length in _groups(target, library.lengths_D):
        at_L, lengths_B = torch.arange(length), library.lengths_D[chosen_B]
        rows_BL = library.firsts_D[chosen_B][:, None] + at_L
        real_T = (at_L < lengths_B[:, None]).flatten().nonzero()[:, 0].to(weight.device)
        rows_T = rows_BL.clamp(max=len(tokens_X) - 1).flatten().to(weight.device)
        taps = Taps(layers)
        batch = Batch.packed([length] * len(chosen_B), device=weight.device)
        # What follows the end of a document is not seen from inside.
        hidden_TD = target(tokens_X[rows_T], batch, taps)
        into_Y = rows_T[real_T]
        hidden_XD[into_Y], taps_XF[into_Y] = hidden_TD[real_T], taps.joined()[real_T]
        advance(len(chosen_B))
    return Features(tokens_X, taps_XF, hidden_XD)


def _groups(target: Model, lengths_D: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Documents that are filled up to one length, as many as fit."""
    config = target.config
    row = HELD_SIZES * config.hidden_size * target.norm.weight.itemsize
    filled_D = torch.tensor([_filled(length) for length in lengths_D.tolist()])
    for length in filled_D.unique().tolist():
        scores = 4 * config.num_heads * length
        count = max(1, READ_BYTES[target.norm.weight.device.type] // (length * max(row, scores)))
        for chosen_B in (filled_D == length).nonzero()[:, 0].split(count):
            yield chosen_B, length


def _filled(length: int) -> int:
    step = max(SHORTEST, (1 << (length - 1).bit_length()) // (2 * STEPS_AN_OCTAVE))
    return -(-length // step) * step


class Lessons:
    """Lessons of excerpts drawn at random, `tokens` tokens and `anchors` anchors at most.

    All anchors are drawn about as often, but for those of a long document.
    """

    def __init__(
        self, target: Model, documents: Sequence[Document], layers: list[int], *,
        windows: Sequence[int | None], rows: int, tokens: int, anchors: int,
    ):  # fmt: skip
        documents = [one for one in documents if len(one.tokens) - one.prompt_length > 1]
        self.library, self.target, self.layers = Library.of(documents), target, layers
        whole = Extent.reaching(windows, int(self.library.lengths_D.max()), rows=rows)
        self.excerpts = max(1, min(tokens // whole.tokens, anchors))
        each = min(whole.span, -(-anchors // self.excerpts))
        self.extent = Extent(whole.reach, whole.span, each, rows)
        shares_D = (self.library.anchors_D.double() / each).clamp(1.0, MOST_EXCERPTS)
        self.shares_D = shares_D.cumsum(0)
        self.kept: Features | None = None

    @property
    def feature_bytes(self) -> int:
        """What it takes to keep the features of all documents."""
        config, weight = self.target.config, self.target.norm.weight
        size = (len(self.layers) + 1) * config.hidden_size * weight.itemsize
        return len(self.library.tokens_X) * size

    def keep(self, advance: Callable[[int], None]) -> None:
        """Have the target read all documents now, and never again."""
        self.kept = read(self.target, self.library, self.layers, advance)

    def draw(self, generator: torch.Generator) -> Lesson:
        drawn_E = torch.rand(self.excerpts, generator=generator, dtype=torch.float64)
        documents_E = torch.searchsorted(self.shares_D, drawn_E * self.shares_D[-1], right=True)
        anchors_EA = self._anchors(documents_E, generator)
        if self.kept is not None:
            return lesson_of(self.library, self.kept, documents_E, anchors_EA, self.extent)
        some, documents_E = documents_E.unique(return_inverse=True)
        firsts, lengths = self.library.firsts_D[some], self.library.lengths_D[some]
        tokens = [
            self.library.tokens_X[first : first + length]
            for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
        ]
        library = Library(torch.cat(tokens), lengths, self.library.prompts_D[some])
        features = read(self.target, library, self.layers)
        return lesson_of(library, features, documents_E, anchors_EA, self.extent)

    def _anchors(self, documents_E: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Positions of anchors near each other, in rising order and -1 behind them: [E, A]."""
        span, count_E = self.extent.span, self.library.anchors_D[documents_E]
        room_E = (count_E - span).clamp(min=0)
        # Half a span may lie outside: else the ends of an answer were drawn less often.
        drawn_E = torch.rand(len(documents_E), generator=generator) * (room_E + span) - span // 2
        start_E = torch.minimum(drawn_E.long().clamp(min=0), room_E)
        order_ES = torch.rand(len(documents_E), span, generator=generator)
        inside_ES = start_E[:, None] + torch.arange(span) < count_E[:, None]
        order_ES = order_ES.masked_fill(~inside_ES, 2.0)
        lowest_EA = order_ES.topk(self.extent.anchors, largest=False)
        places_EA = lowest_EA.indices.masked_fill(lowest_EA.values > 1.0, span).sort().values
        first_E = self.library.prompts_D[documents_E] + start_E
        return torch.where(places_EA < span, first_E[:, None] + places_EA, -1)
