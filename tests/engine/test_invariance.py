"""What a request gets does not depend on what else the engine does (FP32 on a CPU)."""

import json
import random
from dataclasses import replace

import pytest
import torch
from drafted import fake_graphs
from tiny import VOCAB, Answer, prompts, request, run, start, write_checkpoint

from limelight.engine.engine import Engine

NEAR = 1e-4


def alone(folder, one) -> Answer:
    """The answer of an idle engine without a prefix cache."""
    engine = start(folder, enable_prefix_caching=False, max_num_seqs=2)
    return run(engine, [one])[0]


def assert_near(answer, expected):
    assert answer.token_ids == expected.token_ids
    for got, want in zip(answer.logprobs, expected.logprobs, strict=True):
        assert abs(got.logprob - want.logprob) < NEAR


class Traffic:
    """Requests that come a few at a time and are sometimes given up."""

    def __init__(self, engine: Engine, rng: random.Random):
        self.engine, self.rng = engine, rng
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()

    def step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id].take(output)
        self.engine.scheduler.check()

    def add(self, one) -> None:
        self.answers[one.id] = Answer()
        self.engine.add(one)

    def abort(self, name: str) -> None:
        if self.engine.abort(name) is not None:
            self.aborted.add(name)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.stats().cache_usage == 0.0


@pytest.mark.parametrize(
    "turns, hits", [(90, 3000), pytest.param(300, 10_000, marks=pytest.mark.slow)]
)
def test_reused_blocks_never_show_another_texts_keys(folder, either_loop, turns, hits):
    """64 blocks, prompts that share heads, four at a time, every fifth given up."""
    rng = random.Random(5)
    heads = prompts(100, 200, 330, seed=1)
    texts = [rng.choice(heads)[: rng.randrange(90, 330)] + tail for tail in prompts(*range(9, 19))]
    expected = {i: alone(folder, request(text)) for i, text in enumerate(texts)}
    block = 16 * 2 * 2 * 16 * 4 * 4  # tokens, keys and values, KV heads, size, layers, bytes
    engine = start(folder, kv_cache_memory_bytes=64 * block, max_num_seqs=4)
    engine.overlap = either_loop
    traffic, owner = Traffic(engine, rng), {}
    for turn in range(turns):
        i = rng.randrange(len(texts))
        one = request(texts[i])
        owner[one.id] = i
        traffic.add(one)
        while engine.stats().running + engine.stats().waiting >= 4:
            traffic.step()
        if turn % 5 == 4:
            for _ in range(3):
                traffic.step()
            traffic.abort(one.id)
    traffic.drain()
    assert engine.stats().prefix_hits > hits
    for name, answer in traffic.answers.items():
        if name not in traffic.aborted:
            assert_near(answer, expected[owner[name]])


def test_a_sampled_request_is_the_same_alone_and_after_preemption(folder, either_loop):
    asked = [
        request(prompt, max_tokens=60, temperature=0.8, top_p=0.95, seed=7 + i, prompt_logprobs=1)
        for i, prompt in enumerate(prompts(100, 90, 80, 70, 110, 60))
    ]
    engine = start(folder, max_model_len=200, kv_cache_memory_bytes=600_000)
    engine.overlap = either_loop
    answers = run(engine, asked)
    assert engine.stats().preemptions > 0
    for one, answer in zip(asked, answers, strict=True):
        expected = alone(folder, one)
        assert_near(answer, expected)
        assert len(answer.prompt_logprobs) == len(one.prompt_token_ids)


def test_a_slot_used_again_shows_nothing_of_its_former_request(folder):
    rng = random.Random(3)
    engine = start(folder, max_num_seqs=8)
    plain = [request(prompt) for prompt in prompts(5, 40, 75, 130)]
    expected = [alone(folder, one) for one in plain]
    for _ in range(8):
        traffic, checked = Traffic(engine, rng), []
        for i, one in enumerate(plain):
            again = replace(one, id=request([1]).id)
            checked.append((again.id, expected[i]))
            traffic.add(again)
            loud = request(
                prompts(rng.randrange(1, 90), seed=rng.randrange(99))[0],
                max_tokens=rng.randrange(1, 12), seed=rng.randrange(99), temperature=1.5,
                allowed_token_ids=rng.sample(range(VOCAB), 9), logit_bias={3: 60.0},
                repetition_penalty=1.7, frequency_penalty=0.5, min_tokens=1,
            )  # fmt: skip
            traffic.add(loud)
            traffic.step()
            if rng.random() < 0.3:
                traffic.abort(loud.id)
        traffic.drain()
        for name, want in checked:
            assert_near(traffic.answers[name], want)


def test_greedy_rows_do_not_depend_on_their_neighbours_routing(folder):
    same = [request([5] * 30), *(request(prompt) for prompt in prompts(30, 31, 29))]
    engine = start(folder, enable_prefix_caching=False)
    for one, answer in zip(same, run(engine, same), strict=True):
        assert_near(answer, alone(folder, one))


