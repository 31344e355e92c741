"""A model divided among processes: the same answers as in one, and one end for all."""

import asyncio
import inspect
import random
import sys
from pathlib import Path

import pytest
from drafters import write_drafter
from test_client import collect, until
from test_constraints import Small
from tiny import prompts, request, run, start, write_checkpoint

from limelight.config import EngineConfig
from limelight.engine import links
from limelight.engine.client import EngineClient
from limelight.engine.startup import plan_memory, resolve
from limelight.parallel import group
from limelight.parallel.group import open_store
from limelight.types import RoutedExperts

NEAR = 1e-4
BYTES_PER_HEAD, BYTES_OF_ROUTING = 230_000, 25_088
# What 2, 3 and 4 ranks can divide, and a vocabulary that none of them can.
WIDTHS = {"intermediate_size": 96, "moe_intermediate_size": 48}
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 2}


def write(path: Path, family: str, **changes: object) -> Path:
    shared = {"shared_expert_intermediate_size": 48} if family == "flint" else {}
    write_checkpoint(path, family, **(WIDTHS | shared | changes))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("flint"), "flint")


def workload(tokens: int) -> list:
    """Greedy, penalized, held to few tokens, drawn; with 60 tokens more than the cache holds."""
    heads, tails = prompts(60, 50, seed=3), prompts(5, 30, 61, 12, 40, 9, seed=4)
    texts = [heads[i % 2] + tail for i, tail in enumerate(tails)]
    rules = [
        {"prompt_logprobs": 1, "logprobs": 3},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"allowed_token_ids": [3, 5, 8, 13, 21], "min_tokens": 9},
        {"temperature": 0.9, "seed": 11, "logprobs": None},
        {"temperature": 0.7, "seed": 12, "top_p": 0.8},
    ]
    pairs = zip(texts, rules, strict=True)
    return [request(text, max_tokens=tokens, **rule) for text, rule in pairs]


