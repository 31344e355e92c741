"""The experts that are told are those that the tokens went to, however they were computed."""

import random

import numpy as np
import pytest
import torch
from drafted import fake_graphs, inject, knowing, start_drafted
from tiny import FAMILIES, Answer, prompts, request, run, start, write_checkpoint

from limelight.rl.replay import record
from limelight.rl.routing import array

LAYERS, CHOSEN = 7, 2


@pytest.fixture(scope="module", params=["flint", "beam"])
def made(request, tmp_path_factory):
    """A checkpoint, and transformers' eager model of it in FP32."""
    path = tmp_path_factory.mktemp(request.param)
    return path, write_checkpoint(path, request.param)


@pytest.fixture(scope="module")
def flint_made(tmp_path_factory):
    path = tmp_path_factory.mktemp("flint")
    return path, write_checkpoint(path, "flint")


def expected(model, one, token_ids) -> np.ndarray:
    """The rows of a request and its answer by transformers, all in one forward."""
    tokens = torch.tensor([one.prompt_token_ids + token_ids])
    with record(model) as chosen, torch.no_grad():
        model(tokens)
    rows = np.zeros((tokens.shape[1], LAYERS, CHOSEN), dtype=np.uint8)
    for layer, ids_TN in chosen.items():
        rows[:, layer] = ids_TN.numpy()
    return rows[one.params.routed_experts_prompt_start or 0 : -1]


def check(model, asked, answers) -> None:
    for one, answer in zip(asked, answers, strict=True):
        got = array(answer.last.routed_experts)
        start = one.params.routed_experts_prompt_start or 0
        assert len(got) == len(one.prompt_token_ids) - start + len(answer.token_ids) - 1
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, expected(model, one, answer.token_ids))


def begin(folder, **config):
    return start(folder, enable_return_routed_experts=True, **config)


def test_rows_are_those_of_transformers_in_chunks_and_behind_a_cached_beginning(made, overlap):
    folder, model = made
    engine = begin(folder, max_num_batched_tokens=23)
    engine.overlap = overlap
    (head,) = prompts(70)
    texts = [*prompts(1, 40, 90), head, [*head[:50], 3, 4, 5]]
    asked = [request(text, max_tokens=9) for text in texts]
    check(model, asked, run(engine, asked))
    again = [request([*head, 7, 8], max_tokens=5), request(head[:33], max_tokens=20)]
    answers = run(engine, again)
    assert all(answer.last.num_cached > 0 for answer in answers)
    check(model, again, answers)


def test_the_prompt_can_be_left_out(made):
    folder, model = made
    asked = [
        request(text, max_tokens=6, routed_experts_prompt_start=first)
        for text, first in zip(prompts(20, 30, 40), (0, 17, 40), strict=True)
    ]
    check(model, asked, run(begin(folder), asked))


def test_sixteen_answers_to_a_prompt_have_rows_of_their_own(flint_made):
    folder, model = flint_made
    (text,) = prompts(37)
    asked = [request(text, max_tokens=12, temperature=1.3, seed=i) for i in range(16)]
    answers = run(begin(folder), asked)
    assert len({tuple(answer.token_ids) for answer in answers}) > 8
    check(model, asked, answers)


def test_rows_outlive_a_preemption(flint_made, overlap):
    folder, model = flint_made
    engine = begin(folder, max_model_len=200, kv_cache_memory_bytes=640_000)
    engine.overlap = overlap
    asked = [
        request(text, max_tokens=60, temperature=0.9, seed=i, routed_experts_prompt_start=5 * i)
        for i, text in enumerate(prompts(100, 90, 80, 70, 110, 60))
    ]
    answers = run(engine, asked)
    assert engine.stats().preemptions > 0 and not engine.routing.kept
    check(model, asked, answers)


@pytest.mark.parametrize(
    ("overlap", "graphs"),
    [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)],
    ids=["plain", "overlapped graphs", "overlapped"],
)
def test_only_drafts_that_stood_have_rows(flint_made, drafter, overlap, graphs):
    folder, model = flint_made
    texts = prompts(9, 30, 50, 77)
    asked = [request(text, max_tokens=20, logprobs=None) for text in texts]
    known = dict(zip((one.id for one in asked), run(start(folder), asked), strict=True))
    engine = start_drafted(
        folder, drafter, enable_return_routed_experts=True, max_model_len=300,
        kv_cache_memory_bytes=1_200_000, max_num_seqs=4,
    )  # fmt: skip
    engine.overlap = overlap
    inject(engine, knowing({name: one.token_ids for name, one in known.items()}, right=0.7))
    if graphs:
        fake_graphs(engine)
    answers = run(engine, asked)
    stats = engine.stats().speculation
    assert 0 < stats.accepted < stats.verified
    check(model, asked, answers)


