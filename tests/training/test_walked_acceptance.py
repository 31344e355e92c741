"""What a text says that a drafter gets accepted is what serving would accept."""

import pytest
import torch
from drafters import FEATURES, Cache, config_json, make_drafter

from limelight.training.acceptance import Acceptance, total, walk
from limelight.training.answers import Document
from limelight.training.lessons import Features, Library

PROMPT, DRAFTS, VOCAB = 5, 7, 97
ACCEPTED = [0, 3, 7, 1, 0, 2, 5]


def serve(drafter, taps_LF, cache, anchor, at):
    """Drafts behind the token at `at`, as an engine makes them."""
    cache.fill(0, taps_LF[:at])
    made = drafter.propose(
        torch.tensor([anchor]), cache.blocks([at], DRAFTS + 1),
        temperature_B=torch.zeros(1), uniform_BN=torch.zeros(1, DRAFTS),
    )  # fmt: skip
    return made.tokens_BN[0].tolist()


def text_of(drafter, taps_LF, accepted, *, cut=0):
    """A text in which so many drafts of each step are right, without its last `cut` tokens."""
    cache, tokens = Cache(drafter, 1), [3, 1, 4, 1, 5, 9]
    for count in accepted:
        drafts = serve(drafter, taps_LF, cache, tokens[-1], len(tokens) - 1)
        tokens += drafts[:count]
        tokens.append((drafts[count] + 1) % VOCAB if count < DRAFTS else 11)
    return tokens[: len(tokens) - cut]


def features_of(texts, taps):
    taps_XF = torch.cat([taps_LF[: len(text)] for text, taps_LF in zip(texts, taps, strict=True)])
    return Features(torch.tensor(sum(texts, [])), taps_XF, taps_XF)


@pytest.fixture(scope="module")
def drafter():
    return make_drafter(config_json())


@torch.inference_mode()
def test_steps_and_accepted_drafts_are_those_of_serving(drafter):
    taps = torch.randn(2, 60, FEATURES, generator=torch.Generator().manual_seed(1))
    # The second text ends inside of its last step, three drafts short.
    texts = [text_of(drafter, taps[0], ACCEPTED), text_of(drafter, taps[1], [1, 4], cut=3)]
    documents = [Document(text, PROMPT, "", False) for text in texts]
    library, features = Library.of(documents), features_of(texts, taps)
    whole, cut = walk(drafter, library, features, drafts=DRAFTS)
    assert (whole.steps, cut.steps) == (len(ACCEPTED), 2)
    right = [sum(count > place for count in ACCEPTED) for place in range(DRAFTS)]
    assert whole.accepted_N.tolist() == right
    assert whole.length == 1 + sum(ACCEPTED) / len(ACCEPTED)
    assert cut.accepted_N.tolist() == [2, 1, 0, 0, 0, 0, 0]
    assert cut.tried_N.tolist() == [2, 2, 1, 1, 0, 0, 0]
    assert [one.rows_N[0] for one in (whole, cut)] == [len(text) - PROMPT - 1 for text in texts]
    # An accepted first draft was found among the candidates, and chosen.
    assert whole.found_N[0] >= whole.chosen_N[0] >= sum(count > 0 for count in ACCEPTED)


def test_a_report_has_shares_by_place():
    counts = [torch.tensor(pair) for pair in ([4, 2], [3, 1], [10, 8], [9, 4], [5, 2])]
    one = Acceptance(1, 4, *counts)
    found = total({"a": one, "b": one})
    assert found.report() == {
        "documents": 2, "steps": 8, "length": 2.0, "accepted": [0.75, 0.5],
        "recall": [0.9, 0.5], "selector": [0.5, 0.25],
    }  # fmt: skip
    assert total({"a": one, "b": one}, ["b"]).steps == 4
