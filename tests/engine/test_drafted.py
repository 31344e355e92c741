"""With drafts a request gets what it gets without, whatever is drafted (FP32 on a CPU)."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafted import Whim, inject, knowing, start_drafted
from safetensors.torch import load_file, save_file
from tiny import prompts, request, run, start

from limelight.engine.drafting import Drafting
from limelight.engine.speculation import Decision, Load

NEAR = 1e-4


def compare(engine, plain, asked, *, right=0.7, seed=0):
    """Serve with drafts that are mostly right, and hold every answer against the plain engine's."""
    expected = run(plain, asked)
    known = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    inject(engine, knowing(known, right=right, seed=seed))
    before = engine.stats().speculation
    answers = run(engine, asked)
    for one, got, want in zip(asked, answers, expected, strict=True):
        assert got.token_ids == want.token_ids, one.params
        for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
            assert abs(mine.logprob - theirs.logprob) < NEAR and mine.rank == theirs.rank
        assert got.last.finish_reason == want.last.finish_reason
        assert got.last.stop_reason == want.last.stop_reason
    stats = engine.stats()
    assert stats.cache_usage == 0.0
    assert stats.speculation.accepted > before.accepted or right == 0
    return answers


@pytest.mark.parametrize("num_drafts, shares", [(7, (0.0, 0.7)), (15, (1.0,))], ids=["N7", "N15"])
def test_greedy_tokens_are_those_of_no_drafts(folder, drafter, either_loop, num_drafts, shares):
    plain = start(folder)
    for right in shares:
        asked = [
            request(text, max_tokens=30, logprobs=None) for text in prompts(3, 16, 40, 90, 130)
        ]
        engine = start_drafted(folder, drafter, num_drafts=num_drafts)
        engine.overlap = either_loop
        compare(engine, plain, asked, right=right)
        stats = engine.stats()
        if right == 1.0:
            assert stats.speculation.accepted == stats.speculation.verified > 0
            assert stats.steps < 30 / (1 + num_drafts) + 12


PARAMETERS = {
    "drawn": {"temperature": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-k 1": {"temperature": 1.0, "top_k": 1},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-4},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5, "temperature": 0.8},
    "frequency": {"frequency_penalty": 1.5},
    "bias": {"logit_bias": {3: 4.0, 5: -50.0}},
    "allowed": {"allowed_token_ids": list(range(0, 60, 3))},
    "min tokens": {"min_tokens": 6, "stop_token_ids": list(range(40))},
    "stop ids": {"stop_token_ids": list(range(0, 97, 9))},
    "ends": {"ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "all": {
        "temperature": 0.9, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {7: 2.0},
        "min_tokens": 3, "stop_token_ids": [11, 50],
    },
}  # fmt: skip


@pytest.mark.parametrize("mode, overlap", [("raw_logprobs", True), ("processed_logprobs", False)])
def test_every_parameter_counts_in_every_row(flint, drafter, overlap, mode):
    """All at once, each with its neighbours' drafts in the same step."""
    asked = [
        request(text, seed=i, **({"max_tokens": 24, "logprobs": 0} | params))
        for i, (text, params) in enumerate(
            zip(prompts(*range(5, 5 + len(PARAMETERS))), PARAMETERS.values(), strict=True)
        )
    ]
    engine = start_drafted(flint, drafter, num_drafts=3, logprobs_mode=mode)
    engine.overlap = overlap
    compare(engine, start(flint, logprobs_mode=mode), asked)


def test_the_device_draws_with_cut_offs_as_the_host_does(flint, drafter, overlap):
    asked = [
        request(text, seed=i, max_tokens=30, logprobs=None, **params)
        for i, (text, params) in enumerate(
            zip(prompts(*range(9, 15)), list(PARAMETERS.values())[:6], strict=True)
        )
    ]
    engine = start_drafted(flint, drafter)
    engine.overlap = overlap
    compare(engine, start(flint), asked)


def test_a_small_cache_chunks_hits_and_preemptions_change_nothing(folder, drafter, either_loop):
    """Little room, prompts that share heads, and some requests given up halfway."""
    rng = random.Random(1)
    heads = prompts(100, 60)
    asked = [
        request(
            rng.choice(heads)[: rng.randrange(20, 100)] + tail, seed=i, max_tokens=40,
            temperature=rng.choice([0.0, 0.8]), logprobs=rng.choice([None, 0]),
        )
        for i, tail in enumerate(prompts(*range(3, 19)))
    ]  # fmt: skip
    given_up = [request(heads[0][:50] + text, max_tokens=90) for text in prompts(*range(3, 8))]
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "max_model_len": 200}
    engine = start_drafted(folder, drafter, kv_cache_memory_bytes=800_000, **limits)
    engine.overlap = either_loop
    for one in given_up:
        engine.add(one)
    for _ in range(9):
        engine.step()
    for one in given_up:
        engine.abort(one.id)
    compare(engine, start(folder, **limits), asked)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0


