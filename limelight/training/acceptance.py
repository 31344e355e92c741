"""How many of its drafts a drafter would get accepted, told from texts of the target alone.

A text that the target wrote greedily is what it would have written with drafts. So they are made at
an anchor, those that the text bears out count, and the next anchor is the token behind them and the
target's own next one. Drafts behind the end of the text are not judged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from limelight.models.dflash2 import DFlash2
from limelight.models.loader import Model
from limelight.training.answers import Document
from limelight.training.lessons import Lesson, by_length, make_lesson, packed
from limelight.training.loss import LessonBlocks, Rows

TOKENS_AT_ONCE, ANCHORS_AT_ONCE = 8192, 512


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
    long = by_length([one for one in documents if len(one.tokens) - one.prompt_length > 1])
    found: dict[str, Acceptance] = {}
    for group in packed(long, TOKENS_AT_ONCE):
        lesson = make_lesson(target, group, drafter.config.taps)
        for document, one in zip(group, walk(drafter, lesson, group, drafts=drafts), strict=True):
            task = document.task
            found[task] = found[task] + one if task in found else one
    return found


def total(by_task: dict[str, Acceptance], tasks: Iterable[str] | None = None) -> Acceptance:
    """Of some of the tasks together, or of all."""
    first, *rest = (by_task[task] for task in (by_task if tasks is None else tasks))
    return sum(rest, first)


@torch.inference_mode()
def walk(
    drafter: DFlash2, lesson: Lesson, documents: Sequence[Document], *, drafts: int
) -> list[Acceptance]:
    """The acceptance of each of a lesson's documents."""
    judged = _judge(drafter, lesson, drafts)
    right_XN, inside_XN = judged.right_XN.int().cumprod(1).bool(), judged.inside_XN
    # Where the step goes from each anchor: past the accepted drafts and the target's own token.
    ahead = (right_XN.sum(1) + 1).tolist()
    row = {anchor: i for i, anchor in enumerate(judged.anchors_X.tolist())}
    results, start = [], 0
    for document in documents:
        end, at = start + len(document.tokens), start + document.prompt_length
        all_ = [row[i] for i in range(at, end - 1)]
        steps = []
        while at < end - 1:
            steps.append(row[at])
            at += ahead[row[at]]
        start = end
        results.append(
            Acceptance(
                1,
                len(steps),
                inside_XN[steps].sum(0),
                right_XN[steps].sum(0),
                inside_XN[all_].sum(0),
                judged.found_XN[all_].sum(0),
                judged.chosen_XN[all_].sum(0),
            )  # fmt: skip
        )
    return results


@dataclass(frozen=True, slots=True)
class _Judged:
    """Of the drafts at each of X anchors: which places the text reaches, and what holds there."""

    anchors_X: torch.Tensor
    inside_XN: torch.Tensor
    right_XN: torch.Tensor
    found_XN: torch.Tensor
    chosen_XN: torch.Tensor


def _judge(drafter: DFlash2, lesson: Lesson, drafts: int) -> _Judged:
    context = drafter.context(lesson.taps_TF, lesson.positions_T)
    anchors_X = lesson.anchors_X
    parts: list[tuple[torch.Tensor, ...]] = []
    for anchors_B in anchors_X.split(ANCHORS_AT_ONCE):
        blocks = LessonBlocks(lesson, anchors_B, drafts + 1, context)
        hidden_BND = drafter(lesson.tokens_T[anchors_B], blocks)[:, 1:]
        unary_BNK, ids_BNK = candidates = drafter.candidates(hidden_BND)
        made = drafter.choose(
            lesson.tokens_T[anchors_B], hidden_BND, candidates,
            temperature_B=torch.zeros(len(anchors_B), device=anchors_B.device),
            uniform_BN=torch.zeros(len(anchors_B), drafts, device=anchors_B.device),
        )  # fmt: skip
        rows = Rows.behind(anchors_B, lesson, drafts)
        true_BN, before_BN = lesson.tokens_T[rows.at_BN], lesson.tokens_T[rows.at_BN - 1]
        scores_BNK = drafter.selector(hidden_BND, unary_BNK, before_BN[..., None], ids_BNK)[:, :, 0]
        best_BN = ids_BNK.gather(2, scores_BNK.argmax(-1, keepdim=True))[..., 0]
        inside_BN = rows.counts_BN
        found_BN = (ids_BNK == true_BN[..., None]).any(-1)
        parts.append(
            tuple(
                (x_BN & inside_BN).cpu()
                for x_BN in (inside_BN, made.tokens_BN == true_BN, found_BN, best_BN == true_BN)
            )
        )
    return _Judged(anchors_X, *(torch.cat(part) for part in zip(*parts, strict=True)))
