"""The kernels of verification against the reference, in the interpreter and on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from ahead import Case, meta

from limelight.ops import noise
from limelight.ops.pieces import PIECE, Cuts
from limelight.ops.sample import invert, sample
from limelight.ops.verify import (
    NOTHING,
    Proposals,
    Verified,
    draft_probs,
    packed_rows,
    verify,
    verify_drawn,
    verify_greedy,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 151_936
SIZES = [7, PIECE + 1, 2 * PIECE + 77]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def call(batch, drafts, candidates, cuts, slots=None):
        def number(*shape):
            return meta(*shape, dtype=torch.float32)

        def integer(*shape, dtype=torch.int64):
            return meta(*shape, dtype=dtype)

        logits = number(batch * (drafts + 1), VOCABULARY)
        starts, drafted = integer(batch + 1, dtype=torch.int32), integer(slots or batch, drafts)
        slots_B = integer(batch, dtype=torch.int32) if slots else None
        if candidates is None:
            return verify_greedy.kernel(logits, starts, drafted, slots_B=slots_B)
        sampling = number(batch), integer(batch), integer(batch)
        cut = Cuts(number(batch), number(batch), number(batch)) if cuts else None
        if candidates == 0:
            return verify_drawn.kernel(
                logits, starts, drafted, *sampling, cuts=cut, slots_B=slots_B
            )
        shape = (slots or batch, drafts, candidates)
        proposals = Proposals(integer(*shape), number(*shape))
        return verify.kernel(
            logits, starts, drafted, *sampling, proposals=proposals, cuts=cut, slots_B=slots_B
        )

    return [
        Case("greedy", lambda: call(1, 7, None, False), decode=True),
        Case("as the sampler draws", lambda: call(64, 7, 0, False), decode=True),
        Case("drawn", lambda: call(64, 7, 16, False), decode=True),
        Case("drawn, cut", lambda: call(64, 7, 16, True)),
        Case("drawn, of slots", lambda: call(64, 7, 16, True, slots=257), decode=True),
        Case("greedy, of slots", lambda: call(1, 7, None, False, slots=257), decode=True),
        Case("as the sampler draws, cut", lambda: call(3, 15, 0, True)),
        Case("no drafts", lambda: call(3, 0, 16, False), decode=True),
        Case("numbers", lambda: noise.draft_uniform.kernel(integers(64), integers(64), drafts=7)),
    ]


def integers(size: int) -> torch.Tensor:
    return meta(size, dtype=torch.int64)


@dataclass
class Batch:
    """Sequences whose drafts are accepted about every second time, some of them greedy."""

    logits_RV: torch.Tensor
    starts_B: torch.Tensor
    drafts_BN: torch.Tensor
    temperature_B: torch.Tensor
    seed_B: torch.Tensor
    position_B: torch.Tensor
    proposals: Proposals

    @classmethod
    def random(cls, batch: int, drafts: int, vocabulary: int, device: str, seed=0) -> "Batch":
        generator = torch.Generator().manual_seed(seed)

        def integer(least, most, *shape):
            return torch.randint(least, most, shape, generator=generator)

        rows_B = integer(0, drafts + 2, batch)
        rows_B[0] = drafts + 1
        starts_B = torch.nn.functional.pad(rows_B.cumsum(0), (1, 0)).int()
        # Rows behind the last sequence, as padding of a graph is.
        logits_RV = 2 * torch.randn(int(starts_B[-1]) + 3, vocabulary, generator=generator)
        temperature_B = 0.4 + torch.rand(batch, generator=generator)
        temperature_B[3::5] = 0.0
        seed_B, position_B = integer(-(2**62), 2**62, batch), integer(0, 5000, batch)
        candidates = min(5, vocabulary)
        ids_BNK = torch.rand(batch, drafts, vocabulary, generator=generator).argsort(-1)
        ids_BNK = ids_BNK[..., :candidates].contiguous()
        scores_BNK = 2 * torch.randn(ids_BNK.shape, generator=generator)
        numbers_BN = noise.draft_uniform(seed_B, position_B, drafts=drafts)
        at_BN = torch.zeros(batch, drafts, dtype=torch.int64)
        for j in range(drafts):
            at_BN[:, j] = invert(draft_probs(scores_BNK[:, j], temperature_B), numbers_BN[:, j])
        drafts_BN = ids_BNK.gather(2, at_BN[..., None])[..., 0]
        sequence_R, i_R = packed_rows(starts_B, len(logits_RV))
        for row, (b, j) in enumerate(zip(sequence_R.tolist(), i_R.tolist(), strict=True)):
            if j < drafts:
                noise_K = torch.randn(candidates, generator=generator)
                logits_RV[row, ids_BNK[b, j]] = 7 + scores_BNK[b, j] + noise_K
        drafts_BN[5::7] = torch.where(torch.arange(drafts) == 1, NOTHING, drafts_BN[5::7])
        drafts_BN[6::7] = torch.where(torch.arange(drafts) == 2, vocabulary + 5, drafts_BN[6::7])
        return cls(
            logits_RV.to(device), starts_B.to(device), drafts_BN.to(device),
            temperature_B.to(device), seed_B.to(device), position_B.to(device),
            Proposals(ids_BNK.to(device), scores_BNK.to(device)),
        )  # fmt: skip

    @classmethod
    def wide(cls, batch: int, drafts: int, *, seed: int) -> "Batch":
        """On a GPU, of a real vocabulary, and as many rows whatever the seed."""
        made = cls.random(batch, drafts, 50, "cuda", seed=seed)
        wide_RV = 2 * torch.randn((drafts + 1) * batch, VOCABULARY, device="cuda")
        here = min(len(wide_RV), len(made.logits_RV))
        wide_RV[:here, 1000:1050] = made.logits_RV[:here] + 9
        made.logits_RV = wide_RV
        made.drafts_BN = (made.drafts_BN + 1000).where(made.drafts_BN >= 0, NOTHING)
        made.proposals = Proposals(made.proposals.ids_BNK + 1000, made.proposals.scores_BNK)
        return made

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (
            self.logits_RV, self.starts_B, self.drafts_BN, self.temperature_B, self.seed_B,
            self.position_B,
        )  # fmt: skip

    def cuts(self, vocabulary: int) -> Cuts:
        """Sequences with none, with each, and with all."""
        batch = len(self.seed_B)
        top_k_B, top_p_B = torch.full((batch,), vocabulary), torch.ones(batch)
        min_p_B = torch.zeros(batch)
        top_k_B[1::4], top_k_B[2::4] = 3, max(vocabulary // 3, 1)
        top_p_B[2::3], min_p_B[3::4] = 0.9, 0.02
        return Cuts(*(x_B.to(self.seed_B.device) for x_B in (top_k_B, top_p_B, min_p_B)))


def assert_same(mine: Verified, theirs: Verified) -> None:
    assert mine.accepted_B.dtype == mine.tokens_BQ.dtype == torch.int64
    assert torch.equal(mine.accepted_B, theirs.accepted_B)
    assert torch.equal(mine.tokens_BQ, theirs.tokens_BQ)
    torch.testing.assert_close(mine.best_B, theirs.best_B, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("vocabulary", SIZES, ids="V{}".format)
def test_drafts_stand_and_fall_as_in_the_reference(vocabulary, cut, device):
    batch = Batch.random(16, 3, vocabulary, device, seed=vocabulary)
    options = {"proposals": batch.proposals, "cuts": batch.cuts(vocabulary) if cut else None}
    theirs = verify.reference(*batch.arguments, **options)
    assert 0 < theirs.accepted_B.sum() < (batch.starts_B.diff() - 1).clamp(min=0).sum()
    assert_same(verify.kernel(*batch.arguments, **options), theirs)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("vocabulary", SIZES, ids="V{}".format)
def test_drafts_stand_that_the_sampler_would_draw(vocabulary, cut, device):
    batch = Batch.random(10, 3, vocabulary, device, seed=vocabulary)
    options = {"cuts": batch.cuts(vocabulary) if cut else None}
    logits_RV, starts_B, drafts_BN, *rest = batch.arguments
    for j in range(3):
        drawn = verify_drawn.reference(logits_RV, starts_B, drafts_BN, *rest, **options)
        right_B = (torch.arange(10, device=device) % 4 != j) & (drawn.tokens_BQ[:, j] != NOTHING)
        drafts_BN[:, j] = drawn.tokens_BQ[:, j].where(right_B, drafts_BN[:, j])
    theirs = verify_drawn.reference(*batch.arguments, **options)
    assert theirs.accepted_B.min() == 0 and theirs.accepted_B.max() == 3
    assert_same(verify_drawn.kernel(*batch.arguments, **options), theirs)


@pytest.mark.parametrize("drafts", [0, 1, 7, 15])
def test_any_number_of_drafts_may_be_verified(drafts, device):
    batch = Batch.random(3, drafts, 300, device, seed=drafts)
    cuts = batch.cuts(300)
    for one, options in ((verify, {"proposals": batch.proposals}), (verify_drawn, {})):
        mine = one.kernel(*batch.arguments, **options, cuts=cuts)
        assert_same(mine, one.reference(*batch.arguments, **options, cuts=cuts))


def test_drafts_may_lie_in_slots(device):
    """As many more slots hold others, in another order."""
    batch = Batch.random(9, 3, 300, device, seed=2)
    logits_RV, starts_B, drafts_BN, *rest = batch.arguments
    slots_B = torch.randperm(18, generator=torch.Generator().manual_seed(0))[:9].int().to(device)

    def spread(x_BX):
        x_SX = torch.full((18, *x_BX.shape[1:]), 3, dtype=x_BX.dtype, device=device)
        return x_SX.index_copy_(0, slots_B.long(), x_BX)

    proposals = Proposals(
        *(spread(x) for x in (batch.proposals.ids_BNK, batch.proposals.scores_BNK))
    )
    sampled = ({"proposals": batch.proposals}, {"proposals": proposals})
    for one, arguments, (packed, slotted) in (
        (verify, rest, sampled), (verify_drawn, rest, ({}, {})), (verify_greedy, [], ({}, {}))
    ):  # fmt: skip
        theirs = one.reference(logits_RV, starts_B, drafts_BN, *arguments, **packed)
        for form in (one.reference, one.kernel):
            mine = form(
                logits_RV, starts_B, spread(drafts_BN), *arguments, **slotted, slots_B=slots_B
            )
            assert_same(mine, theirs)


@pytest.mark.parametrize("vocabulary", SIZES, ids="V{}".format)
def test_where_all_are_greedy_ties_go_to_the_first(vocabulary, device):
    batch = Batch.random(12, 3, vocabulary, device)
    batch.logits_RV.clamp_(max=8.0)
    drafted = verify_greedy.reference(batch.logits_RV, batch.starts_B, batch.drafts_BN)
    for j in range(3):
        batch.drafts_BN[:, j] = drafted.tokens_BQ[:, j].where(
            drafted.tokens_BQ[:, j] != NOTHING, batch.drafts_BN[:, j]
        )
    arguments = (batch.logits_RV, batch.starts_B, batch.drafts_BN)
    theirs = verify_greedy.reference(*arguments)
    assert theirs.accepted_B.sum() > 3
    assert_same(verify_greedy.kernel(*arguments), theirs)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("vocabulary", SIZES, ids="V{}".format)
def test_without_a_draft_the_token_is_the_samplers_own(vocabulary, cut, device):
    count = 6
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = (3 * torch.randn(count, vocabulary, generator=generator)).to(device)
    temperature_R = torch.rand(count, generator=generator).to(device)
    seed_R, position_R = torch.arange(count, device=device), torch.arange(count, device=device) * 3
    cuts = None
    if cut:
        most_R = torch.randint(1, 30, (count,), generator=generator).to(device)
        share_R = torch.rand(count, generator=generator).to(device)
        cuts = Cuts(most_R, share_R, torch.zeros(count, device=device))
    numbers_R = noise.uniform(seed_R, position_R, stream=noise.PLAIN).float()
    token_R, best_R = sample.kernel(logits_RV, temperature_R, numbers_R, cuts=cuts)
    scores_BNK = torch.randn(count, 2, 3, generator=generator).to(device)
    proposals = Proposals(torch.arange(3, device=device).expand(scores_BNK.shape), scores_BNK)
    for one, options in ((verify, {"proposals": proposals}), (verify_drawn, {})):
        result = one.kernel(
            logits_RV, torch.arange(count + 1, device=device),
            torch.full((count, 2), NOTHING, device=device), temperature_R, seed_R, position_R,
            **options, cuts=cuts,
        )  # fmt: skip
        assert torch.equal(result.tokens_BQ[:, 0], token_R)
        assert torch.equal(result.best_B, best_R)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_row_without_numbers_or_allowed_tokens_ends_the_step(bad, temperature, device):
    logits_RV = torch.zeros(3, PIECE + 5, device=device)
    logits_RV[0, 1], logits_RV[2, 0], logits_RV[1] = 200.0, 200.0, bad
    one_B = torch.ones(1, device=device)
    certain = torch.tensor([[[1], [0]]], device=device)
    proposals = Proposals(certain, torch.zeros(1, 2, 1, device=device))
    for one, options in ((verify, {"proposals": proposals}), (verify_drawn, {})):
        result = one.kernel(
            logits_RV, torch.tensor([0, 3], device=device), torch.tensor([[1, 0]], device=device),
            one_B * temperature, torch.tensor([3], device=device), torch.tensor([8], device=device),
            **options, cuts=Cuts(one_B * 2, one_B * 0.9, one_B * 0.1),
        )  # fmt: skip
        assert result.accepted_B.tolist() == [1] and result.tokens_BQ[0, 0] == 1
        assert str(float(result.best_B[0])) == str(bad) and result.tokens_BQ[0, 2] == NOTHING


def test_where_p_and_q_are_the_same_nothing_forbidden_comes(device):
    """The first token of a piece is forbidden; what is left of p is rounding alone."""
    count, vocabulary = 9, 2 * PIECE
    logits_RV = torch.full((2 * count, vocabulary), float("-inf"), device=device)
    ids_K = torch.tensor([5, PIECE + 7, PIECE + 8], device=device)
    generator = torch.Generator().manual_seed(0)
    scores_BK = torch.randn(count, 3, generator=generator).to(device)
    logits_RV[::2].scatter_(1, ids_K.expand(count, -1), scores_BK + 3)
    logits_RV[1::2, 9] = 0.0
    temperature_B = torch.full((count,), 0.7, device=device)
    seed_B = torch.arange(count, device=device)
    drafts_BN = ids_K[torch.arange(count, device=device) % 3][:, None].contiguous()
    proposals = Proposals(ids_K.expand(count, 1, -1).contiguous(), scores_BK[:, None].contiguous())
    result = verify.kernel(
        logits_RV, torch.arange(count + 1, device=device) * 2, drafts_BN, temperature_B, seed_B,
        seed_B, proposals=proposals,
    )  # fmt: skip
    assert result.accepted_B.tolist() == [1] * count
    assert result.tokens_BQ[:, 1].tolist() == [9] * count
    # And a draft that q claims to be surer of than p is, with nothing else left.
    logits_RV[::2, ids_K[1:]] = float("-inf")
    result = verify.kernel(
        logits_RV, torch.arange(count + 1, device=device) * 2, drafts_BN, temperature_B, seed_B,
        seed_B, proposals=proposals,
    )  # fmt: skip
    assert result.tokens_BQ[:, 0].tolist() == [5] * count


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "best"])
def test_real_sizes_as_a_graph(sampled, cut, device):
    made = []
    batches = [Batch.wide(160, 7, seed=seed) for seed in range(2)]
    cuts = batches[0].cuts(VOCABULARY) if cut else None
    static = [x.clone() for x in batches[0].arguments]
    ids_BNK = batches[0].proposals.ids_BNK.clone()
    scores_BNK = batches[0].proposals.scores_BNK.clone()
    one, options = (verify, {"proposals": Proposals(ids_BNK, scores_BNK)})
    if not sampled:
        one, options = (verify_drawn, {})
    one.kernel(*static, **options, cuts=cuts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine = one.kernel(*static, **options, cuts=cuts)
    for batch in batches:
        for into, x in zip(static, batch.arguments, strict=True):
            into.copy_(x)
        ids_BNK.copy_(batch.proposals.ids_BNK)
        scores_BNK.copy_(batch.proposals.scores_BNK)
        graph.replay()
        theirs = one.reference(*static, **options, cuts=cuts)
        assert theirs.accepted_B.sum() > 40
        # One of a wide vocabulary's many intervals may end where a number lies, but for rounding.
        same_B = (mine.tokens_BQ == theirs.tokens_BQ).all(1)
        assert same_B.sum() >= len(same_B) - 2
        torch.testing.assert_close(mine.best_B, theirs.best_B, rtol=0, atol=0)
        made.append(mine.tokens_BQ.clone())
    assert not torch.equal(*made)


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_numbers_of_drafts_are_the_same_on_the_device(drafts, device):
    seed_B = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345], device=device)
    position_B = torch.tensor([0, 1, 17, 2**20, 5, 6], dtype=torch.int32, device=device)
    mine_BN = noise.draft_uniform.kernel(seed_B, position_B, drafts=drafts)
    assert torch.equal(mine_BN, noise.draft_uniform.reference(seed_B, position_B, drafts=drafts))
