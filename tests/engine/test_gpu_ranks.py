"""On two GPUs: ranks give what one gives, and sums in the norms' kernels the bits of NCCL's."""

import multiprocessing
import sys
import time

import pytest
import torch
import torch.distributed as dist

from limelight import LLM, SamplingParams
from limelight.checkpoint import BUNDLED_NAMES
from limelight.engine import links
from limelight.ops import boundary
from limelight.ops.boundary import Partial, sum_add_rmsnorm, sum_sandwich
from limelight.ops.norm import add_rmsnorm, sandwich
from limelight.parallel.collectives import all_reduce
from limelight.parallel.group import join, leave, open_store, store_at, take_device
from limelight.parallel.seat import Seat
from limelight.speculative import NO_DRAFTS
from limelight.types import DeviceLost, StructuredOutputsParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROMPT = "Once upon a time there was a"
SETTINGS = {"device": "cuda", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**28, "seed": 1}
# Rounds in a graph, and how often it is replayed. Odd, so that each has both places in turn.
ROUNDS, REPLAYS = 101, 1000
EPS = 1e-6
SECONDS = 240
THROUGH_NCCL = """
import sys
import limelight.ops.boundary as boundary
from limelight.engine import worker
boundary.MOST_BYTES = {}
sys.exit(worker.main())
"""


def many_rounds(rank: int, port: int, size: int, rows_of: list[int]) -> None:
    """Replay a graph of boundaries of random numbers; no round may differ from NCCL and a norm."""
    device = torch.device("cuda")
    take_device(device, rank, 2)
    mesh = join(store_at(port), device, Seat(rank, 2), width=size, dtype=torch.bfloat16)
    assert mesh.peers is not None and not mesh.leaves(mesh.peers.rows + 1)
    same, own = (torch.Generator("cuda").manual_seed(seed) for seed in (1, 2 + rank))

    def drawn(*shape: int, generator: torch.Generator = same) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    post, pre = drawn(size), drawn(size)
    rounds = []
    for i in range(ROUNDS):
        rows = rows_of[i % len(rows_of)]
        h, x = drawn(rows, size), drawn(rows, size, generator=own)
        total = all_reduce(x.clone(), mesh)
        if i % 2:
            expected = add_rmsnorm.kernel(h, total, pre, eps=EPS)
        else:
            expected = sandwich.kernel(h, total, post, pre, n=5, eps=EPS)
        rounds.append((h, Partial(x, mesh.peers, torch.clone), expected))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def run() -> None:
        for i, (h, x, expected) in enumerate(rounds):
            if i % 2:
                found = sum_add_rmsnorm.kernel(h, x, pre, eps=EPS)
            else:
                found = sum_sandwich.kernel(h, x, post, pre, n=5, eps=EPS)
            for a, b in zip(found, expected, strict=True):
                wrong.add_((a != b).sum())

    run()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    start = time.monotonic()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    count = ROUNDS * REPLAYS
    print(f"rank {rank}: {count} rounds of {size} columns in {time.monotonic() - start:.1f} s")
    assert wrong.item() == 0
    # Both ranks have the same bits.
    h, x, _ = rounds[0]
    _, mine = sum_sandwich.kernel(h, x, post, pre, n=5, eps=EPS)
    first = mine.clone()
    dist.broadcast(first, group=mesh.group, group_src=0)
    assert torch.equal(first, mine)
    del graph
    leave()


