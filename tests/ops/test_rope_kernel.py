"""The kernels between projection and attention against their references."""

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops import rope
from limelight.ops.activation import softcap
from limelight.ops.paging import FP8, LayerCache
from limelight.ops.rope import Heads, Rotation

EPS = 1e-6
pytestmark = pytest.mark.usefixtures("poisoned")
places = pytest.mark.parametrize("place", PLACES)

# Query heads, KV heads, head size, further heads in a row.
FLINT, BEAM = (32, 4, 128, 0), (6, 1, 128, 6)
SHAPES = [FLINT, BEAM, (6, 2, 32, 6), (3, 3, 16, 1)]


def compile_cases() -> list[Case]:
    cases = [
        Case("rotation", lambda: rotation(torch.bfloat16)),
        Case("ssmax", lambda: rope.ssmax.kernel(meta(3, dtype=torch.int64))),
        Case("softcap", lambda: softcap.kernel(meta(2, 151_936, dtype=torch.float32), cap=30.0)),
    ]

    def rotation(dtype):
        positions = meta(9, dtype=torch.int64)
        return rope.rotation.kernel(positions, head_dim=128, theta=1e4, dtype=dtype)

    def prepare(tokens, shape, dtype, fp8=False, **more):
        heads, kv_heads, size, further = shape
        row = (heads + 2 * kv_heads + further) * size
        turn = dtype and Rotation(*(meta(tokens, 1, size, dtype=dtype) for _ in range(2)))
        pairs = meta(2, kv_heads, 4096, size, dtype=FP8 if fp8 else torch.bfloat16)
        cache = LayerCache(pairs, meta(2, dtype=torch.float32) if fp8 else None)
        rope.prepare.kernel(
            meta(tokens, row), meta(2, size), cache,
            meta(tokens, dtype=torch.int64), heads=Heads(heads, kv_heads, EPS), turn=turn, **more,
        )  # fmt: skip

    for tokens in (1, 4096):
        for name, shape, dtype, more in (
            ("Flint window", FLINT, torch.bfloat16, {}),
            ("Flint full", FLINT, None, {}),
            ("Beam window", BEAM, torch.float32, {}),
            ("Beam full", BEAM, None, {"ssmax_T": meta(tokens, dtype=torch.float32)}),
            ("Flint window FP8", FLINT, torch.bfloat16, {"fp8": True}),
            (
                "Beam full FP8",
                BEAM,
                None,
                {"ssmax_T": meta(tokens, dtype=torch.float32), "fp8": True},
            ),
        ):
            call = lambda a=(tokens, shape, dtype), b=more: prepare(*a, **b)  # noqa: E731
            cases.append(Case(f"prepare {name} T{tokens}", call, decode=True))
    return cases


@places
@pytest.mark.parametrize("dtype", ["fp32", "rounded"])
def test_angles_are_right_at_far_positions(dtype, place):
    device, rounded = place
    dtype = torch.float32 if dtype == "fp32" else rounded
    positions = torch.tensor([0, 1, 511, 2048, 262_143, 1_048_575, 77], device=device)
    turn = rope.rotation.kernel(positions, head_dim=32, theta=1e4, dtype=dtype)
    expected = rope.rotation.reference(positions.cpu(), head_dim=32, theta=1e4, dtype=dtype)
    for mine, right in ((turn.cos, expected.cos), (turn.sin, expected.sin)):
        assert mine.dtype == dtype and mine.shape == right.shape
        assert (mine.cpu().float() - right.float()).abs().max() <= torch.finfo(dtype).eps
    scale = rope.ssmax.kernel(positions).cpu()
    assert torch.allclose(scale, rope.ssmax.reference(positions.cpu()), rtol=1e-6)


