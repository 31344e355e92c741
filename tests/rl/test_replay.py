"""Replay makes a trainer of transformers send tokens where the rollout did."""

import pytest
import torch
from tiny import prompts, write_checkpoint

from limelight.rl.replay import record, replay


@pytest.fixture(scope="module", params=["flint", "beam"])
def model(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def own(model, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a model and the ids [T, L, N] that it chooses."""
    with record(model) as chosen, torch.no_grad():
        logits = model(tokens).logits
    ids_TLN = torch.zeros(tokens.numel(), 7, 2, dtype=torch.uint8)
    for layer, ids_TN in chosen.items():
        ids_TLN[:, layer] = ids_TN.to(torch.uint8)
    return logits, ids_TLN


def test_a_models_own_choice_replayed_changes_nothing(model):
    tokens = torch.tensor(prompts(30, 30))
    logits, ids_TLN = own(model, tokens)
    with replay(model, ids_TLN), torch.no_grad():
        assert torch.allclose(model(tokens).logits, logits, atol=1e-6)
    assert not any(one._forward_hooks for one in model.modules())


def test_other_experts_are_taken_and_gradients_reach_the_router(model):
    tokens = torch.tensor(prompts(20))
    logits, ids_TLN = own(model, tokens)
    other_TLN = (ids_TLN + 1) % 8
    with replay(model, other_TLN), record(model) as taken:
        changed = model(tokens).logits
    for layer, ids_TN in taken.items():
        assert torch.equal(ids_TN, other_TLN[:, layer].long())
    assert not torch.allclose(changed, logits, atol=1e-3)
    changed.logsumexp(-1).sum().backward()
    routers = [one for name, one in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert routers and all(bool(one.grad.abs().sum() > 0) for one in routers)
    model.zero_grad()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[:, :3], "a column for layer"),
        (lambda ids: ids[:-1], "19"),
        (lambda ids: ids * 0, "distinct"),
        (lambda ids: ids.long() + 8, "below 8"),
    ],
    ids=["layers", "tokens", "twice the same", "unknown"],
)
def test_ids_that_cannot_be_replayed_are_refused(model, change, words):
    tokens = torch.tensor(prompts(20))
    _, ids_TLN = own(model, tokens)
    with pytest.raises(ValueError, match=words), replay(model, change(ids_TLN)):
        model(tokens)
    assert not any(one._forward_hooks for one in model.modules())


def test_a_model_without_routers_is_refused():
    with pytest.raises(ValueError, match="no router"), replay(torch.nn.Linear(2, 2), None):
        pass
