"""Drafts beside rules that have a say in each row."""

import torch

from limelight.ops.verify import Proposals
from limelight.runner.sampler import Sampler
from limelight.runner.verifier import Offer, Verifier
from limelight.types import Request, SamplingParams


class LastForbidden:
    """A guide that lets every token come but the last of three."""

    forced, banned, needs_mask, is_behind, is_whole = None, [], False, False, False

    def __init__(self):
        self.refused = None

    def fork(self):
        return LastForbidden()

    def accept(self, token_id):
        if token_id == 2:
            self.refused = "not this one"


def test_a_drawn_draft_that_is_forbidden_leaves_the_distribution_alone():
    """It is refused by its chance: the token in its place is one of max(p - q, 0)."""
    p_V, q_V, count = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 1e-4, 0.4999]), 20_000
    sampler = Sampler(vocab_size=3, eos_token_ids=[], device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    drafts = torch.multinomial(q_V.expand(count, 3), 1, generator=generator)[:, 0].tolist()
    offers = []
    for b, draft in enumerate(drafts):
        request = Request(
            id=str(b), prompt_token_ids=[0], params=SamplingParams(temperature=1.0), max_tokens=9,
            seed=b * 7919 + 13,
        )  # fmt: skip
        sampler.admit(b, request, [])
        sampler.rules[b].guide = LastForbidden()
        offers.append(Offer(b, 2 * b, [draft], 5))
    proposals = Proposals(torch.arange(3).repeat(count, 1, 1), q_V.log().repeat(count, 1, 1))
    runs = Verifier(sampler, 1).judge(p_V.log().repeat(2 * count, 1), offers, proposals)
    first = torch.tensor([runs[b].token_ids[0] for b in range(count)])
    counts = torch.bincount(first, minlength=3)
    expected = count * p_V[:2]
    # A thousandth of samples lies above 10.83.
    assert counts[2] == 0 and ((counts[:2] - expected) ** 2 / expected).sum() < 10.83
    assert all(runs[b].accepted <= runs[b].verified <= 1 for b in range(count))
