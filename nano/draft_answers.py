"""What a model answers to thousands of prompts at once, for its drafter to learn from.

An engine serves who comes and goes; here all prompts are there from the start, so a step is one
replay of a CUDA graph over keys and values that lie side by side. On a CPU it is the same without
the graph. Answers are the likeliest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from limelight.models.loader import Model
from limelight.ops.activation import output_gate
from limelight.ops.attention import attend_packed, gate_of
from limelight.ops.rope import Heads, Rotation, split_heads
from limelight.ops.router import Routed

CACHE_BYTES = 8 * 2**30  # of keys and values, on a GPU
CACHE_BYTES_CPU = 2**29
MOST_TEXTS = 4096  # at once
PROMPT_TOKENS = 2**16  # read at once
LOOK_EVERY = 16  # steps, between two looks whether all texts have ended


@dataclass
class Texts:
    """Stands in for `Batch`: B texts whose keys and values lie in [layers][2, B, K, L, C].

    With a `length`, some texts' first tokens are read, else the token of each at `positions_T`.
    """

    caches: list[torch.Tensor]
    rows: slice
    positions_T: torch.Tensor
    length: int | None = None
    last_tokens_S: torch.Tensor | None = None

    def routed(self, layer: int) -> Routed | None:
        return None

    def attend(
        self,
        layer: int,
        qkv_TN: torch.Tensor,
        norm_2C: torch.Tensor,
        *,
        heads: Heads,
        window: int | None,
        scale: float,
        turn: Rotation | None = None,
        ssmax_T: torch.Tensor | None = None,
        sinks_H: torch.Tensor | None = None,
        gate_bias_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q_THC, k_TKC, v_TKC = split_heads(qkv_TN, norm_2C, heads=heads, turn=turn, ssmax_T=ssmax_T)
        if self.length is None:
            out_THC = self._step(layer, q_THC, k_TKC, v_TKC, window, sinks_H, scale)
        else:
            for cache, x_TKC in zip(self.caches[layer], (k_TKC, v_TKC), strict=True):
                x_BKLC = x_TKC.unflatten(0, (-1, self.length)).transpose(1, 2)
                cache[self.rows, :, : self.length] = x_BKLC
            lengths = [self.length] * (len(q_THC) // self.length)
            out_THC = attend_packed(
                q_THC, k_TKC, v_TKC, lengths, window=window, sinks_H=sinks_H, scale=scale
            )
        if gate_bias_H is not None:
            out_THC = output_gate(out_THC, gate_of(qkv_TN, out_THC), gate_bias_H)
        return out_THC.flatten(1)

    def _step(
        self, layer: int, q_BHC: torch.Tensor, k_BKC: torch.Tensor, v_BKC: torch.Tensor,
        window: int | None, sinks_H: torch.Tensor | None, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        (keys_BKLC, values_BKLC), at_B = self.caches[layer], self.positions_T
        texts_B = torch.arange(len(at_B), device=at_B.device)
        keys_BKLC[texts_B, :, at_B], values_BKLC[texts_B, :, at_B] = k_BKC, v_BKC
        at_L = torch.arange(keys_BKLC.shape[2], device=at_B.device)
        hidden_BL = at_L > at_B[:, None]
        if window is not None:
            hidden_BL |= at_L <= at_B[:, None] - window
        q_BKGC = q_BHC.unflatten(1, (keys_BKLC.shape[1], -1))
        scores_BKGL = (q_BKGC @ keys_BKLC.mT).float() * scale
        scores_BKGL = scores_BKGL.masked_fill(hidden_BL[:, None, None], float("-inf"))
        if sinks_H is not None:
            sinks = sinks_H.float().view(1, *q_BKGC.shape[1:3], 1).expand(len(at_B), -1, -1, -1)
            scores_BKGL = torch.cat([scores_BKGL, sinks], dim=-1)
        weights_BKGL = scores_BKGL.softmax(-1)[..., : len(at_L)].to(q_BHC.dtype)
        return (weights_BKGL @ values_BKLC).flatten(1, 2)


class Writer:
    """B texts that a model goes on with, of up to `longest` tokens each."""

    def __init__(self, model: Model, texts: int, longest: int):
        config, weight = model.config, model.norm.weight
        shape = (2, texts, config.num_kv_heads, longest, config.head_dim)
        self.model, self.device = model, weight.device
        self.caches = [weight.new_zeros(shape) for _ in range(config.num_layers)]
        self.tokens_B = torch.zeros(texts, dtype=torch.int64, device=self.device)
        self.at_B = torch.zeros_like(self.tokens_B)
        self.written_BL = torch.zeros(texts, longest, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def read(self, prompts: Sequence[list[int]]) -> None:
        """Begin with these, of about one length; the rest of B go on with what they were."""
        length = max(map(len, prompts))
        ids = torch.tensor([one + [0] * (length - len(one)) for one in prompts]).to(self.device)
        lengths_B = torch.tensor([len(one) for one in prompts], device=self.device)
        for rows_B in torch.arange(len(prompts)).split(max(1, PROMPT_TOKENS // length)):
            rows = slice(int(rows_B[0]), int(rows_B[-1]) + 1)
            positions_T = torch.arange(length, device=self.device).repeat(len(rows_B))
            batch = Texts(self.caches, rows, positions_T, length)
            hidden_TD = self.model(ids[rows].flatten(), batch)
            last_B = lengths_B[rows] - 1 + length * torch.arange(len(rows_B), device=self.device)
            self.tokens_B[rows] = self.model.logits(hidden_TD[last_B]).argmax(-1)
        self.at_B[: len(prompts)] = lengths_B
        self.written_BL[: len(prompts)].scatter_(
            1, lengths_B[:, None], self.tokens_B[: len(prompts), None]
        )

    def step(self) -> None:
        """One more token of each text; those that are full write their last place anew."""
        if self.device.type != "cuda":
            return self._step()
        if self.graph is None:
            self._step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            return None
        return self.graph.replay()

    def _step(self) -> None:
        batch = Texts(self.caches, slice(None), self.at_B)
        hidden_BD = self.model(self.tokens_B, batch)
        self.tokens_B.copy_(self.model.logits(hidden_BD).argmax(-1))
        self.at_B.add_(1).clamp_(max=self.written_BL.shape[1] - 1)
        self.written_BL.scatter_(1, self.at_B[:, None], self.tokens_B[:, None])


@torch.no_grad()
def answers(
    model: Model,
    prompts: Sequence[list[int]],
    *,
    most: int,
    ends: Sequence[int],
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The likeliest answer to each prompt, up to one of the tokens `ends` or of `most` tokens."""
    found: list[list[int]] = [[]] * len(prompts)
    for group, writer in _groups(model, prompts, most):
        writer.read([prompts[i] for i in group])
        ends_E = torch.tensor(ends, device=writer.device)
        for step in range(most - 1):
            writer.step()
            if step % LOOK_EVERY == LOOK_EVERY - 1 and _all_ended(writer, len(group), ends_E):
                break
        texts = writer.written_BL[: len(group)].tolist()
        for i, text in zip(group, texts, strict=True):
            found[i] = _cut(text[len(prompts[i]) :][:most], ends)
        writer.written_BL.zero_()
        advance(len(group))
    return found