def answers_of(folder: Path, size: int, kv_heads: int, *, tokens: int = 60) -> tuple[list, object]:
    """Of the workload, and then of some that begin as others did."""
    engine = start(
        folder, tensor_parallel_size=size, max_num_batched_tokens=50, max_model_len=200,
        kv_cache_memory_bytes=BYTES_PER_HEAD * max(1, kv_heads // size) + BYTES_OF_ROUTING,
        enable_return_routed_experts=True,
    )  # fmt: skip
    engine.overlap = size == 2
    try:
        asked = workload(tokens)
        answers = run(engine, asked)
        again = [request(one.prompt_token_ids) for one in asked[:3]]
        # Of 1, 7 and 150 tokens at once, and all to the same experts.
        again += [request(text) for text in [*prompts(1, 7, 150), [5] * 60, [5] * 61]]
        answers += run(engine, again)
        # Those that the ranks draw without gathering logits.
        drawn = [request(one.prompt_token_ids, logprobs=None, temperature=t, seed=5)
                 for one, t in zip(asked, (0.0, 0.7, 1.0), strict=False)]  # fmt: skip
        return answers + run(engine, drawn), engine.stats()
    finally:
        engine.close()


def assert_near(answers: list, expected: list) -> None:
    """The same tokens and log-probabilities, as far as the answers go."""
    for answer, want in zip(answers, expected, strict=True):
        count = len(answer.token_ids)
        assert count > 0 and answer.token_ids == want.token_ids[:count]
        reports = [*answer.logprobs, *(answer.prompt_logprobs or [])[1:]]
        wanted = [*want.logprobs[:count], *(want.prompt_logprobs or [])[1:]]
        for got, told in zip(reports, wanted, strict=True):
            assert abs(got.logprob - told.logprob) < NEAR
        assert_same_experts(answer.last.routed_experts, want.last.routed_experts)


def assert_same_experts(got: RoutedExperts | None, want: RoutedExperts | None) -> None:
    """As far as the answers go; None where experts are not returned."""
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert got.shape[0] > 0 and got == want.first(got.shape[0])


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("flint", 2, FOUR),
        ("beam", 2, FOUR),
        pytest.param("flint", 3, THREE, marks=pytest.mark.slow),
    ],
    ids=["flint by 2", "beam by 2", "flint by 3"],
)
def test_answers_do_not_depend_on_the_number_of_ranks(tmp_path, family, size, changes):
    write(tmp_path, family, **changes)
    heads = changes["num_key_value_heads"]
    (expected, before), (answers, after) = (answers_of(tmp_path, n, heads) for n in (1, size))
    for stats in (before, after):
        assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert_near(answers, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flint", "beam"])
def test_four_ranks_share_two_kv_heads(tmp_path, family):
    write(tmp_path, family, **FOUR)
    expected, answers = (answers_of(tmp_path, size, 2, tokens=6)[0] for size in (1, 4))
    assert_near(answers, expected)


OTHER = """
import sys
import limelight
from limelight.engine import worker
{change}
sys.exit(worker.main())
"""


def with_peers(mesh, size, dtype, device):
    """As if these ranks had memory in common, which no kernel then reads on a CPU."""
    from dataclasses import replace

    import torch

    from limelight.ops.boundary import Peers

    return replace(mesh, peers=Peers.of(mesh.rank, size, dtype, torch.zeros(mesh.size).long()))


@pytest.mark.parametrize("family", ["flint", pytest.param("beam", marks=pytest.mark.slow)])
def test_sums_that_are_left_to_the_norms_come_to_the_same(tmp_path, monkeypatch, family):
    """As on GPUs, where a kernel makes them; also where a drafter reads the stream between."""
    folder = write(tmp_path / "target", family)
    write_drafter(tmp_path / "drafter")
    spec = {"model": str(tmp_path / "drafter"), "num_speculative_tokens": 3}

    def answers(size: int) -> list[list[int]]:
        engine = start(
            folder, tensor_parallel_size=size, speculative_config=spec, max_num_batched_tokens=50,
            max_model_len=64,
        )  # fmt: skip
        try:
            assert size == 1 or engine.runner.runner.mesh.leaves(1)
            return [one.token_ids for one in run(engine, [request(p) for p in prompts(40, 3)])]
        finally:
            engine.close()

    expected = answers(1)
    change = f"{inspect.getsource(with_peers)}\nimport limelight.parallel.group as group\n"
    text = OTHER.format(change=change + "group.with_peers = with_peers")
    monkeypatch.setattr(links, "PROGRAM", (sys.executable, "-c", text))
    monkeypatch.setattr(group, "with_peers", with_peers)
    assert answers(2) == expected


@pytest.mark.slow
def test_uneven_prompts_and_one_expert_for_all_are_only_slower(tmp_path):
    write(tmp_path, "flint", max_position_embeddings=1024)

    def answers(size: int) -> list:
        engine = start(
            tmp_path, tensor_parallel_size=size, max_num_seqs=64, max_num_batched_tokens=256,
            max_model_len=1024, kv_cache_memory_bytes=2**25,
        )  # fmt: skip
        try:
            uneven = run(engine, [request(prompt) for prompt in prompts(1, 7, 700)])
            alike = [request([i % 97] * 30, max_tokens=4) for i in range(64)]
            return uneven + run(engine, alike)
        finally:
            engine.close()

    assert_near(answers(2), answers(1))


def constrained(**changes: object) -> list[list[int]]:
    """Answers under a grammar, a budget of reasoning, and neither, with drafts."""
    small = Small(**changes)
    try:
        asked = [small.ask(temperature=t, max_tokens=50) for t in (0.0, 0.8)]
        asked += [
            small.ask(waits=True, budget=7, max_tokens=40),
            small.ask(form=None, max_tokens=40),
        ]
        answers = run(small.engine, [one for listed in asked for one in listed])
        assert small.engine.stats().speculation.verified > 0
        return [answer.token_ids for answer in answers]
    finally:
        small.engine.close()


@pytest.mark.slow
def test_constraints_and_drafts_hold_on_all_ranks_as_on_one():
    assert constrained(tensor_parallel_size=2) == constrained()


def test_a_packed_model_with_an_fp8_cache_is_divided_too():
    def answers(size):
        engine = start(
            Path("beam-nano-nvfp4"), tensor_parallel_size=size, kv_cache_dtype="fp8",
            max_model_len=128, speculative_config={"num_speculative_tokens": 0},
        )  # fmt: skip
        try:
            return run(engine, [request(prompt) for prompt in prompts(20, 33)])
        finally:
            engine.close()

    for got, want in zip(answers(2), answers(1), strict=True):
        assert abs(got.logprobs[0].logprob - want.logprobs[0].logprob) < 0.05


def test_what_cannot_be_divided_is_refused_by_name():
    def plan(model, size):
        config = EngineConfig(model=model, device="cpu", tensor_parallel_size=size)
        return plan_memory(config, resolve(config))

    with pytest.raises(ValueError, match=r"experts\.\S+: 8 columns a rank are not whole blocks"):
        plan("beam-nano-nvfp4", 8)
    with pytest.raises(ValueError, match="8 query heads cannot be divided among 3 ranks"):
        plan("flint-nano", 3)


def test_each_rank_plans_for_its_share():
    def plan(size):
        config = EngineConfig(model="beam-nano", device="cpu", tensor_parallel_size=size)
        found = plan_memory(config, resolve(config))
        return found, {kind.name: kind.nbytes for kind in found.kinds}

    (whole, every), (part, share) = plan(1), plan(4)
    assert 4 * share["routed experts"] == every["routed experts"]
    assert 2 * part.block.nbytes == whole.block.nbytes  # two KV heads, each on two ranks
    assert part.usable < whole.usable / 3


@pytest.mark.slow
def test_requests_that_come_one_by_one_and_leave_never_wait_long(folder):
    async def main():
        rng = random.Random(2)
        client = EngineClient(
            EngineConfig(model=str(folder), device="cpu", max_model_len=128, tensor_parallel_size=2)
        )
        await client.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 60)
            for i in range(200):
                # One gets as far as a sequence can.
                count = 127 - 3 if i == 20 else rng.randint(1, 5)
                leave = 1 if i % 10 == 9 and count > 1 else None
                one = request([i % 97, 3, 4], max_tokens=count)
                within = 60 if i == 20 else 5
                told = await asyncio.wait_for(collect(client, one, leave_after=leave), within)
                assert leave or told[1] == "length" and len(told[0]) == count
                await asyncio.sleep(rng.random() * 0.05)
            await until(lambda: client.stats.running == 0 and client.stats.cache_usage == 0.0)
        finally:
            await client.close()

    asyncio.run(main())


def test_no_one_from_elsewhere_reaches_the_store():
    store = open_store()
    port = f"{store.port:04X}"
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port}")
    ]
    assert listening == [f"0100007F:{port}"]
