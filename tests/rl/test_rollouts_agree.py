"""A trainer of transformers in BF16 finds the log-probabilities of a rollout again."""

from contextlib import nullcontext

import peft
import pytest
import torch
from adapter_files import ATTENTION, PARAMETERS
from transformers import AutoModelForCausalLM

from limelight import LLM, LoRARequest, SamplingParams
from limelight.checkpoint import locate
from limelight.rl.mxfp8 import fake_quantized
from limelight.rl.replay import replay

pytestmark = pytest.mark.slow
TEXTS = ["Once upon a time", "The cat", "What is 2 + 3?", "A story about a dog"]
MOST = 0.006  # worst seen: 0.0042, without an adapter
MOST_MXFP8 = 0.03


def rollouts(name: str, adapter=None, **config):
    settings = {"speculative_config": {"num_speculative_tokens": 0}, "device": "cpu"} | config
    with LLM(
        name, dtype="bfloat16", enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs", **settings,
    ) as llm:  # fmt: skip
        params = SamplingParams(
            temperature=1.0, max_tokens=60, logprobs=0, n=4, seed=1, ignore_eos=True
        )
        return llm.generate(TEXTS, params, lora_request=adapter)


def difference(model, prompt, answer, *, replayed: bool) -> torch.Tensor:
    """|log-probability of the trainer - of the rollout| of each token of an answer."""
    ids = torch.tensor([prompt + answer.token_ids])
    rows = torch.from_numpy(answer.routed_experts).long()
    # The last token was never computed, so any experts will do.
    last = torch.arange(rows.shape[2]).expand(1, rows.shape[1], -1)
    with torch.no_grad():
        if replayed:
            with replay(model, torch.cat([rows, last])):
                logits = model(ids).logits
        else:
            logits = model(ids).logits
    trained = torch.log_softmax(logits[0].float(), dim=-1)[len(prompt) - 1 : -1]
    chosen = trained.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    told = [
        one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    return (chosen - torch.tensor(told)).abs()


def trainer(name: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        locate(name), dtype=torch.bfloat16, experts_implementation="grouped_mm"
    ).eval()


def means(name: str, model=None, adapter=None, **config) -> tuple[float, float]:
    """With replay and without, over all tokens of all answers."""
    model, answers = model or trainer(name), rollouts(name, adapter, **config)
    pairs = [(one.prompt_token_ids, each) for one in answers for each in one.outputs]
    with fake_quantized(model) if "quantization" in config else nullcontext():
        return tuple(
            torch.cat([difference(model, *pair, replayed=replayed) for pair in pairs]).mean().item()
            for replayed in (True, False)
        )


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_replay_brings_bf16_rollouts_near_and_nearer_than_without(name):
    near, without = means(name, batch_invariant=True)
    assert near < MOST and near < without


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_replay_helps_without_batch_invariance_too(name):
    near, without = means(name)
    assert near < without


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_rollouts_in_mxfp8_are_near_to_a_trainer_that_rounds_alike(name):
    """Numbers between two codes fall to either, so that they are farther apart than in BF16."""
    near, without = means(name, batch_invariant=True, quantization="mxfp8")
    print(f"{name}: {near:.5f} with replay, {without:.5f} without")
    assert near < MOST_MXFP8 and near < without


@pytest.mark.parametrize("name", ["flint-nano", "beam-nano"])
def test_replay_brings_rollouts_with_an_adapter_as_near(name, tmp_path):
    """An adapter of attention and routed experts in FP32, beside and within weights in BF16."""
    torch.manual_seed(0)
    config = {"target_modules": ATTENTION, "target_parameters": PARAMETERS}
    model = peft.get_peft_model(trainer(name), peft.LoraConfig(r=8, lora_alpha=8, **config)).eval()
    with torch.no_grad():
        for path, x in model.named_parameters():
            if "lora_B" in path:
                x.normal_(std=0.02)
    model.save_pretrained(tmp_path)
    near, without = means(
        name, model, LoRARequest("policy", 1, str(tmp_path)), batch_invariant=True,
        enable_lora=True, max_lora_rank=8, lora_dtype="float32", merge_lora_experts=True,
    )  # fmt: skip
    # Few tokens would go elsewhere.
    assert near < MOST and near < 1.02 * without