def test_a_conversation_finds_its_beginning_as_without_drafts(folder, drafter):
    """Four turns: each finds all full blocks of the one before, and says the same."""
    plain, engine = start(folder), start_drafted(folder, drafter)
    history = prompts(150)[0]
    for turn in range(4):
        asked = [request(history, max_tokens=20, logprobs=None)]
        (answer,) = compare(engine, plain, asked, seed=turn)
        assert answer.last.num_cached >= (len(history) - 24 - 20) // 16 * 16 or turn == 0
        history = history + answer.token_ids + prompts(4, seed=turn)[0]


@pytest.mark.parametrize("limit, overlap", [(128, True), (130, False)])
def test_the_longest_length_ends_an_answer_at_exactly_that(flint, drafter, overlap, limit):
    """The drafter's config knows 64 positions, which bind no one."""
    asked = [
        request(text, max_tokens=min(50, limit - len(text)), logprobs=None)
        for text in prompts(60, 64, 65, 78, *range(limit - 9, limit))
    ]
    engine = start_drafted(flint, drafter, max_model_len=limit)
    engine.overlap = overlap
    answers = compare(engine, start(flint, max_model_len=limit), asked)
    assert all(answer.last.finish_reason == "length" for answer in answers)


@pytest.mark.parametrize(
    "value, method, adaptive",
    [
        (0.0, "probabilistic", True),
        (float("nan"), "greedy", False),
        (float("nan"), "probabilistic", True),
        (1e30, "greedy", False),
    ],
)
def test_a_broken_drafter_costs_no_text(flint, drafter, tmp_path, value, method, adaptive):
    tensors = load_file(drafter / "model.safetensors")
    save_file(
        {name: torch.full_like(tensor, value) for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((drafter / "config.json").read_text())
    asked = [request(text, max_tokens=12, logprobs=None) for text in prompts(4, 40)]
    expected = run(start(flint), asked)
    engine = start_drafted(flint, tmp_path, adaptive=adaptive, draft_sample_method=method)
    got = run(engine, asked)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert all(one.last.error is None for one in got)


@pytest.mark.parametrize("right", [0.0, 0.5])
def test_a_drafter_that_is_never_accepted_is_told_of_once(flint, drafter, caplog, right):
    asked = [request(text, max_tokens=20, logprobs=None) for text in prompts(*range(5, 17))]
    engine = start_drafted(flint, drafter)
    with caplog.at_level("WARNING"):
        compare(engine, start(flint), asked, right=right)
    told = [record for record in caplog.records if "of the first" in record.message]
    assert engine.stats().speculation.verified >= 500 and len(told) == (right == 0)


def test_a_cache_type_of_its_own_is_refused_by_name(flint, drafter):
    spec = {"model": str(drafter), "kv_cache_dtype": "fp8"}
    with pytest.raises(ValueError, match="kv_cache_dtype is auto, not fp8"):
        start(flint, speculative_config=spec)


@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
def test_other_caches_hold_the_drafters_keys_too(flint, drafter, kind):
    asked = [request(text, max_tokens=16, logprobs=None) for text in prompts(4, 40, 90)]
    engine = start_drafted(flint, drafter, kv_cache_dtype=kind)
    expected = run(start(flint, kv_cache_dtype=kind), asked)
    got = run(engine, asked)
    # Roundings of a cache move near ties; a wrong key would move everything.
    same = sum(a.token_ids == b.token_ids for a, b in zip(got, expected, strict=True))
    assert same >= 2


def test_adaptive_drafting_gives_the_same_texts_and_learns(folder, drafter, either_loop):
    asked = [
        request(text, max_tokens=40, seed=i, temperature=0.7 * (i % 2), logprobs=None)
        for i, text in enumerate(prompts(*range(20, 36)))
    ]
    engine = start_drafted(folder, drafter, adaptive=True)
    engine.overlap = either_loop
    compare(engine, start(folder), asked)
    spec = engine.stats().speculation
    assert spec.verified <= spec.offered and spec.predicted > 0
    assert spec.intercepts != [-0.2] * 7


def test_whatever_is_decided_about_drafts_the_texts_are_the_same(folder, drafter, overlap):
    """Steps with drafts and without in any order, trimmed anyhow, prompts in pieces between."""
    seed = int(overlap)
    asked = [
        request(
            text, seed=i, max_tokens=30, temperature=0.8 * (i % 2), top_p=0.9 if i % 4 == 3 else 1,
            logprobs=0 if i == 4 else None,
        )
        for i, text in enumerate(prompts(*range(20, 60, 4), seed=seed))
    ]  # fmt: skip
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 64}
    plain = start(folder, **limits)
    expected = run(plain, asked)
    known = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    engine = start_drafted(folder, drafter, **limits)
    engine.overlap, engine.drafting = overlap, Drafting(Whim(seed))
    inject(engine, knowing(known, right=0.8))
    answers = run(engine, asked)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert engine.drafting.policy.rests > 0 and engine.stats().cache_usage == 0.0


class Diary(Whim):
    """Rests for long. What it is told of drafts hangs on all that is in the drafter's cache."""

    def __init__(self):
        super().__init__(0)
        self.steps = 0
        self.odds: list[np.ndarray] = []

    def choose(self, load: Load) -> Decision:
        self.steps += 1
        return Decision(sum(load.drafts), self.steps % 24 > 20)

    def goes_on_resting(self) -> bool:
        return False

    def drafted(self, slots, odds_BN) -> None:
        self.odds.append(odds_BN.copy())


def test_a_drafter_that_has_rested_finds_all_that_was_left_for_it(flint, drafter):
    """Be it in blocks that were shared, given back, or computed again in the meantime."""
    heads = prompts(60, 40)
    asked = [
        request(heads[i % 2] + tail, max_tokens=40 + i, logprobs=None)
        for i, tail in enumerate(prompts(*range(3, 10)))
    ]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 200}
    diaries, counts = [], []
    for waits in (True, False):
        engine = start_drafted(flint, drafter, kv_cache_memory_bytes=600_000, **limits)
        engine.drafting = Drafting(Diary())
        take = engine.runner.drafted.drafter.take

        def taking(*rows, late, take=take, waits=waits):
            counts.append(late)
            take(*rows, late=late and waits)

        engine.runner.drafted.drafter.take = taking
        run(engine, asked)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0
        diaries.append(engine.drafting.policy.odds)
    assert sum(counts) > 100 and len(diaries[0]) == len(diaries[1]) > 10
    for mine, other in zip(*diaries, strict=True):
        assert np.abs(mine - other).max() < 1e-3