@pytest.mark.parametrize("size", [2048, 5120])
@pytest.mark.parametrize("rows", [[1], [8, 1, 3, 40], [600, 1, 200, 8]], ids=["1", "few", "many"])
def test_a_hundred_thousand_rounds_give_the_bits_of_nccl_and_a_norm(rows, size):
    if max(rows) * size * 2 > 2**22:
        rows = [count * 2048 // size or 1 for count in rows]
    spawn, port = multiprocessing.get_context("spawn"), open_store()
    both = [
        spawn.Process(target=many_rounds, args=(rank, port.port, size, rows)) for rank in range(2)
    ]
    for one in both:
        one.start()
    end = time.monotonic() + SECONDS
    for one in both:
        one.join(max(0.0, end - time.monotonic()))
        one.kill()
        one.join()
    assert [one.exitcode for one in both] == [0, 0]


def through_nccl(monkeypatch) -> None:
    """Sums by a collective on both ranks."""
    monkeypatch.setattr(boundary, "MOST_BYTES", {})
    monkeypatch.setattr(links, "PROGRAM", (sys.executable, "-c", THROUGH_NCCL))


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = [1, 7, 30, 64, 200][:count]
    return [torch.randint(5, 500, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("way", ["fused", "nccl"])
@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_two_ranks_write_what_one_finds_likeliest(name, way, eager, monkeypatch):
    settings = SETTINGS | {"speculative_config": NO_DRAFTS, "enforce_eager": eager}
    asked = prompts(5)
    if way == "nccl":
        through_nccl(monkeypatch)
    with LLM(name, tensor_parallel_size=2, **settings) as llm:
        assert (llm.engine.runner.runner.mesh.peers is None) == (way == "nccl")
        greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        drawn = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=16, seed=3, ignore_eos=True)
        answers = [one.outputs[0].token_ids for one in llm.generate(asked, greedy)]
        again = [one.outputs[0].token_ids for one in llm.generate(asked, greedy)]
        assert answers == again
        assert all(len(one.outputs[0].token_ids) == 16 for one in llm.generate(asked, drawn))
    with LLM(name, **settings) as llm:
        texts = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
        judge = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        behind = []
        for prompt, told in zip(asked, llm.generate(texts, judge), strict=True):
            tokens = told.prompt_token_ids[len(prompt) :]
            for token, report in zip(tokens, told.prompt_logprobs[len(prompt) :], strict=True):
                best = max(one.logprob for one in report.values())
                behind.append(best - report[token].logprob)
        # Sums of two are rounded in between, and now and then a token goes to another expert: on a
        # CPU log-probabilities of random text differ by 0.1 in the mean, and by 4 at most.
        assert sum(behind) / len(behind) < 0.1


# By each step's shares of the vocabulary, on the device and by rules that the host is asked for.
RULES = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.2},
    {"temperature": 0.8, "logit_bias": {7: 3.0, 4000: -5.0}, "min_tokens": 5},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{6,30}")},
]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", [None, "greedy", "probabilistic"])
def test_two_ranks_choose_over_shares_by_every_rule(method, eager):
    spec = NO_DRAFTS
    if method is not None:
        spec = {
            "model": "flint-nano-dflash2", "num_speculative_tokens": 7,
            "draft_sample_method": method, "enable_adaptive_verification": False,
        }  # fmt: skip
    settings = SETTINGS | {"speculative_config": spec, "enforce_eager": eager}
    with LLM("flint-nano", tensor_parallel_size=2, **settings) as llm:
        rules = [SamplingParams(max_tokens=40, seed=i, **rule) for i, rule in enumerate(RULES)]
        answers = llm.generate([PROMPT] * len(rules), rules)
        for rule, answer in zip(rules, answers, strict=True):
            (choice,) = answer.outputs
            assert choice.token_ids
            assert rule.logprobs is None or len(choice.logprobs) == len(choice.token_ids)
        assert set(answers[-1].outputs[0].text) <= set("ab")
        # The only token that is left, whatever ranks hold it.
        for token in (3, 4090):
            only = SamplingParams(temperature=1.0, allowed_token_ids=[token], max_tokens=3)
            (one,) = llm.generate([PROMPT], only)
            assert set(one.outputs[0].token_ids) == {token}


def test_drafts_work_on_two_ranks():
    with LLM("flint-nano", tensor_parallel_size=2, **SETTINGS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64)
        assert llm.generate([PROMPT] * 3, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("way", ["fused", "nccl"])
def test_a_rank_that_is_killed_ends_the_steps_of_the_other(way, monkeypatch):
    if way == "nccl":
        through_nccl(monkeypatch)
    llm = LLM("flint-nano", tensor_parallel_size=2, speculative_config=NO_DRAFTS, **SETTINGS)
    (worker,) = llm.engine.ranks.workers
    count = 0
    start = None
    with pytest.raises(DeviceLost, match="rank 1"):
        params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
        for _ in llm.stream(PROMPT, params):
            count += 1
            if count == 20:
                worker.link.process.kill()
                start = time.monotonic()
    assert start is not None and time.monotonic() - start < 10
    llm.close()
    assert time.monotonic() - start < 25
    # The device is whole: nothing of the lost step still runs on it.
    torch.ones(1, device="cuda").sum().item()