def test_an_aborted_request_tells_what_was_computed_for_its_tokens(flint_made, overlap):
    folder, model = flint_made
    engine = begin(folder, max_num_batched_tokens=32)
    engine.overlap = overlap
    one, unborn = request(prompts(40)[0], max_tokens=50), request(prompts(99)[0])
    engine.add(one)
    token_ids = []
    for _ in range(12):
        token_ids += [token for output in engine.step() for token in output.token_ids]
    engine.add(unborn)
    engine.step()
    told = engine.abort(one.id).routed_experts
    token_ids_now = len(array(told)) - len(one.prompt_token_ids) + 1
    assert token_ids_now >= len(token_ids) > 3
    rows = expected(model, one, token_ids)
    np.testing.assert_array_equal(array(told)[: len(rows)], rows)
    assert engine.abort(unborn.id).routed_experts is None
    engine.scheduler.check()


@pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlapped"]
)
def test_random_traffic_in_a_small_cache_never_shows_anothers_rows(flint_made, overlap):
    """Blocks are reused, prefixes hit, sequences preempted and given up, all in one engine."""
    folder, model = flint_made
    rng = random.Random(4)
    heads = prompts(60, 90, seed=2)
    engine = begin(
        folder, max_model_len=200, kv_cache_memory_bytes=700_000, max_num_batched_tokens=48
    )
    engine.overlap = overlap
    asked, taken = [], {}
    for turn in range(25):
        text = rng.choice(heads)[: rng.randrange(5, 90)] + prompts(rng.randrange(1, 30))[0]
        one = request(
            text, max_tokens=rng.randrange(1, 50), temperature=1.0, seed=turn,
            routed_experts_prompt_start=rng.choice([0, len(text) // 2, len(text)]),
        )  # fmt: skip
        asked.append(one)
        taken[one.id] = []
        engine.add(one)
        while engine.stats().running + engine.stats().waiting > 5:
            for output in engine.step():
                taken[output.request_id].append(output)
        if turn % 7 == 3:
            engine.abort(one.id)
    while engine.has_work:
        for output in engine.step():
            taken[output.request_id].append(output)
    assert engine.stats().preemptions > 0 and engine.stats().prefix_hits > 0
    ended = [one for one in asked if taken[one.id] and taken[one.id][-1].finish_reason]
    assert len(ended) > 18 and not engine.routing.kept
    for one in ended:
        token_ids = [token for output in taken[one.id] for token in output.token_ids]
        rows = array(taken[one.id][-1].routed_experts)
        np.testing.assert_array_equal(rows, expected(model, one, token_ids))


def test_rows_are_computed_anew_when_all_is_to_be_forgotten(flint_made, overlap):
    """As new weights do it: what had been kept of a preempted sequence goes too."""
    folder, model = flint_made
    engine = begin(folder)
    engine.overlap = overlap
    asked = [request(text, max_tokens=20) for text in prompts(30, 50)]
    answers = {one.id: Answer() for one in asked}
    for one in asked:
        engine.add(one)
    for turn in range(60):
        if turn in (6, 13):
            for output in engine.settle():
                answers[output.request_id].take(output)
            engine.scheduler.preempt_all()
            engine.scheduler.renew_prefixes()
            engine.routing.renew()
        for output in engine.step():
            answers[output.request_id].take(output)
    assert not engine.has_work
    check(model, asked, list(answers.values()))


def test_nothing_is_kept_unless_it_is_asked_for(flint_made):
    folder, _ = flint_made
    engine = start(folder)
    answer = run(engine, [request([1, 2, 3])])[0]
    assert answer.last.routed_experts is None and engine.runner.storage.routed_SLN is None


def test_a_model_without_what_it_takes_is_refused_at_the_start(tmp_path):
    write_checkpoint(tmp_path, "flint", mlp_only_layers=list(range(7)))
    with pytest.raises(ValueError, match="no routed experts"):
        begin(tmp_path)
    assert set(FAMILIES) == {"flint", "beam"}
