"""Tokens follow the distribution that the parameters ask for, and nothing of another request."""

import math

import pytest
import torch

from limelight.ops.noise import plain_uniform
from limelight.runner.logprobs import token_logprobs
from limelight.runner.sampler import Sampler
from limelight.types import Request, SamplingParams

VOCAB, EOS = 11, 10
CPU = torch.device("cpu")


def sampler() -> Sampler:
    return Sampler(vocab_size=VOCAB, eos_token_ids=[EOS], device=CPU)


def ask(prompt=(1,), *, seed=0, bad_words=(), **params) -> Request:
    return Request(
        id="r", prompt_token_ids=list(prompt), params=SamplingParams(**params),
        max_tokens=100, seed=seed, bad_words=[list(word) for word in bad_words],
    )  # fmt: skip


def logits_of(*values: float) -> torch.Tensor:
    """One row: these logits, the others far below."""
    row = torch.full((1, VOCAB), -20.0)
    row[0, : len(values)] = torch.tensor(values)
    return row


def pick(request: Request, logits: torch.Tensor, *, position=5, output=()) -> int:
    one = sampler()
    one.admit(0, request, list(output))
    return one.choose(logits, [0], [position])[0].token_ids[0]


def shares(logits: torch.Tensor, *, draws=4000, **params) -> list[float]:
    """How often each token comes, over seeds; 16 slots at a time."""
    one, counts = sampler(), [0] * VOCAB
    for first in range(0, draws, 16):
        for slot in range(16):
            one.admit(slot, ask(seed=first + slot, **params), [])
        for choice in one.choose(logits.expand(16, -1), list(range(16)), [7] * 16):
            counts[choice.token_ids[0]] += 1
    return [count / draws for count in counts]


def assert_close(measured: list[float], expected: list[float]):
    # Four standard deviations of 4,000 draws at most.
    for got, want in zip(measured, expected, strict=False):
        assert abs(got - want) < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_tempered_softmax(temperature):
    logits = logits_of(1.0, 0.0, 2.0, -1.0)
    expected = torch.softmax(logits[0] / temperature, dim=-1).tolist()
    assert_close(shares(logits, temperature=temperature), expected)


def test_top_k_keeps_the_k_likeliest():
    kept = torch.softmax(torch.tensor([1.0, 2.0]), dim=-1).tolist()
    assert_close(shares(logits_of(1.0, 0.0, 2.0, -1.0), top_k=2), [kept[0], 0, kept[1], 0])


def test_top_p_keeps_the_fewest_that_reach_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05] + [1e-9] * 7]))
    assert_close(shares(logits, top_p=0.79), [0.625, 0.375, 0, 0])
    assert_close(shares(logits, top_p=1e-4), [1.0, 0, 0, 0])


def test_min_p_keeps_what_is_likely_beside_the_best():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05] + [1e-9] * 7]))
    assert_close(shares(logits, min_p=0.5), [0.625, 0.375, 0, 0])


def test_zero_temperature_takes_the_likeliest_whatever_else_is_asked():
    assert pick(ask(temperature=0, top_p=0.1, top_k=3), logits_of(1.0, 5.0, 4.9)) == 1


def test_top_k_of_one_is_greedy():
    assert shares(logits_of(1.0, 1.1), draws=64, temperature=2.0, top_k=1)[1] == 1.0


def test_a_seed_gives_the_same_token_in_any_slot_and_batch():
    one, logits = sampler(), torch.randn(8, VOCAB)
    for slot in range(8):
        one.admit(slot, ask(seed=40 + slot, temperature=1.0), [])
    together = one.choose(logits, list(range(8)), [9] * 8)
    for slot in range(8):
        assert (
            pick(ask(seed=40 + slot), logits[slot : slot + 1], position=9)
            == together[slot].token_ids[0]
        )


@pytest.mark.parametrize(
    "loud", [{"top_p": 0.5}, {"top_k": 2}, {"temperature": 0}, {"n": 2}], ids=str
)
def test_a_seeded_token_does_not_depend_on_a_neighbours_parameters(loud):
    logits = torch.randn(1, VOCAB)
    for seed in range(40):
        one = sampler()
        one.admit(0, ask(seed=seed), [])
        one.admit(1, ask(seed=seed, **loud), [])
        together = one.choose(logits.expand(2, -1), [0, 1], [3, 3])
        assert together[0].token_ids[0] == pick(ask(seed=seed), logits, position=3)


def test_random_numbers_differ_by_seed_and_position_and_are_even():
    values = [plain_uniform(seed, position) for seed in range(-40, 40) for position in range(40)]
    assert len(set(values)) == len(values) and min(values) >= 0 and max(values) < 1
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    neighbours = list(zip(values, values[1:], strict=False))
    mean = sum((a - 0.5) * (b - 0.5) for a, b in neighbours) / len(neighbours)
    assert abs(mean) < 0.01


