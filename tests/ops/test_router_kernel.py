"""The routers' kernels against their references, in the interpreter and on a GPU."""

import pytest
import torch
from ahead import Case, meta
from near import PLACES, assert_near

from limelight.ops.router import Routed, norm_route, route

EPS = 1e-6
# Rows, channels, experts, chosen, groups, groups kept.
SIZES = [
    (1, 192, 8, 2, 1, 1),
    (3, 192, 12, 3, 4, 2),
    (5, 100, 24, 4, 3, 3),
    (9, 192, 12, 3, 4, 2),
    (19, 300, 40, 6, 5, 2),
]
MODELS = [
    (rows, size, 256, *rest)
    for size, rest in [(2048, (6, 1, 1)), (5120, (8, 8, 4))]
    for rows in [1, 2, 7, 8, 9, 33, 130, 1000]
]
GPU = ("cuda", torch.bfloat16)
IDS = "T{0[0]}-D{0[1]}-E{0[2]}-N{0[3]}-G{0[4]}-kept{0[5]}".format

pytestmark = pytest.mark.usefixtures("poisoned")


def compile_cases() -> list[Case]:
    cases = []
    for rows in [1, 8, 9, 33, 130, 4096]:
        h, norm, router = meta(rows, 2048), meta(2048), meta(256, 2048, dtype=torch.float32)
        cases.append(
            Case(
                f"norm_route T{rows}",
                lambda a=(h, h, norm, router): norm_route.kernel(*a, eps=EPS, count=6),
                decode=rows < 1000,
            )
        )
        y, router = meta(rows, 5120), meta(256, 5120, dtype=torch.float32)
        bias = meta(256, dtype=torch.float32)
        kept = Routed(meta(8, 49, 8, dtype=torch.uint8)[:, 3], meta(rows, dtype=torch.int64))
        cases.append(
            Case(
                f"route T{rows}, kept",
                lambda a=(y, router, bias), kept=kept: route.kernel(
                    *a, count=8, groups=8, kept_groups=4, routed=kept
                ),
                decode=rows < 1000,
            )
        )
        cases.append(
            Case(
                f"route T{rows}",
                lambda a=(y, router, bias): route.kernel(*a, count=8, groups=8, kept_groups=4),
                decode=rows < 1000,
            )
        )
    return cases


def tensors(case, place):
    device, dtype = place
    rows, size, experts, *_ = case
    draw = {"generator": torch.Generator(device).manual_seed(sum(case)), "device": device}

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, **draw).to(dtype)

    h, x, norm = normal(rows, size), normal(rows, size), 1 + normal(size) / 4
    router = normal(experts, size, dtype=torch.float32) / size**0.5
    return h, x, norm, router, normal(experts, dtype=torch.float32) / 4


def check_choice(found, expected, *, tolerance=2e-6):
    """Equal weights; equal experts, but where their scores are as near as the arithmetic."""
    (weights, ids), (expected_weights, expected_ids) = found, expected
    assert weights.dtype == torch.float32 and weights.shape == ids.shape == expected_ids.shape
    assert (weights - expected_weights).abs().max() < tolerance
    assert (ids != expected_ids).sum() <= ids.numel() // 1000


def check_norm_route(case, place):
    *_, count, _, _ = case
    h, x, norm, router, _ = tensors(case, place)
    kernel, reference = norm_route.kernel, norm_route.reference
    added, y, *choice = kernel(h, x, norm, router, eps=EPS, count=count)
    expected_added, expected_y, *_ = reference(h, x, norm, router, eps=EPS, count=count)
    assert torch.equal(added, expected_added) and y.dtype == place[1]
    assert_near(y, expected_y, dtype=place[1])
    best = torch.sigmoid(y.double() @ router.double().T).topk(count, dim=-1)
    check_choice(choice, (best.values / best.values.sum(dim=-1, keepdim=True), best.indices))


def check_route(case, place):
    *_, count, groups, kept = case
    y, _, _, router, bias = tensors(case, place)
    options = {"count": count, "groups": groups, "kept_groups": kept}
    found = route.kernel(y, router, bias, **options)
    check_choice(found, route.reference(y.double(), router, bias, **options))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_norm_route_adds_norms_and_chooses(case, place):
    check_norm_route(case, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_route_keeps_to_the_best_groups(case, place):
    check_route(case, place)


def check_kept(case, place):
    """The ids that the experts get, in the slots of their tokens and nowhere else."""
    rows, _, experts, count, groups, kept_groups = case
    h, x, norm, router, bias = tensors(case, place)
    dtype = torch.uint8 if experts <= 256 else torch.int16
    for one, slots in ((norm_route, [*range(2 * rows, 0, -2)]), (route, [*range(1, rows), -1])):
        kept_SLN = torch.full((2 * rows + 2, 3, count), 99, dtype=dtype, device=h.device)
        expected = kept_SLN.clone()
        slots_T = torch.tensor(slots, device=h.device)
        routed = Routed(kept_SLN[:, 1], slots_T)
        if one is route:
            options = {"groups": groups, "kept_groups": kept_groups}
            *_, ids = route.kernel(x, router, bias, count=count, routed=routed, **options)
        else:
            *_, ids = norm_route.kernel(h, x, norm, router, eps=EPS, count=count, routed=routed)
        expected[slots_T[slots_T >= 0], 1] = ids[slots_T >= 0].to(dtype)
        assert torch.equal(kept_SLN, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_ids_are_kept_in_the_slots_of_their_tokens(case, place):
    check_kept(case, place)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS, ids=IDS)
def test_ids_of_the_models_are_kept(case):
    check_kept(case, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS, ids=IDS)
def test_the_routers_of_the_models(case):
    check_norm_route(case, GPU)
    check_route(case, GPU)


@pytest.mark.parametrize("rows", [1, 9])
def test_of_equal_scores_the_first_experts_are_chosen(rows):
    y, router = torch.randn(rows, 32), torch.zeros(10, 32)
    bias = torch.zeros(10)
    _, ids = route.kernel(y, router, bias, count=3, groups=1, kept_groups=1)
    assert ids.tolist() == [[0, 1, 2]] * rows
    _, ids = route.kernel(y, router, bias, count=6, groups=5, kept_groups=3)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * rows


def test_the_kernel_never_chooses_outside_the_best_groups():
    # Expert 4 is the best of all, but its group of two has the lowest sum.
    y, router = torch.eye(6)[:1], torch.zeros(6, 6)
    router[:, 0] = torch.tensor([0.5, 0.6, 0.5, 0.5, 2.9, -9.0])
    weights, ids = route.kernel(y, router, torch.zeros(6), count=2, groups=3, kept_groups=2)
    assert ids.tolist()[0][0] == 1 and 4 not in ids[0]
    assert weights.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_ids_are_experts_whatever_the_scores_are(rows, value):
    y, router, bias = torch.randn(rows, 32), torch.randn(12, 32), torch.zeros(12)
    y[0, 3] = value
    _, ids = route.kernel(y, router, bias, count=4, groups=3, kept_groups=2)
    assert ids.min() >= 0 and ids.max() < 12
    _, _, _, ids = norm_route.kernel(y, y, torch.ones(32), router, eps=EPS, count=4)
    assert ids.min() >= 0 and ids.max() < 12


def test_no_rows_are_routed_nowhere():
    weights, ids = route.kernel(
        torch.empty(0, 32), torch.randn(12, 32), torch.zeros(12), count=4, groups=3, kept_groups=2
    )
    assert weights.shape == ids.shape == (0, 4)
