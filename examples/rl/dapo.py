"""DAPO on a served model: a trainer that is small enough to read.

    python examples/rl/dapo.py flint-nano --steps 50

starts `limelight serve` (or goes to the one at --url), and at each step asks it for answers to
sums, keeps the groups that some answers are right in and some are not, trains transformers' model
on them with the experts that the answers' tokens went to, and sends the new weights. Flags that are
not known here go to the server. In --out: log.jsonl, a line a step; rewards.png; model/.
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from matplotlib.figure import Figure
from objective import advantages, dapo_loss, sample_informative, soft_punishment
from rollouts import Answer, Question, Sums, generate, post, serving, transfer_flags
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from limelight.bench import record
from limelight.checkpoint import locate
from limelight.rl.mxfp8 import fake_quantized
from limelight.rl.replay import record as record_experts
from limelight.rl.replay import replay, routers
from limelight.rl.sender import WeightSender

Sample = tuple[Question, Answer, float]  # the last is its reward
Row = dict[str, object]
ADAPTER = "policy"


@dataclass(frozen=True, slots=True)
class Batch:
    """B answers behind their prompts, padded on the right to S tokens. Counting from the second
    token, [B, S - 1]: whether it counts, and its log-probability as it was sampled."""

    tokens_BS: torch.Tensor
    counts_BS: torch.Tensor
    sampled_BS: torch.Tensor
    ids_BSLN: torch.Tensor  # experts
    advantages_B: torch.Tensor

    @classmethod
    def of(cls, groups: list[list[Sample]], args: argparse.Namespace, num_chosen: int) -> "Batch":
        samples = [one for group in groups for one in group]
        lengths = [len(asked.token_ids) + len(answer.token_ids) for asked, answer, _ in samples]
        B, S, L = len(samples), max(lengths), samples[0][1].routed.shape[1]
        tokens_BS, sampled_BS = torch.zeros(B, S, dtype=torch.long), torch.zeros(B, S - 1)
        counts_BS = torch.zeros(B, S - 1, dtype=torch.bool)
        # Any distinct ids for padding and for the last token, which no one has computed.
        ids_BSLN = torch.arange(num_chosen).expand(B, S, L, -1).clone()
        for b, ((asked, answer, _), length) in enumerate(zip(samples, lengths, strict=True)):
            at = slice(len(asked.token_ids) - 1, length - 1)
            tokens_BS[b, :length] = torch.tensor(asked.token_ids + answer.token_ids)
            sampled_BS[b, at] = torch.tensor(answer.logprobs)
            counts_BS[b, at] = args.keep_overlong or not answer.truncated
            ids_BSLN[b, : length - 1] = torch.from_numpy(answer.routed.astype("int64"))
        rewards = [[reward for _, _, reward in group] for group in groups]
        made = (tokens_BS, counts_BS, sampled_BS, ids_BSLN, advantages(rewards))
        return cls(*(x.to(args.device) for x in made))

    def rows(self, index: torch.Tensor) -> "Batch":
        return Batch(*(getattr(self, field.name)[index] for field in fields(self)))


class Trainer:
    """A model as it is served, and AdamW over FP32 copies of what is trained of it."""

    def __init__(self, name: str, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        self.args = args
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(
            locate(name), dtype=getattr(torch, args.dtype)
        ).to(args.device)
        if args.lora:
            self.model = adapted(self.model, args.lora)
        self.num_chosen = next(iter(routers(self.model).values())).top_k
        self.trained = [x for x in self.model.parameters() if x.requires_grad]
        self.copies = [x.detach().float().clone() for x in self.trained]
        self.adamw = torch.optim.AdamW(self.copies, args.lr, weight_decay=args.weight_decay)
        self.warm_up = torch.optim.lr_scheduler.LinearLR(
            self.adamw, 1 / (args.warm_up + 1), total_iters=args.warm_up
        )

    def logprobs(self, batch: Batch, *, replayed: bool = True) -> torch.Tensor:
        """[B, S - 1], of each token after the first."""
        # Attention is causal and padding on the right, so it needs no mask.
        with ExitStack() as within:
            if self.args.quantization:
                within.enter_context(fake_quantized(self.model))
            if replayed:
                within.enter_context(replay(self.model, batch.ids_BSLN.flatten(0, 1)))
            logits_BSV = self.model(batch.tokens_BS, use_cache=False).logits[:, :-1]
        logprobs_BSV = (logits_BSV.float() / self.args.temperature).log_softmax(-1)
        return logprobs_BSV.gather(2, batch.tokens_BS[:, 1:, None])[..., 0]

    def learn(self, batch: Batch) -> Row:
        """Make the updates of a step; returns what is logged of them."""
        with torch.no_grad(), record_experts(self.model) as chosen:
            old_BS, own_BS = self.logprobs(batch), self.logprobs(batch, replayed=False)
        replayed, own = ((x - batch.sampled_BS)[batch.counts_BS].abs() for x in (old_BS, own_BS))
        ids_LTN = batch.ids_BSLN.flatten(0, 1).transpose(0, 1)
        apart_LTN = [x.sort().values != ids_LTN[i].sort().values for i, x in chosen.items()]
        apart_BS = torch.stack(apart_LTN).any(-1).any(0).view_as(batch.tokens_BS)[:, :-1]
        # The old policy is the trainer's of before this step; the rollouts' may differ a little.
        weights_BS = (old_BS - batch.sampled_BS).exp().clamp(max=self.args.importance_cap)
        loss = norm = 0.0
        for index in torch.randperm(len(old_BS), device=old_BS.device).chunk(self.args.updates):
            part = batch.rows(index)
            value = dapo_loss(
                self.logprobs(part), old_BS[index], part.advantages_B, part.counts_BS,
                weights_BS[index],
            )  # fmt: skip
            value.backward()
            loss, norm = loss + value.item() / self.args.updates, max(norm, self._update())
        return {
            "abs_diff_replayed": replayed.mean().item(), "abs_diff_own": own.mean().item(),
            "routed_apart": apart_BS[batch.counts_BS].float().mean().item(),
            "loss": loss, "grad_norm": norm,
        }  # fmt: skip

    @torch.no_grad()
    def _update(self) -> float:
        for copy, x in zip(self.copies, self.trained, strict=True):
            copy.grad, x.grad = None if x.grad is None else x.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.copies, self.args.max_norm)
        self.adamw.step()
        self.warm_up.step()
        for copy, x in zip(self.copies, self.trained, strict=True):
            x.copy_(copy)
        return float(norm)


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """With adapters on attention and MLPs: in Flint dense and shared ones, while PEFT adapts the
    routed experts of Beam by these names."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SystemExit("--lora needs peft: pip install peft") from error
    linear = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=linear))


