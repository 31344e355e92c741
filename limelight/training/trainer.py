"""Updates of a drafter's weights: AdamW on FP32 copies, at a rate that rises and then falls.

What happens in a step depends on its number and the seed alone, so a training that was saved goes
on as if it had not ended.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from limelight.models.dflash2 import DFlash2
from limelight.models.loader import Model
from limelight.training.lessons import Lesson, Lessons
from limelight.training.loss import Loss, Rows, Teacher, block_loss
from limelight.training.settings import DraftSettings

WARM_UP, CLIP = 0.04, 1.0  # the warm-up as a share of the steps
MATRIX_DECAY, OTHER_DECAY = 0.1, 0.01
BETAS = (0.9, 0.95)
STANDARD = 0.02  # deviation of new weights, for thousands of channels
FADING = 0.5  # gamma of the loss, as a share of a block
PIECE_BYTES = 2 * 2**30  # of logits and scores of attention, at once
LOGIT_COPIES = 6  # of drafter and target, their logarithms, and gradients
SCORE_COPIES = 3
UNCAPTURED = 3  # steps before a graph is captured, in which all that is made once is made
MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def initialize(drafter: DFlash2, generator: torch.Generator) -> None:
    """Norms 1, convolutions that pass on what they get, everything else small."""
    deviation = max(STANDARD, drafter.config.hidden_size**-0.5)
    for name, target in drafter.targets.items():
        into = target.into
        assert isinstance(into, torch.Tensor)
        if "norm" in name:
            into.fill_(1.0)
        elif name.endswith("base_kernel"):
            into.zero_()
            into[:, 0] = 1.0
        elif name.endswith("kernel_projection.weight"):
            into.zero_()
        else:
            made = torch.empty(into.shape).normal_(0.0, deviation, generator=generator)
            into.copy_(made)


class Trainer:
    """A drafter, its FP32 weights, and how many steps they have learned."""

    def __init__(self, drafter: DFlash2, target: Model, lessons: Lessons, settings: DraftSettings):
        self.drafter, self.target, self.lessons = drafter, target, lessons
        self.settings, self.step, self.loss = settings, 0, block_loss
        named = dict(drafter.named_parameters())
        self.weights = [weight.requires_grad_(True) for weight in named.values()]
        self.masters = {
            name: torch.nn.Parameter(weight.detach().float().clone())
            for name, weight in named.items()
        }
        groups = [
            {
                "params": [w for w in self.masters.values() if (w.ndim > 1) is matrix],
                "weight_decay": decay,
            }
            for matrix, decay in ((True, MATRIX_DECAY), (False, OTHER_DECAY))
        ]
        device = self.weights[0].device
        cuda = device.type == "cuda"
        # On the device, so that a step need not be told of it.
        self.rate = torch.tensor(settings.rate, device=device)
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=BETAS, fused=cuda, capturable=cuda
        )
        self.captured = Captured(self._learn) if cuda else None

    def advance(self) -> Loss:
        """One update, on blocks drawn anew."""
        mixed = (self.settings.training_seed * 1_000_003 + self.step) % 2**63
        lesson = self.lessons.draw(torch.Generator().manual_seed(mixed))
        self.rate.fill_(self.settings.rate * _share(self.step, self.settings.steps))
        loss = self._learn(lesson) if self.captured is None else self.captured(lesson)
        self.step += 1
        return loss

    def _learn(self, lesson: Lesson) -> Loss:
        loss = self._gradients(lesson)
        for master, weight in zip(self.masters.values(), self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), CLIP)
        self.optimizer.step()
        self._copy_to_drafter()
        return loss

    def _gradients(self, lesson: Lesson) -> Loss:
        """Of all blocks, some excerpts at a time as memory allows."""
        block = self.drafter.config.block_size
        count = Rows.behind(lesson, block - 1).counts_BN.sum()
        losses = []
        with torch.enable_grad():
            for piece in lesson.split(self._piece):
                rows = Rows.behind(piece, block - 1)
                teacher = Teacher.of(self.target, piece, rows)
                loss = self.loss(
                    self.drafter, piece, rows, teacher, gamma=FADING * block, count=count
                )
                loss.total.backward()
                losses.append(Loss(loss.unary.detach(), loss.selector.detach()))
        return sum(losses[1:], losses[0])

    @property
    def _piece(self) -> int:
        """Excerpts at once."""
        config, extent, itemsize = (
            self.drafter.config,
            self.lessons.extent,
            self.weights[0].itemsize,
        )
        logits = LOGIT_COPIES * 4 * config.vocab_size * (config.block_size - 1)
        rows = extent.anchors * config.block_size
        keys = extent.tokens + rows
        scores = SCORE_COPIES * itemsize * config.num_heads * config.block_size * keys
        return max(1, PIECE_BYTES // (extent.anchors * (logits + scores)))

    @torch.no_grad()
    def _copy_to_drafter(self) -> None:
        torch._foreach_copy_(self.weights, list(self.masters.values()))

    def save(self, file: Path) -> None:
        """All that the next step depends on; the file is there whole or as it was before."""
        tensors = {f"weight {name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for moment in MOMENTS:
                tensors[f"{moment} {name}"] = self.optimizer.state[master][moment]
        partial = file.with_name(file.name + ".partial")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, partial, metadata={"step": json.dumps(self.step)})
        os.replace(partial, file)

    def restore(self, file: Path) -> None:
        """Go on where `save` was called."""
        with safe_open(file, framework="pt") as stored, torch.no_grad():
            self.step = json.loads(stored.metadata()["step"])
            for name, master in self.masters.items():
                master.copy_(stored.get_tensor(f"weight {name}"))
                state = {
                    moment: stored.get_tensor(f"{moment} {name}").to(master.device)
                    for moment in MOMENTS
                }
                state["step"] = torch.tensor(float(self.step), device=master.device)
                self.optimizer.state[master] = state
        self._copy_to_drafter()


def _share(step: int, steps: int) -> float:
    """Of the highest rate: a warm-up, then half a wave of a cosine."""
    warm = max(1, int(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Captured:
    """What a CUDA graph repeats: all that is done with a lesson, without a word of the host.

    Lessons must be of one shape; the first few are gone through without a graph. The result is in
    the same memory each time.
    """

    def __init__(self, learn: Callable[[Lesson], Loss]):
        self.learn, self.seen = learn, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()

    def __call__(self, lesson: Lesson) -> Loss:
        if self.seen < UNCAPTURED:
            self.seen += 1
            return self._apart(lesson)
        if self.graph is None:
            self.lesson = Lesson(*(tensor.clone() for tensor in lesson.tensors))
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.loss = self.learn(self.lesson)
        for mine, given in zip(self.lesson.tensors, lesson.tensors, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.loss

    def _apart(self, lesson: Lesson) -> Loss:
        """On the stream that the graph will be captured on, as autograd remembers it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.learn(lesson)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss
