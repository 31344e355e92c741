"""TRL's GRPOTrainer, unmodified, on a model that Limelight serves.

    python examples/rl/grpo.py flint-nano --steps 20

starts `limelight serve`, lets TRL ask it for answers to sums (`use_vllm=True`,
`vllm_mode="server"`) and send it new weights before each step, and says what has become of both.
Flags that are not known here go to the server. It needs TRL 1.16, with vLLM up to 0.31 installed
beside it, of which TRL uses the client's side of weight transfer. In --out: log.json and model/.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from datasets import Dataset
from rollouts import Answer, Question, Sums, free_port, generate, post, serving, transfer_flags
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client
from vllm_over_gloo import over_gloo

from limelight.bench import record
from limelight.checkpoint import locate

KEPT = {
    "reward": "reward",
    "loss": "loss",
    "grad_norm": "grad_norm",
    # Of log-probabilities, the server's and the trainer's.
    "abs_diff": "sampling/sampling_logp_difference/mean",
}


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within the block, TRL's client sends weights over gloo."""
    meet = vllm_client.VLLMClient.init_communicator

    def meet_on_cpu(client: vllm_client.VLLMClient, device: object) -> None:
        meet(client, "cuda")  # The name passes TRL's check, and without an index nothing is set.

    patched = patch.object(vllm_client.VLLMClient, "init_communicator", meet_on_cpu)
    with over_gloo(vllm_client), patched:
        yield


def trainer_of(name: str, url: str, sums: Sums, args: argparse.Namespace) -> GRPOTrainer:
    """A GRPOTrainer that learns sums with the server at `url`."""
    model = AutoModelForCausalLM.from_pretrained(locate(name), dtype="float32")
    ends = model.generation_config.eos_token_id  # one, or a list
    ends = ends if isinstance(ends, list) else [ends]

    def right(completion_ids: list[list[int]], right: list[str], **_: object) -> list[float]:
        told = [Answer(ids, [], None, truncated=ids[-1] not in ends) for ids in completion_ids]
        asked = [Question([], value) for value in right]
        return [float(sums.is_right(*pair)) for pair in zip(asked, told, strict=True)]

    questions = sums.draw(args.groups * args.steps)
    rows = [
        {"prompt": [{"role": "user", "content": one.text}], "right": one.right} for one in questions
    ]
    config = GRPOConfig(
        output_dir=str(args.out), use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        vllm_group_port=free_port(), chat_template_kwargs={"enable_thinking": False},
        per_device_train_batch_size=args.groups * args.samples, num_generations=args.samples,
        max_completion_length=args.max_tokens, max_steps=args.steps, learning_rate=args.lr,
        lr_scheduler_type="constant", epsilon_high=0.28, mask_truncated_completions=True,
        seed=args.seed, bf16=args.device != "cpu", use_cpu=args.device == "cpu",
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
    )  # fmt: skip
    return GRPOTrainer(
        model, right, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=sums.tokenizer, peft_config=adapters(args.lora) if args.lora else None,
    )  # fmt: skip


def adapters(rank: int):
    """Of attention; TRL adds them to the weights that it sends."""
    from peft import LoraConfig

    linear = "q_proj k_proj v_proj o_proj".split()
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=linear)


def score(url: str, sums: Sums, args: argparse.Namespace) -> float:
    """The share of held-out sums that greedy answers of the server get right."""
    told = generate(url, sums.held_out, seed=0, temperature=0.0, max_tokens=args.max_tokens)
    right = [sums.is_right(*pair) for pair in zip(sums.held_out, sum(told, []), strict=True)]
    return sum(right) / len(right)


def train(name: str, url: str, args: argparse.Namespace) -> dict:
    """Let TRL train; the log of its steps, and the server before and after."""
    sums = Sums(AutoTokenizer.from_pretrained(locate(name)), args.seed, args.held_out)
    baseline = post(url, "/weight_checker", {"action": "checksum"})
    told = {"score_before": score(url, sums, args)}
    with on_cpu() if args.device == "cpu" else nullcontext():
        trainer = trainer_of(name, url, sums, args)
        trainer.train()
        # TRL sends weights before it asks for answers, so those of the last step have not gone yet.
        trainer.vllm_generation.sync_weights()
    changed = post(url, "/weight_checker", {"action": "compare", "baseline": baseline})
    trainer.save_model(str(args.out / "model"))
    steps = [
        {name: row[key] for name, key in KEPT.items() if key in row}
        for row in trainer.state.log_history
        if "reward" in row
    ]
    told |= {"score_after": score(url, sums, args), "tensors": len(baseline["tensors"])}
    return told | {"tensors_changed": len(changed["different"]), "steps": steps}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a checkpoint of Flint or Beam, or a bundled model")
    parser.add_argument("--out", type=Path, default=Path("grpo"))
    parser.add_argument("--device", default="cpu", help="cuda: the server has the second GPU")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: train all weights")
    for name, default in DEFAULTS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser


DEFAULTS: dict[str, int | float] = {
    "seed": 0, "steps": 20, "groups": 16, "samples": 8, "held_out": 64, "max_tokens": 16,
    "lr": 3e-4,
}  # fmt: skip


def main(argv: list[str]) -> None:
    args, flags = arguments().parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device != "cpu":
        # Else TRL's trainer would take the server's GPU too.
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    log, dtype = args.out / "server.log", "float32" if args.device == "cpu" else "bfloat16"
    flags = transfer_flags(args.device) + flags
    with serving(args.model, device=args.device, dtype=dtype, log=log, flags=flags) as url:
        told = train(args.model, url, args)
    steps = told.pop("steps")
    command = {"command": shlex.join(["python", "examples/rl/grpo.py", *argv])}
    record.save(args.out / "log.json", record.record("rl", [], steps) | command | told)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
