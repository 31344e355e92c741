"""Embedding against torch's, in the interpreter and on a GPU."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.embed import embed, embed_blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    numbers = meta(8, dtype=torch.int64)
    weight, options = meta(150_144, 2048), {"rows": 8, "mask": 7, "scale": 2.5}
    return [
        Case("embed", lambda: embed.kernel(numbers, numbers, weight), decode=True),
        Case("blocks", lambda: embed_blocks.kernel(numbers, weight, None, **options), decode=True),
        Case(
            "blocks with a mask",
            lambda: embed_blocks.kernel(numbers, weight, meta(2048), **options),
            decode=True,
        ),
    ]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["of the weight", "of its own"])
@pytest.mark.parametrize("scale", [1.0, 45.25])
def test_a_block_is_an_anchor_and_masks(scale, masked, dtype, device):
    """An anchor may be the mask itself."""
    weight_VD = torch.randn(11, 1030, device=device).to(dtype)
    mask_D = torch.randn(1030, device=device).to(dtype) if masked else None
    anchors_B = torch.tensor([4, 9, 0], device=device)
    options = {"rows": 4, "mask": 9, "scale": scale}
    mine_TD = embed_blocks.kernel(anchors_B, weight_VD, mask_D, **options)
    theirs_TD = embed_blocks.reference(anchors_B, weight_VD, mask_D, **options)
    assert torch.equal(mine_TD, theirs_TD) and mine_TD.dtype == dtype
    assert torch.equal(mine_TD[4], mine_TD[1])