def test_repetition_penalty_lowers_what_stands_in_prompt_or_output():
    logits = logits_of(2.0, 1.9, 1.8)
    request = ask([0], temperature=0, repetition_penalty=1.5)
    assert pick(request, logits) == 1
    assert pick(request, logits, output=[1]) == 2


def test_presence_and_frequency_count_the_output_alone():
    logits = logits_of(2.0, 1.9)
    assert pick(ask([0, 0], temperature=0, presence_penalty=1.0), logits) == 0
    assert pick(ask([1], temperature=0, presence_penalty=0.2), logits, output=[0]) == 1
    assert pick(ask([1], temperature=0, frequency_penalty=0.06), logits, output=[0]) == 0
    assert pick(ask([1], temperature=0, frequency_penalty=0.06), logits, output=[0, 0]) == 1


def test_penalties_follow_the_output_as_it_grows():
    one = sampler()
    one.admit(0, ask(temperature=0, presence_penalty=1.0), [])
    tokens = [one.choose(logits_of(2.0, 1.9, 1.8), [0], [p])[0].token_ids[0] for p in range(3)]
    assert tokens == [0, 1, 2]


def test_bias_and_allowed_ids_decide_who_may_come():
    assert pick(ask(temperature=0, logit_bias={3: 50.0}), logits_of(2.0)) == 3
    assert pick(ask(temperature=0, logit_bias={0: -100.0}), logits_of(2.0, 1.0)) == 1
    assert pick(ask(temperature=0, logit_bias={0: -100}), logits_of(2.0, 1.0)) == 1
    assert pick(ask(temperature=0, allowed_token_ids=[4, 2]), logits_of(5, 4, 1, 0, 2)) == 4


def test_no_end_comes_before_min_tokens():
    logits = torch.full((1, VOCAB), 0.0)
    logits[0, EOS], logits[0, 7], logits[0, 2] = 9.0, 8.0, 7.0
    request = ask(temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=[7])
    assert pick(request, logits) == 2
    assert pick(request, logits, output=[1]) == 2
    assert pick(request, logits, output=[1, 1]) == EOS


def test_bad_words_are_banned_where_they_would_be_completed():
    request = ask(temperature=0, bad_words=[[1, 2], [3]])
    logits = logits_of(0, 0, 5.0, 6.0, 4.0)
    assert pick(request, logits, output=[0]) == 2
    assert pick(request, logits, output=[0, 1]) == 4


def test_logprobs_are_those_of_the_model_before_penalties_and_temperature():
    one, logits = sampler(), torch.randn(1, VOCAB)
    one.admit(0, ask(temperature=0.1, logit_bias={5: 100.0}, logprobs=3), [])
    report = one.choose(logits, [0], [1])[0].logprobs[0]
    expected = torch.log_softmax(logits[0], dim=-1)
    assert report.token_id == 5
    assert report.logprob == pytest.approx(expected[5].item(), abs=1e-6)
    assert report.rank == (expected > expected[5]).sum() + 1
    assert [token for token, _ in report.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize("count, reported", [(0, 0), (4, 4), (VOCAB + 5, VOCAB), (-1, VOCAB)])
def test_as_many_candidates_are_reported_as_were_asked_for(count, reported):
    assert len(token_logprobs(torch.randn(1, VOCAB), [3], count)[0].top) == reported


def test_logits_that_are_not_numbers_fail_their_own_request_only():
    one, logits = sampler(), torch.randn(3, VOCAB)
    logits[1, 4] = float("nan")
    for slot in range(3):
        one.admit(slot, ask(temperature=float(slot > 0)), [])
    choices = one.choose(logits, [0, 1, 2], [1] * 3)
    assert [bool(choice.token_ids) for choice in choices] == [True, False, True]


def test_nothing_left_to_choose_is_an_error():
    one = sampler()
    one.admit(0, ask(temperature=1.0, allowed_token_ids=[3], bad_words=[[3]]), [])
    assert "no token" in one.choose(logits_of(1.0), [0], [1])[0].refused


def test_a_slot_keeps_nothing_of_its_former_user():
    one, logits = sampler(), logits_of(3.0, 2.0, 1.0)
    one.admit(0, ask([0], temperature=0, repetition_penalty=9.0, allowed_token_ids=[2]), [2])
    one.choose(logits, [0], [1])
    one.admit(0, ask([0], temperature=0), [])
    assert one.choose(logits, [0], [1])[0].token_ids == [0]
