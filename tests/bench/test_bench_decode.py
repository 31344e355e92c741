import argparse
import random

import pytest

from limelight.bench import workload
from limelight.bench.decode import DROPPED_STEPS, agreement, compare, time_decode
from limelight.bench.prefill import time_prefill
from limelight.config import EngineConfig
from limelight.types import Output


class ScriptedEngine:
    """Computes one prompt a step, then one token for each of the first `room` sequences a step."""

    def __init__(self, room=100):
        self.room = room
        self.waiting, self.running, self.aborted = [], {}, []
        self.steps = 0

    @property
    def has_work(self):
        return bool(self.waiting or self.running)

    def add(self, request):
        self.waiting.append(request)

    def abort(self, request_id):
        self.running.pop(request_id, None)
        self.aborted.append(request_id)

    def step(self):
        self.steps += 1
        outputs = [self._token(request) for request in list(self.running.values())[: self.room]]
        if self.waiting:
            request = self.waiting.pop(0)
            self.running[request.id] = request
            outputs.append(self._token(request))
        return outputs

    def _token(self, request):
        done = "length" if request.max_tokens == 1 else None
        if done:
            del self.running[request.id]
        return Output(request_id=request.id, token_ids=[self.steps], finish_reason=done)


def prompts(batch, context=5):
    return workload.random_prompts(random.Random(1), batch=batch, context=context, vocab=17)


def test_random_prompts_have_the_size_and_the_vocabulary_asked_for():
    assert [len(prompt) for prompt in prompts(3)] == [5, 5, 5]
    assert all(0 <= token < 17 for prompt in prompts(3) for token in prompt)
    assert prompts(3) == prompts(3)
    assert len(set(map(tuple, prompts(3)))) == 3


def test_only_steps_in_which_all_decode_are_timed_and_the_first_are_dropped():
    engine = ScriptedEngine()
    decoded = time_decode(engine, prompts(3), num_steps=4, max_model_len=100)
    assert len(decoded.seconds) == 4
    assert all(second > 0 for second in decoded.seconds)
    # Three steps of prefill, in which the first sequences go on already.
    assert engine.steps == 3 + DROPPED_STEPS + 4
    assert [len(tokens) for tokens in decoded.token_ids] == [15, 14, 13]


def test_nothing_is_left_in_the_engine_after_a_run():
    engine = ScriptedEngine()
    time_decode(engine, prompts(3), num_steps=1, max_model_len=100)
    assert not engine.has_work
    assert len(engine.aborted) == 3


def test_a_batch_that_does_not_fit_at_once_is_an_error_not_a_figure():
    engine = ScriptedEngine(room=2)
    with pytest.raises(ValueError, match="only 2 of 3"):
        time_decode(engine, prompts(3), num_steps=4, max_model_len=100)
    assert not engine.has_work


def test_a_context_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="do not fit the model's length of 16"):
        time_decode(ScriptedEngine(), prompts(1), num_steps=4, max_model_len=16)


def test_a_prefill_ends_with_the_last_first_token():
    engine = ScriptedEngine()
    assert time_prefill(engine, prompts(4)) > 0
    assert engine.steps == 4
    assert not engine.has_work


def test_contestants_decode_the_same_prompts_in_turn():
    order = []

    def contestant(name, last_token):
        def time_one(given):
            order.append((name, given))
            decoded = time_decode(ScriptedEngine(), given, num_steps=2, max_model_len=100)
            decoded.token_ids[0][-1] = last_token
            return decoded

        return time_one

    given = prompts(1)
    rows = compare({"a": contestant("a", 5), "b": contestant("b", 6)}, given, rounds=2)
    assert order == [("a", given), ("b", given)] * 2
    assert [row["engine"] for row in rows] == ["a", "b"]
    assert [row["step_ms"]["n"] for row in rows] == [4, 4]
    assert rows[0]["same_tokens"] == 1
    assert rows[1]["same_tokens"] == round(10 / 11, 4)


def test_agreement_ends_at_the_first_difference():
    assert agreement([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 1
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == 0.5


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache_has_one_label_however_it_is_spelled(kind):
    args = argparse.Namespace(tensor_parallel_slice=1)
    found = workload.labels(args, EngineConfig(kv_cache_dtype=kind), "bfloat16", [])
    assert (found["weights"], found["kv"]) == ("bf16", "fp8")


def test_steps_of_several_ranks_are_not_timed_in_one_process():
    with pytest.raises(ValueError, match="--tensor-parallel-slice"):
        workload.check_alone(EngineConfig(tensor_parallel_size=2))
