"""On a GPU: kernels, graphs and overlap give what the references and transformers give."""

import numpy as np
import pytest
import torch
from tiny import FAMILIES, prompts, request, run, start

from limelight.checkpoint import BUNDLED_DRAFTERS, BUNDLED_NAMES
from limelight.ops import use_reference
from limelight.rl.mxfp8 import fake_quantized
from limelight.rl.routing import array
from limelight.speculative import NO_DRAFTS

pytestmark = pytest.mark.gpu
WIDTHS = {
    "flint": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "sliding_window": 513, "moe_intermediate_size": 512, "num_experts": 64,
        "num_experts_per_tok": 6, "shared_expert_intermediate_size": 1024,
        "max_position_embeddings": 4096,
    },
    "beam": {
        "hidden_size": 5120, "intermediate_size": 4096, "num_hidden_layers": 6,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 512, "moe_intermediate_size": 320, "num_experts": 64,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "max_position_embeddings": 4096,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=["flint", "beam"])
def real(request, tmp_path_factory):
    """A checkpoint of real widths and few layers, and the model of transformers, in BF16."""
    folder = tmp_path_factory.mktemp(request.param)
    base, config_class, model_class = FAMILIES[request.param]
    config = config_class(**(base | WIDTHS[request.param]))
    with torch.device("cuda"):
        model = model_class._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            mean, std = (1.0, 0.2) if "norm" in name else (0.0, 1.0 if "embed" in name else 0.02)
            tensor.normal_(mean, std, generator=generator)
    model.eval().save_pretrained(folder)
    return folder, model


def engine(folder, *, dtype="bfloat16", **config):
    return start(folder, device="cuda", dtype=dtype, kv_cache_memory_bytes=2**27, **config)


@torch.no_grad()
def theirs(model, ids):
    """The log-probability of each token after the first."""
    logits = model(torch.tensor([ids], device="cuda")).logits[0].float()
    chosen = torch.tensor(ids, device="cuda")[1:, None]
    return torch.log_softmax(logits, dim=-1)[:-1].gather(1, chosen)[:, 0]


def ours(answer):
    reports = [*answer.prompt_logprobs[1:], *answer.logprobs]
    return torch.tensor([report.logprob for report in reports], device="cuda")


def test_prompts_and_answers_are_as_likely_as_transformers_says(real):
    """No further from FP32 than transformers or the references are."""
    folder, model = real
    served = engine(folder, max_num_batched_tokens=600)
    lengths = (1, 40, 1300, 600)
    asked = [request(p, max_tokens=24, prompt_logprobs=0) for p in prompts(*lengths)]
    answers = run(served, asked)
    texts = [one.prompt_token_ids + a.token_ids for one, a in zip(asked, answers, strict=True)]
    exact = [theirs(model.float(), ids) for ids in texts]
    rounded = [theirs(model.bfloat16(), ids) for ids in texts]
    again = [request(ids[:-1], max_tokens=1, prompt_logprobs=0) for ids in texts]
    with use_reference():
        # Without the one token that each makes beyond its text.
        plain = [ours(answer)[:-1] for answer in run(served, again)]

    def distance(found):
        pairs = zip(found, exact, strict=True)
        return torch.cat([(x - right[: len(x)]).abs() for x, right in pairs]).mean().item()

    kernels, peer, references = (
        distance(found) for found in ([ours(answer) for answer in answers], rounded, plain)
    )
    print(f"from FP32: kernels {kernels:.5f}, transformers {peer:.5f}, references {references:.5f}")
    assert kernels < 1.2 * min(peer, references) + 1e-3


def test_answers_by_mxfp8_are_as_likely_as_transformers_says_that_rounds_alike(real):
    """A number between two codes may fall to either, so rounding differs more than in BF16; least
    so for the references, which multiply and add as transformers does."""
    folder, model = real
    model.set_experts_implementation("grouped_mm")
    served = engine(folder, max_num_batched_tokens=600, quantization="mxfp8")
    assert served.runner.graphs
    asked = [request(p, max_tokens=24, prompt_logprobs=0) for p in prompts(1, 40, 1300, 600)]
    answers = run(served, asked)
    texts = [one.prompt_token_ids + a.token_ids for one, a in zip(asked, answers, strict=True)]
    with fake_quantized(model):
        rounded = [theirs(model.bfloat16(), ids) for ids in texts]
    with use_reference():
        again = [request(ids[:-1], max_tokens=1, prompt_logprobs=0) for ids in texts]
        plain = [ours(answer)[:-1] for answer in run(served, again)]
    unrounded = [theirs(model, ids) for ids in texts]
    kernels, references, none = (
        torch.cat([(x - y[: len(x)]).abs() for x, y in zip(found, rounded, strict=True)]).mean()
        for found in ([ours(answer) for answer in answers], plain, unrounded)
    )
    print(f"from transformers: kernels {kernels:.5f}, references {references:.5f}, {none:.5f}")
    # Texts of few tokens: of Beam's the references themselves are 0.85 times as far as unrounded.
    assert kernels < 1.5 * references + 1e-3 and kernels < 0.9 * none


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_plain_graphed_and_overlapped_steps_give_the_same_tokens(name):
    # All prompts in one step: the last tokens of a chunked one may go through another kernel in a
    # graph, which rounds otherwise.
    settings = {
        "max_num_batched_tokens": 256, "max_num_seqs": 8, "speculative_config": NO_DRAFTS
    }  # fmt: skip
    plain = engine(name, enforce_eager=True, async_scheduling=False, **settings)
    graphed = engine(name, async_scheduling=False, **settings)
    overlapped = engine(name, **settings)
    assert overlapped.overlap and graphed.runner.graphs and not plain.runner.graphs
    for seed, params in ((1, {}), (2, {"temperature": 0.8}), (3, {"temperature": 1, "top_p": 0.9})):
        answers = []
        for served in (plain, graphed, overlapped):
            # Eight of one length each fill every step in the same way.
            asked = [
                request(p, max_tokens=90, seed=i, logprobs=None, **params)
                for i, p in enumerate(prompts(*[30] * 8, seed=seed))
            ]
            answers.append([answer.token_ids for answer in run(served, asked)])
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", sorted(BUNDLED_DRAFTERS))
def test_drafts_give_the_likeliest_tokens_by_step_by_graph_and_overlapped(name, method, adaptive):
    settings = {"dtype": "float32", "max_num_batched_tokens": 128, "max_num_seqs": 8}
    plain = engine(name, speculative_config=NO_DRAFTS, **settings)
    for how in ({"enforce_eager": True}, {"async_scheduling": False}, {}):
        served = engine(name, speculative_config=drafted(name, method, adaptive), **settings, **how)
        for params in ({}, {"temperature": 0.7, "top_k": 1}, {"temperature": 0.7, "top_p": 1e-4}):
            assert max(behind_the_best(plain, served, **params)) < 0.01  # but for near ties
        stats = served.stats().speculation
        assert 0 < stats.accepted <= stats.verified
        served.close()
    plain.close()


