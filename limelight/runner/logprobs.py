"""Log-probabilities that are told with tokens: the model's own, or those that they were drawn by.

    raw         softmax of the model's logits
    processed   softmax of (logits behind bans, bias and penalties) / temperature, over what min-p,
                top-k and top-p leave; a greedy row counts as temperature 1 without cut-offs

Either may be told as logits instead. What is ruled out has -inf. Those of a prompt are raw always.
"""

import math
from collections.abc import Sequence

import torch

from limelight.ops.pieces import Cuts
from limelight.ops.sample import GREEDY_BELOW, probabilities
from limelight.types import LogprobsMode, TokenLogprobs

NOT_FINITE = "the log-probability of a token is not a finite number"


def tempered(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, token_ids: list[int], cuts: Cuts | None
) -> torch.Tensor:
    """Processed logits [R, V] as each row's token was drawn by them; that token is never cut."""
    warmth_R = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0)
    tempered_RV = logits_RV / warmth_R[:, None]
    if cuts is None:
        return tempered_RV
    left_RV = probabilities(logits_RV, temperature_R, cuts) > 0
    # What is too unlikely for FP32 has the probability 0, and is left where nothing cuts.
    uncut_R = (cuts.top_k_B >= logits_RV.shape[1]) & (cuts.top_p_B >= 1) & (cuts.min_p_B <= 0)
    left_RV |= (uncut_R | (temperature_R < GREEDY_BELOW))[:, None]
    left_RV.scatter_(1, torch.tensor(token_ids, device=logits_RV.device)[:, None], True)
    return tempered_RV.masked_fill(~left_RV, float("-inf"))


def as_told(logits_RV: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """The numbers of a mode, from its raw or processed FP32 logits."""
    return logits_RV if mode.endswith("logits") else torch.log_softmax(logits_RV, dim=-1)


def reports(
    values_RV: torch.Tensor, token_ids: list[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Value and rank of one token a row, and of the `counts[r]` largest (-1: all)."""
    vocab_size = values_RV.shape[1]
    wanted = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    chosen_R1 = values_RV.gather(1, torch.tensor(token_ids, device=values_RV.device)[:, None])
    ranks = (values_RV > chosen_R1).sum(dim=-1).add_(1).tolist()
    top = values_RV.topk(max(wanted), dim=-1)
    rows = zip(
        token_ids, chosen_R1[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(),
        wanted, strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs(token_id, value, rank, list(zip(ids[:count], values[:count], strict=True)))
        for token_id, value, rank, ids, values, count in rows
    ]


def token_logprobs(
    logits_RV: torch.Tensor, token_ids: list[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """The raw log-probabilities of one token a row, from FP32 logits."""
    return reports(torch.log_softmax(logits_RV, dim=-1), token_ids, counts)


def is_finite(report: TokenLogprobs) -> bool:
    """Whether it can be told: the token's own is a number, and no other one is beyond all."""
    others = (value for _, value in report.top)
    return math.isfinite(report.logprob) and all(value < math.inf for value in others)
