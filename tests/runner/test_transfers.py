"""What goes between host and device arrives, whatever its size."""

import pytest
import torch

from limelight.runner import transfers
from limelight.runner.transfers import carry

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 21, 30])
def test_all_bytes_arrive_on_the_host_and_come_back(place, count, monkeypatch):
    monkeypatch.setattr(transfers, "PIECE", 7)
    there = torch.randint(256, (count,), dtype=torch.uint8, device=place)
    here, back = torch.zeros(count, dtype=torch.uint8), torch.zeros_like(there)
    carry(there, here)
    assert torch.equal(here, there.cpu())
    carry(here, back)
    assert torch.equal(back, there)


@pytest.mark.gpu
def test_what_was_launched_before_is_carried_too():
    there = torch.zeros(2**28 + 5, dtype=torch.uint8, device="cuda")
    here = torch.zeros(len(there), dtype=torch.uint8)
    for _ in range(20):
        there += 1
    carry(there, here)
    assert bool((here == 20).all())