@pytest.mark.parametrize("name", sorted(BUNDLED_DRAFTERS))
def test_drafts_give_likely_tokens_in_bfloat16(name):
    """A token that goes to another expert by rounding can be far behind, by plain steps too."""
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
    plain = engine(name, speculative_config=NO_DRAFTS, **settings)
    served = engine(name, speculative_config=drafted(name, "greedy", adaptive=False), **settings)
    behind = behind_the_best(plain, served)
    assert sum(behind) / len(behind) < 0.05


def drafted(name, method, adaptive):
    return {
        "model": BUNDLED_DRAFTERS[name], "enable_adaptive_verification": adaptive,
        "draft_sample_method": method,
    }  # fmt: skip


def behind_the_best(plain, served, **params):
    """How much likelier the likeliest token was, by `plain`, than each that `served` gave."""
    asked = [request(p, max_tokens=60, logprobs=None, **params) for p in prompts(*[30] * 8)]
    found = []
    for one, answer in zip(asked, run(served, asked), strict=True):
        text = one.prompt_token_ids + answer.token_ids
        read = run(plain, [request(text, max_tokens=1, prompt_logprobs=1)])[0]
        reports = read.prompt_logprobs[len(one.prompt_token_ids) :]
        assert [report.token_id for report in reports] == answer.token_ids
        found += [report.top[0][1] - report.logprob for report in reports]
    return found


def test_a_long_run_takes_no_more_memory():
    served = engine("flint-nano", max_num_seqs=16)
    figures = []
    for seed in range(4):
        asked = [
            request(p, max_tokens=120, logprobs=None) for p in prompts(*range(5, 200, 9), seed=seed)
        ]
        run(served, asked)
        torch.cuda.synchronize()
        figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert figures[-1] == figures[1]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_where_batches_must_not_matter_they_change_no_bit(real, graphs):
    """Alone, together, in chunks, behind a cached beginning: logits and experts."""
    folder = real[0]
    options = {
        "device": "cuda", "dtype": "bfloat16", "batch_invariant": True,
        "logprobs_mode": "raw_logits", "enable_return_routed_experts": True,
        "kv_cache_memory_bytes": 2**27, "max_model_len": 2048, "enforce_eager": not graphs,
    }  # fmt: skip
    head, *tails = prompts(700, 1, 40, 17, 90)
    asked = [request([*head[: 200 * i], *tail], max_tokens=20) for i, tail in enumerate(tails)]
    single = start(folder, max_num_seqs=1, enable_prefix_caching=False, **options)
    expected = [run(single, [one])[0] for one in asked]
    single.close()
    engine = start(folder, max_num_seqs=16, max_num_batched_tokens=160, **options)
    for _ in range(2):
        again = [request(one.prompt_token_ids, max_tokens=20) for one in asked]
        for got, want in zip(run(engine, again), expected, strict=True):
            assert got.token_ids == want.token_ids and got.logprobs == want.logprobs
            assert got.last.routed_experts == want.last.routed_experts
    assert engine.stats().prefix_hits > 0
    engine.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_experts_are_told_alike_from_graphs_and_without(real, graphs):
    """Rows of every step, distinct, and those of the kernels that ran: a repeat has the same."""
    folder = real[0]
    engine = start(
        folder, device="cuda", dtype="bfloat16", enable_return_routed_experts=True,
        kv_cache_memory_bytes=2**27, max_model_len=2048, enforce_eager=not graphs,
        max_num_batched_tokens=256,
    )  # fmt: skip
    shape = WIDTHS["flint" if "flint" in str(folder) else "beam"]
    for _ in range(2):
        asked = [
            request(text, max_tokens=30, logprobs=None, routed_experts_prompt_start=start)
            for text, start in zip(prompts(5, 300, 700), (0, 100, 700), strict=True)
        ]
        for one, answer in zip(asked, run(engine, asked), strict=True):
            rows = array(answer.last.routed_experts)
            first = one.params.routed_experts_prompt_start
            assert len(rows) == len(one.prompt_token_ids) - first + 30 - 1
            sparse = rows[:, 3:]
            assert rows.max() < shape["num_experts"]
            ordered = np.sort(sparse, axis=-1)
            assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert engine.stats().prefix_hits > 0
    engine.close()
