"""Random traffic with drafts, through eager steps and padded ones: each gets what it gets alone."""

import random

import pytest
from drafted import (
    Whim,
    fake_graphs,
    inject,
    knowing,
    start_drafted,
    write_drafter_for,
)
from test_constraints import Small
from test_drafted import PARAMETERS
from tiny import Answer, prompts, request, run, start

from limelight.engine.drafting import Drafting

VOCABULARY = 4096
NEAR = 1e-3


def serve(engine, asked, fillers, rng):
    """The answers to `asked`, which come one by one among fillers that are given up at times."""
    answers, waiting, others = {one.id: Answer() for one in asked}, list(asked), []
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop())
        if fillers and rng.random() < 0.2:
            others.append(fillers.pop())
            engine.add(others[-1])
        if others and rng.random() < 0.2:
            engine.abort(others.pop(rng.randrange(len(others))).id)
        for output in engine.step():
            if output.request_id in answers:
                answers[output.request_id].take(output)
        engine.scheduler.check()
    assert engine.stats().cache_usage == 0.0
    return [answers[one.id] for one in asked]


def mixed(rng, heads):
    """A prompt that may share its beginning, to be answered in some way."""
    text = rng.choice(heads)[: rng.choice([0, 16, 32, 48, 60])]
    text = text + prompts(rng.choice([1, 1, 2, 5, 30]), seed=rng.randrange(10**6))[0]
    params = {"logprobs": None, "temperature": rng.choice([0.0, 0.8])}
    if rng.random() < 0.3:
        params = {"logprobs": None} | rng.choice(list(PARAMETERS.values()))
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 0
    settings = {"seed": rng.randrange(99), "max_tokens": rng.choice([1, 2, 3, 20, 40])} | params
    return request(text, **settings)


@pytest.mark.parametrize("turn", range(2))
def test_no_order_of_requests_changes_an_answer(folder, drafter, turn):
    # Of four kinds each model has two.
    seed = turn + 2 * folder.name.startswith("beam")
    rng = random.Random(seed)
    num_drafts = rng.choice([1, 3, 7])
    limits = {
        "max_num_seqs": rng.choice([3, 6, 8]), "max_model_len": 150,
        "max_num_batched_tokens": rng.choice([24, 64, 200]),
    }  # fmt: skip
    heads = prompts(100, 64, seed=seed)
    asked = [mixed(rng, heads) for _ in range(14)]
    expected = run(start(folder, **limits), asked)
    known = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    fillers = [
        request(heads[0][: rng.choice([1, 20, 50])] + [i], max_tokens=30, logprobs=None)
        for i in range(6)
    ]
    known |= {one.id: [0] * 30 for one in fillers}
    room = rng.choice([500_000, 700_000, 3_000_000])
    engine = start_drafted(
        folder, drafter, num_drafts=num_drafts, kv_cache_memory_bytes=room, **limits
    )
    engine.overlap = seed % 2 == 0
    if seed % 3:
        engine.drafting = Drafting(Whim(seed, num_drafts))
    graphs = fake_graphs(engine) if seed % 4 < 3 else []
    inject(engine, knowing(known, right=rng.choice([0.3, 0.8, 1.0]), seed=seed))
    for one, got, want in zip(asked, serve(engine, asked, fillers, rng), expected, strict=True):
        assert got.last.error is None and got.token_ids == want.token_ids, one
        assert got.last.finish_reason == want.last.finish_reason
        assert got.last.stop_reason == want.last.stop_reason
        reports = [*got.logprobs, *(got.prompt_logprobs or [])[1:]]
        theirs = [*want.logprobs, *(want.prompt_logprobs or [])[1:]]
        for mine, other in zip(reports, theirs, strict=True):
            assert mine.token_id == other.token_id and abs(mine.logprob - other.logprob) < NEAR
    assert all(graph.replays for graph in graphs[:3])


