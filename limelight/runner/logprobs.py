"""Log-probabilities that are told with tokens: the model's own, or those that they were drawn by.

    raw         softmax of the model's logits
    processed   softmax of (logits behind bans, bias and penalties) / temperature, over what min-p,
                top-k and top-p leave; a greedy row counts as temperature 1 without cut-offs

Either may be told as logits instead. What is ruled out has -inf. Those of a prompt are raw always.
The device finds where tokens stand in their rows (`ops/standing.py`), and the best of these, behind
the step that chose them; the host makes numbers of that once it knows the tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from limelight.ops.pieces import Cuts
from limelight.ops.standing import standing
from limelight.ops.topk import top_tokens
from limelight.parallel.sampling import Share, standing_in_shares, top_tokens_of_shares
from limelight.runner.transfers import on_its_way, sent
from limelight.types import TokenLogprobs

NOT_FINITE = "the log-probability of a token is not a finite number"
# How many of a row's best are looked for: at least as many as are asked for, by a kernel for each
# of these counts. More are sorted.
COUNTS = (1, 5, 20)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of X tokens, what is told of each: how many of its row's best beside it, all -1, and of which
    distribution; `warmths` are temperatures."""

    counts: list[int]
    warmths: list[float]
    cuts: Cuts | None = None  # by token
    as_logits: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """What the log-probabilities of X tokens are made of."""

    wanted: Wanted
    figures_5X: torch.Tensor  # as `standing` has them
    best_XK: torch.Tensor | None = None  # of each token's row
    ids_XK: torch.Tensor | None = None

    def on_its_way(self) -> "Told":
        """The same for the host, there once the step has run."""
        figures_5X = on_its_way(self.figures_5X)
        if self.best_XK is None or self.ids_XK is None:
            return replace(self, figures_5X=figures_5X)
        return Told(self.wanted, figures_5X, on_its_way(self.best_XK), on_its_way(self.ids_XK))

    def reports(self, at: Sequence[int], token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Of the tokens at these places: their values and ranks, and the best of their rows."""
        logit, best, weight, larger, left = self.figures_5X.cpu().numpy()[:, at]
        # As the device rounds them.
        warmth = np.array(self.wanted.warmths, dtype=np.float32)[at].astype(np.float64)
        # Numbers that are none are found by whoever asked.
        with np.errstate(all="ignore"):
            whole = 0.0 * best if self.wanted.as_logits else best / warmth + np.log(weight)
            values = (logit / warmth - whole).astype(np.float32).tolist()
            tops = self._tops(at, warmth, whole, left)
        each = zip(token_ids, values, larger.tolist(), tops, strict=True)
        return [TokenLogprobs(id_, value, 1 + int(n), top) for id_, value, n, top in each]

    def _tops(
        self, at: Sequence[int], warmth: np.ndarray, whole: np.ndarray, left: np.ndarray
    ) -> list[list[tuple[int, float]]]:
        if self.best_XK is None or self.ids_XK is None:
            return [[] for _ in at]
        values = self.best_XK.cpu().numpy()[at] / warmth[:, None] - whole[:, None]
        # Cut-offs leave the first ones.
        values[np.arange(values.shape[1]) >= left[:, None]] = -np.inf
        rows = (self.ids_XK.cpu().numpy()[at].tolist(), values.astype(np.float32).tolist())
        counts = [self.wanted.counts[x] for x in at]
        return [
            list(zip(ids, of_row, strict=True))[: None if count < 0 else count]
            for ids, of_row, count in zip(*rows, counts, strict=True)
        ]


def tell(
    logits_RV: torch.Tensor,
    rows_X: torch.Tensor,
    tokens_X: torch.Tensor,
    wanted: Wanted,
    *,
    vocab_size: int,
    share: Share | None = None,
) -> Told:
    """Of tokens [X] in rows of FP32 logits, both int64; of row -1 nothing can be told. With a
    `share` of the vocabulary all its ranks do so together."""
    warmth_X = sent(wanted.warmths, torch.float32, logits_RV.device)
    most = _looked_for(wanted.counts, vocab_size)
    if share is not None:
        figures_5X = standing_in_shares(
            logits_RV, rows_X, tokens_X, warmth_X, share, cuts=wanted.cuts
        )
        if not most:
            return Told(wanted, figures_5X)
        return Told(wanted, figures_5X, *top_tokens_of_shares(logits_RV, rows_X, share, count=most))
    logit_X = logits_RV[rows_X, tokens_X]
    figures_5X = standing(logits_RV, rows_X, logit_X, warmth_X, cuts=wanted.cuts)
    if not most:
        return Told(wanted, figures_5X)
    return Told(wanted, figures_5X, *top_tokens(logits_RV, count=most, rows_T=rows_X))


def _looked_for(counts: list[int], vocab_size: int) -> int:
    """How many of each row's best are looked for."""
    most = max((vocab_size if count < 0 else count for count in counts), default=0)
    return min(next((count for count in (0, *COUNTS) if count >= most), most), vocab_size)


def token_logprobs(
    logits_RV: torch.Tensor, token_ids: list[int], count: int, share: Share | None = None
) -> list[TokenLogprobs]:
    """The raw log-probabilities of one token a row, from its logits, and of the `count` best."""
    rows, device = range(len(token_ids)), logits_RV.device
    wanted = Wanted([count] * len(rows), [1.0] * len(rows))
    rows_X, tokens_X = (sent(x, torch.int64, device) for x in (rows, token_ids))
    vocab_size = logits_RV.shape[1] if share is None else share.vocabulary
    told = tell(logits_RV, rows_X, tokens_X, wanted, vocab_size=vocab_size, share=share)
    return told.reports(rows, token_ids)


def is_finite(report: TokenLogprobs) -> bool:
    """Whether it can be told: the token's own is a number, and no other one is beyond all."""
    others = (value for _, value in report.top)
    return math.isfinite(report.logprob) and all(value < math.inf for value in others)