def test_the_window_reaches_exactly_as_far_as_the_config_says(tmp_path):
    """One window layer: a change at W - 1 tokens back is seen, one at W is not, bit for bit."""
    window = 33
    write_checkpoint(
        tmp_path, "flint", num_hidden_layers=1, layer_types=["sliding_attention"],
        sliding_window=window, mlp_only_layers=[0],
    )  # fmt: skip
    (prompt,) = prompts(120)
    for chunk in (512, 10):
        engine = start(tmp_path, max_num_batched_tokens=chunk, enable_prefix_caching=False)

        def last_logprobs(distance, engine=engine):
            changed = list(prompt)
            if distance is not None:
                changed[-1 - distance] = (changed[-1 - distance] + 1) % VOCAB
            one = request(changed, max_tokens=1, logprobs=VOCAB)
            return dict(run(engine, [one])[0].logprobs[0].top)

        unchanged = last_logprobs(None)
        assert last_logprobs(window - 1) != unchanged
        assert last_logprobs(window) == unchanged


def test_huge_sinks_leave_only_the_last_token_to_decide(tmp_path):
    oracle = write_checkpoint(tmp_path, "flint")
    with torch.no_grad():
        for layer in oracle.model.layers:
            layer.self_attn.sinks.fill_(1e4)
    oracle.save_pretrained(tmp_path)
    engine = start(tmp_path, max_num_batched_tokens=50)
    asked = [request([*prompt, 7], max_tokens=4) for prompt in prompts(40, 150, 199)]
    answers = run(engine, asked)
    again = run(engine, asked[-1:] and [request(asked[-1].prompt_token_ids, max_tokens=4)])
    assert again[0].last.num_cached > 0
    for answer in answers + again:
        assert_near(answer, answers[0])


def test_routing_is_the_same_at_every_batch_size(folder):
    """32 prompts one by one and together: the same experts' tokens."""
    texts = prompts(*[7 + i % 23 for i in range(32)], seed=2)
    asked = [request(text, max_tokens=3) for text in texts]
    together = run(start(folder, max_num_seqs=32), asked)
    single = start(folder, max_num_seqs=32, max_num_batched_tokens=32, enable_prefix_caching=False)
    by_token = [run(single, [request(text, max_tokens=3)])[0] for text in texts]
    for one, other in zip(together, by_token, strict=True):
        assert_near(one, other)


def test_memory_promised_at_the_start_is_there(folder):
    """As many sequences as the plan says run without preemption, and window layers count less."""
    engine = start(folder, max_model_len=340, kv_cache_memory_bytes=1_500_000, max_num_seqs=64)
    groups = engine.scheduler.groups
    for length in (34, 340):
        promised = groups.sequences_of_length(length, 340)
        asked = [
            request(prompt, max_tokens=9)
            for prompt in prompts(*[length - 9] * promised, seed=length)
        ]
        before = engine.stats().preemptions
        run(engine, asked)
        assert promised > 0 and engine.stats().preemptions == before


def test_a_cache_below_one_sequence_is_refused_with_the_number_that_works(folder):
    with pytest.raises(ValueError, match="--max-model-len [0-9]+") as caught:
        start(folder, kv_cache_memory_bytes=300_000)
    longest = int(str(caught.value).split("--max-model-len ")[1].split()[0])
    engine = start(folder, kv_cache_memory_bytes=300_000, max_model_len=longest)
    answers = run(engine, [request(prompts(longest - 4)[0], max_tokens=4)])
    assert len(answers[0].token_ids) == 4
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes [0-9]+"):
        start(folder, kv_cache_memory_bytes=1000)


@pytest.mark.parametrize("ids", [5000, [-1], ["a"], {}], ids=str)
def test_an_end_token_outside_the_vocabulary_is_refused_at_the_start(tmp_path, ids):
    write_checkpoint(tmp_path, "flint")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id"):
        start(tmp_path)


def test_a_cache_larger_than_memory_is_refused_before_it_is_taken(folder):
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes"):
        start(folder, kv_cache_memory_bytes=10**12)


@pytest.mark.parametrize("limit", [24, 64])
def test_steps_padded_as_graphs_are_give_the_same_tokens(folder, either_loop, limit):
    """Chunks of prompts beside sequences that decode; one is told of its prompt, by no graph."""
    asked = [
        request(text, logprobs=None, prompt_logprobs=0 if i == 3 else None, max_tokens=20)
        for i, text in enumerate(prompts(1, 40, 17, 100, 5, 64, 130, 2))
    ]
    expected = run(start(folder), asked)
    engine = start(folder, max_num_batched_tokens=limit, max_num_seqs=5)
    engine.overlap = either_loop
    graphs, traffic = fake_graphs(engine), Traffic(engine, random.Random(0))
    for one in asked:
        traffic.add(one)
        traffic.step()
    traffic.drain()
    for one, want in zip(asked, expected, strict=True):
        got = traffic.answers[one.id]
        assert got.token_ids == want.token_ids
        assert (got.prompt_logprobs is None) == (want.prompt_logprobs is None)
    assert all(graph.replays > 3 for graph in graphs)
