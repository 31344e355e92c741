"""The pieces of DAPO against sums by hand."""

import math

import pytest
import torch
from objective import (
    NothingToLearn,
    advantages,
    dapo_loss,
    sample_informative,
    soft_punishment,
)


def loss(ratios, advantages_B, counts=None, **options):
    ratio_BS = torch.tensor(ratios)
    counts_BS = torch.ones_like(ratio_BS, dtype=torch.bool) if counts is None else counts
    old_BS = torch.full_like(ratio_BS, -1.5)
    return dapo_loss(
        old_BS + ratio_BS.log(), old_BS, torch.tensor(advantages_B), counts_BS, **options
    ).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.27, 1.0, -1.27),  # above 1 + clip_low, and still below 1 + clip_high
        (1.4, 1.0, -1.28),
        (0.5, 1.0, -0.5),  # the lesser of both has no bound on this side
        (0.5, -1.0, 0.8),
        (1.4, -1.0, 1.4),
        (12.0, -1.0, 10.0),
        (12.0, -0.5, 5.0),
    ],
)
def test_the_clip_is_higher_above_than_below(ratio, advantage, expected):
    assert loss([[ratio]], [advantage]) == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient():
    logprobs_BS = torch.tensor([[0.0, math.log(1.4)]], requires_grad=True)
    counts_BS = torch.ones(1, 2, dtype=torch.bool)
    dapo_loss(logprobs_BS, torch.zeros(1, 2), torch.tensor([1.0]), counts_BS).backward()
    assert logprobs_BS.grad.tolist() == [[-0.5, 0.0]]


def test_the_mean_is_over_the_tokens_of_the_batch_not_over_answers():
    counts_BS = torch.tensor([[True, True, True], [True, False, False]])
    told = loss([[1.0, 1.1, 0.9], [1.2, 9.0, 9.0]], [1.0, -2.0], counts_BS)
    assert told == pytest.approx((-1.0 - 1.1 - 0.9 + 2.4) / 4)


def test_answers_that_do_not_count_change_nothing_not_even_the_mean():
    counts_BS = torch.tensor([[True, True], [False, False]])
    alone = loss([[1.0, 1.1]], [1.0])
    assert loss([[1.0, 1.1], [math.inf, 0.0]], [1.0, -5.0], counts_BS) == pytest.approx(alone)
    assert loss([[1.0]], [1.0], torch.zeros(1, 1, dtype=torch.bool)) == 0.0


def test_tokens_are_weighted():
    assert loss([[1.0, 1.0]], [1.0], weights_BS=torch.tensor([[0.5, 2.0]])) == -1.25


def test_advantages_are_of_the_group():
    # Standard deviations 1/2 and 1 / sqrt(3).
    told = advantages([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]).tolist()
    assert told[:4] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert told[4:] == pytest.approx([x * math.sqrt(3) / 2 for x in (-1, 1, 1, -1)], abs=1e-5)


def test_punishment_begins_within_the_buffer():
    told = [soft_punishment(n, max_tokens=16, buffer=4) for n in (1, 12, 13, 16)]
    assert told == [0.0, 0.0, -0.25, -1.0]
    assert soft_punishment(16, max_tokens=16, buffer=0) == 0.0


def test_groups_of_one_reward_are_dropped_and_drawn_again():
    draws = iter([[[1, 1], [0, 1]], [[0, 0], [0, 0]], [[1, 0], [0, 1]]])
    kept, drawn = sample_informative(lambda: next(draws), list, wanted=2, max_draws=3)
    assert kept == [[0, 1], [1, 0]] and len(drawn) == 6


def test_drawing_ends_with_an_error_that_says_what_there_was():
    with pytest.raises(NothingToLearn, match="1 of 6 groups"):
        draws = iter([[[1, 1], [0, 1]], [[0, 0], [0, 0]], [[1, 1], [1, 1]], [[0, 1], [0, 1]]])
        sample_informative(lambda: next(draws), list, wanted=2, max_draws=3)
