"""Log-probabilities are those of the mode, beside any other request and behind drafts."""

import math

import pytest
import torch

from limelight.runner.sampler import Sampler
from limelight.runner.verifier import Offer, Verifier
from limelight.types import Request, SamplingParams

VOCAB = 11


def sampler(mode: str) -> Sampler:
    return Sampler(
        vocab_size=VOCAB, eos_token_ids=[], device=torch.device("cpu"), logprobs_mode=mode
    )


def ask(*, seed=3, logprobs=VOCAB, **params) -> Request:
    return Request(
        id="r", prompt_token_ids=[1], params=SamplingParams(logprobs=logprobs, **params),
        max_tokens=100, seed=seed,
    )  # fmt: skip


def told(mode: str, logits_RV: torch.Tensor, *requests: Request, output=(4,)) -> list:
    """What is told with the token of each row."""
    one = sampler(mode)
    for slot, request in enumerate(requests):
        one.admit(slot, request, list(output))
    rows = list(range(len(requests)))
    return [run.logprobs[0] for run in one.choose(logits_RV, rows, [5] * len(rows))]


def values(report) -> torch.Tensor:
    """The told numbers by token id."""
    by_id = torch.full((VOCAB,), math.nan)
    for token_id, value in report.top:
        by_id[token_id] = value
    return by_id


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 2


def test_raw_ones_know_nothing_of_temperature_and_penalties(logits):
    (report,) = told("raw_logprobs", logits, ask(temperature=0.3, presence_penalty=2.0, top_k=2))
    assert torch.equal(values(report), torch.log_softmax(logits[0].double(), -1).float())
    (report,) = told("raw_logits", logits, ask(temperature=0.3, top_k=2))
    assert torch.equal(values(report), logits[0])


def test_equal_ones_come_in_the_order_of_their_tokens():
    logits = torch.tensor([[0.0, 2, 1, 2, 1, 0, 2, 0, 0, 0, 1]])
    for count in (0, 1, 4, 6, 20, -1):
        (report,) = told("raw_logprobs", logits, ask(temperature=0.0, logprobs=count))
        ids = [1, 3, 6, 2, 4, 10, 0, 5, 7, 8, 9][: None if count < 0 else count]
        assert (report.token_id, report.rank) == (1, 1)
        assert [token_id for token_id, _ in report.top] == ids


def test_processed_ones_are_of_the_distribution_that_is_drawn_from(logits):
    shifted = logits[0].clone()
    shifted[4] -= 2.0
    shifted[7] += 1.5
    (report,) = told(
        "processed_logprobs", logits,
        ask(temperature=0.5, presence_penalty=2.0, logit_bias={7: 1.5}),
    )  # fmt: skip
    assert torch.allclose(values(report), torch.log_softmax(shifted / 0.5, -1))
    assert report.logprob == values(report)[report.token_id]
    assert report.rank == 1 + int((values(report) > report.logprob).sum())


def test_what_cut_offs_leave_out_has_no_chance(logits):
    kept = logits[0].topk(3).indices
    expected = torch.full((VOCAB,), -math.inf)
    expected[kept] = torch.log_softmax(logits[0, kept] / 1.5, -1)
    (report,) = told("processed_logprobs", logits, ask(temperature=1.5, top_k=3))
    assert torch.allclose(values(report), expected)
    (report,) = told("processed_logits", logits, ask(temperature=1.5, top_k=3))
    expected[kept] = logits[0, kept] / 1.5
    assert torch.allclose(values(report), expected)


def test_a_row_is_told_the_same_whatever_its_neighbours_ask(logits):
    asked = [
        ask(temperature=0.0),
        ask(temperature=0.7),
        ask(top_p=0.5),
        ask(temperature=0.0, top_k=1),
    ]
    together = told("processed_logprobs", logits.repeat(4, 1), *asked)
    alone = [told("processed_logprobs", logits, one)[0] for one in asked]
    assert together == alone
    # A greedy row has temperature 1 and no cut-offs.
    assert torch.allclose(values(together[3]), torch.log_softmax(logits[0], -1))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_verified_token_has_the_numbers_that_it_has_without_drafts(mode):
    """Penalties count the drafts before a row."""
    rows = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    request = ask(temperature=0.8, top_p=0.9, frequency_penalty=1.0, presence_penalty=1.0)
    plain = sampler(mode)
    plain.admit(0, request, [4])
    steps = [plain.choose(rows[i : i + 1], [0], [5 + i])[0] for i in range(4)]
    tokens = [step.token_ids[0] for step in steps]
    drafted = sampler(mode)
    drafted.admit(0, request, [4])
    run = Verifier(drafted, 3).judge(rows, [Offer(0, 0, tokens[:3], 5)], None)[0]
    assert run.token_ids == tokens
    expected = [step.logprobs[0] for step in steps]
    for got, want in zip(run.logprobs, expected, strict=True):
        assert (got.token_id, got.rank) == (want.token_id, want.rank)
        assert got.logprob == pytest.approx(want.logprob, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_numbers_that_are_not_finite_end_their_request_alone(mode, bad, logits):
    one = sampler(mode)
    for slot in range(3):
        one.admit(slot, ask(temperature=0.0), [])
    rows = logits.repeat(3, 1)
    rows[1, 6] = bad
    good, failed, other = one.choose(rows, [0, 1, 2], [5, 5, 5])
    assert failed.error and not failed.token_ids and not failed.logprobs
    assert good.token_ids == other.token_ids and good.error is None
    assert good.logprobs == other.logprobs


def test_a_verified_row_that_is_not_finite_ends_its_request_alone(logits):
    one = sampler("raw_logprobs")
    for slot in range(2):
        one.admit(slot, ask(temperature=0.0), [])
    best = int(logits.argmax())
    rows = logits.repeat(4, 1)
    rows[1, best] = math.inf
    runs = Verifier(one, 4).judge(rows, [Offer(0, 0, [best], 5), Offer(1, 2, [best], 5)], None)
    assert "not a finite number" in runs[0].error and runs[0].token_ids == [best]
    assert runs[1].error is None and len(runs[1].logprobs) == 2
