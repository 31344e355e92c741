"""Requests of several adapters in one engine: their answers, cache, drafts and ranks."""

from dataclasses import replace

import pytest
import torch
from adapter_files import (
    ATTENTION,
    EXPERTS,
    INNER,
    PARAMETERS,
    SIZE,
    attention,
    write_adapter,
    write_by_peft,
)
from drafted import inject, knowing, start_drafted
from test_adapters import adapter
from tiny import prompts, request, run, start, write_checkpoint

from limelight import LLM
from limelight.engine import scheduler
from limelight.rl.lora import AdapterBank
from limelight.types import RequestError, SamplingParams


@pytest.fixture
def served(tmp_path):
    """A Flint with room for two adapters, and the folders of two."""
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3)
    folders = [str(write_adapter(tmp_path / f"{seed}", attention(), seed=seed)) for seed in (1, 2)]
    return start(tmp_path / "base", enable_lora=True, max_loras=2), folders


def asked(prompt, adapter_id, **params):
    return replace(request(prompt, **params), adapter_id=adapter_id)


def test_requests_of_many_adapters_in_one_batch_are_answered_as_each_alone(served):
    engine, folders = served
    for number, folder in enumerate(folders, 1):
        engine.load_adapter(adapter(number, folder=folder))
    cases = [(prompt, number) for prompt in prompts(33, 9) for number in (0, 1, 2)]
    alone = [run(engine, [asked(*case)])[0].token_ids for case in cases]
    together = run(engine, [asked(*case) for case in cases])
    assert [answer.token_ids for answer in together] == alone
    assert len({tuple(tokens) for tokens in alone[:3]}) == 3


def test_more_adapters_than_slots_take_turns(tmp_path):
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3)
    engine = start(tmp_path / "base", enable_lora=True, max_loras=1)
    (prompt,) = prompts(20)
    for number in (1, 2, 3):
        folder = write_adapter(tmp_path / f"{number}", attention(), seed=number)
        engine.load_adapter(adapter(number, folder=str(folder)))
    alone = [run(engine, [asked(prompt, number)])[0].token_ids for number in (1, 2, 3)]
    answers = run(engine, [asked(prompt, number) for number in (1, 2, 3, 1, 2, 3)])
    assert [answer.token_ids for answer in answers] == alone * 2
    engine.adapters.check()


def test_who_waits_for_a_slot_is_not_overtaken_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_OVERTAKEN", 10)
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3)
    engine = start(tmp_path / "base", enable_lora=True, max_loras=1)
    (prompt,) = prompts(5)
    for number in (1, 2):
        folder = write_adapter(tmp_path / f"{number}", attention(), seed=number)
        engine.load_adapter(adapter(number, folder=str(folder)))
    waiting, served = asked(prompt, 2, max_tokens=2), False
    engine.add(asked(prompt, 1, max_tokens=4))
    engine.add(waiting)
    for _ in range(40):
        # There is always one more of the other adapter.
        engine.add(asked(prompt, 1, max_tokens=4))
        served |= any(output.request_id == waiting.id for output in engine.step())
    assert served


def test_nobody_finds_the_prefix_of_another_adapter_or_of_an_older_one(served):
    engine, folders = served
    (prompt,) = prompts(100)
    engine.load_adapter(adapter(1, folder=folders[0]))

    def cached(adapter_id):
        (answer,) = run(engine, [asked(prompt, adapter_id, max_tokens=2)])
        return answer.last.num_cached

    assert [cached(0), cached(1), cached(0), cached(1)] == [0, 0, 96, 96]
    engine.load_adapter(adapter(1, folder=folders[1], in_place=True))
    assert [cached(1), cached(1), cached(0)] == [0, 96, 96]


def test_an_adapter_that_is_replaced_serves_running_requests_from_their_next_step_on(served):
    engine, folders = served
    (prompt,) = prompts(20)
    engine.load_adapter(adapter(1, folder=folders[0]))
    (old,) = run(engine, [asked(prompt, 1, max_tokens=12)])
    running = asked(prompt, 1, max_tokens=12)
    engine.add(running)
    tokens = []
    while len(tokens) < 12:
        tokens += [token for output in engine.step() for token in output.token_ids]
        if len(tokens) == 4:
            engine.load_adapter(adapter(1, folder=folders[1], in_place=True))
    assert tokens[:4] == old.token_ids[:4] and tokens != old.token_ids
    (new,) = run(engine, [asked(prompt, 1, max_tokens=12)])
    assert new.last.num_cached == 0 and new.token_ids != tokens
    # A plain start with the new adapter gives the same.
    engine.load_adapter(adapter(2, folder=folders[1]))
    assert run(engine, [asked(prompt, 2, max_tokens=12)])[0].token_ids == new.token_ids