@pytest.mark.parametrize("seqs, tokens", [(64, 64), (3, 3), (1, 1)])
def test_few_tokens_and_many_sequences_fit_the_graphs(flint, drafter, seqs, tokens):
    """A graph with prompts may have as many rows that need logits as it has rows."""
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": 150}
    asked = [request(text, max_tokens=12, logprobs=None) for text in prompts(30, 2, 1, 45)]
    expected = run(start(flint), asked)
    engine = start_drafted(flint, drafter, **limits)
    graphs = fake_graphs(engine)
    known = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    inject(engine, knowing(known, right=0.7))
    assert [a.token_ids for a in run(engine, asked)] == [a.token_ids for a in expected]
    assert graphs[2].replays + graphs[4].replays > 0


@pytest.mark.parametrize("tail", [1, 2])
def test_a_token_that_the_host_knows_stands_in_its_own_row_of_a_graph(folder, drafter, tail):
    """A prompt of one token, and one whose rest is cached, join others that decode."""
    asked = [request(text, max_tokens=20, logprobs=None) for text in prompts(40, 50, 33)]
    late = [request([7 + tail], max_tokens=10, logprobs=None)]
    again = [request(asked[2].prompt_token_ids, max_tokens=10, logprobs=None)]
    everyone = [*asked, *late, *again]
    expected = run(start(folder), everyone)
    engine = start_drafted(folder, drafter)
    graphs = fake_graphs(engine)
    known = {one.id: answer.token_ids for one, answer in zip(everyone, expected, strict=True)}
    inject(engine, knowing(known, right=0.5 * tail))
    answers = {one.id: Answer() for one in everyone}
    for turn in range(200):
        for one in {0: asked, 3: late, 6: again}.get(turn, []):
            engine.add(one)
        for output in engine.step():
            answers[output.request_id].take(output)
    assert [a.token_ids for a in answers.values()] == [a.token_ids for a in expected]
    assert answers[again[0].id].last.num_cached == 32 and graphs[0].replays > 0


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_constraints_and_budgets_hold_in_any_traffic(tmp_path, seed):
    rng = random.Random(seed)
    plain = Small(speculative_config={"num_speculative_tokens": 0})
    small = Small(speculative_config={"model": str(write_drafter_for("flint-nano", tmp_path))})
    kinds = [{}, {"waits": True}, {"waits": True, "budget": 5}, {"form": None}]

    def ask(who):
        who.count, draw = 100, random.Random(seed)
        # Of drawn tokens roundings decide one in some ten thousand: most are the best.
        return [
            who.ask(
                f"Item {i}: {'on and ' * (i % 5)}", seed=i, temperature=0.8 * (i == 0),
                max_tokens=draw.choice([20, 60]), logprobs=0 if i % 3 == 0 else None,
                ignore_eos=i == 3, **kinds[i % 4],
            )[0]
            for i in range(8)
        ]  # fmt: skip

    expected, asked = run(plain.engine, ask(plain)), ask(small)
    known = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    fillers = [small.ask(f"filler {i}", seed=i, waits=i % 2 == 1)[0] for i in range(6)]

    def drafts(request_id, made):
        ids = known.get(request_id, [])[made : made + 7]
        ids = ids + [rng.randrange(VOCABULARY) for _ in range(7 - len(ids))]
        wrong = [rng.randrange(VOCABULARY), small.end[0], 2]
        return [token if rng.random() < 0.8 else rng.choice(wrong) for token in ids]

    inject(small.engine, drafts)
    small.engine.overlap = seed % 2 == 0
    if seed:
        small.engine.drafting = Drafting(Whim(seed))
    for got, want in zip(serve(small.engine, asked, fillers, rng), expected, strict=True):
        assert got.token_ids == want.token_ids and got.last.error is None
        assert got.last.finish_reason == want.last.finish_reason
        assert got.last.refused == want.last.refused
    for one in (plain, small):
        one.engine.close()
