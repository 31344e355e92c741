"""How many of its drafts a drafter would get accepted, told from texts of the target alone.

A text that the target wrote greedily is what it would have written with drafts. So they are made at
an anchor, those that the text bears out count, and the next anchor is the token behind them and the
target's own next one. Drafts behind the end of the text are not judged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from limelight.models.dflash2 import DFlash2
from limelight.models.loader import Model
from limelight.training.answers import Document
from limelight.training.lessons import Extent, Features, Lesson, Library, lesson_of, read
from limelight.training.loss import LessonBlocks, Rows

TOKENS_AT_ONCE, ANCHORS_AT_ONCE = 2**18, 2048
SPAN = 16  # anchors of an excerpt


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over steps; by place of a draft, N of each.

    `tried_N` are drafts that the text reaches, `accepted_N` those right with all before them right.
    Over all anchors, `rows_N` are places that the text reaches, `found_N` those whose token is one
    of the candidates, `chosen_N` those where the selector takes it behind the true one before.
    """

    documents: int
    steps: int
    tried_N: torch.Tensor
    accepted_N: torch.Tensor
    rows_N: torch.Tensor
    found_N: torch.Tensor
    chosen_N: torch.Tensor

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.documents + other.documents, self.steps + other.steps,
            self.tried_N + other.tried_N, self.accepted_N + other.accepted_N,
            self.rows_N + other.rows_N, self.found_N + other.found_N,
            self.chosen_N + other.chosen_N,
        )  # fmt: skip

    @property
    def length(self) -> float:
        """Accepted drafts and the target's own token, a step."""
        return 1.0 + self.accepted_N.sum().item() / max(1, self.steps)

    def report(self) -> dict[str, object]:
        """As plain data, to four decimals."""
        return {
            "documents": self.documents,
            "steps": self.steps,
            "length": round(self.length, 4),
            "accepted": _shares(self.accepted_N, self.tried_N),
            "recall": _shares(self.found_N, self.rows_N),
            "selector": _shares(self.chosen_N, self.rows_N),
        }


def _shares(some_N: torch.Tensor, all_N: torch.Tensor) -> list[float]:
    return [round(x, 4) for x in (some_N / all_N.clamp(min=1)).tolist()]


def measure(
    drafter: DFlash2, target: Model, documents: Iterable[Document], *, drafts: int
) -> dict[str, Acceptance]:
    """The acceptance by task; documents whose answer is a single token have no step."""
    long = [one for one in documents if len(one.tokens) - one.prompt_length > 1]
    found: dict[str, Acceptance] = {}
    for group in _packed(long):
        library = Library.of(group)
        features = read(target, library, drafter.config.taps)
        for document, one in zip(
            group, walk(drafter, library, features, drafts=drafts), strict=True
        ):
            task = document.task
            found[task] = found[task] + one if task in found else one
    return found


def _packed(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """In the order of their lengths, in lists whose features are held at once."""
    held: list[Document] = []
    size = 0
    for document in sorted(documents, key=lambda one: len(one.tokens)):
        if held and size + len(document.tokens) > TOKENS_AT_ONCE:
            yield held
            held, size = [], 0
        held.append(document)
        size += len(document.tokens)
    if held:
        yield held


def total(by_task: dict[str, Acceptance], tasks: Iterable[str] | None = None) -> Acceptance:
    """Of some of the tasks together, or of all."""
    first, *rest = (by_task[task] for task in (by_task if tasks is None else tasks))
    return sum(rest, first)


@torch.inference_mode()
def walk(
    drafter: DFlash2, library: Library, features: Features, *, drafts: int
) -> list[Acceptance]:
    """The acceptance of each document of a library, whose answers have two tokens or more."""
    judged = _judge(drafter, library, features, drafts)
    right_XN = judged.right_XN.int().cumprod(1).bool()
    # Where the step goes from each anchor: past the accepted drafts and the target's own token.
    ahead = (right_XN.sum(1) + 1).tolist()
    results, first = [], 0
    for count in library.anchors_D.tolist():
        steps, at, all_ = [], first, slice(first, first + count)
        while at < first + count:
            steps.append(at)
            at += ahead[at]
        first += count
        results.append(
            Acceptance(
                1,
                len(steps),
                judged.inside_XN[steps].sum(0),
                right_XN[steps].sum(0),
                judged.inside_XN[all_].sum(0),
                judged.found_XN[all_].sum(0),
                judged.chosen_XN[all_].sum(0),
            )  # fmt: skip
        )
    return results


@dataclass(frozen=True, slots=True)
class _Judged:
    """Of the drafts at each of X anchors: which places the text reaches, and what holds there."""

    inside_XN: torch.Tensor
    right_XN: torch.Tensor
    found_XN: torch.Tensor
    chosen_XN: torch.Tensor


def _judge(drafter: DFlash2, library: Library, features: Features, drafts: int) -> _Judged:
    """All anchors, document by document."""
    longest = int(library.lengths_D.max())
    reach = Extent.reaching(drafter.config.windows, longest, rows=drafts).reach
    extent = Extent(reach, SPAN, SPAN, drafts)
    spans_D = -(-library.anchors_D // extent.span)
    documents_E = torch.arange(len(spans_D)).repeat_interleave(spans_D)
    span_E = torch.arange(len(documents_E)) - (spans_D.cumsum(0) - spans_D)[documents_E]
    at_EA = extent.span * span_E[:, None] + torch.arange(extent.span)
    inside_EA = at_EA < library.anchors_D[documents_E][:, None]
    anchors_EA = torch.where(inside_EA, at_EA + library.prompts_D[documents_E][:, None], -1)
    parts: list[tuple[torch.Tensor, ...]] = []
    at_once = max(1, ANCHORS_AT_ONCE // extent.span)
    for chosen_E in torch.arange(len(documents_E)).split(at_once):
        lesson = lesson_of(library, features, documents_E[chosen_E], anchors_EA[chosen_E], extent)
        some_B = inside_EA[chosen_E].flatten()
        parts.append(tuple(x_BN.cpu()[some_B] for x_BN in _facts(drafter, lesson, drafts)))
    return _Judged(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _facts(drafter: DFlash2, lesson: Lesson, drafts: int) -> list[torch.Tensor]:
    """The fields of `_Judged` of a lesson's anchors."""
    anchors_B = lesson.anchor_tokens_B
    hidden_BND = drafter(anchors_B, LessonBlocks.of(drafter, lesson, drafts + 1))[:, 1:]
    hidden_BND = hidden_BND.contiguous()
    unary_BNK, ids_BNK = candidates = drafter.candidates(hidden_BND)
    made = drafter.choose(
        anchors_B, hidden_BND, candidates,
        temperature_B=torch.zeros(len(anchors_B), device=anchors_B.device),
        uniform_BN=torch.zeros(len(anchors_B), drafts, device=anchors_B.device),
    )  # fmt: skip
    rows, tokens_T = Rows.behind(lesson, drafts), lesson.tokens_EL.flatten()
    before_BN, true_BN = tokens_T[rows.before_BN], tokens_T[rows.before_BN + 1]
    scores_BNK = drafter.selector(hidden_BND, unary_BNK, before_BN[..., None], ids_BNK)[:, :, 0]
    best_BN = ids_BNK.gather(2, scores_BNK.argmax(-1, keepdim=True))[..., 0]
    found_BN = (ids_BNK == true_BN[..., None]).any(-1)
    facts = (rows.counts_BN, made.tokens_BN == true_BN, found_BN, best_BN == true_BN)
    return [fact_BN & rows.counts_BN for fact_BN in facts]