@places
@pytest.mark.parametrize("tokens", [1, 6], ids="T{}".format)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}-{0[1]}-{0[2]}".format)
@pytest.mark.parametrize("form", ["plain", "rounded turn", "fp32 turn", "ssmax"])
def test_prepared_heads_are_those_of_the_reference(form, shape, tokens, place):
    (device, dtype), (heads, kv_heads, size, further) = place, shape
    positions = torch.randint(100_000, (tokens,), device=device)
    more = {}
    if "turn" in form:
        kind = dtype if form == "rounded turn" else torch.float32
        turn = rope.rotation.reference(positions, head_dim=size, theta=1e4, dtype=kind)
        more["turn"] = turn
    if form == "ssmax":
        more["ssmax_T"] = rope.ssmax.reference(positions)
    # Rows are part of wider ones, and a few of them are padding.
    width = (heads + 2 * kv_heads + further) * size
    qkv_TN = torch.randn(tokens, width + 8, device=device).to(dtype)[:, :width]
    weight_2C = (1 + 0.2 * torch.randn(2, size, device=device)).to(dtype)
    slots_T = (torch.randperm(2 * tokens, device=device) + 1)[:tokens]
    slots_T[3::4] = -1
    results = []
    for form_ in (rope.prepare.kernel, rope.prepare.reference):
        pairs_2KSC = torch.full(
            (2, kv_heads, 2 * tokens + 2, size), 9.0, dtype=dtype, device=device
        )
        q_THC = form_(
            qkv_TN, weight_2C, LayerCache(pairs_2KSC), slots_T,
            heads=Heads(heads, kv_heads, EPS), **more,
        )  # fmt: skip
        results.append((q_THC, pairs_2KSC))
    (q_THC, pairs), (right_THC, right_pairs) = results
    assert q_THC.dtype == dtype
    assert_near(q_THC, right_THC, dtype=dtype)
    if dtype != torch.float32:
        # Rounded at the same points: few numbers differ. (A product that is not rounded before its
        # sum is makes a third of them differ.)
        assert (q_THC == right_THC).float().mean() > 0.98
    assert_near(pairs, right_pairs, dtype=dtype)
    untouched = (right_pairs == 9.0).all(dim=(0, 1, 3))
    assert (pairs[:, :, untouched] == 9.0).all() and untouched.sum() >= tokens // 4


def hard_to_round(dtype, device):
    """[N, 16]: half-way cases of FP8 and their neighbours, tiny and huge numbers, and others."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([middles * (1 + step * torch.finfo(dtype).eps) for step in (-1, 0, 1)])
    extremes = torch.tensor([0.0, 2**-9, 2**-10, 2**-24, 448.0, 463.9, 464.0, 480.0, 6e4])
    x = torch.cat((numbers, near, extremes, torch.randn(99) * 50, torch.randn(99) / 50))
    x = torch.cat((x, -x))
    return x[: len(x) // 16 * 16].view(-1, 16).to(device, dtype)


@places
@pytest.mark.parametrize("v_scale", [1.0, 0.25, 0.3])
def test_fp8_is_rounded_to_the_bit_as_torch_rounds(v_scale, place):
    v_TC = hard_to_round(place[1], place[0])
    tokens, caches = len(v_TC), []
    qkv_TN = torch.cat((torch.randn(tokens, 32, device=place[0]).to(place[1]), v_TC), dim=1)
    weight_2C = torch.ones(2, 16, device=place[0]).to(place[1])
    slots_T = torch.arange(1, tokens + 1, device=place[0])
    slots_T[5] = -1
    for form in (rope.prepare.kernel, rope.prepare.reference):
        pairs_2KSC = torch.zeros(2, 1, tokens + 1, 16, device=place[0]).to(FP8)
        scales_2 = torch.tensor([0.01, v_scale], device=place[0])
        form(qkv_TN, weight_2C, LayerCache(pairs_2KSC, scales_2), slots_T, heads=Heads(1, 1, EPS))
        caches.append(pairs_2KSC.view(torch.uint8))
    (keys, values), (right_keys, right_values) = caches
    assert torch.equal(values, right_values)
    assert (keys == right_keys).float().mean() > 0.99
    assert ((keys.int() - right_keys.int()).abs() <= 1).all()


@places
def test_the_soft_cap_is_a_hyperbolic_tangent(place):
    x = torch.cat((torch.randn(3, 700) * 40, torch.tensor([[0.0, 1e-4, -1e9] * 100 + [5.0] * 400])))
    x = x.to(place[0])
    out = softcap.kernel(x, cap=30.0)
    assert (out.double() - 30 * torch.tanh(x.double() / 30)).abs().max() < 1e-5
