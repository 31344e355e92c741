"""How far a drafter is from its target, in blocks at anchors of a lesson.

At an anchor, a token of an answer, the drafter fills a block of masks from the target's features of
all tokens before; every anchor's block is its own. The row k places behind an anchor learns

    KL(p || q)  of the target's distribution p there and q of the drafter's logits, and
    the place of p's best token among the candidates, scored behind the true token before it

each weighted by exp(-(k - 1) / gamma), as later rows count only where all before them are right.
The embedding and the LM head are the target's and stay as they are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from limelight.models.dflash2 import DFlash2
from limelight.models.loader import Model
from limelight.ops.attention import attend
from limelight.ops.rope import Heads, Rotation, split_heads
from limelight.training.lessons import Lesson

SELECTOR_SHARE = 1.0
NO_ROWS = 1e-5


@dataclass(frozen=True)
class LessonBlocks:
    """Stands in for `PagedBlocks`: a block at each anchor, over keys and values by layer.

    Rows see the same keys as while serving.
    """

    lesson: Lesson
    anchors_B: torch.Tensor
    rows: int
    context: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def positions_T(self) -> torch.Tensor:
        rows_Q = torch.arange(self.rows, device=self.anchors_B.device)
        return (self.lesson.positions_T[self.anchors_B][:, None] + rows_Q).flatten()

    def attend(
        self,
        layer: int,
        qkv_TN: torch.Tensor,
        norm_2C: torch.Tensor,
        *,
        heads: Heads,
        window: int | None,
        causal: bool,
        scale: float,
        turn: Rotation,
    ) -> torch.Tensor:
        q, k, v = (
            x.unflatten(0, (-1, self.rows))
            for x in split_heads(qkv_TN, norm_2C, heads=heads, turn=turn)
        )
        reach = int(self.lesson.positions_T.max()) if window is None else window - 1
        columns_L = torch.arange(-reach, self.rows, device=q.device)
        rows_Q1 = torch.arange(self.rows, device=q.device)[:, None]
        hidden_QL = torch.zeros(self.rows, len(columns_L), dtype=torch.bool, device=q.device)
        if causal:
            hidden_QL = columns_L > rows_Q1
        if window is not None:
            hidden_QL = hidden_QL | ((columns_L - rows_Q1).abs() >= window)
        at_BL = self.anchors_B[:, None] + columns_L
        foreign_BL = (columns_L < 0) & (at_BL < self.lesson.starts_T[self.anchors_B][:, None])
        hidden_BQL = hidden_QL | foreign_BL[:, None]
        at_BW = at_BL[:, :reach].clamp(min=0)
        # The gradients of a key that many blocks see are summed in FP32.
        before = (x_TKC.float()[at_BW].to(x_TKC.dtype) for x_TKC in self.context[layer])
        k_KBLC, v_KBLC = (
            torch.cat(pair, dim=1).permute(2, 0, 1, 3) for pair in zip(before, (k, v), strict=True)
        )
        bias_BQL = torch.zeros(hidden_BQL.shape, device=q.device)
        bias_BQL = bias_BQL.masked_fill(hidden_BQL, float("-inf"))
        return attend(q, k_KBLC, v_KBLC, bias_BQL, scale=scale).flatten(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows behind anchors are to learn: N rows each, of which some count."""

    at_BN: torch.Tensor
    counts_BN: torch.Tensor

    @classmethod
    def behind(cls, anchors_B: torch.Tensor, lesson: Lesson, rows: int) -> "Rows":
        """Those inside of the anchor's document count."""
        at_BN = anchors_B[:, None] + torch.arange(1, rows + 1, device=anchors_B.device)
        inside_BN = at_BN < len(lesson.tokens_T)
        at_BN = at_BN.clamp(max=len(lesson.tokens_T) - 1)
        same_BN = lesson.starts_T[at_BN] == lesson.starts_T[anchors_B][:, None]
        return cls(at_BN, inside_BN & same_BN & lesson.answers_T[at_BN])


@dataclass(frozen=True, slots=True)
class Loss:
    """Means over the rows that count."""

    unary: torch.Tensor
    selector: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.unary + SELECTOR_SHARE * self.selector

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.unary + other.unary, self.selector + other.selector)


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says where rows learn: logarithms of p, and its best token."""

    logs_BNV: torch.Tensor
    best_BN: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, target: Model, lesson: Lesson, rows: Rows) -> "Teacher":
        # The target's logits behind a token are those of the next.
        before_BN = rows.at_BN - 1
        logits_TV = target.logits(lesson.hidden_TD[before_BN.flatten()])
        logs_TV, best_T = logits_TV.log_softmax(-1), logits_TV.argmax(-1)
        return cls(logs_TV.view(*before_BN.shape, -1), best_T.view(before_BN.shape))


def block_loss(
    drafter: DFlash2,
    lesson: Lesson,
    anchors_B: torch.Tensor,
    learned: Rows,
    teacher: Teacher,
    *,
    gamma: float,
    count: torch.Tensor,
) -> Loss:
    """The two losses above of a block at each anchor, over `count` rows that count in all."""
    rows = drafter.config.block_size
    context = drafter.context(lesson.taps_TF, lesson.positions_T)
    blocks = LessonBlocks(lesson, anchors_B, rows, context)
    hidden_BND = drafter(lesson.tokens_T[anchors_B], blocks)[:, 1:]
    logits_BNV = drafter.logits(hidden_BND.flatten(0, 1)).unflatten(0, learned.at_BN.shape)
    unary_BN = F.kl_div(
        logits_BNV.log_softmax(-1), teacher.logs_BNV, reduction="none", log_target=True
    ).sum(-1)
    before_BN = lesson.tokens_T[learned.at_BN - 1]
    selector_BN = selector_loss(drafter, hidden_BND, logits_BNV, teacher.best_BN, before_BN)
    fading_N = torch.exp(-torch.arange(rows - 1, device=anchors_B.device) / gamma)
    weights_BN = fading_N * learned.counts_BN / (count + NO_ROWS)
    return Loss(*((x_BN * weights_BN).sum() for x_BN in (unary_BN, selector_BN)))


def selector_loss(
    drafter: DFlash2,
    hidden_BND: torch.Tensor,
    logits_BNV: torch.Tensor,
    best_BN: torch.Tensor,
    before_BN: torch.Tensor,
) -> torch.Tensor:
    """Cross entropy of the target's best token among the candidates; it takes the last place where
    it is none of them: [B, N]."""
    ids_BNK = logits_BNV.detach().topk(drafter.config.candidates, dim=-1).indices
    found_BNK = ids_BNK == best_BN[..., None]
    missing_BN = ~found_BNK.any(-1)
    last_BN = torch.where(missing_BN, best_BN, ids_BNK[..., -1])
    ids_BNK = torch.cat([ids_BNK[..., :-1], last_BN[..., None]], dim=-1)
    place_BN = (ids_BNK == best_BN[..., None]).int().argmax(-1)
    scores_BN1K = drafter.selector(
        hidden_BND, logits_BNV.gather(2, ids_BNK), before_BN[..., None], ids_BNK
    )
    losses = F.cross_entropy(scores_BN1K.flatten(0, 2), place_BN.flatten(), reduction="none")
    return losses.view(place_BN.shape)