def test_drawn_drafts_follow_the_seed_alone(flint, drafter, overlap):
    """With as many drafts each time, a seed gives its text alone, beside others, and again; but
    where two candidates' scores are equal to rounding, either may be drawn, and one text is let go
    its own way."""
    asked = [
        request(text, max_tokens=24, seed=i, temperature=1.0, logprobs=None)
        for i, text in enumerate(prompts(*range(30, 38)))
    ]
    engine = start_drafted(flint, drafter, draft_sample_method="probabilistic")
    engine.overlap = overlap
    together = run(engine, asked)
    again = [run(engine, [one])[0] for one in asked[:3]]
    pairs = zip(again, together, strict=False)
    assert sum(one.token_ids == other.token_ids for one, other in pairs) >= 2
    assert len({tuple(one.token_ids) for one in together}) == 8


def test_the_first_end_in_the_order_of_positions_ends_the_answer(flint, drafter, overlap):
    """What stands behind it in the same step is in no text, no log-probability and no count."""
    (text,) = prompts(20)
    plain = start(flint)
    (whole,) = run(plain, [request(text, max_tokens=30)])
    stop = whole.token_ids[5]
    at = whole.token_ids.index(stop)
    engine = start_drafted(flint, drafter)
    engine.overlap = overlap
    inject(engine, lambda request_id, made: whole.token_ids[made : made + 7])
    for cap, reason in ((30, "stop"), (at + 1, "stop"), (at, "length"), (2, "length")):
        asked = request(text, max_tokens=cap, stop_token_ids=[stop])
        (answer,) = run(engine, [asked])
        assert answer.token_ids == whole.token_ids[: min(cap, at + 1)]
        assert len(answer.logprobs) == len(answer.token_ids)
        assert answer.last.finish_reason == reason
    ignoring = request(text, max_tokens=30, stop_token_ids=[stop], min_tokens=at + 3)
    (answer,) = run(engine, [ignoring])
    (expected,) = run(
        plain, [request(text, max_tokens=30, stop_token_ids=[stop], min_tokens=at + 3)]
    )
    assert answer.token_ids == expected.token_ids and len(answer.token_ids) > at + 2


