"""What is asked of a step's logits takes no step out of its graph.

On a CPU, in FP32, graphs are steps padded as they are; those of a GPU have tests of their own.
"""

import pytest
import torch
from drafted import fake_graphs, inject, knowing, start_drafted
from tiny import Answer, prompts, request, run, start

from limelight.checkpoint import BUNDLED_DRAFTERS, BUNDLED_NAMES
from limelight.engine.speculation import Decision
from limelight.speculative import NO_DRAFTS

NEAR = 1e-5
KINDS = [
    {"logprobs": None},
    {"logprobs": 0, "temperature": 0.8},
    {"logprobs": 3, "temperature": 1.2, "top_p": 0.7},
    {"logprobs": -1},
    {"logprobs": 30, "temperature": 0.9, "top_k": 6, "min_p": 0.02},
    {"logprobs": 2, "frequency_penalty": 1.5, "temperature": 0.8},
    {"logprobs": None, "logit_bias": {3: 4.0}, "min_tokens": 4},
]


def asked(*, quiet: bool = False) -> list:
    """One of each kind; if all are `quiet` none asks for log-probabilities."""
    texts = prompts(*range(5, 5 + len(KINDS)))
    each = [kind | {"logprobs": None} if quiet else kind for kind in KINDS]
    return [
        request(text, seed=i, max_tokens=16, **kind)
        for i, (text, kind) in enumerate(zip(texts, each, strict=True))
    ]


def graphed(engine, monkeypatch):
    """The engine with graphs for all its steps, and without any other way to make one."""
    runner = engine.runner
    graphs = fake_graphs(engine)
    monkeypatch.setattr(type(runner), "_forward", None)
    if runner.drafted is not None:
        found = type(runner.drafted)._graph_of

        def graph_of(drafted, extent):
            graph = found(drafted, extent)
            assert graph is not None
            return graph

        monkeypatch.setattr(type(runner.drafted), "_graph_of", graph_of)
    return graphs


def assert_same(answers, expected):
    for got, want in zip(answers, expected, strict=True):
        assert got.last.error is None and got.token_ids == want.token_ids
        for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
            assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=NEAR)
            assert [value for _, value in mine.top] == pytest.approx(
                [value for _, value in theirs.top], abs=NEAR
            )


def test_a_short_prompt_beside_many_drafts_goes_into_a_larger_graph(flint, drafter, monkeypatch):
    many = [request(p, max_tokens=12) for p in prompts(*range(3, 18))]
    late = [request(p, max_tokens=6) for p in prompts(7, 5)]
    expected = [answer.token_ids for answer in run(start(flint), many + late)]
    engine = start_drafted(flint, drafter, num_drafts=3, max_num_batched_tokens=128)
    known = {one.id: ids for one, ids in zip(many + late, expected, strict=True)}
    inject(engine, knowing(known, right=0.9))
    graphed(engine, monkeypatch)
    answers, left = {one.id: Answer() for one in many + late}, list(late)
    for one in many:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].take(output)
        if left and min(len(answers[one.id].token_ids) for one in many) > 2:
            engine.add(left.pop(0))
    assert [answers[one.id].token_ids for one in many + late] == expected


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize(
    ("mode", "overlap"), [("raw_logprobs", True), ("processed_logprobs", False)]
)
def test_who_asks_and_who_has_rules_stay_in_the_graphs_of_all(
    flint, drafter, overlap, mode, drafts, monkeypatch
):
    everyone = asked()
    expected = run(start(flint, logprobs_mode=mode), everyone)
    assert [len(a.logprobs) > 0 for a in expected] == [k["logprobs"] is not None for k in KINDS]
    if drafts:
        engine = start_drafted(flint, drafter, num_drafts=3, logprobs_mode=mode)
        known = {one.id: a.token_ids for one, a in zip(everyone, expected, strict=True)}
        inject(engine, knowing(known, right=0.7))
    else:
        engine = start(flint, logprobs_mode=mode)
    engine.overlap = overlap
    graphs = graphed(engine, monkeypatch)
    assert_same(run(engine, everyone), expected)
    assert sum(graph.replays for graph in graphs) > 5


def test_who_asks_gets_the_tokens_of_who_does_not(flint):
    engine = start(flint)
    (quiet, loud) = (run(engine, asked(quiet=quiet)) for quiet in (True, False))
    assert [one.token_ids for one in quiet] == [one.token_ids for one in loud]