@contextmanager
def delivery(url: str, trainer: Trainer) -> Iterator[Callable[[str], None]]:
    """What makes a server have the trainer's weights, or its adapters, given their version.

    Adapters go through a folder of --out, which the server has to see.
    """
    args = trainer.args
    if args.lora:
        folder = (args.out / "adapter").resolve()

        def load(version: str) -> None:
            trainer.model.save_pretrained(folder)
            post(
                url, "/skyrl/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)}
            )

        load("0")
        yield load
    else:
        backend = "gloo" if args.device == "cpu" else "nccl"
        with WeightSender(url, backend=backend, device=args.device) as sender:
            yield lambda version: sender.send(trainer.model.named_parameters(), version=version)


class Rollouts:
    """Questions, the server's answers to them, and their rewards."""

    def __init__(self, url: str, sums: Sums, args: argparse.Namespace):
        self.url, self.sums, self.args, self.num_sampled = url, sums, args, 0
        self.model = ADAPTER if args.lora else None

    def draw(self) -> list[list[Sample]]:
        """As many groups as a step needs, of new questions."""
        args, questions = self.args, self.sums.draw(self.args.groups)
        groups = generate(
            self.url, questions, self.model, seed=args.seed + self.num_sampled, n=args.samples,
            temperature=args.temperature, max_tokens=args.max_tokens,
        )  # fmt: skip
        self.num_sampled += args.groups * args.samples
        return [
            [(asked, answer, self._reward(asked, answer)) for answer in group]
            for asked, group in zip(questions, groups, strict=True)
        ]

    def _reward(self, asked: Question, answer: Answer) -> float:
        length, limit = len(answer.token_ids), self.args.max_tokens
        punishment = soft_punishment(length, max_tokens=limit, buffer=self.args.overlong_buffer)
        return self.sums.is_right(asked, answer) + punishment

    def score(self) -> float:
        """The share of held-out questions that greedy answers get right."""
        asked, limit = self.sums.held_out, self.args.max_tokens
        told = generate(self.url, asked, self.model, seed=0, temperature=0.0, max_tokens=limit)
        right = [self.sums.is_right(*pair) for pair in zip(asked, sum(told, []), strict=True)]
        return sum(right) / len(right)


