"""On one GPU: what ranks do of their shares is what one does of all logits, also in a CUDA graph.

Shares are those of ranks that are threads, or the only one's, whose exchanges are copies: so a
graph can hold them. Times are printed.
"""

import pytest
import torch
from ranks import among_ranks, share_of

from limelight.ops.pieces import Cuts
from limelight.ops.sample import sample
from limelight.ops.verify import Proposals, verify_by
from limelight.parallel.mesh import Mesh
from limelight.parallel.sampling import Share, sample_share
from limelight.parallel.verifying import judge_by

pytestmark = pytest.mark.gpu
VOCABULARY, SEQUENCES, DRAFTS = 151_936, 32, 7


class Rows:
    """Rows of wide logits, greedy and drawn ones; cut-offs of every kind and none."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.logits_RV = 3 * torch.randn(count, VOCABULARY, generator=generator)
        self.logits_RV[::5] = self.logits_RV[::5].round(decimals=1)
        self.temperature_R = torch.rand(count, generator=generator) + 0.3
        self.temperature_R[::7] = 0.0
        self.uniform_R = torch.rand(count, generator=generator)
        at_R = torch.arange(count)
        self.cuts = Cuts(
            torch.tensor([50, VOCABULARY, 1, 20_000])[at_R % 4].cuda(),
            torch.tensor([0.95, 0.9, 1.0])[at_R % 3].cuda(),
            torch.tensor([0.0, 0.0, 0.01, 0.0, 0.0])[at_R % 5].cuda(),
        )
        for name in ("logits_RV", "temperature_R", "uniform_R"):
            setattr(self, name, getattr(self, name).cuda())

    @property
    def drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.temperature_R, self.uniform_R


def replayed(name: str, work) -> object:
    """What `work` makes in a graph, whose time is printed."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    print(f"{name}: {begin.elapsed_time(end) / 20 * 1000:.0f} us")
    return made


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("count", [1, 8, 128])
@torch.inference_mode()
def test_a_graph_draws_from_a_share_what_the_kernels_draw_from_all(count, cut):
    rows, share = Rows(count, count), Share(Mesh.single(), 0, VOCABULARY)
    cuts = rows.cuts if cut else None
    given = (rows.logits_RV, *rows.drawn)
    mine = replayed(f"share, {count} rows", lambda: sample_share(*given, share, cuts=cuts))
    theirs = replayed(f"all, {count} rows", lambda: sample(*given, cuts=cuts))
    assert torch.equal(mine[1], theirs[1])
    # A number may lie where intervals meet, but for rounding.
    assert (mine[0] != theirs[0]).sum() <= 1 + count // 100


@torch.inference_mode()
def test_ranks_draw_from_their_shares_what_one_draws_from_all(monkeypatch):
    rows = Rows(64, 1)
    token_R, best_R = sample(rows.logits_RV, *rows.drawn, cuts=rows.cuts)

    def work(mesh):
        with torch.inference_mode():
            own_RS, share = share_of(rows.logits_RV, mesh)
            return sample_share(own_RS, *rows.drawn, share, cuts=rows.cuts)

    found = among_ranks(monkeypatch, 3, work)[0]
    for mine_R, top_R in found:
        assert torch.equal(mine_R, found[0][0]) and torch.equal(top_R, best_R)
    assert (found[0][0] != token_R).sum() <= 1


@pytest.mark.parametrize("way", ["best", "drawn"])
@torch.inference_mode()
def test_a_graph_judges_drafts_from_a_share_as_from_all(way):
    rows, share = Rows(SEQUENCES * (1 + DRAFTS), 3), Share(Mesh.single(), 0, VOCABULARY)
    generator = torch.Generator().manual_seed(4)
    shape = (SEQUENCES, DRAFTS, 20)
    ids_BNK = rows.logits_RV.view(SEQUENCES, 1 + DRAFTS, -1)[:, :-1].topk(20).indices
    scores_BNK = torch.randn(shape, generator=generator).cuda()
    proposals = Proposals(ids_BNK.contiguous(), scores_BNK) if way == "drawn" else None
    drafts_BN = ids_BNK[..., 0].contiguous()
    starts_B = torch.arange(SEQUENCES + 1, dtype=torch.int32, device="cuda") * (1 + DRAFTS)
    places = (torch.arange(SEQUENCES, device="cuda") for _ in range(2))
    temperature_B = rows.temperature_R[:SEQUENCES].contiguous()
    asked = (rows.logits_RV, starts_B, drafts_BN, temperature_B, *places)
    cuts = Cuts(*(x_R[:SEQUENCES].contiguous() for x_R in rows.cuts.arguments))
    mine, theirs = (
        replayed(name, work)
        for name, work in (
            (f"share, {way}", lambda: judge_by(proposals, *asked, share, cuts=cuts)),
            (f"all, {way}", lambda: verify_by(proposals, *asked, cuts=cuts)),
        )
    )
    assert int(theirs.accepted_B.sum()) > SEQUENCES // 4
    assert (mine.tokens_BQ != theirs.tokens_BQ).any(dim=1).sum() <= 2
