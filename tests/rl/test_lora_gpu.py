"""On a GPU: adapters in graphs, drafts and overlapped steps, and how far they are from FP32."""

import json
from dataclasses import replace

import pytest
import torch
from adapter_files import write_whole
from safetensors.torch import load_file
from tiny import FAMILIES, prompts, request, run, start

from limelight.ops import use_reference
from limelight.speculative import NO_DRAFTS
from limelight.types import LoRARequest

pytestmark = pytest.mark.gpu
WIDTHS = {
    "flint": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "sliding_window": 513, "moe_intermediate_size": 512, "num_experts": 64,
        "num_experts_per_tok": 6, "shared_expert_intermediate_size": 1024,
        "max_position_embeddings": 4096,
    },
    "beam": {
        "hidden_size": 5120, "intermediate_size": 4096, "num_hidden_layers": 5,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 512, "moe_intermediate_size": 320, "num_experts": 64,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "max_position_embeddings": 4096,
    },
}  # fmt: skip
NAMES = ("flint-nano", "beam-nano", "flint-nano-nvfp4", "beam-nano-nvfp4")


def engine(folder, **config):
    settings = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**27, "enable_lora": True} | config
    return start(folder, device="cuda", **settings)


def load(served, folders):
    for number, folder in enumerate(folders, 1):
        served.load_adapter(LoRARequest(f"{number}", number, str(folder)))


def asked(prompt, number, **params):
    return replace(request(prompt, **params), adapter_id=number)


@pytest.mark.parametrize("name", NAMES)
def test_plain_graphed_and_overlapped_steps_with_adapters_give_the_same_tokens(name, tmp_path):
    # All prompts in one step: see the same without adapters.
    settings = {
        "max_num_batched_tokens": 256, "max_num_seqs": 8, "speculative_config": NO_DRAFTS,
        "max_loras": 2,
    }  # fmt: skip
    folders = [write_whole(tmp_path / f"{seed}", name, seed=seed) for seed in (1, 2)]
    hows = ({"enforce_eager": True, "async_scheduling": False}, {"async_scheduling": False}, {})
    answers = []
    for how in hows:
        served = engine(name, **settings, **how)
        load(served, folders)
        cases = [
            asked(p, i % 3, max_tokens=60, logprobs=None) for i, p in enumerate(prompts(*[30] * 8))
        ]
        answers.append([answer.token_ids for answer in run(served, cases)])
        served.close()
    assert answers[0] == answers[1] == answers[2]
    assert len(set(map(tuple, answers[0]))) > 3


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_drafts_beside_adapters_give_the_likeliest_tokens(name, tmp_path):
    folder = write_whole(tmp_path / "own", name, seed=1, scale=0.02)
    served = engine(name, max_num_batched_tokens=128, max_num_seqs=8)
    plain = engine(name, max_num_batched_tokens=128, max_num_seqs=8, speculative_config=NO_DRAFTS)
    for one in (served, plain):
        load(one, [folder])
    cases = [
        asked(p, i % 2, max_tokens=60, logprobs=None) for i, p in enumerate(prompts(*[30] * 8))
    ]
    for one, answer in zip(cases, run(served, cases), strict=True):
        text = one.prompt_token_ids + answer.token_ids
        again = asked(text, one.adapter_id, max_tokens=1, prompt_logprobs=1)
        reports = run(plain, [again])[0].prompt_logprobs[len(one.prompt_token_ids) :]
        assert max(report.top[0][1] - report.logprob for report in reports) < 0.2
    assert served.stats().speculation.accepted > 0


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_where_batches_must_not_matter_adapters_change_no_bit(name, tmp_path):
    folders = [write_whole(tmp_path / f"{seed}", name, seed=seed) for seed in (1, 2)]
    settings = {
        "batch_invariant": True, "merge_lora_experts": True, "logprobs_mode": "raw_logits",
        "speculative_config": NO_DRAFTS,
    }  # fmt: skip
    cases = [asked(p, i % 3, max_tokens=20) for i, p in enumerate(prompts(5, 40, 130, 30, 9, 70))]
    answers = []
    for how in ({"max_num_seqs": 1, "enable_prefix_caching": False}, {"max_num_seqs": 8}):
        served = engine(name, max_num_batched_tokens=64, **settings, **how)
        load(served, folders)
        apart = [[one] for one in cases] if how["max_num_seqs"] == 1 else [cases]
        answers.append([answer for part in apart for answer in run(served, part)])
        served.close()
    for alone, together in zip(*answers, strict=True):
        assert (alone.token_ids, alone.logprobs) == (together.token_ids, together.logprobs)


def fold(model, folder):
    """The model of transformers with an adapter within its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale, rank = config["lora_alpha"] / config["r"], config["r"]
    tensors = load_file(folder / "adapter_model.safetensors", device="cuda")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            if ".mlp.experts" not in path:
                model.get_submodule(path).weight += scale * b @ a
                continue
            experts = model.get_submodule(path.removesuffix(".base_layer"))
            count = len(experts.down_proj)
            weight = experts.gate_up_proj if path.endswith(".base_layer") else experts.down_proj
            b = b.unflatten(1, (rank, count)).permute(2, 0, 1)
            weight += scale * b @ a.unflatten(0, (count, rank))


@torch.no_grad()
def theirs(model, ids):
    logits = model(torch.tensor([ids], device="cuda")).logits[0].float()
    chosen = torch.tensor(ids, device="cuda")[1:, None]
    return torch.log_softmax(logits, dim=-1)[:-1].gather(1, chosen)[:, 0]


@pytest.mark.parametrize("lora_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["flint", "beam"])
def test_adapters_are_no_further_from_fp32_than_the_references(family, lora_dtype, tmp_path):
    base, config_class, model_class = FAMILIES[family]
    config = config_class(**(base | WIDTHS[family]))
    with torch.device("cuda"):
        model = model_class._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            mean, std = (1.0, 0.2) if "norm" in name else (0.0, 1.0 if "embed" in name else 0.02)
            tensor.normal_(mean, std, generator=generator)
    model.eval().save_pretrained(tmp_path / "base")
    folder = write_whole(tmp_path / "own", str(tmp_path / "base"), seed=1, scale=0.03)
    fold(model.float(), folder)
    found = {}
    for how in ("beside", "merged", "references"):
        served = engine(
            tmp_path / "base", lora_dtype=lora_dtype, merge_lora_experts=how == "merged",
            max_num_batched_tokens=600,
        )  # fmt: skip
        load(served, [folder])
        cases = [asked(p, 1, max_tokens=1, prompt_logprobs=0) for p in prompts(40, 1300, 600)]
        if how == "references":
            with use_reference():
                answers = run(served, cases)
        else:
            answers = run(served, cases)
        exact = [theirs(model, one.prompt_token_ids) for one in cases]
        ours = [[r.logprob for r in answer.prompt_logprobs[1:]] for answer in answers]
        pairs = zip(ours, exact, strict=True)
        errors = [(torch.tensor(mine, device="cuda") - other).abs() for mine, other in pairs]
        found[how] = torch.cat(errors).mean().item()
        served.close()
    print(f"{family} {lora_dtype}: mean distance from FP32 {found}")
    assert found["beside"] < 1.2 * found["references"] + 1e-3
    assert found["merged"] < 1.2 * found["references"] + 1e-3