def train(name: str, args: argparse.Namespace, url: str, trainer: Trainer) -> Iterator[Row]:
    """A row of the log a step, and a last one with the score alone."""
    sums = Sums(AutoTokenizer.from_pretrained(locate(name)), args.seed, args.held_out)
    rollouts = Rollouts(url, sums, args)
    with delivery(url, trainer) as deliver:
        score = rollouts.score()
        for step in range(args.steps):
            times = [time.perf_counter()]
            kept, drawn = sample_informative(
                rollouts.draw, lambda group: [reward for _, _, reward in group],
                wanted=args.groups, max_draws=args.max_draws,
            )  # fmt: skip
            times.append(time.perf_counter())
            told = trainer.learn(Batch.of(kept, args, trainer.num_chosen))
            times.append(time.perf_counter())
            deliver(str(step + 1))
            times.append(time.perf_counter())
            samples = [one for group in drawn for one in group]
            row: Row = {"step": step} | ({} if step else {"score": score})
            row |= {
                "reward": sum(reward for *_, reward in samples) / len(samples),
                "truncated": sum(answer.truncated for _, answer, _ in samples) / len(samples),
                "groups_drawn": len(drawn), **told,
            }  # fmt: skip
            names = ("rollout_s", "train_s", "send_s")
            yield row | {n: b - a for n, a, b in zip(names, times, times[1:], strict=False)}
        yield {"step": args.steps, "score": rollouts.score()}


def plot(path: Path, title: str, rows: list[Row]) -> None:
    """Rewards, and below them how far trainer and rollouts are apart."""
    canvas = Figure(figsize=(7, 6), layout="constrained")
    above, below = canvas.subplots(2, sharex=True)
    for axes, figure, label, mark in (
        (above, "reward", "mean reward of all answers", "-"),
        (above, "score", "held-out sums that are right, greedy", "o"),
        (below, "abs_diff_own", "the trainer's own experts", "-"),
        (below, "abs_diff_replayed", "the rollouts' experts", "-"),
    ):
        having = [row for row in rows if figure in row]
        x, y = ([row[one] for row in having] for one in ("step", figure))
        axes.plot(x, y, mark, label=label)
        axes.legend()
        axes.grid(alpha=0.3)
    above.set(title=title, ylim=(0, 1))
    below.set(xlabel="step", ylabel="mean |logprob - rollout's logprob|", ylim=(0, None))
    canvas.savefig(path)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a checkpoint of Flint or Beam, or a bundled model")
    parser.add_argument("--url", help="a server that has --enable-rl, --logprobs-mode "
                        "processed_logprobs and --enable-return-routed-experts")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("dapo"))
    parser.add_argument("--json", type=Path, help="a file for the whole run")
    parser.add_argument("--device", default="cpu", help="cuda: the server has the second GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: train all weights")
    parser.add_argument("--quantization", "-q", choices=("mxfp8",),
                        help="round weights and activations on both sides")  # fmt: skip
    parser.add_argument("--keep-overlong", action="store_true", help="learn from cut answers too")
    for name, default in DEFAULTS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser


DEFAULTS: dict[str, int | float] = {
    "seed": 0, "steps": 50, "groups": 16, "samples": 8, "updates": 2, "max_draws": 30,
    "held_out": 64, "max_tokens": 16, "overlong_buffer": 4, "temperature": 1.0, "lr": 2e-4,
    "warm_up": 5, "weight_decay": 0.1, "max_norm": 1.0, "importance_cap": 2.0,
}  # fmt: skip


def delivery_flags(args: argparse.Namespace) -> list[str]:
    """By which a server takes weights, or adapts as PEFT does, to the rounding."""
    if not args.lora:
        return transfer_flags(args.device)
    return [
        "--enable-lora", "--allow-runtime-lora-updating", "--max-lora-rank", str(args.lora),
        "--lora-dtype", "float32", "--merge-lora-experts",
    ]  # fmt: skip


def main(argv: list[str]) -> None:
    args, flags = (parser := arguments()).parse_known_args(argv)
    if args.url and flags:
        parser.error(f"the server at --url has its flags already: {shlex.join(flags)}")
    if args.quantization and args.lora:
        parser.error("--lora: adapters are not quantized as the weights that they are added to are")
    if args.quantization and not args.url:
        flags += ["--quantization", args.quantization]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the server ends too
    args.out.mkdir(parents=True, exist_ok=True)
    trainer, rows = Trainer(args.model, args), []
    log = args.out / "server.log"
    flags = delivery_flags(args) + flags
    served = serving(args.model, device=args.device, dtype=args.dtype, log=log, flags=flags)
    with (
        nullcontext(args.url) if args.url else served as url,
        (args.out / "log.jsonl").open("w") as out,
    ):
        for row in train(args.model, args, url, trainer):
            rows.append({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
            print(json.dumps(rows[-1]), file=out, flush=True)
            print("  ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    plain = trainer.model.merge_and_unload() if args.lora else trainer.model
    plain.save_pretrained(args.out / "model")
    if args.json is not None:
        command = {"command": shlex.join(["python", "examples/rl/dapo.py", *argv])}
        record.save(args.json, record.record("rl", [], rows) | command)
    plot(args.out / "rewards.png", f"DAPO, {args.model}, {args.dtype}, {args.device}", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
