"""What DAPO optimises: advantages within a group, which groups count, and the loss.

B answers of S tokens at most. For a token with advantage A and r = exp(logprob - old logprob):

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        A >= 0
    loss = the same, but at most -dual_clip A                       A < 0

summed over all tokens that count and divided by their number, so a token of a long answer counts
as much as one of a short answer. There is no KL term.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Group = TypeVar("Group")


class NothingToLearn(RuntimeError):
    """Too few groups had more than one reward: the task is too easy or too hard."""


def soft_punishment(length: int, *, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """0 up to `max_tokens - buffer` tokens, then down to `-factor` at `max_tokens`."""
    over = length - (max_tokens - buffer)
    return -factor * over / buffer if buffer and over > 0 else 0.0


def advantages(rewards: Sequence[Sequence[float]]) -> torch.Tensor:
    """[B]: how many standard deviations each reward is above the mean of its group."""
    rewards_PG = torch.tensor(rewards)
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-6)).flatten()


def sample_informative(
    draw: Callable[[], list[Group]],
    rewards: Callable[[Group], Sequence[float]],
    *,
    wanted: int,
    max_draws: int,
) -> tuple[list[Group], list[Group]]:
    """Draw until `wanted` groups have more than one reward: these, and all that were drawn.

    `NothingToLearn` after `max_draws` draws.
    """
    kept: list[Group] = []
    drawn: list[Group] = []
    for _ in range(max_draws):
        drawn += (groups := draw())
        kept += [group for group in groups if len(set(rewards(group))) > 1]
        if len(kept) >= wanted:
            return kept[:wanted], drawn
    raise NothingToLearn(
        f"{len(kept)} of {len(drawn)} groups had more than one reward, and {wanted} are needed: "
        "take more samples, or other questions"
    )


def dapo_loss(
    logprobs_BS: torch.Tensor,
    old_BS: torch.Tensor,
    advantages_B: torch.Tensor,
    counts_BS: torch.Tensor,
    weights_BS: torch.Tensor | float = 1.0,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
) -> torch.Tensor:
    """The loss, a scalar; tokens count where `counts_BS` is true, with these weights."""
    A_B1 = advantages_B[:, None]
    ratio_BS = torch.where(counts_BS, logprobs_BS - old_BS, 0.0).exp()
    loss_BS = -torch.minimum(ratio_BS * A_B1, ratio_BS.clamp(1 - clip_low, 1 + clip_high) * A_B1)
    loss_BS = torch.where(A_B1 < 0, torch.minimum(loss_BS, -dual_clip * A_B1), loss_BS)
    return torch.where(counts_BS, loss_BS * weights_BS, 0.0).sum() / counts_BS.sum().clamp(min=1)
