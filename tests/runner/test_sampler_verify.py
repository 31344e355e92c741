"""Verification and the sampler choose alike: their numbers, their cut-offs, their ties."""

import pytest
import torch

from limelight.ops import noise
from limelight.ops.pieces import Cuts
from limelight.ops.sample import sample
from limelight.ops.verify import NOTHING, Proposals, verify_by, verify_greedy
from limelight.runner.sampler import Sampler
from limelight.types import Request, SamplingParams

VOCAB = 23
PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 4},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.3},
    {"temperature": 1.2, "min_p": 0.02, "top_p": 0.95, "top_k": 9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1e-6, "top_p": 0.5},
    {"temperature": 0.9, "top_p": 1e-4},
]


def test_the_numbers_of_plain_tokens_are_the_samplers_own():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]
    positions = [0, 1, 17, 2**20]
    got = noise.uniform(
        torch.tensor(seeds)[:, None], torch.tensor(positions), stream=noise.PLAIN
    ).tolist()
    assert got == [
        [noise.plain_uniform(seed, position) for position in positions] for seed in seeds
    ]


def settings() -> tuple[torch.Tensor, Cuts]:
    params = [SamplingParams(**given) for given in PARAMS]
    cuts = Cuts(
        torch.tensor([p.top_k or VOCAB for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
    )
    return torch.tensor([p.temperature for p in params]), cuts


@pytest.mark.parametrize("drafts", ["none", "placeholders"])
def test_without_a_draft_every_parameter_gives_the_samplers_token(drafts):
    generator, batch = torch.Generator().manual_seed(1), len(PARAMS)
    temperature_B, cuts = settings()
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=[], device=torch.device("cpu"))
    for trial in range(40):
        # Rounded, so that there are ties.
        logits_BV = (2 * torch.randn(batch, VOCAB, generator=generator)).round(decimals=1)
        seeds, positions = [trial * 31 + b - 600 for b in range(batch)], list(range(3, batch + 3))
        for b, given in enumerate(PARAMS):
            request = Request(
                id="r", prompt_token_ids=[1], params=SamplingParams(**given), max_tokens=9,
                seed=seeds[b],
            )  # fmt: skip
            sampler.admit(b, request, [])
        want = [c.token_ids[0] for c in sampler.choose(logits_BV, list(range(batch)), positions)]
        # Rows with cut-offs are drawn in the order of the vocabulary, as the operation draws them.
        number_B = noise.uniform(torch.tensor(seeds), torch.tensor(positions), stream=noise.PLAIN)
        token_B, _ = sample(logits_BV, temperature_B, number_B.float(), cuts=cuts)
        cut_B = (cuts.top_k_B < VOCAB) | (cuts.top_p_B < 1) | (cuts.min_p_B > 0)
        want = torch.where(cut_B, token_B, torch.tensor(want)).tolist()
        rows = 1 if drafts == "none" else 3
        scores_BNK = torch.randn(batch, 2, 3, generator=generator)
        for proposals in (None, Proposals(torch.arange(3).expand(scores_BNK.shape), scores_BNK)):
            result = verify_by(
                proposals, logits_BV.repeat_interleave(rows, dim=0),
                torch.arange(batch + 1) * rows, torch.full((batch, 2), NOTHING), temperature_B,
                torch.tensor(seeds), torch.tensor(positions), cuts=cuts,
            )  # fmt: skip
            assert result.tokens_BQ[:, 0].tolist() == want
            assert result.accepted_B.tolist() == [0] * batch


def test_greedy_ties_go_to_the_samplers_token():
    logits_RV = torch.zeros(6, VOCAB)
    logits_RV[:, [9, 4, 15]] = 3.0
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=[], device=torch.device("cpu"))
    params = SamplingParams(temperature=0)
    sampler.admit(0, Request(id="r", prompt_token_ids=[1], params=params, max_tokens=9, seed=0), [])
    plain = sampler.choose(logits_RV[:1], [0], [4])[0].token_ids[0]
    result = verify_greedy(logits_RV, torch.tensor([0, 3, 6]), torch.tensor([[4, 4], [4, 9]]))
    assert result.tokens_BQ.tolist() == [[plain] * 3, [plain, plain, NOTHING]]
    assert result.accepted_B.tolist() == [2, 1]
