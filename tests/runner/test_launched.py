"""What comes of a step that has run."""

import torch

from limelight.runner.launched import Launched
from limelight.steps import Grant, StepPlan


def test_odds_of_new_drafts_may_be_kept_while_their_memory_is_used_again():
    grants = [Grant(slot, 5, 1, [], True) for slot in (3, 1)]
    launched = Launched(StepPlan(grants=grants, drafts=True), grants, torch.device("cpu"))
    launched.odds_PN = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    drafted = launched.end().result().drafted
    launched.odds_PN.zero_()
    assert drafted.slots == [3, 1] and drafted.odds_BN.tolist() == [[1, 2], [3, 4]]