def test_an_unloaded_adapter_ends_its_requests_and_refuses_others(served):
    engine, folders = served
    (prompt,) = prompts(20)
    engine.load_adapter(adapter(1, folder=folders[0]))
    (alone,) = run(engine, [asked(prompt, 1)])
    first, second = asked(prompt, 1), asked(prompt, 1)
    engine.add(first)
    engine.step()
    engine.adapters.unload(1)
    engine.add(second)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    refused = [output for output in outputs if output.request_id == second.id]
    assert [output.refused for output in refused] == ["the adapter of this request is not loaded"]
    tokens = [t for o in outputs if o.request_id == first.id for t in o.token_ids]
    assert tokens == alone.token_ids[1:] or tokens == alone.token_ids
    engine.adapters.check()


def test_an_adapter_whose_slot_could_not_be_filled_is_placed_anew(served, monkeypatch):
    engine, folders = served
    (prompt,) = prompts(20)
    engine.load_adapter(adapter(1, folder=folders[0]))
    engine.load_adapter(adapter(2, folder=folders[1]))
    (alone,) = run(engine, [asked(prompt, 2)])
    place = AdapterBank.place

    def fail(bank, adapter_id, slot):
        monkeypatch.setattr(AdapterBank, "place", place)
        raise RuntimeError("no memory")

    monkeypatch.setattr(AdapterBank, "place", fail)
    (failed,) = run(engine, [asked(prompt, 1)])
    assert failed.last.error == "no memory"
    (answer,) = run(engine, [asked(prompt, 1)])
    assert answer.last.error is None and answer.token_ids != alone.token_ids
    engine.load_adapter(adapter(1, folder=folders[1], in_place=True))
    monkeypatch.setattr(AdapterBank, "place", fail)
    assert run(engine, [asked(prompt, 0)])[0].last.error == "no memory"
    assert run(engine, [asked(prompt, 1)])[0].token_ids == alone.token_ids
    engine.adapters.check()


def test_an_adapter_that_another_rank_cannot_read_is_held_by_none(served, monkeypatch):
    engine, folders = served
    (prompt,) = prompts(20)
    engine.load_adapter(adapter(1, folder=folders[0]))
    (before,) = run(engine, [asked(prompt, 1)])
    with monkeypatch.context() as patched:
        patched.setattr("limelight.runner.control._failed_ranks", lambda *_: [1])
        with pytest.raises(RuntimeError, match="rank 1 failed"):
            engine.load_adapter(adapter(1, folder=folders[1], in_place=True))
        assert run(engine, [asked(prompt, 1)])[0].token_ids == before.token_ids
        # Read again for a request, it ends that one alone.
        engine.adapters._held.pop(1)
        other, lost = run(engine, [asked(prompt, 0), asked(prompt, 1)])
        assert "rank 1 failed" in lost.last.error and other.last.finish_reason == "length"
    assert run(engine, [asked(prompt, 1)])[0].token_ids == before.token_ids
    engine.adapters.check()


def test_without_room_adapters_are_refused(tmp_path):
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3)
    engine = start(tmp_path / "base")
    with pytest.raises(RequestError, match="--enable-lora"):
        engine.load_adapter(adapter(1))
    (answer,) = run(engine, [asked(prompts(5)[0], 1)])
    assert "--enable-lora" in answer.last.refused


def test_drafts_are_judged_with_the_adapter_of_their_request(folder, drafter, tmp_path):
    room = {"enable_lora": True, "max_loras": 2}
    plain, drafted = start(folder, **room), start_drafted(folder, drafter, **room)
    for engine in (plain, drafted):
        for number in (1, 2):
            path = write_adapter(tmp_path / f"{number}", attention(), seed=number)
            engine.load_adapter(adapter(number, folder=str(path)))
    cases = [asked(text, number, max_tokens=20) for text in prompts(9, 40) for number in (0, 1, 2)]
    expected = run(plain, cases)
    known = {one.id: answer.token_ids for one, answer in zip(cases, expected, strict=True)}
    inject(drafted, knowing(known, right=0.8))
    answers = run(drafted, cases)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert drafted.stats().speculation.accepted > 0


