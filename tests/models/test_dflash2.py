"""A drafter over its cache gives what the equations give on the whole context at once."""

import math
from dataclasses import dataclass

import pytest
import torch
from drafters import FEATURES, Cache, config_json, make_drafter, weights_of

from limelight.models.dflash2 import Drafts
from limelight.ops.selector import walk
from limelight.ops.verify import draft_probs

CONTEXTS = [0, 1, 23, 31, 32, 33, 96, 640]
NEAR = {"rtol": 1e-4, "atol": 1e-4}
VARIANTS = {
    "as published": {},
    "causal": {"is_causal": True},
    "a full layer": {"layer_types": ["sliding_attention", *["full_attention"] * 2]},
    "a narrow window": {"sliding_window": 8},
    "no cap": {"drafting": {"final_logit_softcapping": 0, "output_multiplier": None}},
    "one tap": {"drafting": {"conv_kernel_size": 1, "input_embedding_scale": None}},
}


@dataclass
class Expected:
    """What the equations give for one block."""

    hidden_QD: torch.Tensor
    candidates_NK: torch.Tensor
    unary_NK: torch.Tensor
    table_NKK: torch.Tensor
    tokens_N: list[int]


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x_THC, positions_T, theta):
    """Pairs of channels (i, i + C / 2) as complex numbers, turned by angles in FP32."""
    half = x_THC.shape[-1] // 2
    angle = positions_T[:, None].float() * (1 / theta ** (torch.arange(half) / half))
    turned = (
        torch.complex(*x_THC.double().split(half, dim=-1)) * torch.exp(1j * angle.double())[:, None]
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


def convolved(x_QD, base_PD, change_QPG):
    group = x_QD.shape[1] // change_QPG.shape[2]
    y_QD = torch.zeros_like(x_QD)
    for j in range(len(x_QD)):
        for k in range(min(j + 1, len(base_PD))):
            kernel_D = base_PD[k] + change_QPG[j, k].repeat_interleave(group)
            y_QD[j] += kernel_D * x_QD[j - k]
    return y_QD


class Dense:
    """The equations, in FP64, for a context whose features are all there."""

    def __init__(self, model, *, limit=2**30):
        self.config, self.limit = model.config, limit
        self.w = {name: value.double() for name, value in weights_of(model).items()}
        self.embedding_VD = model.ends.embed.weight.double()
        self.head_VD = model.ends.head.weight.double()

    def attention(self, layer, x_QD, features_TD):
        c, at = self.config, f"layers.{layer}.self_attn."
        context = len(features_TD)
        places = torch.arange(context + len(x_QD)).clamp(max=self.limit - 1)
        both = torch.cat([features_TD, x_QD])

        def heads(name, y, normed):
            y = (y @ self.w[f"{at}{name}_proj.weight"].T).unflatten(1, (-1, c.head_dim))
            return rms(y, self.w[f"{at}{name}_norm.weight"]) if normed else y

        q = rotated(heads("q", x_QD, True), places[context:], c.rope_theta)
        k = rotated(heads("k", both, True), places, c.rope_theta)
        v = heads("v", both, False)
        k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, dim=1) for y in (k, v))
        apart = places[context:, None] - places
        seen = torch.arange(len(both)) < self.limit
        if (window := c.windows[layer]) is not None:
            seen = seen & (apart.abs() < window)
        if c.causal[layer]:
            seen = seen & (apart >= 0)
        scores = torch.einsum("qhc,thc->hqt", q, k) / math.sqrt(c.head_dim)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out = torch.einsum("hqt,thc->qhc", weights, v).flatten(1)
        return out @ self.w[f"{at}o_proj.weight"].T

    def feed_forward(self, layer, x_QD):
        gate, up, down = (
            self.w[f"layers.{layer}.mlp.{k}_proj.weight"] for k in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(x_QD @ gate.T) * (x_QD @ up.T)) @ down.T

    def hidden(self, taps_TF, anchor, rows):
        c, w = self.config, self.w
        features_TD = rms(taps_TF.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
        h = self.embedding_VD[[anchor] + [c.mask_token_id] * (rows - 1)] * c.embedding_scale
        for i in range(c.num_layers):
            for norm, conv, run in (
                ("input", "attention", lambda x, i=i: self.attention(i, x, features_TD)),
                ("post_attention", "mlp", lambda x, i=i: self.feed_forward(i, x)),
            ):
                n = rms(h, w[f"layers.{i}.{norm}_layernorm.weight"])
                base = w[f"layers.{i}.{conv}_conv.base_kernel"]
                change = n @ w[f"layers.{i}.{conv}_conv.kernel_projection.weight"].T
                change = change.view(rows, 2, c.conv_taps, -1)
                x = run(convolved(n, base[0], change[:, 0]))
                h = h + convolved(x, base[1], change[:, 1])
        return rms(h, w["norm.weight"])

    def __call__(self, taps_TF, anchor, drafts, *, temperature=0.0, uniform_N=()):
        c, w = self.config, self.w
        hidden_QD = self.hidden(taps_TF, anchor, drafts + 1)
        logits = hidden_QD[1:] @ self.head_VD.T * c.logit_scale
        if c.logit_softcap:
            logits = c.logit_softcap * torch.tanh(logits / c.logit_softcap)
        unary, ids = logits.sort(dim=1, descending=True)
        unary, ids = unary[:, : c.candidates], ids[:, : c.candidates]
        gate = hidden_QD[1:] @ w["candidate_selector.hidden_projection.weight"].T
        table = torch.zeros(drafts, c.candidates, c.candidates, dtype=torch.float64)
        for j in range(drafts):
            before = ids[j - 1] if j else torch.full((c.candidates,), anchor)
            for u in range(c.candidates):
                left = w["candidate_selector.predecessor_codebook"][before[u]] * gate[j]
                right = w["candidate_selector.successor_codebook"][ids[j]]
                table[j, u] = unary[j] + right @ left
        tokens, at = [], 0
        for j in range(drafts):
            row = table[j, at]
            at = int(row.argmax())
            if temperature:
                q = torch.softmax(row / temperature, dim=0)
                at = int((q.cumsum(0) <= uniform_N[j]).sum())
            tokens.append(int(ids[j, at]))
        return Expected(hidden_QD, ids, unary, table, tokens)


def features(context, seed=0):
    generator = torch.Generator().manual_seed(context * 31 + seed)
    return torch.randn(context, FEATURES, generator=generator)


@torch.inference_mode()
def drafted(model, contexts, drafts=7, *, temperatures=None, uniform_BN=None, damage=None):
    """Hidden states, scores and drafts for contexts that came in two chunks."""
    cache = Cache(model, len(contexts))
    for sequence, context in enumerate(contexts):
        taps_TF, cut = features(context), context // 3
        cache.fill(sequence, taps_TF[:cut])
        cache.fill(sequence, taps_TF[cut:], first=cut)
    if damage is not None:
        damage(cache)
    anchors_B = torch.arange(len(contexts)) * 11 % 90 + 2
    hidden_BQD = model(anchors_B, cache.blocks(contexts, drafts + 1))
    made = model.propose(
        anchors_B, cache.blocks(contexts, drafts + 1),
        temperature_B=torch.tensor(temperatures or [0.0] * len(contexts)),
        uniform_BN=torch.zeros(len(contexts), drafts) if uniform_BN is None else uniform_BN,
    )  # fmt: skip
    return anchors_B, hidden_BQD, made


def table(model, hidden_BQD, anchors_B):
    hidden_BND = hidden_BQD[:, 1:]
    unary_BNK, ids_BNK = model.candidates(hidden_BND)
    anchors_B1K = anchors_B[:, None, None].expand(-1, 1, ids_BNK.shape[2])
    before_BNK = torch.cat([anchors_B1K, ids_BNK[:, :-1]], dim=1)
    return unary_BNK, ids_BNK, model.selector(hidden_BND, unary_BNK, before_BNK, ids_BNK)


@torch.inference_mode()
def assert_agrees(model, contexts, drafts=7, **settings):
    anchors_B, hidden_BQD, made = drafted(model, contexts, drafts, **settings)
    unary_BNK, ids_BNK, scores_BNKK = table(model, hidden_BQD, anchors_B)
    temperatures = settings.get("temperatures") or [0.0] * len(contexts)
    dense = Dense(model)
    for b, context in enumerate(contexts):
        uniform_N = () if "uniform_BN" not in settings else settings["uniform_BN"][b].double()
        expected = dense(
            features(context), int(anchors_B[b]), drafts,
            temperature=temperatures[b], uniform_N=uniform_N,
        )  # fmt: skip
        torch.testing.assert_close(hidden_BQD[b].double(), expected.hidden_QD, **NEAR)
        assert torch.equal(ids_BNK[b], expected.candidates_NK)
        torch.testing.assert_close(unary_BNK[b].double(), expected.unary_NK, **NEAR)
        torch.testing.assert_close(scores_BNKK[b].double(), expected.table_NKK, **NEAR)
        assert made.tokens_BN[b].tolist() == expected.tokens_N
        assert torch.equal(made.proposals.ids_BNK[b], ids_BNK[b])
    return made


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_block_behind_any_context_agrees_with_the_equations(context):
    assert_agrees(make_drafter(config_json()), [context])


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_of_mixed_contexts_agree_with_the_equations(variant):
    assert_agrees(make_drafter(config_json(**VARIANTS[variant])), [33, 0, 640, 23, 96])


@pytest.mark.parametrize("drafts", [1, 3, 15])
def test_a_block_may_be_of_another_size_than_the_trained_one(drafts):
    assert_agrees(make_drafter(config_json()), [40, 5], drafts)


def test_walks_with_given_noise_agree_with_the_equations():
    model, contexts = make_drafter(config_json()), [33, 5, 96]
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        uniform_BN = torch.rand(3, 7, generator=generator)
        assert_agrees(model, contexts, temperatures=[0.7, 0.0, 3.0], uniform_BN=uniform_BN)


def test_a_walk_draws_from_the_proposal_it_reports():
    model = make_drafter(config_json())
    count = 3000
    uniform_BN = torch.rand(count, 2, generator=torch.Generator().manual_seed(2))
    # One sequence's scores, walked with much noise.
    anchors_B, hidden_BQD, _ = drafted(model, [50], 2)
    scores_BNKK = table(model, hidden_BQD, anchors_B)[2].expand(count, -1, -1, -1)
    heat_B = torch.full((count,), 4.0)
    chosen_BN, rows_BNK = walk(scores_BNKK, heat_B, uniform_BN)
    q_BNK = draft_probs(rows_BNK, heat_B[:, None])
    for first in range(8):
        behind = chosen_BN[:, 0] == first
        share = behind.float().mean()
        assert abs(share - q_BNK[0, 0, first]) < 4 * (0.25 / count) ** 0.5
        if (total := int(behind.sum())) > 100:
            seconds_M = torch.bincount(chosen_BN[behind, 1], minlength=8) / total
            q_M = q_BNK[behind][0, 1]
            assert (seconds_M - q_M).abs().max() < 4 * (0.25 / total) ** 0.5


def test_what_lies_outside_the_window_is_never_touched():
    model, contexts = make_drafter(config_json()), [33, 0, 640, 23, 96]

    def damage(cache):
        kept = {0}
        for b, context in enumerate(contexts):
            seen_T = torch.arange(max(0, context - 31), context)
            for slots_T in cache.slots(b, seen_T):
                kept |= set(slots_T.tolist())
        slots = cache.storage.pool.shape[3]
        gone = [slot for slot in range(slots) if slot not in kept]
        cache.storage.pool[:, :, :, gone] = float("nan")

    *_, whole = drafted(model, contexts)
    *_, damaged = drafted(model, contexts, damage=damage)
    assert torch.equal(whole.proposals.scores_BNK, damaged.proposals.scores_BNK)
    assert torch.equal(whole.tokens_BN, damaged.tokens_BN)


def test_the_oldest_token_in_the_window_counts_and_the_one_before_does_not():
    model = make_drafter(config_json())

    def change(position):
        def damage(cache):
            for slots_T in cache.slots(0, torch.tensor([position])):
                cache.storage.pool[:, :, :, slots_T] += 1.0

        return drafted(model, [96], damage=damage)[1]

    whole = drafted(model, [96])[1]
    assert torch.equal(change(96 - 32), whole)
    assert not torch.equal(change(96 - 31), whole)


def test_a_row_sees_later_rows_of_its_own_block_alone():
    model = make_drafter(config_json())
    cache = Cache(model, 2)
    blocks = cache.blocks([0, 0], 8)
    before = model(torch.tensor([5, 6]), blocks)
    after = model(torch.tensor([5, 7]), cache.blocks([0, 0], 8))
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    shorter = model(torch.tensor([5, 6]), cache.blocks([0, 0], 7))
    assert (shorter[:, 1] - before[:, 1]).abs().max() > 1e-3


def test_padding_between_blocks_changes_nothing():
    model = make_drafter(config_json())
    cache = Cache(model, 3)
    for sequence in (0, 2):
        cache.fill(sequence, features(40, sequence))
    anchors_B = torch.tensor([5, 0, 9])
    settings = {"temperature_B": torch.zeros(3), "uniform_BN": torch.zeros(3, 7)}
    whole = model.propose(anchors_B, cache.blocks([40, 0, 40], 8), **settings)
    pool = cache.storage.pool.clone()
    padded = model.propose(anchors_B, cache.blocks([40, None, 40], 8), **settings)
    assert torch.equal(cache.storage.pool, pool)
    for b in (0, 2):
        assert torch.equal(whole.proposals.scores_BNK[b], padded.proposals.scores_BNK[b])
    assert padded.tokens_BN[1].min() >= 0 and padded.tokens_BN[1].max() < 97


def test_rows_before_the_longest_length_do_not_mind_those_behind_it():
    model, limit = make_drafter(config_json()), 100
    cache = Cache(model, 1)
    cache.fill(0, features(97))
    hidden_BQD = model(torch.tensor([5]), cache.blocks([97], 8, limit=limit))
    expected_QD = Dense(model, limit=limit).hidden(features(97), 5, 8)
    torch.testing.assert_close(hidden_BQD[0, :3].double(), expected_QD[:3], **NEAR)
    # Past the limit a slot would be another sequence's.
    fresh = Cache(model, 1, longest=limit)
    fresh.fill(0, features(97))
    assert model(torch.tensor([5]), fresh.blocks([97], 8, limit=limit)).isfinite().all()


@pytest.mark.parametrize("what", ["nan", "zero", "inf"])
def test_a_broken_drafter_still_drafts_tokens(what):
    model = make_drafter(config_json())
    for target in model.targets.values():
        target.into.fill_(float(what) if what != "zero" else 0.0)
    uniform_BN = torch.tensor([[0.0, 0.5, 0.999, 1.0, 0.1, 0.2, 0.3]]).expand(2, -1)
    *_, made = drafted(model, [5, 40], temperatures=[0.0, 0.8], uniform_BN=uniform_BN)
    assert isinstance(made, Drafts)
    assert made.tokens_BN.min() >= 0 and made.tokens_BN.max() < 97
    q_BNK = draft_probs(made.proposals.scores_BNK, torch.tensor([[0.0], [0.8]]))
    torch.testing.assert_close(q_BNK.sum(-1), torch.ones(2, 7))


def test_context_keys_are_those_the_cache_gets_and_carry_gradients():
    model = make_drafter(config_json())
    cache, taps_TF = Cache(model, 1), features(19).requires_grad_()
    cache.fill(0, taps_TF.detach())
    positions_T = torch.arange(19)
    pairs = model.context(taps_TF, positions_T)
    for layer, pair in enumerate(pairs):
        slots_T = cache.slots(0, positions_T)[cache.storage.group_of_layer[layer]]
        for half, x_TKC in enumerate(pair):
            stored_KTC = cache.storage.caches[layer].pairs_2KSC[half][:, slots_T]
            torch.testing.assert_close(stored_KTC.transpose(0, 1), x_TKC)
    sum(k.sum() + v.sum() for k, v in pairs).backward()
    assert taps_TF.grad.abs().min() > 0