def test_a_stop_among_the_drafts_goes_before_the_fault_behind_it(flint, drafter):
    """Behind the stop nothing is allowed, which no one asks any more."""
    (text,) = prompts(20)
    (free,) = run(start(flint), [request(text, max_tokens=1, logprobs=None)])
    first = free.token_ids[0]
    stop = (first + 1) % 97
    asked = [
        replace(
            request(
                text, max_tokens=10, logprobs=None, allowed_token_ids=[first, stop],
                stop_token_ids=ends,
            ),
            bad_words=[[stop, stop], [stop, first], [first, first]],
        )
        for ends in ([stop], [])
    ]  # fmt: skip
    expected = run(start(flint), asked)
    engine = start_drafted(flint, drafter)
    inject(engine, lambda request_id, made: ([first] + [stop] * 9)[made : made + 7])
    for got, want in zip(run(engine, asked), expected, strict=True):
        assert got.token_ids == want.token_ids == [first, stop]
        assert (got.last.finish_reason, got.last.refused) == (
            want.last.finish_reason, want.last.refused,
        )  # fmt: skip
    assert [want.last.finish_reason for want in expected] == ["stop", "error"]


def test_a_draft_that_loses_because_of_the_draft_before_it_is_refused(flint, drafter):
    """(a, a) where the second a is best only as long as the first is not counted."""
    (text,) = prompts(25)
    params = {"frequency_penalty": 2.0, "logprobs": None, "max_tokens": 8}
    (unpunished,) = run(start(flint), [request(text, max_tokens=1, logprobs=None)])
    (expected,) = run(start(flint), [request(text, **params)])
    engine = start_drafted(flint, drafter)
    inject(engine, lambda request_id, made: unpunished.token_ids * 7)
    (answer,) = run(engine, [request(text, **params)])
    assert answer.token_ids == expected.token_ids
