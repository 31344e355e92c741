"""DFlash 2: a drafter that fills a block of masked tokens at once, out of its target's features.

Every token that the target has run leaves keys and values c -> (W_k c, W_v c) in each layer, where

    c = norm(fc [its taps])

A block is an anchor, the newest token, and masks; with n the norm of the stream h, each layer is

    h <- h + conv'(attention(conv(n)));   h <- h + conv'(feed_forward(conv(n)))

whose convolutions along the block have kernels that are projections of n. Row j of the block gives
the drafted token at its own position: candidates are the best of the target's logits of norm(h),
and a selector of pairs scores each after each before it (`ops.selector`).

The embedding and the LM head are the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from limelight.models.batch import Blocks
from limelight.models.dflash2_config import DFlash2Config
from limelight.models.dummy import ONES, PROJECTION, Dummy
from limelight.models.layers import (
    Embedding,
    LMHead,
    Placement,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
    all_of,
)
from limelight.ops import linear, rope, selector
from limelight.ops.activation import softcap
from limelight.ops.block import conv_add_rmsnorm, dynamic_conv
from limelight.ops.embed import embed_blocks
from limelight.ops.paging import LayerCache
from limelight.ops.rope import Heads, Rotation
from limelight.ops.topk import top_tokens
from limelight.ops.verify import Proposals
from limelight.parallel.collectives import all_gather

AVERAGE = Dummy(0.5, 0.0)


@dataclass(frozen=True, slots=True)
class Ends:
    """What the drafter shares with its target. Not a module: its weights are not the drafter's."""

    embed: Embedding
    head: LMHead


@dataclass(frozen=True, slots=True)
class Drafts:
    """N drafted tokens for each of B blocks, and what each was drawn from."""

    tokens_BN: torch.Tensor
    proposals: Proposals


class HeadStack(nn.Module):
    """Queries, keys and values of all layers, stacked: the context's are then one product."""

    def __init__(self, config: DFlash2Config, place: Placement):
        super().__init__()
        size, hidden = config.head_dim, config.hidden_size
        query = place.mesh.shard(config.num_heads, what="query heads of the drafter")
        kv = place.mesh.kv_shard(config.num_kv_heads)
        parts = [("q_proj", config.num_heads, query)]
        parts += [(name, config.num_kv_heads, kv) for name in ("k_proj", "v_proj")]
        rows = [(part.stop - part.start) * size for _, _, part in parts]
        self.channels = slice(query.start * size, query.stop * size)
        self.queries = rows[0]
        self.weight_LND = place.empty(config.num_layers, sum(rows), hidden)
        self.norm_L2C = place.empty(config.num_layers, 2, size)
        for i in range(config.num_layers):
            at = place.within(f"layers.{i}.self_attn")
            pieces = self.weight_LND[i].split(rows)
            for (name, total, part), into in zip(parts, pieces, strict=True):
                take = slice(part.start * size, part.stop * size), all_of(hidden)
                at.fill(f"{name}.weight", into, (total * size, hidden), take, PROJECTION)
            for name, into in zip(("q_norm", "k_norm"), self.norm_L2C[i], strict=True):
                at.fill(f"{name}.weight", into, (size,), (all_of(size),), ONES)
        eps = config.rms_norm_eps
        self.heads = Heads(query.stop - query.start, kv.stop - kv.start, eps)
        self.context_heads = Heads(0, self.heads.keys, eps)

    def context(self, c_TD: torch.Tensor) -> torch.Tensor:
        """Rows [k | v] of every layer: [L, T, N]."""
        return torch.matmul(c_TD, self.weight_LND[:, self.queries :].mT)


