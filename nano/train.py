"""Train a bundled model: tokenizer, data, weights, files, scores.

`python -m nano.train flint-nano` writes into the folder that Limelight ships; a GPU is needed for
more than a rehearsal (`--device cpu --steps 3 --rows 1`).
"""

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from limelight.models.beam import Beam, BeamConfig
from limelight.models.flint import Flint, FlintConfig
from limelight.models.layers import Placement
from limelight.models.loader import find_tensors, load_weights, match_tensors
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from nano import tokenizers
from nano.attention import RowMasks, reference_batch
from nano.chat import FAMILIES, FLINT, Family
from nano.data import ROW, Rows, TrainingRows, encode_code
from nano.evaluate import score, table
from nano.experts import replace_experts
from nano.export import copy_written_files, save_weights

PEAK_RATE, WARM_UP, DECAY = 3e-3, 300, 0.4  # steps; the share of the training that decays
RESUMED_WARM_UP = 20  # steps, for the optimizer alone to find its scale
WEIGHT_DECAY, BETAS, CLIP = 0.05, (0.9, 0.95), 1.0
BALANCE_LOSS = 0.01  # Flint's
BIAS_STEP = 0.001  # Beam's (DeepSeek-V3, 2.1.2)
# Beam's residual expects embeddings of the size of its normed sublayers.
EMBEDDING_SIZE, HEAD_SIZE = {Flint: 0.3, Beam: 1.0}, 0.01
MOST_ERROR = 0.2  # of BF16 hidden states, where near ties send tokens to other experts
REPORT_EVERY, SAVE_EVERY = 100, 1000  # steps
SCORED_AT = (0.35, 0.7)  # of the training, and at its end


def build(family: Family, folder: Path, device: torch.device) -> Flint | Beam:
    """The model of the family's config.json with random weights."""
    config = json.loads((folder / "config.json").read_text())
    place = Placement(
        Mesh.single(), torch.bfloat16 if device.type == "cuda" else torch.float32, device
    )
    if family is FLINT:
        return Flint(FlintConfig.from_dict(config), place)
    return Beam(BeamConfig.from_dict(config), place)


@torch.no_grad()
def initialize(model: Flint | Beam) -> None:
    """Norms 1, per-head numbers 0, matrices so that each keeps the size of its input."""
    for name, target in model.targets.items():
        into = target.into
        assert isinstance(into, torch.Tensor)
        if into.ndim == 1:
            into.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        elif "embed_tokens" in name:
            into.normal_(0.0, EMBEDDING_SIZE[type(model)])
        elif "lm_head" in name:
            into.normal_(0.0, HEAD_SIZE)
        else:
            into.normal_(0.0, into.shape[-1] ** -0.5)
            if isinstance(model, Flint) and name.endswith(("o_proj.weight", "down_proj.weight")):
                into.mul_((2 * len(model.layers)) ** -0.5)


