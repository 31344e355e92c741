"""Answers written by thousands are those of a model that reads the whole text for each token."""

import pytest
import torch

from limelight.config import EngineConfig
from limelight.engine.startup import resolve
from limelight.models.batch import Batch
from limelight.progress import Progress
from limelight.training.course import load_target
from nano import draft_answers
from nano.chat import FAMILIES
from nano.draft_answers import answers

MOST = 12
PROMPTS = [list(range(20, 20 + length)) for length in (3, 40, 90, 17)]


@torch.inference_mode()
def slowly(target, prompt):
    text = list(prompt)
    for _ in range(MOST):
        hidden_TD = target(torch.tensor(text), Batch.packed([len(text)]))
        text.append(int(target.logits(hidden_TD[-1:]).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_the_model_and_end_behind_an_end(name, monkeypatch):
    target = load_target(resolve(EngineConfig(model=name, device="cpu")), Progress(quiet=True))
    expected = [slowly(target, prompt) for prompt in PROMPTS]
    ends = expected[1][5:6]
    cut = [one[: one.index(ends[0]) + 1] if ends[0] in one else one for one in expected]
    assert answers(target, PROMPTS, most=MOST, ends=[]) == expected
    # Two at once, and prompts of several lengths one after the other in one cache.
    monkeypatch.setattr(draft_answers, "MOST_TEXTS", 2)
    assert answers(target, PROMPTS, most=MOST, ends=ends) == cut
