"""Attention over whole pieces of keys, and how pieces are joined, against the equation in FP64."""

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops.far import attend_piece, join

pytestmark = pytest.mark.usefixtures("poisoned")


def compile_cases() -> list[Case]:
    def joined(queries, heads):
        sums = (
            meta(queries, heads, 128, dtype=torch.float32),
            meta(queries, heads, dtype=torch.float32),
        )
        new = meta(queries, heads, 128), meta(queries, heads, dtype=torch.float32)
        return join.kernel(*sums, *new)

    return [Case(f"join {heads} heads", lambda h=heads: joined(1024, h)) for heads in (32, 6)]


def by_the_equation(q_THC, k_KLC, v_KLC, *, causal, scale):
    group = q_THC.shape[1] // len(k_KLC)
    k_HLC, v_HLC = (x.double().repeat_interleave(group, 0) for x in (k_KLC, v_KLC))
    scores_HTL = q_THC.double().transpose(0, 1) @ k_HLC.transpose(1, 2) * scale
    if causal:
        hidden_TL = torch.ones_like(scores_HTL[0], dtype=torch.bool).triu(1)
        scores_HTL = scores_HTL.masked_fill(hidden_TL, float("-inf"))
    return (scores_HTL.softmax(-1) @ v_HLC).transpose(0, 1), scores_HTL.logsumexp(-1).T


def drawn(queries, keys, heads, kv_heads, size, device, dtype):
    torch.manual_seed(queries + keys)
    q_THC = torch.randn(queries, heads, size, device=device).to(dtype)
    k_KLC, v_KLC = (torch.randn(kv_heads, keys, size, device=device).to(dtype) for _ in range(2))
    return q_THC, k_KLC, v_KLC


@pytest.mark.parametrize(
    "form, place, sizes",
    [
        ("reference", ("cpu", torch.float32), (13, 40, 6, 2, 16)),
        pytest.param(
            "kernel", ("cuda", torch.bfloat16), (1024, 2048, 32, 4, 128), marks=pytest.mark.gpu
        ),
        pytest.param(
            "kernel", ("cuda", torch.bfloat16), (2048, 2048, 6, 1, 128), marks=pytest.mark.gpu
        ),
    ],
)
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_a_piece_gives_results_and_logarithms_of_sums(form, place, sizes, causal):
    (device, dtype), (queries, keys, *shape) = place, sizes
    given = drawn(queries, queries if causal else keys, *shape, device, dtype)
    out_THC, lse_TH = getattr(attend_piece, form)(*given, causal=causal, scale=0.3)
    expected_THC, expected_TH = by_the_equation(*given, causal=causal, scale=0.3)
    assert out_THC.dtype == dtype and out_THC.is_contiguous() and lse_TH.is_contiguous()
    assert_near(out_THC, expected_THC, dtype=dtype)
    assert (lse_TH - expected_TH).abs().max() < 1e-3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("heads, size", [(6, 16), (17, 32)])
def test_pieces_join_to_what_all_their_keys_give(heads, size, place):
    device, dtype = place
    q_THC, k_KLC, v_KLC = drawn(5, 60, heads, 1, size, device, dtype)
    wide = (x.float() for x in (q_THC, k_KLC, v_KLC))
    expected_THC, expected_TH = by_the_equation(*wide, causal=False, scale=2.0)
    parts = zip(k_KLC.split([11, 30, 19], 1), v_KLC.split([11, 30, 19], 1), strict=True)
    first, *rest = (attend_piece.reference(q_THC, *part, causal=False, scale=2.0) for part in parts)
    out_THC, lse_TH = first[0].float(), first[1]
    for piece in rest:
        join.kernel(out_THC, lse_TH, *piece)
    assert_near(out_THC, expected_THC, dtype=dtype)
    assert (lse_TH - expected_TH).abs().max() < 1e-3
