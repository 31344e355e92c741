"""With drafts a request gets what it gets without, whatever is drafted (FP32 on a CPU)."""

import pytest
from drafted import inject, knowing, start_drafted, write_drafter
from tiny import prompts, request, run, start, write_checkpoint


@pytest.fixture(scope="module", params=["flint", "beam"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, request.param)
    return path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    write_drafter(path)
    return path


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlap(request):
    return request.param


def plainly(folder, asked):
    """The answers of an engine without drafts."""
    return run(start(folder), asked)


@pytest.mark.parametrize("num_drafts", [1, 2, 7, 15], ids="N{}".format)
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0], ids="right{}".format)
def test_greedy_tokens_are_those_of_no_drafts(folder, drafter, overlap, num_drafts, right):
    asked = [request(text, max_tokens=40, logprobs=None) for text in prompts(3, 16, 40, 90, 130)]
    expected = plainly(folder, asked)
    engine = start_drafted(folder, drafter, num_drafts=num_drafts)
    engine.overlap = overlap
    answers = {one.id: answer.token_ids for one, answer in zip(asked, expected, strict=True)}
    inject(engine, knowing(answers, right=right))
    got = run(engine, asked)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    stats = engine.stats()
    assert stats.cache_usage == 0.0
    spec = stats.speculation
    if right == 1.0:
        assert spec.accepted == spec.verified > 0
        assert stats.steps < 40 / (1 + num_drafts) + 12
    elif right == 0.0:
        assert spec.accepted == 0 < spec.verified
