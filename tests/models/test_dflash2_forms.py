"""A drafter in other types, with an FP8 cache, and divided among ranks, drafts alike."""

import threading
from dataclasses import replace

import pytest
import torch
from drafters import CPU, FEATURES, Cache, config_json, make_drafter, make_ends, randomize

from limelight.models import dflash2, dflash2_loader
from limelight.models.dflash2 import DFlash2
from limelight.models.dummy import UNIT
from limelight.models.layers import Placement, all_of
from limelight.models.targets import Target
from limelight.ops import rope
from limelight.ops.fp4 import FP4
from limelight.ops.paging import LayerCache
from limelight.parallel import collectives
from limelight.parallel.mesh import Mesh
from limelight.quant.stored import Stored

# Weights so small that the network does not enlarge what rounding does.
MILD = 0.08
CONTEXTS = [33, 0, 96]
ANCHORS_B = torch.tensor([3, 50, 80])
SETTINGS = {
    "temperature_B": torch.tensor([0.0, 0.7, 2.0]),
    "uniform_BN": torch.rand(3, 7, generator=torch.Generator().manual_seed(4)),
}


@torch.inference_mode()
def run(model, *, dtype=torch.float32):
    """Hidden states and drafts behind some contexts."""
    cache = Cache(model, len(CONTEXTS), longest=120, dtype=dtype)
    for sequence, context in enumerate(CONTEXTS):
        generator = torch.Generator().manual_seed(sequence)
        taps_TF = torch.randn(context, FEATURES, generator=generator)
        cache.fill(sequence, taps_TF.to(model.fc.dtype))
    hidden_BQD = model(ANCHORS_B, cache.blocks(CONTEXTS, 8))
    return hidden_BQD, model.propose(ANCHORS_B, cache.blocks(CONTEXTS, 8), **SETTINGS)


def distance(found, right):
    return ((found.float() - right).norm() / right.norm()).item()


def test_a_drafter_in_bf16_is_near_the_one_in_fp32():
    exact = make_drafter(config_json())
    rounded = make_drafter(config_json(), replace(CPU, dtype=torch.bfloat16))
    randomize(rounded, size=MILD)
    for name, target in exact.targets.items():
        target.into.copy_(rounded.targets[name].into)
    exact.ends.embed.weight.copy_(rounded.ends.embed.weight)
    assert distance(run(rounded, dtype=torch.bfloat16)[0], run(exact)[0]) < 0.02


def test_a_drafter_over_an_fp8_cache_is_near_the_one_over_fp32():
    model = make_drafter(config_json())
    randomize(model, size=MILD)
    assert 0 < distance(run(model, dtype=torch.float8_e4m3fn)[0], run(model)[0]) < 0.05


class Ranks:
    """Collectives of threads that stand in for two ranks."""

    def __init__(self):
        self.barrier, self.parts = threading.Barrier(2), [None, None]

    def _meet(self, x, mesh):
        self.parts[mesh.rank] = x.clone()
        self.barrier.wait(30)
        parts = list(self.parts)
        self.barrier.wait(30)
        return parts

    def all_reduce(self, x, mesh):
        return sum(self._meet(x, mesh))

    def all_gather(self, x, mesh):
        return torch.cat(self._meet(x, mesh), dim=-1)


def on_rank(rank, whole, found):
    place = Placement(Mesh(rank, 2), torch.float32, torch.device("cpu"))
    ends = make_ends(whole.config, replace(place, targets={}), like=whole.ends)
    model = DFlash2(whole.config, replace(place, targets={}), ends).eval()
    for name, target in model.targets.items():
        target.into.copy_(whole.targets[name].into[target.take])
    found[rank] = run(model)


def test_two_ranks_draft_what_one_does(monkeypatch):
    whole, ranks, found = make_drafter(config_json()), Ranks(), [None, None]
    monkeypatch.setattr(dflash2, "all_gather", ranks.all_gather)
    monkeypatch.setattr(collectives, "all_reduce", ranks.all_reduce)
    threads = [threading.Thread(target=on_rank, args=(r, whole, found)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    hidden_BQD, made = run(whole)
    for part_BQD, drafts in found:
        torch.testing.assert_close(part_BQD, hidden_BQD, rtol=1e-4, atol=1e-4)
        assert torch.equal(drafts.tokens_BN, made.tokens_BN)
        assert torch.equal(drafts.proposals.ids_BNK, made.proposals.ids_BNK)


@pytest.mark.parametrize("share, fits", [(0.1, True), (0.9, False)], ids=["rounded", "another"])
def test_a_copy_of_a_head_that_the_target_has_in_nvfp4_may_differ_by_rounding(share, fits):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (97, 24), dtype=torch.uint8, generator=generator)
    scales = torch.rand(97, 3, generator=generator).add(0.5).to(torch.float8_e4m3fn)
    held = FP4(codes, scales, torch.full((97,), 0.1))
    values = dflash2_loader._values(held)
    noise = torch.randn(values.shape, generator=generator)
    values = values + share * values.norm() / noise.norm() * noise
    stored = Stored(
        "file", "lm_head.weight", "lm_head.weight", "F32", (97, 48),
        lambda into, take: into.copy_(values[take]),
    )  # fmt: skip
    target = Target(held, (97, 48), (all_of(97), all_of(48)), UNIT)
    if fits:
        dflash2_loader._check_copy(stored, target)
    else:
        with pytest.raises(ValueError, match="lm_head.weight"):
            dflash2_loader._check_copy(stored, target)


def test_the_kernel_fills_the_cache_as_its_reference_does():
    generator = torch.Generator().manual_seed(2)
    kv_TN, norm_2C = (torch.randn(7, 4 * 16, generator=generator), torch.rand(2, 16) + 0.5)
    turn = rope.rotation(torch.arange(7) * 90, head_dim=16, theta=1e4, dtype=torch.float32)
    slots_T = torch.tensor([5, -1, 8, 9, 3, -1, 1])
    caches = [LayerCache(torch.zeros(2, 2, 12, 16)) for _ in range(2)]
    for prepare, cache in zip((rope.prepare.kernel, rope.prepare.reference), caches, strict=True):
        heads = rope.Heads(0, 2, 1e-6)
        q_THC = prepare(kv_TN, norm_2C, cache, slots_T, heads=heads, turn=turn)
        assert q_THC.shape == (7, 0, 16)
    assert caches[1].pairs_2KSC[:, :, 8].abs().min() > 0
    torch.testing.assert_close(caches[0].pairs_2KSC, caches[1].pairs_2KSC)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_pass_is_one_graph_that_waits_for_nothing():
    place = Placement(Mesh.single(), torch.bfloat16, torch.device("cuda"))
    model = make_drafter(config_json(), place)
    cache = Cache(model, 3, longest=120, device="cuda", dtype=torch.bfloat16)
    for sequence, context in enumerate(CONTEXTS):
        cache.fill(sequence, torch.randn(context, FEATURES, device="cuda").bfloat16())
    blocks, anchors_B = cache.blocks(CONTEXTS, 8), ANCHORS_B.cuda()
    settings = {name: value.cuda() for name, value in SETTINGS.items()}

    def step():
        return model.propose(anchors_B, replace(blocks, _layouts={}), **settings)

    eager = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    graph.replay()
    assert torch.equal(made.tokens_BN, eager.tokens_BN)
    anchors_B.copy_(torch.tensor([9, 8, 7]))
    graph.replay()
    assert torch.equal(made.tokens_BN, step().tokens_BN)
