"""CUDA graphs of several sizes, and the logits that they leave to what is launched behind them."""

import pytest
import torch

from limelight.progress import Progress
from limelight.runner.graphs import Graphs
from limelight.runner.launched import Judged, Outcome

VOCABULARY = 50_000


@pytest.mark.gpu
def test_logits_are_there_behind_each_replay_and_hold_no_memory():
    weight_V = torch.randn(VOCABULARY, device="cuda")
    inputs = {size: torch.zeros(size, 1, device="cuda") for size in (4, 12, 64)}

    def step(hidden_R1: torch.Tensor) -> Outcome:
        logits_RV = hidden_R1 * weight_V
        best_R, token_R = logits_RV.max(dim=1)
        return Outcome(Judged(token_R[:, None], best_R), logits_RV)

    for size in inputs:
        step(inputs[size])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graphs = Graphs(
        step, lambda size: inputs[size], sorted(inputs), Progress(quiet=True), lend=Outcome.lent
    )
    assert torch.cuda.memory_allocated() - before < 4 * VOCABULARY * min(inputs)
    for size in (64, 4, 12, 4, 64):
        inputs[size].normal_()
        outcome = graphs.replay(size)
        assert torch.equal(outcome.logits_RV, inputs[size] * weight_V)
        token_R, at_R = outcome.judged.tokens_BQ[:, 0], torch.arange(size, device="cuda")
        assert torch.equal(outcome.logits_RV[at_R, token_R], outcome.judged.best_B)
