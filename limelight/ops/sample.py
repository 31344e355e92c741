"""The next token of each row of logits: the best one, or one drawn by inversion.

    z = cap * tanh(logits / cap) where there is a cap;  p = softmax(z / temperature)
    token = the first v with p_0 + ... + p_v > uniform * (p_0 + ... + p_V)

Below `GREEDY_BELOW` the temperature counts as 0: the first of the largest logits. The probabilities
are FP32, their sums over the vocabulary FP64.
"""

import torch

from limelight.ops import op
from limelight.ops.activation import softcap

GREEDY_BELOW = 1e-5


def sample_reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    *,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64 [R], and the largest logit of each row, FP32 [R], NaN if one is NaN.

    `uniform_R` holds numbers of [0, 1]; with a NaN or without a finite logit the token means
    nothing.
    """
    if cap is not None:
        logits_RV = softcap(logits_RV, cap=cap)
    best_R, token_R = logits_RV.max(dim=-1)
    rows = (temperature_R >= GREEDY_BELOW).nonzero()[:, 0]
    if len(rows):
        scaled_RV = logits_RV[rows] / temperature_R[rows, None]
        token_R[rows] = invert(torch.softmax(scaled_RV, dim=-1), uniform_R[rows])
    return token_R, best_R


def invert(probs_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulated probabilities holds the number of its row."""
    cumulated_RV = probs_RV.double().cumsum(dim=-1)
    target_R1 = uniform_R.double()[:, None] * cumulated_RV[:, -1:]
    token_R1 = torch.searchsorted(cumulated_RV, target_R1, right=True)
    # Rounding may leave the number at the very end; the last token with a probability is meant.
    last_R1 = torch.searchsorted(cumulated_RV, cumulated_RV[:, -1:].contiguous())
    return torch.minimum(token_R1, last_R1)[:, 0].clamp(0, probs_RV.shape[1] - 1)


sample = op(reference=sample_reference, kernel=sample_reference)
