"""Experts divided among ranks give what one rank gives, however uneven the ranks' rows are."""

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from limelight.models.layers import Experts, Placement, SwiGLU
from limelight.parallel.expert_mesh import ExpertMesh
from limelight.parallel.expert_placement import ExpertPlacement
from limelight.parallel.mesh import Mesh

EXPERTS, CHOSEN, SIZE, INNER = 8, 3, 64, 32
BACKENDS = ["allgather_reducescatter", "all2all", "all2all_pipelined"]
CPU = torch.device("cpu")
# Rows of each data rank in one step: even, uneven, none at all on one.
STEPS = [[5, 5], [1, 40], [0, 7]]
TIGHT = {"rtol": 1e-5, "atol": 1e-6}


def fill(layer: torch.nn.Module, place: Placement) -> None:
    """What a checkpoint would put there: each expert's numbers follow from its own number."""
    for name, target in place.targets.items():
        for slot, expert in enumerate(target.experts or range(len(target.into))):
            seed = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * expert)
            value = torch.randn(target.shape[1:], generator=seed) * target.shape[-1] ** -0.5
            take = target.take[1:] if len(target.shape) == 3 else ()
            target.into[slot].copy_(value[take] if take else value)


def made(mesh: ExpertMesh | None, *, fp32: bool) -> tuple[Experts, SwiGLU]:
    place = Placement(Mesh.single(), torch.float32, CPU, prefix="layers.3.", experts=mesh)
    experts = Experts(EXPERTS, SIZE, INNER, place, fp32=fp32, scale=2.5)
    shared = SwiGLU(SIZE, 16, place.beside_experts.within("shared"), fp32=fp32)
    fill(experts, place)
    return experts, shared


def routed(rows: int, seed: int, hot: bool = False):
    draw = torch.Generator().manual_seed(seed)
    y_TD = torch.randn(rows, SIZE, generator=draw)
    scores = torch.rand(rows, EXPERTS, generator=draw)
    if hot:
        scores[:, :CHOSEN] += 1
    weights, ids = scores.topk(CHOSEN, dim=-1)
    return y_TD, weights / weights.sum(-1, keepdim=True), ids


def mesh_of(rank: int, size: int, tp: int, backend: str, **given) -> ExpertMesh:
    groups = [dist.new_group(list(range(i, i + tp))) for i in range(0, size, tp)]
    rows = Mesh(rank % tp, tp, groups[rank // tp]) if tp > 1 else Mesh.single()
    placement = given.pop("placement", ExpertPlacement.of(EXPERTS, size))
    return ExpertMesh(
        rank, size, placement, rows, dist.group.WORLD, backend=backend, **given
    )  # fmt: skip


def compare(mesh: ExpertMesh, steps: list[list[int]], *, hot: bool = False, near=TIGHT) -> None:
    """Each data rank's rows against the layer of one rank; without the shared expert every
    second time."""
    data_rank = mesh.rank // mesh.rows.size
    for number, rows in enumerate(steps):
        experts, shared = made(mesh, fp32=number % 2 == 0)
        alone, alone_shared = made(None, fp32=number % 2 == 0)
        mesh.pace.most = max(rows)
        given = routed(rows[data_rank], 10 * number + data_rank, hot)
        beside = (shared, alone_shared) if number % 2 else (None, None)
        found = experts(*given, beside[0])
        torch.testing.assert_close(found, alone(*given, beside[1]), **near)


def every_step(rank: int, tp: int) -> None:
    for backend in BACKENDS:
        mesh = mesh_of(rank, dist.get_world_size(), tp, backend)
        compare(mesh, STEPS)
        compare(mesh, [[40, 33]], hot=True)


@pytest.mark.parametrize(("size", "tp"), [(2, 1), (4, 2)], ids=["DP2", "TP2-DP2"])
def test_experts_on_all_ranks_give_what_one_rank_gives(size, tp):
    run_ranks(size, every_step, tp)


def one_group(rank: int) -> None:
    """Ranks of one tensor-parallel group bring a part each of the same rows."""
    for backend in BACKENDS:
        mesh = mesh_of(rank, 2, 2, backend)
        experts, shared = made(mesh, fp32=True)
        alone, alone_shared = made(None, fp32=True)
        for rows in (1, 2, 7):
            given = routed(rows, rows)
            torch.testing.assert_close(
                experts(*given, shared), alone(*given, alone_shared), **TIGHT
            )


def test_ranks_with_the_same_rows_share_the_way_to_the_experts():
    run_ranks(2, one_group)


def with_copies(rank: int) -> list[int]:
    loads = {3: [50.0, 40.0, 1, 1, 1, 1, 0, 0]}
    placement = ExpertPlacement.of(EXPERTS, 2, spare=4, loads=loads)
    assert len(placement.held(3, rank)) == 6
    assert all({0, 1} <= set(placement.held(3, r)) for r in range(2))
    for backend in BACKENDS:
        mesh = mesh_of(rank, 2, 1, backend, placement=placement, records=True)
        compare(mesh, STEPS, hot=True)
    experts, _ = made(mesh, fp32=True)
    mesh.pace.most, mesh.pace.valid_1 = 6, torch.tensor([4])
    experts(*routed(6, 1, hot=True))
    experts.serve(CHOSEN)
    return experts.divided.counts_E.tolist()


def test_copies_of_hot_experts_change_nothing_and_the_load_is_counted():
    first, second = run_ranks(2, with_copies)
    # Padding counts for nothing: four rows of six are real.
    assert first == second and sum(first) == 4 * CHOSEN and first[:3] == [4, 4, 4]


def in_fp8(rank: int) -> None:
    for backend in BACKENDS:
        mesh = mesh_of(rank, 2, 1, backend, fp8=True)
        compare(mesh, STEPS, near={"rtol": 0.1, "atol": 0.3})
        experts, _ = made(mesh, fp32=True)
        alone, _ = made(None, fp32=True)
        mesh.pace.most = 50
        given = routed(50, rank)
        found, exact = experts(*given), alone(*given)
        error = (found - exact).norm() / exact.norm()
        assert 0 < error < 0.06, error


def test_rows_that_travel_as_fp8_lose_little():
    run_ranks(2, in_fp8)
