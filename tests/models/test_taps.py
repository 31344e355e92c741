"""Taps are the residual streams that transformers reports, and leave the model as it is."""

import pytest
import torch
from tiny import prompts, write_checkpoint

from limelight.models.batch import Batch
from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.models.taps import Taps
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress

LAYERS = 7


@pytest.fixture(params=["flint", "beam"], scope="module")
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    oracle = write_checkpoint(folder, request.param, seed=3)
    place = Placement(Mesh.single(), torch.float32, torch.device("cpu"))
    return oracle, load_model(folder, place, progress=Progress(quiet=True))


def streams(oracle, ids):
    """The output of every layer: what transformers collects, but the last without the norm."""
    found = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: found.append(out))
        for layer in oracle.model.layers
    ]
    reported = oracle.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    found = [out[0] if isinstance(out, tuple) else out for out in found]
    for i, out in enumerate(found[:-1]):
        assert torch.equal(out, reported[i + 1])
    return [out[0] for out in found]


@pytest.mark.parametrize("layers", [[0], [6], [0, 3, 6], list(range(LAYERS))], ids=str)
@torch.inference_mode()
def test_taps_are_what_transformers_reports(both, layers):
    oracle, model = both
    texts = prompts(1, 18, 60)
    taps = Taps(layers)
    batch = Batch.packed([len(ids) for ids in texts])
    tokens_T = torch.tensor(sum(texts, []))
    hidden_TD = model(tokens_T, batch, taps)
    assert torch.equal(hidden_TD, model(tokens_T, batch))
    rows = taps.joined().split([len(ids) for ids in texts])
    for ids, row_TF in zip(texts, rows, strict=True):
        outputs = streams(oracle, ids)
        expected_TF = torch.cat([outputs[layer] for layer in layers], dim=-1)
        torch.testing.assert_close(row_TF, expected_TF, rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_not_there_is_noticed(both):
    taps = Taps([0, LAYERS])
    both[1](torch.tensor([1, 2]), Batch.packed([2]), taps)
    with pytest.raises(AssertionError):
        taps.joined()