def on_gpu(name, **config):
    """Eight sequences of one length each fill every step of such an engine in the same way."""
    return start(
        name, device="cuda", dtype="bfloat16", kv_cache_memory_bytes=2**27, max_num_seqs=8,
        max_num_batched_tokens=256, **config,
    )  # fmt: skip


def eight(tokens: int = 60, **changes) -> list:
    kinds = [*KINDS, {"logprobs": 20, "temperature": 1.0}]
    return [
        request(text, seed=i, **(kind | {"max_tokens": tokens, "ignore_eos": True} | changes))
        for i, (text, kind) in enumerate(zip(prompts(*[30] * 8), kinds, strict=True))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_plain_graphed_and_overlapped_steps_tell_the_same(name, mode, monkeypatch):
    settings = {"logprobs_mode": mode, "speculative_config": NO_DRAFTS}
    plain = on_gpu(name, enforce_eager=True, async_scheduling=False, **settings)
    expected = run(plain, eight())
    plain.close()
    for how in ({"async_scheduling": False}, {}):
        served = on_gpu(name, **settings, **how)
        # A step without a graph fails from here on.
        monkeypatch.setattr(served.runner, "_forward", None)
        for got, want in zip(run(served, eight()), expected, strict=True):
            assert got.last.error is None and got.token_ids == want.token_ids
            for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=0.05)
                assert [len(x.top) for x in (mine, theirs)] == [len(mine.top)] * 2
        served.close()


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_graphs_tell_the_softmax_of_the_logits_that_they_leave(drafts):
    """Twice the same steps: once all logits are told, which FP64 then says the rest of."""
    (name, folder), *_ = sorted(BUNDLED_DRAFTERS.items())
    spec = {"model": folder, "enable_adaptive_verification": False} if drafts else NO_DRAFTS
    found = []
    for mode, count in (("raw_logits", -1), ("raw_logprobs", 20)):
        served = on_gpu(name, logprobs_mode=mode, speculative_config=spec)
        found.append(run(served, eight(20, logprobs=count)))
        served.close()
    for all_, told in zip(*found, strict=True):
        assert all_.token_ids == told.token_ids
        for logits, report in zip(all_.logprobs, told.logprobs, strict=True):
            ids, values = zip(*logits.top, strict=True)
            exact = torch.tensor(values, dtype=torch.float64).log_softmax(0)
            assert [token_id for token_id, _ in report.top] == list(ids[:20])
            assert report.rank == 1 + sum(value > logits.logprob for value in values)
            assert [value for _, value in report.top] == pytest.approx(
                exact[:20].tolist(), abs=2e-6
            )
            assert report.logprob == pytest.approx(
                exact[ids.index(report.token_id)].item(), abs=2e-6 * (1 - report.logprob)
            )


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", sorted(BUNDLED_DRAFTERS))
def test_steps_with_drafts_keep_their_graphs_whatever_is_asked(name, method, monkeypatch):
    spec = {
        "model": BUNDLED_DRAFTERS[name], "enable_adaptive_verification": False,
        "draft_sample_method": method,
    }  # fmt: skip
    served = on_gpu(name, speculative_config=spec)
    drafted = served.runner.drafted
    replays, replay = [], drafted.graphs.replay
    monkeypatch.setattr(drafted.graphs, "replay", lambda size: replays.append(size) or replay(size))
    monkeypatch.setattr(drafted, "run", None)
    for answer in run(served, eight()):
        assert answer.last.error is None and len(answer.token_ids) == 60
    assert len(replays) > 5
    served.close()


@pytest.mark.gpu
def test_what_is_learned_of_many_steps_pins_no_memory_for_each():
    (name, folder), *_ = sorted(BUNDLED_DRAFTERS.items())
    spec = {"model": folder, "enable_adaptive_verification": True}
    served = on_gpu(name, speculative_config=spec)
    policy = served.drafting.policy
    # Every step drafts, and nothing is learned: all that is told stays.
    policy.choose = lambda load: Decision(sum(load.drafts), bool(load.slots), timed=False)
    policy.learn = lambda: None
    run(served, eight(100, logprobs=None))
    told, before = len(policy.observed.passes), torch.cuda.host_memory_stats()["num_host_alloc"]
    run(served, eight(100, logprobs=None))
    assert len(policy.observed.passes) > told + 20
    assert torch.cuda.host_memory_stats()["num_host_alloc"] - before < 10
    served.close()