class Trainer:
    """A model, the FP32 copy of its weights that the optimizer moves, and how far it has come."""

    def __init__(
        self, family: Family, folder: Path, *, rows: int, device: torch.device, resume: Path | None
    ):
        self.family, self.folder, self.rows, self.device = family, folder, rows, device
        self.model = build(family, folder, device)
        initialize(self.model)
        if resume is not None:
            stored = find_tensors(resume)
            load_weights(match_tensors(stored, self.model.targets, {}, folder=resume), Progress())
        self.targets = self.model.targets
        self.sparse = replace_experts(self.model)
        # Beam's selection biases move by a rule of their own.
        named = {n: p for n, p in self.model.named_parameters() if not n.endswith("bias_E")}
        self.weights = [weight.requires_grad_(True) for weight in named.values()]
        self.masters: list[torch.Tensor] = [
            nn.Parameter(weight.detach().float().clone()) for weight in self.weights
        ]
        decays = [weight.ndim > 1 and "norm" not in name for name, weight in named.items()]
        groups = [
            {"params": [m for m, one in zip(self.masters, decays, strict=True) if one is decayed],
             "weight_decay": WEIGHT_DECAY if decayed else 0.0}
            for decayed in (True, False)
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=BETAS, fused=True)
        on_gpu = device.type == "cuda"
        windows = set(self.model.config.windows)
        self.masks = RowMasks(rows, ROW, windows, device=device) if on_gpu else None
        self.loss = torch.compile(self._loss) if on_gpu else self._loss
        self.hidden = torch.compile(self.model.forward) if on_gpu else self.model.forward

    def batch(self, starts_BL: torch.Tensor):
        return self.masks.batch(starts_BL) if self.masks else reference_batch(starts_BL)

    @torch.no_grad()
    def check(self, rows: Rows) -> float:
        """The median distance of hidden states from the reference ops', as a share of them."""
        tokens_T, starts_BL = (
            x.to(self.device) for x in (rows.tokens_BL.flatten(), rows.starts_BL)
        )
        right_TD = self.model(tokens_T, reference_batch(starts_BL)).float()
        found_TD = self.hidden(tokens_T, self.batch(starts_BL)).float()
        errors_T = (found_TD - right_TD).norm(dim=-1) / right_TD.norm(dim=-1)
        return errors_T.median().item()

    def _loss(self, tokens_T, weights_T, batch):
        """Weighted mean over tokens, how unevenly experts are used, and their load [layers, E]."""
        hidden_TD = self.model(tokens_T, batch)
        logits_TV = self.model.logits(hidden_TD)
        losses_T = F.cross_entropy(logits_TV, tokens_T.roll(-1), reduction="none")
        counts_T = weights_T.roll(-1)
        loss = (losses_T * counts_T).sum() / counts_T.sum()
        imbalance = torch.stack([one.experts.imbalance for one in self.sparse]).mean()
        return loss, imbalance, torch.stack([one.experts.load_E.detach() for one in self.sparse])

    def step(self, rows: Rows, rate: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One update; returns loss, imbalance and load, still on the device."""
        tokens_T = rows.tokens_BL.to(self.device, non_blocking=True).flatten()
        weights_T = rows.weights_BL.to(self.device, non_blocking=True).flatten()
        batch = self.batch(rows.starts_BL.to(self.device, non_blocking=True))
        loss, imbalance, load = self.loss(tokens_T, weights_T, batch)
        (loss + BALANCE_LOSS * imbalance if self.family is FLINT else loss).backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
            if self.family is not FLINT:
                for feed_forward, load_E in zip(self.sparse, load, strict=True):
                    feed_forward.bias_E += BIAS_STEP * torch.sign(1 / len(load_E) - load_E)
        return loss.detach(), imbalance.detach(), load

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy answers, up to and with a stop token; the whole text again for each token."""
        stops = set(json.loads((self.folder / "config.json").read_text())["eos_token_id"])
        answers: list[list[int]] = [[] for _ in prompts]
        open_ = list(range(len(prompts)))
        for _ in range(max_tokens):
            texts = [prompts[i] + answers[i] for i in open_]
            for i, token in zip(open_, self._next_tokens(texts), strict=True):
                answers[i].append(token)
            open_ = [i for i in open_ if answers[i][-1] not in stops]
            if not open_:
                break
        return answers

    def _next_tokens(self, texts: list[list[int]]) -> list[int]:
        found = []
        length = ROW if self.masks else max(map(len, texts))
        for tokens_BL, starts_BL, ends in _packed(texts, self.rows, length):
            batch = self.batch(starts_BL.to(self.device))
            hidden_TD = self.hidden(tokens_BL.to(self.device).flatten(), batch)
            found += self.model.logits(hidden_TD[ends]).argmax(dim=-1).tolist()
        return found

    @torch.no_grad()
    def code_loss(self, files: list[np.ndarray]) -> float:
        """Nats a token on held-out code, in rows of its own."""
        tokens = torch.cat([torch.from_numpy(one.astype("int64")) for one in files])
        tokens = tokens[: len(tokens) // ROW * ROW].unflatten(0, (-1, ROW))
        sums = []
        for part in tokens.split(self.rows)[: 8 if self.masks else 1]:
            padded = F.pad(part, (0, 0, 0, self.rows - len(part)))
            hidden_TD = self.hidden(
                padded.flatten().to(self.device),
                self.batch(torch.zeros_like(padded).to(self.device)),
            )
            logits = self.model.logits(hidden_TD[: part.numel() - 1])
            sums.append(F.cross_entropy(logits, part.flatten()[1:].to(self.device)))
        return torch.stack(sums).mean().item()


def _packed(
    texts: list[list[int]], rows: int, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Batches of rows that hold the texts in order, and where in the flat batch each text ends."""

    def fresh() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        tokens, starts = torch.zeros(2, rows, length, dtype=torch.int64)
        return tokens, starts, []

    tokens, starts, ends = fresh()
    row = at = 0
    for text in texts:
        if at + len(text) > length:
            row, at = row + 1, 0
        if row == rows:
            yield tokens, starts, ends
            (tokens, starts, ends), row = fresh(), 0
        tokens[row, at : at + len(text)] = torch.tensor(text)
        starts[row, at:] = at
        at += len(text)
        starts[row, at:] = at
        ends.append(row * length + at - 1)
    yield tokens, starts, ends


@dataclass
class Schedule:
    """How far the training is: by steps, or by minutes where these run out first."""

    steps: int
    minutes: float
    started: float
    peak: float = PEAK_RATE
    first: float = 0.0  # the share of a whole training that has been done before

    def share(self, step: int) -> float:
        spent = (time.monotonic() - self.started) / (60 * self.minutes)
        return min(1.0, self.first + (1 - self.first) * max(step / self.steps, spent))

    def rate(self, step: int, share: float) -> float:
        """Linear warm-up, constant, linear decay to nothing."""
        warm_up = WARM_UP if self.first == 0.0 else RESUMED_WARM_UP
        return self.peak * min(1.0, (step + 1) / warm_up, (1 - share) / DECAY)


def train(family: Family, args: argparse.Namespace) -> None:
    folder = args.out or family.folder
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    copy_written_files(family, folder)
    if args.resume is None:
        tokenizers.train(family).save(str(folder / "tokenizer.json"))
    elif args.resume.resolve() != folder.resolve():
        shutil.copy(args.resume / "tokenizer.json", folder)
    tokenizer = tokenizers.load(folder)
    code, held_out = encode_code(tokenizer)
    share = multiprocessing.Value("d", 0.0)
    rows = TrainingRows(family, tokenizer, code, rows=args.rows, share=share, seed=args.seed)
    workers = {"num_workers": args.workers, "prefetch_factor": 4} if args.workers else {}
    batches = iter(DataLoader(rows, batch_size=None, pin_memory=device.type == "cuda", **workers))
    trainer = Trainer(family, folder, rows=args.rows, device=device, resume=args.resume)
    print(
        f"{sum(w.numel() for w in trainer.weights)} parameters, "
        f"{sum(map(len, code))} tokens of code"
    )
    error = trainer.check(next(batches))
    if error > MOST_ERROR:
        raise RuntimeError(f"hidden states differ from the reference by {error:.1%}")
    print(f"hidden states differ from the reference by {error:.2%}", flush=True)
    first = 0.0 if args.resume is None else 1.0 - DECAY
    schedule = Schedule(args.steps, args.minutes, time.monotonic(), args.rate, first)
    run(trainer, batches, share, schedule, lambda: show_scores(trainer, held_out, args.limit))
    save_weights(trainer.targets, folder)
    show_scores(trainer, held_out, args.limit)


def run(trainer: Trainer, batches, share, schedule: Schedule, show: Callable[[], None]) -> None:
    step, scored, since = 0, 0, time.monotonic()
    while (at := schedule.share(step)) < 1.0:
        share.value = at
        loss, imbalance, load = trainer.step(next(batches), schedule.rate(step, at))
        step += 1
        if step % REPORT_EVERY == 0:
            spent, since = time.monotonic() - since, time.monotonic()
            speed = REPORT_EVERY * trainer.rows * ROW / spent
            print(
                f"{trainer.family.name} {step:6} {at:6.1%} loss {loss:.3f} "
                f"imbalance {imbalance:.3f} load {load.min():.3f}-{load.max():.3f} "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )
        if step % SAVE_EVERY == 0:
            save_weights(trainer.targets, trainer.folder)
        if scored < len(SCORED_AT) and at >= SCORED_AT[scored]:
            scored += 1
            show()
            since = time.monotonic()


def show_scores(trainer: Trainer, held_out: list[np.ndarray], limit: int | None) -> None:
    started = time.monotonic()
    tokenizer = tokenizers.load(trainer.folder)
    print(table(score(trainer.family, tokenizer, trainer.generate, show=1, limit=limit)))
    loss = trainer.code_loss(held_out)
    print(
        f"held-out code: {loss:.3f} nats a token ({time.monotonic() - started:.0f} s)", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=FAMILIES)
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: where it is shipped)"
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="end sooner, after this time"
    )
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="highest learning rate")
    parser.add_argument(
        "--resume", type=Path, help="go on from this folder's weights, in the decaying part"
    )
    parser.add_argument("--rows", type=int, default=16, help=f"of {ROW} tokens, a step")
    parser.add_argument("--workers", type=int, default=7, help="processes that make data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, help="score on so many questions of each task")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(FAMILIES[args.model], args)


if __name__ == "__main__":
    main()