def _groups(
    model: Model, prompts: Sequence[list[int]], most: int
) -> Iterator[tuple[list[int], Writer]]:
    """Prompts in the order of their lengths, as many as there is room for; and who writes them."""
    config, itemsize = model.config, model.norm.weight.itemsize
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    while order:
        longest = -(-(len(prompts[order[0]]) + most) // 16) * 16
        row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
        room = CACHE_BYTES if model.norm.weight.is_cuda else CACHE_BYTES_CPU
        texts = min(MOST_TEXTS, len(order), max(1, room // (row * longest)))
        writer = Writer(model, texts, longest)
        # The same graph goes on until prompts are so short that it would read much for nothing.
        while order and 4 * (len(prompts[order[0]]) + most) > 3 * longest:
            group, order = order[:texts], order[texts:]
            yield group, writer


def _all_ended(writer: Writer, count: int, ends_E: torch.Tensor) -> bool:
    """Whether each text has an end in what was written of it: zeros stand before."""
    written = writer.written_BL[:count]
    some = torch.isin(written, ends_E[ends_E != 0]) if len(ends_E) else written < 0
    return bool(some.any(1).all())


def _cut(answer: list[int], ends: Sequence[int]) -> list[int]:
    for i, token in enumerate(answer):
        if token in ends:
            return answer[: i + 1]
    return answer
