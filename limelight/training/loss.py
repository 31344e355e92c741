"""How far a drafter is from its target, in blocks at anchors of a lesson.

At an anchor, a token of an answer, the drafter fills a block of masks from the target's features of
all tokens before; every anchor's block is its own. The row k places behind an anchor learns

    KL(p || q)  of the target's distribution p there and q of the drafter's logits, and
    the place of p's best token among the candidates, scored behind the true token before it

each weighted by exp(-(k - 1) / gamma), as later rows count only where all before them are right.
The embedding and the LM head are the target's and stay as they are.
"""

from dataclasses import dataclass, field

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
    """Stands in for `PagedBlocks`: a block at each anchor of a lesson, over keys and values of its
    tokens by layer.

    Rows see the same keys as while serving.
    """

    lesson: Lesson
    rows: int
    context: list[tuple[torch.Tensor, torch.Tensor]]
    _biases: dict[tuple[int | None, bool], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, drafter: DFlash2, lesson: Lesson, rows: int) -> "LessonBlocks":
        positions_T = lesson.positions_EL.flatten()
        return cls(lesson, rows, drafter.context(lesson.taps_ELF.flatten(0, 1), positions_T))

    @property
    def positions_T(self) -> torch.Tensor:
        anchors_EA = self.lesson.firsts_E[:, None] + self.lesson.places_EA
        rows_Q = torch.arange(self.rows, device=anchors_EA.device)
        return (anchors_EA[..., None] + rows_Q).flatten()

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
        # The rows of all blocks of an excerpt, X, see its L tokens, and each its own block.
        excerpts, group = len(self.lesson.tokens_EL), heads.queries // heads.keys
        q_EXHC, *fresh = (
            x_TJC.unflatten(0, (excerpts, -1))
            for x_TJC in split_heads(qkv_TN, norm_2C, heads=heads, turn=turn)
        )
        # Each query head has keys of its own: torch's attention in tiles knows no groups.
        k_HEYC, v_HEYC = (
            torch.cat([before_TKC.unflatten(0, (excerpts, -1)), own_EXKC], dim=1)
            .repeat_interleave(group, dim=2)
            .permute(2, 0, 1, 3)
            for before_TKC, own_EXKC in zip(self.context[layer], fresh, strict=True)
        )
        bias_EXY = self._bias(window, causal)
        out_EXHC = attend(q_EXHC, k_HEYC, v_HEYC, bias_EXY, scale=scale)
        return out_EXHC.flatten(0, 1).flatten(1)

    def _bias(self, window: int | None, causal: bool) -> torch.Tensor:
        """0, or -inf where a key is hidden from a row."""
        if (window, causal) not in self._biases:
            self._biases[window, causal] = self._hidden(window, causal)
        return self._biases[window, causal]

    def _hidden(self, window: int | None, causal: bool) -> torch.Tensor:
        places_EA, device = self.lesson.places_EA, self.lesson.tokens_EL.device
        anchors_EX1 = places_EA.repeat_interleave(self.rows, dim=1)[..., None]
        rows_X = torch.arange(anchors_EX1.shape[1], device=device)
        at_L = torch.arange(self.lesson.tokens_EL.shape[1], device=device)
        hidden_EXL = at_L >= anchors_EX1
        if window is not None:
            hidden_EXL |= at_L <= anchors_EX1 + (rows_X % self.rows)[:, None] - window
        blocks_X = rows_X // self.rows
        hidden_XX = blocks_X[:, None] != blocks_X
        if causal:
            hidden_XX |= rows_X > rows_X[:, None]
        hidden_EXX = hidden_XX.expand(len(places_EA), -1, -1)
        hidden_EXY = torch.cat([hidden_EXL, hidden_EXX], dim=-1)
        return torch.zeros(hidden_EXY.shape, device=device).masked_fill(hidden_EXY, float("-inf"))


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows behind all anchors are to learn: N rows each, of which some count."""

    before_BN: torch.Tensor  # the token before each row's, as a row of all excerpts' tokens
    counts_BN: torch.Tensor

    @classmethod
    def behind(cls, lesson: Lesson, rows: int) -> "Rows":
        """Those inside of the anchor's document count."""
        excerpts, length = lesson.tokens_EL.shape
        device = lesson.tokens_EL.device
        ahead_N = torch.arange(1, rows + 1, device=device)
        at_EAN = lesson.places_EA[..., None] + ahead_N
        ends_E11 = (lesson.lengths_E - lesson.firsts_E)[:, None, None]
        counts_EAN = (lesson.anchors_EA >= 0)[..., None] & (at_EAN < ends_E11)
        starts_E = length * torch.arange(excerpts, device=device)
        before_EAN = starts_E[:, None, None] + at_EAN - 1
        return cls(before_EAN.flatten(0, 1), counts_EAN.flatten(0, 1))


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
        logits_TV = target.logits(lesson.hidden_ELD.flatten(0, 1)[rows.before_BN.flatten()])
        logs_TV, best_T = logits_TV.log_softmax(-1), logits_TV.argmax(-1)
        return cls(logs_TV.unflatten(0, rows.before_BN.shape), best_T.view(rows.before_BN.shape))


def block_loss(
    drafter: DFlash2,
    lesson: Lesson,
    learned: Rows,
    teacher: Teacher,
    *,
    gamma: float,
    count: torch.Tensor,
) -> Loss:
    """The two losses above of a block at each anchor, over `count` rows that count in all."""
    rows, shape = drafter.config.block_size, learned.counts_BN.shape
    blocks = LessonBlocks.of(drafter, lesson, rows)
    hidden_BND = drafter(lesson.anchor_tokens_B, blocks)[:, 1:]
    logits_BNV = drafter.logits(hidden_BND.flatten(0, 1)).unflatten(0, shape)
    unary_BN = F.kl_div(
        logits_BNV.log_softmax(-1), teacher.logs_BNV, reduction="none", log_target=True
    ).sum(-1)
    before_BN = lesson.tokens_EL.flatten()[learned.before_BN]
    selector_BN = selector_loss(drafter, hidden_BND, logits_BNV, teacher.best_BN, before_BN)
    fading_N = torch.exp(-torch.arange(rows - 1, device=logits_BNV.device) / gamma)
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
