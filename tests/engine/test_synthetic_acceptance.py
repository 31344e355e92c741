"""With synthetic acceptance an engine gets the tokens a step that were told, by any policy."""

import math

import pytest
from drafted import start_drafted, write_drafter
from machine import Machine
from tiny import prompts, request, run, start, write_checkpoint

from limelight.engine.timing import Timing

RATES = [0.9, 0.7, 0.5, 0.35]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("flint", "drafter"))
    write_checkpoint(target, "flint")
    write_drafter(drafter)
    return target, drafter


def make(folders, *, rates=RATES, adaptive=False, spread=None):
    target, drafter = folders
    speculative = {
        "model": str(drafter), "num_speculative_tokens": len(rates),
        "enable_adaptive_verification": adaptive, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates, "synthetic_spread": spread,
    }  # fmt: skip
    return start(target, speculative_config=speculative)


def serve(engine, *, count=12, max_tokens=160, seed=0, **params):
    settings = {"logprobs": None} | params
    asked = [
        request(text, max_tokens=max_tokens, seed=1000 * seed + i, **settings)
        for i, text in enumerate(prompts(*[9] * count, seed=seed))
    ]
    return run(engine, asked)


@pytest.mark.parametrize("temperature, overlap", [(0.0, True), (0.8, False)])
def test_as_many_drafts_stand_in_each_place_as_were_told(folders, temperature, overlap, caplog):
    engine = make(folders)
    engine.overlap = overlap
    assert "texts mean nothing" in caplog.text
    for answer in serve(engine, temperature=temperature):
        assert len(answer.token_ids) == 160
    stats = engine.stats().speculation
    assert stats.synthetic
    for accepted, verified, rate in zip(stats.accepted_at, stats.verified_at, RATES, strict=True):
        assert abs(accepted / verified - rate) < 4 * math.sqrt(rate * (1 - rate) / verified)


def test_what_decides_learns_the_rates_and_finds_the_drafts_that_stand(folders, monkeypatch):
    # Rows so dear that about half of the drafts are worth theirs.
    machine = Machine(lambda rows, context: 10 + 0.5 * rows, lambda count: 1.0)
    monkeypatch.setattr(Timing, "costs", lambda timing, progress: machine.costs())
    engine = make(folders, adaptive=True)
    monkeypatch.setattr(engine.drafting.policy, "timed", lambda times: None)
    serve(engine, count=8, max_tokens=250, seed=1)
    before = engine.stats().speculation
    serve(engine, count=8, max_tokens=200, seed=2)
    stats = engine.stats().speculation
    accepted, verified, offered = (
        getattr(stats, name) - getattr(before, name) for name in ("accepted", "verified", "offered")
    )
    assert stats.predicted - before.predicted == pytest.approx(accepted, rel=0.08)
    assert stats.slope == pytest.approx(1.0, abs=0.3)
    assert all(abs(one) < 0.6 for one in stats.intercepts)
    assert 0.3 < verified / offered < 0.8
    assert accepted / verified > sum(RATES) / len(RATES) + 0.1


def test_a_request_that_the_host_judges_stands_by_the_same_rates(folders):
    alone = [answer.token_ids for answer in serve(make(folders), count=4, max_tokens=30)]
    engine = make(folders)
    asked = serve(engine, count=4, max_tokens=30, logprobs=2)
    assert [answer.token_ids for answer in asked] == alone
    assert all(len(answer.logprobs) == 30 for answer in asked)


def test_nothing_else_says_that_acceptance_is_synthetic(folders):
    engine = start_drafted(*folders, num_drafts=4)
    serve(engine, count=2, max_tokens=20)
    assert not engine.stats().speculation.synthetic
