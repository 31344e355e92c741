"""DAPO on a served model: a trainer of a policy that is small enough to read.

    python examples/rl/dapo.py flint-nano --steps 50

starts `limelight serve` (or takes the one at --url), and for each step asks it for answers to sums,
keeps the groups in which some answers are right and some are not, trains transformers' model on
them with the experts that the answers' tokens went to, and sends the new weights. Flags that are
not known here go to the server. In --out: log.jsonl, a line a step; rewards.png; model/.

On a GPU the trainer has the first one, and the server the second.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from objective import advantages, dapo_loss, sample_informative, soft_punishment
from rollouts import Question, Rollout, Server, Sums, rollout
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from limelight.bench import record
from limelight.checkpoint import locate
from limelight.rl.replay import replay, routers
from limelight.rl.sender import WeightSender

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may choose; the defaults are for the bundled models."""

    url: str | None = None
    out: Path = Path("dapo")
    json: Path | None = None
    device: str = "cpu"
    dtype: str = "bfloat16"
    seed: int = 0
    steps: int = 50
    # A step: so many groups of so many answers, learned from in so many updates.
    groups: int = 16
    samples: int = 8
    updates: int = 2
    max_draws: int = 30
    held_out: int = 64
    max_tokens: int = 16
    temperature: float = 1.0
    overlong_buffer: int = 4
    overlong_filter: int = 1
    lr: float = 1e-4
    warm_up: int = 5
    weight_decay: float = 0.1
    max_norm: float = 1.0
    importance_cap: float = 2.0
    lora: int = 0  # rank of adapters; 0: all weights


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers as the trainer reads them, padded to the right. Of B sequences of S tokens:

    those that count [B, S - 1] (entry i is of token i + 1), their log-probabilities as sampled, and
    the experts [B, S, layers, chosen] of each token.
    """

    tokens_BS: torch.Tensor
    counts_BS: torch.Tensor
    sampled_BS: torch.Tensor
    ids_BSLN: torch.Tensor
    advantages_B: torch.Tensor

    @classmethod
    def of(cls, groups: list[list[Rollout]], settings: Settings, num_chosen: int) -> "Batch":
        rollouts = [one for group in groups for one in group]
        lengths = [len(one.question.token_ids) + len(one.token_ids) for one in rollouts]
        B, S, L = len(rollouts), max(lengths), rollouts[0].routed.shape[1]
        tokens_BS = torch.zeros(B, S, dtype=torch.long)
        counts_BS, sampled_BS = torch.zeros(B, S - 1, dtype=torch.bool), torch.zeros(B, S - 1)
        # Any distinct ids for padding and for the last token, which no one has computed.
        ids_BSLN = torch.arange(num_chosen).expand(B, S, L, -1).clone()
        for b, (one, length) in enumerate(zip(rollouts, lengths, strict=True)):
            tokens_BS[b, :length] = torch.tensor(one.question.token_ids + one.token_ids)
            answer = slice(len(one.question.token_ids) - 1, length - 1)
            counts_BS[b, answer] = not (settings.overlong_filter and one.truncated)
            sampled_BS[b, answer] = torch.tensor(one.logprobs)
            ids_BSLN[b, : length - 1] = torch.from_numpy(one.routed.astype("int64"))
        made = (tokens_BS, counts_BS, sampled_BS, ids_BSLN, advantages(groups))
        return cls(*(x.to(settings.device) for x in made))

    def part(self, rows: torch.Tensor) -> "Batch":
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))


class Trainer:
    """The model, in the precision that is served, and AdamW over FP32 copies of what it trains."""

    def __init__(self, model: nn.Module, settings: Settings):
        self.model, self.settings = model, settings
        self.num_chosen = next(iter(routers(model).values())).top_k
        self.trained = [x for x in model.parameters() if x.requires_grad]
        self.copies = [x.detach().float().clone() for x in self.trained]
        self.adamw = torch.optim.AdamW(
            self.copies, lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.warm_up = torch.optim.lr_scheduler.LambdaLR(
            self.adamw, lambda step: min(1.0, (step + 1) / max(1, settings.warm_up))
        )

    def logprobs(self, batch: Batch, *, replayed: bool = True) -> torch.Tensor:
        """[B, S - 1]: of each token after the first, at the temperature of sampling."""
        # Padding is to the right and attention causal, so no mask is needed.
        if replayed:
            with replay(self.model, batch.ids_BSLN.flatten(0, 1)):
                logits_BSV = self.model(batch.tokens_BS, use_cache=False).logits
        else:
            logits_BSV = self.model(batch.tokens_BS, use_cache=False).logits
        scaled_BSV = logits_BSV[:, :-1].float() / self.settings.temperature
        return scaled_BSV.log_softmax(-1).gather(2, batch.tokens_BS[:, 1:, None])[..., 0]

    def learn(self, batch: Batch) -> Row:
        """Make the updates of a step; returns what is logged of them."""
        with torch.no_grad():
            old_BS, own_BS = self.logprobs(batch), self.logprobs(batch, replayed=False)
        replayed, own = ((x - batch.sampled_BS)[batch.counts_BS].abs() for x in (old_BS, own_BS))
        # From what sampled the tokens to the policy of the trainer before this step.
        cap = self.settings.importance_cap
        weights_BS = (old_BS - batch.sampled_BS).exp().clamp(max=cap)
        losses, norms = [], []
        rows = torch.randperm(len(old_BS)).to(old_BS.device)
        for part in rows.chunk(self.settings.updates):
            these = batch.part(part)
            loss = dapo_loss(
                self.logprobs(these), old_BS[part], these.advantages_B, these.counts_BS,
                weights_BS=weights_BS[part],
            )  # fmt: skip
            loss.backward()
            losses.append(loss.item())
            norms.append(self._step())
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "replayed_abs_diff": replayed.mean().item(),
            "own_abs_diff": own.mean().item(),
        }

    def _step(self) -> float:
        for copy, x in zip(self.copies, self.trained, strict=True):
            copy.grad, x.grad = None if x.grad is None else x.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.copies, self.settings.max_norm)
        self.adamw.step()
        self.warm_up.step()
        with torch.no_grad():
            for copy, x in zip(self.copies, self.trained, strict=True):
                x.copy_(copy)
        return float(norm)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the server gets: all weights, adapters added to those that they adapt."""
        layers = dict(self.model.named_modules())
        for name, x in self.model.named_parameters():
            if "lora_" in name:
                continue
            layer = layers[name.rpartition(".base_layer.")[0]] if ".base_layer." in name else None
            if layer is not None and name.endswith(".weight"):
                x = (x.float() + layer.get_delta_weight("default").float()).to(x.dtype)
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), x