class BlockConvolution(nn.Module):
    """The convolutions before and after a sublayer, with kernels of what enters it."""

    def __init__(self, config: DFlash2Config, place: Placement):
        super().__init__()
        size, taps = config.hidden_size, config.conv_taps
        self.shape = (2, taps, size // config.conv_group)
        self.base_2PD = place.whole("base_kernel", 2, taps, size, dummy=AVERAGE)
        outputs = 2 * taps * self.shape[-1]
        self.projection = place.whole("kernel_projection.weight", outputs, size, dummy=PROJECTION)

    def changes(self, y_TD: torch.Tensor) -> torch.Tensor:
        """What `y_TD` adds to the kernels before and after: [2, T, P, G]."""
        return linear.project(y_TD, self.projection).unflatten(1, self.shape).movedim(1, 0)

    def before(self, x_TD: torch.Tensor, changes_2TPG: torch.Tensor, rows: int) -> torch.Tensor:
        return dynamic_conv(x_TD, self.base_2PD[0], changes_2TPG[0], rows=rows)

    def after(
        self,
        h_TD: torch.Tensor,
        x_TD: torch.Tensor,
        changes_2TPG: torch.Tensor,
        rows: int,
        norm: RMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream h with what the sublayer x adds to it, and its norm."""
        return conv_add_rmsnorm(
            h_TD, x_TD, self.base_2PD[1], changes_2TPG[1], norm.weight, rows=rows, eps=norm.eps
        )


class Attention(nn.Module):
    def __init__(self, config: DFlash2Config, layer: int, channels: slice, place: Placement):
        super().__init__()
        self.layer, self.scale = layer, config.head_dim**-0.5
        self.window, self.causal = config.windows[layer], config.causal[layer]
        width = config.num_heads * config.head_dim
        self.o = RowParallelLinear("o_proj", width, channels, config.hidden_size, place)

    def forward(
        self, x_TD: torch.Tensor, turn: Rotation, stack: HeadStack, blocks: Blocks
    ) -> torch.Tensor:
        qkv_TN = linear.project(x_TD, stack.weight_LND[self.layer])
        out_TN = blocks.attend(
            self.layer, qkv_TN, stack.norm_L2C[self.layer],
            heads=stack.heads, window=self.window, causal=self.causal, scale=self.scale, turn=turn,
        )  # fmt: skip
        return self.o(out_TN)


class Layer(nn.Module):
    def __init__(self, config: DFlash2Config, layer: int, channels: slice, place: Placement):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_in = RMSNorm(size, place.within("input_layernorm"), eps=eps)
        self.attention_conv = BlockConvolution(config, place.within("attention_conv"))
        self.attention = Attention(config, layer, channels, place.within("self_attn"))
        self.feed_forward_in = RMSNorm(size, place.within("post_attention_layernorm"), eps=eps)
        self.feed_forward_conv = BlockConvolution(config, place.within("mlp_conv"))
        self.feed_forward = SwiGLU(size, config.inner_size, place.within("mlp"), fp32=False)

    def forward(
        self,
        h_TD: torch.Tensor,
        y_TD: torch.Tensor,
        norm: RMSNorm,
        turn: Rotation,
        stack: HeadStack,
        blocks: Blocks,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream, which enters with its norm y, and what `norm`, the next one, makes of it."""
        conv, rows = self.attention_conv, blocks.rows
        changes = conv.changes(y_TD)
        x_TD = self.attention(conv.before(y_TD, changes, rows), turn, stack, blocks)
        h_TD, y_TD = conv.after(h_TD, x_TD, changes, rows, self.feed_forward_in)
        conv = self.feed_forward_conv
        changes = conv.changes(y_TD)
        x_TD = self.feed_forward(conv.before(y_TD, changes, rows))
        return conv.after(h_TD, x_TD, changes, rows, norm)


class Selector(nn.Module):
    """The codebooks of candidates by what precedes and by what follows them."""

    def __init__(self, config: DFlash2Config, place: Placement):
        super().__init__()
        vocab, rank = config.vocab_size, config.rank
        self.before_VR = place.whole("predecessor_codebook", vocab, rank, dummy=PROJECTION)
        self.after_VR = place.whole("successor_codebook", vocab, rank, dummy=PROJECTION)
        self.gate_RD = place.whole(
            "hidden_projection.weight", rank, config.hidden_size, dummy=PROJECTION
        )

    def gate(self, hidden_BND: torch.Tensor) -> torch.Tensor:
        """What weighs the products of a place's codes, [B, N, R]."""
        gate_BNR = linear.project(hidden_BND.flatten(0, 1), self.gate_RD)
        return gate_BNR.unflatten(0, hidden_BND.shape[:2])

    def forward(
        self,
        hidden_BND: torch.Tensor,
        unary_BNK: torch.Tensor,
        before_BNK: torch.Tensor,
        candidates_BNK: torch.Tensor,
    ) -> torch.Tensor:
        """Scores of each candidate after each token that may stand before it: [B, N, K, K]."""
        return selector.score_table(
            unary_BNK, self.gate(hidden_BND),
            _codes(self.before_VR, before_BNK), _codes(self.after_VR, candidates_BNK),
        )  # fmt: skip


def _codes(codes_VR: torch.Tensor, ids_BNK: torch.Tensor) -> torch.Tensor:
    """Rows of a codebook. Many are of one token: the sum of their gradients is of FP32, and by
    addition where plain indexing would sort."""
    return codes_VR.float().index_select(0, ids_BNK.flatten()).unflatten(0, ids_BNK.shape)


class DFlash2(nn.Module):
    """The `layers` of `Paged` and of `Blocks` are the drafter's own, counted from 0."""

    def __init__(self, config: DFlash2Config, place: Placement, ends: Ends):
        super().__init__()
        self.config, self.ends, self.targets = config, ends, place.targets
        size, eps = config.hidden_size, config.rms_norm_eps
        features = len(config.taps) * config.target_hidden_size
        self.fc = place.whole("fc.weight", size, features, dummy=PROJECTION)
        self.context_norm = RMSNorm(size, place.within("hidden_norm"), eps=eps)
        self.stack = HeadStack(config, place)
        self.layers = nn.ModuleList(
            [
                Layer(config, i, self.stack.channels, place.within(f"layers.{i}"))
                for i in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(size, place.within("norm"), eps=eps)
        self.selector = Selector(config, place.within("candidate_selector"))
        # Given with some checkpoints, instead of the target's embedding of the mask.
        self.mask_D: torch.Tensor | None = None

    def _turn(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Rotation:
        head_dim, theta = self.config.head_dim, self.config.rope_theta
        return rope.rotation(positions_T, head_dim=head_dim, theta=theta, dtype=dtype)

    def _context(self, taps_TF: torch.Tensor) -> torch.Tensor:
        return self.stack.context(self.context_norm(linear.project(taps_TF, self.fc)))

    def context(
        self, taps_TF: torch.Tensor, positions_T: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [T, K, C] that target tokens leave in each layer; differentiable."""
        turn = self._turn(positions_T, taps_TF.dtype)
        pairs = []
        for kv_TN, norm_2C in zip(self._context(taps_TF), self.stack.norm_L2C, strict=True):
            heads = self.stack.context_heads
            _, k_TKC, v_TKC = rope.split_heads(kv_TN, norm_2C, heads=heads, turn=turn)
            pairs.append((k_TKC, v_TKC))
        return pairs

    def fill(
        self,
        taps_TF: torch.Tensor,
        positions_T: torch.Tensor,
        slots: Sequence[torch.Tensor],
        caches: Sequence[LayerCache],
    ) -> None:
        """The same into the cache of each layer, at its slots; a row whose slot is -1 goes
        nowhere."""
        turn = self._turn(positions_T, taps_TF.dtype)
        for layer, kv_TN in enumerate(self._context(taps_TF)):
            rope.prepare(
                kv_TN, self.stack.norm_L2C[layer], caches[layer], slots[layer],
                heads=self.stack.context_heads, turn=turn,
            )  # fmt: skip

    def embed(self, anchors_B: torch.Tensor, rows: int) -> torch.Tensor:
        """Each anchor and its masks: [B * rows, D]."""
        return embed_blocks(
            anchors_B, self.ends.embed.weight, self.mask_D,
            rows=rows, mask=self.config.mask_token_id, scale=self.config.embedding_scale,
        )  # fmt: skip

    def forward(self, anchors_B: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The normed hidden states of all rows, [B, Q, D]."""
        h_TD = self.embed(anchors_B, blocks.rows)
        turn = self._turn(blocks.positions_T, h_TD.dtype)
        first, *norms = [*(layer.attention_in for layer in self.layers), self.norm]
        assert isinstance(first, RMSNorm)
        y_TD = first(h_TD)
        for layer, norm in zip(self.layers, norms, strict=True):
            h_TD, y_TD = layer(h_TD, y_TD, norm, turn, self.stack, blocks)
        return y_TD.unflatten(0, (-1, blocks.rows))

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """FP32 [T, V], as the candidates are chosen by; this is for training."""
        return self._capped(self.ends.head(hidden_TD))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap=cap)

    def candidates(self, hidden_BND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The K best tokens of each row, and their logits FP32, best first: [B, N, K] each."""
        head, count = self.ends.head, self.config.candidates
        logits_TV = linear.lm_head(hidden_BND.flatten(0, 1), head.weight)
        if head.padding:
            logits_TV = F.pad(logits_TV, (0, head.padding), value=float("-inf"))
        best_TK, ids_TK = top_tokens(logits_TV, count=min(count, logits_TV.shape[1]))
        if head.mesh.size > 1:
            # Of each rank's share of the vocabulary as many, then of all; equal ones lie in order.
            best_TX, ids_TX = (all_gather(x, head.mesh) for x in (best_TK, ids_TK + head.first))
            best_TK, at_TK = top_tokens(best_TX, count=count)
            ids_TK = ids_TX.gather(1, at_TK)
        shape = (*hidden_BND.shape[:2], count)
        return self._capped(best_TK).view(shape), ids_TK.view(shape)

    def propose(
        self,
        anchors_B: torch.Tensor,
        blocks: Blocks,
        *,
        temperature_B: torch.Tensor,
        uniform_BN: torch.Tensor,
    ) -> Drafts:
        """N drafts behind each anchor, N one less than the block's rows; see `selector.choose`."""
        hidden_BND = self(anchors_B, blocks)[:, 1:].contiguous()
        return self.choose(
            anchors_B, hidden_BND, self.candidates(hidden_BND),
            temperature_B=temperature_B, uniform_BN=uniform_BN,
        )  # fmt: skip

    def choose(
        self,
        anchors_B: torch.Tensor,
        hidden_BND: torch.Tensor,
        candidates: tuple[torch.Tensor, torch.Tensor],
        *,
        temperature_B: torch.Tensor,
        uniform_BN: torch.Tensor,
    ) -> Drafts:
        """The last part of `propose`: one of its candidates for each place."""
        unary_BNK, ids_BNK = candidates
        tokens_BN, scores_BNK = selector.choose(
            unary_BNK, ids_BNK, self.selector.gate(hidden_BND), anchors_B,
            self.selector.before_VR, self.selector.after_VR, temperature_B, uniform_BN,
        )  # fmt: skip
        return Drafts(tokens_BN, Proposals(ids_BNK, scores_BNK))
