"""Embedding against torch's, in the interpreter and on a GPU."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.embed import embed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    numbers = meta(8, dtype=torch.int64)
    return [Case("embed", lambda: embed.kernel(numbers, numbers, meta(150_144, 2048)), decode=True)]


@pytest.mark.parametrize("size", [40, 1030], ids="D{}".format)
def test_a_code_below_zero_stands_for_the_last_token_of_a_slot(size, device):
    weight_VD = torch.randn(11, size, device=device)
    last_tokens_S = torch.tensor([4, 10, 0], device=device)
    codes_T = torch.tensor([3, -1, -3, 0, 10, -2, -1], device=device)
    expected_TD = weight_VD[torch.tensor([3, 4, 0, 0, 10, 10, 4], device=device)]
    for form in (embed.reference, embed.kernel):
        assert torch.equal(form(codes_T, last_tokens_S, weight_VD), expected_TD)


def test_no_codes_are_no_rows(device):
    none_T = torch.empty(0, dtype=torch.int64, device=device)
    last_tokens_S = torch.zeros(1, dtype=torch.int64, device=device)
    weight_VD = torch.randn(2, 8, device=device)
    assert embed.kernel(none_T, last_tokens_S, weight_VD).shape == (0, 8)