def load(model: str, settings: Settings) -> nn.Module:
    """transformers' model; with adapters on attention and MLPs that are no experts, if asked for.

    Adapters are sent as weights: the server needs no flags for them.
    """
    torch.manual_seed(settings.seed)
    kind = getattr(torch, settings.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(locate(model), dtype=kind).to(settings.device)
    if not settings.lora:
        return loaded
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SystemExit("--lora needs peft: pip install peft") from error
    linear = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    return get_peft_model(
        loaded, LoraConfig(r=settings.lora, lora_alpha=settings.lora, target_modules=linear)
    )


class Run:
    """A server, a trainer and the questions between them."""

    def __init__(self, server: Server, trainer: Trainer, sums: Sums):
        self.server, self.trainer, self.sums = server, trainer, sums
        self.settings, self.num_asked = trainer.settings, 0

    def draw(self) -> list[list[Rollout]]:
        """As many groups as a step has, of new questions."""
        settings = self.settings
        questions = self.sums.draw(settings.groups)
        choices = self.server.generate(
            questions, n=settings.samples, temperature=settings.temperature,
            max_tokens=settings.max_tokens, seed=settings.seed + self.num_asked,
        )  # fmt: skip
        self.num_asked += settings.groups * settings.samples
        return [
            [rollout(question, one, self._reward(question, one)) for one in group]
            for question, group in zip(questions, choices, strict=True)
        ]

    def _reward(self, question: Question, choice: dict) -> float:
        ids, settings = choice["token_ids"], self.settings
        right = choice["finish_reason"] == "stop" and self.sums.is_right(question, ids)
        return float(right) + soft_punishment(
            len(ids), max_tokens=settings.max_tokens, buffer=settings.overlong_buffer
        )

    def score(self) -> float:
        """The share of held-out questions that greedy answers get right."""
        questions = self.sums.held_out
        choices = self.server.generate(
            questions, temperature=0.0, max_tokens=self.settings.max_tokens
        )
        right = [self.sums.is_right(q, one["token_ids"]) for q, [one] in zip(questions, choices)]  # noqa: B905
        return sum(right) / len(right)

    def step(self) -> Row:
        """Rollouts and updates; the server has the old weights still."""
        began = time.perf_counter()
        kept, drawn = sample_informative(
            self.draw, wanted=self.settings.groups, max_draws=self.settings.max_draws
        )
        rewards = [one.reward for group in drawn for one in group]
        rolled = time.perf_counter()
        told = self.trainer.learn(Batch.of(kept, self.settings, self.trainer.num_chosen))
        return {
            "reward": sum(rewards) / len(rewards),
            "groups_drawn": len(drawn),
            "truncated": sum(one.truncated for group in drawn for one in group) / len(rewards),
            "tokens": sum(len(one.token_ids) for group in drawn for one in group) / len(rewards),
            **told,
            "rollout_s": rolled - began,
            "train_s": time.perf_counter() - rolled,
        }


def train(model: str, settings: Settings, flags: list[str]) -> list[Row]:
    """Train for all steps and write what there is to keep; returns the log."""
    trainer = Trainer(load(model, settings), settings)
    tokenizer = AutoTokenizer.from_pretrained(locate(model))
    sums = Sums(tokenizer, seed=settings.seed, num_held_out=settings.held_out)
    settings.out.mkdir(parents=True, exist_ok=True)
    device, rows = settings.device, []
    backend = "gloo" if device == "cpu" else "nccl"
    served = Server(settings.url, model, device=device, dtype=settings.dtype, flags=flags)
    with served as server, WeightSender(server.url, backend=backend, device=device) as sender:
        run = Run(server, trainer, sums)
        with (settings.out / "log.jsonl").open("w") as log:
            for step in range(settings.steps + 1):
                row: Row = {"step": step}
                if step in (0, settings.steps):
                    row["held_out_score"] = run.score()
                if step < settings.steps:
                    row |= run.step()
                    began = time.perf_counter()
                    sender.send(trainer.tensors(), version=str(step + 1))
                    row["send_s"] = time.perf_counter() - began
                rows.append({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
                print(json.dumps(rows[-1]), file=log, flush=True)
                print("  ".join(f"{k} {v:.4g}" for k, v in rows[-1].items()), flush=True)
    keep = getattr(trainer.model, "merge_and_unload", lambda: trainer.model)()
    keep.save_pretrained(settings.out / "model")
    tokenizer.save_pretrained(settings.out / "model")
    return rows


def plot(path: Path, title: str, rows: list[Row]) -> None:
    """The rewards, and below them how far trainer and rollouts are apart."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path}: it needs matplotlib")
        return
    steps = [row for row in rows if "reward" in row]
    canvas = Figure(figsize=(7, 6), layout="constrained")
    above, below = canvas.subplots(2, sharex=True)
    x = [row["step"] for row in steps]
    above.plot(x, [row["reward"] for row in steps], label="reward, all answers")
    scored = [row for row in rows if "held_out_score" in row]
    above.plot(
        [row["step"] for row in scored], [row["held_out_score"] for row in scored], "o",
        label="greedy, held-out sums",
    )  # fmt: skip
    above.set(title=title, ylabel="share that is right")
    below.plot(x, [row["own_abs_diff"] for row in steps], label="the trainer's own experts")
    below.plot(x, [row["replayed_abs_diff"] for row in steps], label="the rollouts' experts")
    below.set(xlabel="step", ylabel="mean |log-probability - rollout's|", ylim=(0, None))
    for axes in (above, below):
        axes.legend()
        axes.grid(alpha=0.3)
    canvas.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="flint-nano")
    kinds = {"url": str, "out": Path, "json": Path}
    for field in fields(Settings):
        kind = kinds.get(field.name) or type(field.default)
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=kind, default=field.default)
    args, flags = parser.parse_known_args()
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    rows = train(args.model, settings, flags)
    title = f"DAPO, {args.model}, {settings.dtype} on {settings.device}"
    plot(settings.out / "rewards.png", title, rows)
    if settings.json is not None:
        told = record.record("rl", [], rows)
        record.save(settings.json, told | {"command": shlex.join(["python", *sys.argv])})


if __name__ == "__main__":
    main()
