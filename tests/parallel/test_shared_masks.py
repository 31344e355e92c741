"""Masks and forced tokens, of which rank 0 tells the others, hold for each one's own tokens."""

import pytest
import torch
from ranks import among_ranks, share_of

from limelight.runner import masks
from limelight.runner.masks import Led, Masks

CPU = torch.device("cpu")


class Guide:
    """Says what it is made to say; its grammar allows the tokens that are multiples of a number."""

    refused = None

    def __init__(self, step=None, banned=(), forced=None):
        self.step, self.banned, self.forced = step, list(banned), forced
        self.needs_mask, self.matcher = step is not None, self

    def fill_next_token_bitmask(self, bits_RV, r):
        bits_RV[r] = 0
        bits_V = bits_RV[r].view(torch.uint8)
        for token_id in range(0, 32 * bits_RV.shape[1], self.step):
            bits_V[token_id // 8] |= 1 << token_id % 8

    def finish_mask(self, mask_V):
        for token_id in self.banned:
            mask_V[token_id // 8] &= ~(1 << token_id % 8) & 255


ROWS = [
    Guide(step=3), Guide(), Guide(banned=[0, 9, 40]), Guide(forced=17), Guide(step=7, banned=[14]),
]  # fmt: skip


def rows_of(rank: int) -> list[Led]:
    """Beside a row without a guide; the last but one has a budget alone."""
    return [
        Led.by(guide if rank == 0 else None, row + 1, constrained=guide.forced is None)
        for row, guide in enumerate(ROWS)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("vocabulary", [50, 97, 256])
def test_shares_of_masks_are_what_all_of_it_is(vocabulary, ranks, monkeypatch):
    # What xgrammar would fill for all rows at once, these guides fill row by row.
    monkeypatch.setattr(Masks, "_ask", Masks._ask_each)
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = torch.randn(len(ROWS) + 1, vocabulary, generator=generator)
    expected_RV = logits_RV.clone()
    whole = Masks(vocab_size=vocabulary, device=CPU)
    whole.mask(expected_RV, rows_of(0))
    whole.force(expected_RV, rows_of(0))
    assert (expected_RV[1, ::3] > float("-inf")).all() and expected_RV[1].isinf().sum() > 20
    assert expected_RV[3].isinf().nonzero()[:, 0].tolist() == [0, 9, 40]
    assert (expected_RV[4] == 0).nonzero()[:, 0].tolist() == [17]
    assert torch.equal(expected_RV[:1], logits_RV[:1]) and torch.equal(expected_RV[2], logits_RV[2])

    def work(mesh):
        own_RS, share = share_of(logits_RV, mesh)
        mine = Masks(vocab_size=vocabulary, device=CPU, share=share)
        mine.mask(own_RS, rows_of(mesh.rank))
        mine.force(own_RS, rows_of(mesh.rank))
        return own_RS

    found, told = among_ranks(monkeypatch, ranks, work, masks)
    assert torch.equal(torch.cat(found, dim=1)[:, :vocabulary], expected_RV)
    share = -(-vocabulary // ranks)
    assert told.sizes == [4 * ((share + 14) // 8), 8 * len(ROWS)]
