"""Train a DFlash 2 drafter on what its target makes of its own text.

At an anchor, a token of an answer, the drafter fills a block of masks from the target's features of
all tokens before; every anchor's block is its own. The row k places behind an anchor learns

    KL(p || q)  of the target's distribution p there and q of the drafter's logits, and
    the place of p's best token among the candidates, scored behind the true token before it

each weighted by exp(-(k - 1) / gamma), as later rows count only where all before them are right.
The embedding and the LM head are the target's and stay as they are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from limelight.models.batch import Batch
from limelight.models.beam import Beam
from limelight.models.dflash2 import DFlash2
from limelight.models.flint import Flint
from limelight.models.taps import Taps
from limelight.ops.attention import attend
from limelight.ops.rope import Heads, Rotation, split_heads

PEAK_RATE, WARM_UP, CLIP = 1e-3, 0.04, 1.0  # the warm-up as a share of the steps
MATRIX_DECAY, OTHER_DECAY = 0.1, 0.01
STANDARD = 0.02  # deviation of new weights, for thousands of channels
SELECTOR_SHARE = 1.0
NO_ROWS = 1e-5


@dataclass(frozen=True, slots=True)
class Lesson:
    """T tokens of packed documents, and what the target makes of them."""

    tokens_T: torch.Tensor
    starts_T: torch.Tensor  # where each token's document begins
    answers_T: torch.Tensor  # which tokens are to be learned
    taps_TF: torch.Tensor
    logits_TV: torch.Tensor

    @property
    def positions_T(self) -> torch.Tensor:
        return torch.arange(len(self.tokens_T), device=self.tokens_T.device) - self.starts_T


@torch.no_grad()
def make_lesson(
    target: Flint | Beam, documents: list[list[int]], prompt_lengths: list[int], layers: list[int]
) -> Lesson:
    """Run the target over whole documents, each a prompt and an answer to it."""
    device, lengths = target.norm.weight.device, [len(ids) for ids in documents]
    tokens_T = torch.tensor([token for ids in documents for token in ids], device=device)
    batch, taps = Batch.packed(lengths, device=device), Taps(layers)
    logits_TV = target.logits(target(tokens_T, batch, taps))
    prompts = torch.tensor(prompt_lengths, device=device)
    prompts_T = prompts.repeat_interleave(torch.tensor(lengths, device=device))
    starts_T = torch.arange(len(tokens_T), device=device) - batch.positions_T
    answers_T = batch.positions_T >= prompts_T
    return Lesson(tokens_T, starts_T, answers_T, taps.joined(), logits_TV)


def choose_anchors(
    lesson: Lesson, *, block_size: int, most: int, generator: torch.Generator
) -> torch.Tensor:
    """Indices of tokens of answers, in a random choice without repetition."""
    able_T = lesson.answers_T.clone()
    able_T[len(able_T) - block_size :] = False
    able_X = able_T.nonzero()[:, 0]
    order_X = torch.randperm(len(able_X), generator=generator).to(able_X.device)
    return able_X[order_X[:most]].sort().values


@dataclass(frozen=True)
class TrainingBlocks:
    """Stands in for `PagedBlocks`: a block at each anchor, over keys and values by layer."""

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
        reach = len(self.lesson.tokens_T) if window is None else window
        at_BW = self.anchors_B[:, None] + torch.arange(-reach, 0, device=q.device)
        hidden_BW = at_BW < self.lesson.starts_T[self.anchors_B][:, None]
        own_QQ = torch.ones(self.rows, self.rows, dtype=torch.bool, device=q.device).triu(1)
        hidden_BQL = torch.cat(
            [
                hidden_BW[:, None].expand(-1, self.rows, -1),
                (own_QQ & causal).expand(len(at_BW), -1, -1),
            ],
            dim=2,
        )
        before = (x_TKC[at_BW.clamp(min=0)] for x_TKC in self.context[layer])
        k_KBLC, v_KBLC = (
            torch.cat(pair, dim=1).permute(2, 0, 1, 3) for pair in zip(before, (k, v), strict=True)
        )
        bias_BQL = torch.zeros(hidden_BQL.shape, device=q.device)
        bias_BQL = bias_BQL.masked_fill(hidden_BQL, float("-inf"))
        return attend(q, k_KBLC, v_KBLC, bias_BQL, scale=scale).flatten(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Loss:
    """Means over the rows that count."""

    unary: torch.Tensor
    selector: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.unary + SELECTOR_SHARE * self.selector


def block_loss(drafter: DFlash2, lesson: Lesson, anchors_B: torch.Tensor, *, gamma: float) -> Loss:
    """The two losses above of a block at each anchor."""
    rows = drafter.config.block_size
    context = drafter.context(lesson.taps_TF, lesson.positions_T)
    blocks = TrainingBlocks(lesson, anchors_B, rows, context)
    hidden_BND = drafter(lesson.tokens_T[anchors_B], blocks)[:, 1:]
    at_BN = anchors_B[:, None] + torch.arange(1, rows, device=anchors_B.device)
    inside_BN = at_BN < len(lesson.tokens_T)
    at_BN = at_BN.clamp(max=len(lesson.tokens_T) - 1)
    same_BN = lesson.starts_T[at_BN] == lesson.starts_T[anchors_B][:, None]
    counts_BN = inside_BN & same_BN & lesson.answers_T[at_BN]

    logits_BNV = drafter.logits(hidden_BND.flatten(0, 1)).unflatten(0, at_BN.shape)
    # The target's logits behind a token are those of the next.
    teacher_BNV = lesson.logits_TV[at_BN - 1]
    unary_BN = F.kl_div(
        logits_BNV.log_softmax(-1), teacher_BNV.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    selector_BN = selector_loss(
        drafter, hidden_BND, logits_BNV, teacher_BNV.argmax(-1), lesson.tokens_T[at_BN - 1]
    )
    fading_N = torch.exp(-torch.arange(rows - 1, device=at_BN.device) / gamma)
    count = counts_BN.sum() + NO_ROWS
    means = ((x_BN * fading_N * counts_BN).sum() / count for x_BN in (unary_BN, selector_BN))
    return Loss(*means)


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


@torch.no_grad()
def initialize(
    drafter: DFlash2, generator: torch.Generator, *, deviation: float = STANDARD
) -> None:
    """Norms 1, convolutions that pass on what they get, everything else small."""
    for name, target in drafter.targets.items():
        into = target.into
        assert isinstance(into, torch.Tensor)
        if "norm" in name:
            into.fill_(1.0)
        elif name.endswith("base_kernel"):
            into.zero_()
            into[:, 0] = 1.0
        elif name.endswith("kernel_projection.weight"):
            into.zero_()
        else:
            into.normal_(0.0, deviation, generator=generator)


def train(
    drafter: DFlash2,
    lessons: list[Lesson],
    *,
    steps: int,
    anchors: int = 64,
    gamma: float | None = None,
    peak_rate: float = PEAK_RATE,
    seed: int = 0,
) -> Iterator[Loss]:
    """One update of the drafter each time, on anchors of a lesson drawn anew; FP32."""
    generator = torch.Generator().manual_seed(seed)
    block = drafter.config.block_size
    weights = [weight.requires_grad_(True) for weight in drafter.parameters()]
    groups = [
        {"params": [w for w in weights if (w.ndim > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, MATRIX_DECAY), (False, OTHER_DECAY))
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * _share(step, steps)
        lesson = lessons[int(torch.randint(len(lessons), (1,), generator=generator))]
        anchors_B = choose_anchors(lesson, block_size=block, most=anchors, generator=generator)
        loss = block_loss(drafter, lesson, anchors_B, gamma=gamma or block / 2)
        optimizer.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        yield Loss(loss.unary.detach(), loss.selector.detach())
    for weight in weights:
        weight.requires_grad_(False)


def _share(step: int, steps: int) -> float:
    """Of the peak rate: a warm-up, then half a wave of a cosine."""
    warm = max(1, int(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
