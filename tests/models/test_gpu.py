"""On a GPU: kernels, graphs and overlap give what the references and transformers give."""

import pytest
import torch
from tiny import FAMILIES, prompts, request, run, start

from limelight.checkpoint import BUNDLED_NAMES
from limelight.ops import use_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
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


def logprobs_of(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0].float()
    return torch.log_softmax(logits, dim=-1)


def reported(reports):
    return torch.tensor([report.logprob for report in reports], device="cuda")


def distance(first, second):
    return (first - second).abs().mean().item()


def engine(folder, **config):
    return start(folder, device="cuda", dtype="bfloat16", kv_cache_memory_bytes=2**30, **config)


def test_prompts_and_answers_are_as_likely_as_transformers_says(real):
    folder, model = real
    served = engine(folder, max_num_batched_tokens=600)
    asked = [
        request(prompt, max_tokens=24, prompt_logprobs=0) for prompt in prompts(1, 40, 1300, 600)
    ]
    answers = run(served, asked)
    exact = model.float()
    rows = []
    for one, answer in zip(asked, answers, strict=True):
        ids = one.prompt_token_ids + answer.token_ids
        right = logprobs_of(exact, ids)[:-1].gather(1, torch.tensor(ids, device="cuda")[1:, None])
        ours = reported([*answer.prompt_logprobs[1:], *answer.logprobs])
        rows.append((ids, right[:, 0], ours))
    model.bfloat16()
    ours_off, theirs_off, apart = [], [], []
    for ids, right, ours in rows:
        theirs = logprobs_of(model, ids)[:-1]
        theirs = theirs.gather(1, torch.tensor(ids, device="cuda")[1:, None])[:, 0]
        ours_off.append((ours - right).abs())
        theirs_off.append((theirs - right).abs())
        apart.append((ours - theirs).abs())
    ours_mean, theirs_mean, between = (
        torch.cat(x).mean().item() for x in (ours_off, theirs_off, apart)
    )
    print(f"from FP32: ours {ours_mean:.5f}, theirs {theirs_mean:.5f}; apart {between:.5f}")
    assert ours_mean < 1.2 * theirs_mean + 1e-3


def test_kernels_agree_with_references(real):
    folder, _ = real
    asked = [request(prompt, max_tokens=1, prompt_logprobs=0) for prompt in prompts(3, 700, 90)]
    served = engine(folder)
    with_kernels = run(served, asked)
    again = [request(one.prompt_token_ids, max_tokens=1, prompt_logprobs=0) for one in asked]
    with use_reference():
        plain = run(served, again)
    for ours, theirs in zip(with_kernels, plain, strict=True):
        first, second = (reported(x.prompt_logprobs[1:]) for x in (ours, theirs))
        assert distance(first, second) < 0.03


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_plain_graphed_and_overlapped_steps_give_the_same_tokens(name):
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    plain = engine(name, enforce_eager=True, async_scheduling=False, **settings)
    graphed = engine(name, async_scheduling=False, **settings)
    overlapped = engine(name, **settings)
    assert overlapped.overlap and graphed.runner.graphs and not plain.runner.graphs
    for seed, temperature in ((1, 0.0), (2, 0.8)):
        answers = []
        for served in (plain, graphed, overlapped):
            # Eight of one length each fill every step in the same way.
            asked = [
                request(p, max_tokens=90, temperature=temperature, seed=i, logprobs=None)
                for i, p in enumerate(prompts(*[30] * 8, seed=seed))
            ]
            answers.append([answer.token_ids for answer in run(served, asked)])
        assert answers[0] == answers[1] == answers[2]


def test_a_long_run_takes_no_more_memory():
    served = engine("flint-nano", max_num_seqs=16)
    figures = []
    for seed in range(4):
        asked = [
            request(p, max_tokens=120, logprobs=None)
            for p in prompts(*range(5, 200, 9), seed=seed)
        ]
        run(served, asked)
        torch.cuda.synchronize()
        figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert figures[-1] == figures[1]