def test_ranks_that_share_a_model_share_its_adapters(tmp_path):
    widths = {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": 48}
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3, **widths)
    shapes = {
        **attention(),
        "2.mlp.experts.base_layer": ((4 * EXPERTS, SIZE), (2 * INNER, 4 * EXPERTS)),
        "2.mlp.experts": ((4 * EXPERTS, INNER), (SIZE, 4 * EXPERTS)),
        "2.mlp.shared_expert.up_proj": ((4, SIZE), (48, 4)),
        "2.mlp.shared_expert.down_proj": ((4, 48), (SIZE, 4)),
    }
    config = {"target_parameters": PARAMETERS, "peft_version": "0.21.2"}
    path = write_adapter(tmp_path / "own", shapes, scale=0.2, **config)
    cases = [asked(text, number, max_tokens=6) for text in prompts(9, 30) for number in (0, 1)]
    answers = []
    for size in (1, 2):
        engine = start(tmp_path / "base", enable_lora=True, tensor_parallel_size=size)
        try:
            engine.load_adapter(adapter(1, folder=str(path)))
            answers.append([answer.token_ids for answer in run(engine, cases)])
        finally:
            engine.close()
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


def test_merged_experts_serve_one_adapter_at_a_time_and_the_base_model_as_it_was(tmp_path):
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3)
    shapes = attention() | {
        "2.mlp.experts.base_layer": ((4 * EXPERTS, SIZE), (2 * INNER, 4 * EXPERTS)),
        "2.mlp.experts": ((4 * EXPERTS, INNER), (SIZE, 4 * EXPERTS)),
    }
    config = {"target_parameters": PARAMETERS, "peft_version": "0.21.2"}
    beside = start(tmp_path / "base", enable_lora=True, max_loras=2)
    merged = start(tmp_path / "base", enable_lora=True, merge_lora_experts=True)
    for engine in (beside, merged):
        for number in (1, 2):
            path = write_adapter(tmp_path / f"{number}", shapes, seed=number, scale=0.2, **config)
            engine.load_adapter(adapter(number, folder=str(path)))
    cases = [asked(text, number) for text in prompts(20, 9) for number in (1, 0, 2)]
    expected, answers = run(beside, cases), run(merged, cases)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    merged.adapters.unload(1)
    assert run(merged, cases[1:2])[0].token_ids == expected[1].token_ids
    merged.adapters.check()


def test_llm_takes_an_adapter_for_all_prompts_or_one_for_each(tmp_path):
    write_checkpoint(tmp_path / "base", "flint", num_hidden_layers=3)
    folder = write_adapter(tmp_path / "own", attention())
    config = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4}
    own, params = adapter(1, folder=str(folder)), SamplingParams(temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path / "base"), enable_lora=True, **config) as llm:
        both = prompts(9, 9)

        def answers(lora_request):
            outputs = llm.generate(both, params, lora_request=lora_request)
            return [output.outputs[0].token_ids for output in outputs]

        without, adapted = answers(None), answers(own)
        assert without != adapted
        assert answers([own, None]) == [adapted[0], without[1]]
        with pytest.raises(ValueError, match="1 adapters for 2 prompts"):
            answers([own])


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_served_adapters_of_peft_give_the_log_probabilities_of_peft(tmp_path, family):
    configs = {
        "a": {"target_modules": ATTENTION, "target_parameters": PARAMETERS},
        "b": {"target_modules": ["q_proj"], "target_parameters": PARAMETERS, "r": 3},
    }
    oracle = write_by_peft(tmp_path, family, configs)
    engine = start(oracle.folder, enable_lora=True, max_loras=2, max_num_batched_tokens=37)
    for number, name in enumerate(configs, 1):
        engine.load_adapter(adapter(number, folder=str(oracle.adapters[name])))
    cases = [(prompt, number) for prompt in prompts(40, 7) for number in (0, 1, 2)]
    answers = run(engine, [asked(*case, max_tokens=8) for case in cases])
    for (prompt, number), answer in zip(cases, answers, strict=True):
        name = [None, *configs][number]
        expected = oracle.logprobs(prompt + answer.token_ids, name)[len(prompt) - 1 : -1]
        found = torch.tensor([report.logprob for report in answer.logprobs])
        own = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (found - own).abs().max() < 1e-4
