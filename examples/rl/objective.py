"""What DAPO optimises: advantages within a group, which groups count, and the loss.

P prompts with G answers each; B answers of S tokens at most. For a token with advantage A and
ratio r = exp(logprob - old logprob):

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        A >= 0
    loss = the same, but at most -dual_clip A                       A < 0

summed over all tokens that count and divided by their number, so each token of a long answer
counts as much as each of a short one. No KL term.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch


class Rewarded(Protocol):
    """An answer with its reward."""

    @property
    def reward(self) -> float: ...


Group = TypeVar("Group", bound=Sequence[Rewarded])


class NothingToLearn(RuntimeError):
    """Every group had one reward, as often as was tried: the task is too easy or too hard."""


def soft_punishment(length: int, *, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """0 up to `max_tokens - buffer` tokens, then down to `-factor` at `max_tokens`."""
    over = length - (max_tokens - buffer)
    return -factor * over / buffer if buffer and over > 0 else 0.0


def advantages(groups: Sequence[Sequence[Rewarded]]) -> torch.Tensor:
    """[P * G]: how many standard deviations a reward is above the mean of its group."""
    rewards_PG = torch.tensor([[one.reward for one in group] for group in groups])
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-6)).flatten()


def sample_informative(
    draw: Callable[[], list[Group]], *, wanted: int, max_draws: int
) -> tuple[list[Group], list[Group]]:
    """Draw groups until `wanted` of them have more than one reward: these, and all that were drawn.

    `NothingToLearn` after `max_draws` draws.
    """
    kept: list[Group] = []
    drawn: list[Group] = []
    for _ in range(max_draws):
        groups = draw()
        drawn += groups
        kept += [group for group in groups if len({one.reward for one in group}) > 1]
        if len(kept) >= wanted:
            return kept[:wanted], drawn
    raise NothingToLearn(
        f"{len(kept)} of {len(drawn)} groups had more than one reward, and {wanted} are needed: "
        "ask for more samples, or for other questions"
    )


def dapo_loss(
    logprobs_BS: torch.Tensor,
    old_BS: torch.Tensor,
    advantages_B: torch.Tensor,
    counts_BS: torch.Tensor,
    *,
    weights_BS: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
) -> torch.Tensor:
    """The loss, a scalar; tokens count where `counts_BS` is true.

    `weights_BS` are importance weights, from what sampled a token to the old policy.
    """
    advantages_B1 = advantages_B[:, None]
    ratio_BS = torch.where(counts_BS, logprobs_BS - old_BS, 0.0).exp()
    clipped_BS = ratio_BS.clamp(1 - clip_low, 1 + clip_high)
    loss_BS = -torch.minimum(ratio_BS * advantages_B1, clipped_BS * advantages_B1)
    bounded_BS = torch.minimum(loss_BS, -dual_clip * advantages_B1)
    loss_BS = torch.where(advantages_B1 < 0, bounded_BS, loss_BS)
    if weights_BS is not None:
        loss_BS = loss_BS * weights_BS
    return torch.where(counts_BS, loss_BS, 0.0).sum() / counts_BS.sum().clamp(min=1)
