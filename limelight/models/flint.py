"""Flint: a pre-norm mixture-of-experts decoder.

    h <- h + attention(norm(h));   h <- h + feed_forward(norm(h));   logits = head(norm(h))

Each sublayer takes the stream h and what the one before adds to it, and returns h and its own part.

Window layers rotate queries and keys; full layers know no positions. Every query head has a sink.
The first layers are dense; the others add a shared expert, ungated, to the routed ones.
"""

from dataclasses import dataclass

import torch
from torch import nn

from limelight.models.batch import Batch
from limelight.models.config import LAYER_TYPES, ConfigReader, Json, ModelConfig, read_common
from limelight.models.dummy import PROJECTION, UNIT
from limelight.models.layers import (
    Embedding,
    Experts,
    HeadProjections,
    LMHead,
    PerHead,
    Placement,
    QKNorm,
    RMSNorm,
    RowParallelLinear,
    SwiGLU,
)
from limelight.models.taps import Taps
from limelight.ops import boundary, linear, rope, router
from limelight.ops.boundary import Summand
from limelight.ops.rope import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class FlintConfig(ModelConfig):
    shared_inner_size: int

    @classmethod
    def from_dict(cls, json: Json, *, source: str = "config.json") -> "FlintConfig":
        reader = ConfigReader(json, source=source)
        layers = reader.integer("num_hidden_layers", high=1024)
        dense = reader.integers("mlp_only_layers")
        dense = [0, 1] if dense is None else dense
        reader.require("decoder_sparse_step", 1, None)
        sparse = [i not in dense for i in range(layers)]
        shared = reader.integer("shared_expert_intermediate_size", 1024)
        return cls(
            **read_common(reader, layer_types=_layer_types(reader, layers), sparse=sparse),
            shared_inner_size=shared,
        )


def _layer_types(reader: ConfigReader, layers: int) -> list[str]:
    """As listed; or by the older keys, which name the layers without positions; or the default."""
    listed = reader.choices("layer_types", LAYER_TYPES, length=layers)
    if listed is not None:
        return listed
    full = reader.integers("no_rope_layer_indices")
    if full is None:
        full = [i for i in range(layers) if i < 2 or i % 4 == 1 or i == layers - 1]
    if reader.json.get("use_sliding_window") is False:
        raise reader.fault("use_sliding_window", "must be true: layers that rotate have a window")
    return ["full_attention" if i in full else "sliding_attention" for i in range(layers)]


class Attention(nn.Module):
    def __init__(self, config: FlintConfig, layer: int, place: Placement):
        super().__init__()
        self.layer, self.window = layer, config.windows[layer]
        self.scale = config.head_dim**-0.5
        self.norm = RMSNorm(
            config.hidden_size, place.within("input_layernorm"), eps=config.rms_norm_eps
        )
        place = place.within("self_attn")
        self.qkv = HeadProjections(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, place
        )
        self.qk_norm = QKNorm(self.qkv, place, eps=config.rms_norm_eps)
        self.sinks = PerHead(
            "softmax_offset", config.num_heads, self.qkv.heads, place, exact=True, dummy=UNIT
        )
        self.o = RowParallelLinear(
            "o_proj", config.num_heads * config.head_dim, self.qkv.channels, config.hidden_size,
            place,
        )  # fmt: skip

    def forward(
        self,
        h_TD: torch.Tensor,
        x_TD: Summand | None,
        turn: Rotation,
        batch: Batch,
    ) -> tuple[torch.Tensor, Summand]:
        h_TD, qkv_TN = linear.norm_project(
            h_TD, x_TD, self.norm.weight, self.qkv.weight,
            eps=self.norm.eps,
        )  # fmt: skip
        out_TN = batch.attend(
            self.layer, qkv_TN, self.qk_norm.weight_2C,
            heads=self.qk_norm.heads, window=self.window, scale=self.scale,
            turn=None if self.window is None else turn, sinks_H=self.sinks.value_H,
        )  # fmt: skip
        return h_TD, self.o(out_TN)


class DenseFeedForward(nn.Module):
    def __init__(self, config: FlintConfig, place: Placement):
        super().__init__()
        self.norm = RMSNorm(
            config.hidden_size, place.within("post_attention_layernorm"), eps=config.rms_norm_eps
        )
        self.mlp = SwiGLU(config.hidden_size, config.inner_size, place.within("mlp"), fp32=False)

    def forward(
        self, h_TD: torch.Tensor, x_TD: Summand, batch: Batch
    ) -> tuple[torch.Tensor, Summand]:
        h_TD, inner_TF = linear.norm_swiglu(
            h_TD, x_TD, self.norm.weight, self.mlp.gate_up.weight, eps=self.norm.eps, fp32=False
        )
        return h_TD, self.mlp.down(inner_TF)


class SparseFeedForward(nn.Module):
    def __init__(self, config: FlintConfig, layer: int, place: Placement):
        super().__init__()
        size = config.hidden_size
        self.layer, self.count = layer, config.experts_per_token
        self.norm = RMSNorm(size, place.within("post_attention_layernorm"), eps=config.rms_norm_eps)
        place = place.within("mlp")
        self.router_ED = place.whole(
            "gate.weight", config.num_experts, size, dtype=torch.float32, dummy=PROJECTION
        )
        self.experts = Experts(
            config.num_experts, size, config.expert_inner_size, place.within("experts"), fp32=False
        )
        self.shared = SwiGLU(
            size, config.shared_inner_size, place.beside_experts.within("shared_expert"),
            fp32=False,
        )  # fmt: skip

    def forward(
        self, h_TD: torch.Tensor, x_TD: Summand, batch: Batch
    ) -> tuple[torch.Tensor, Summand]:
        h_TD, y_TD, weights_TN, ids_TN = router.norm_route(
            h_TD, x_TD, self.norm.weight, self.router_ED,
            eps=self.norm.eps, count=self.count, routed=batch.routed(self.layer),
        )  # fmt: skip
        return h_TD, self.experts(y_TD, weights_TN, ids_TN, self.shared)


class Layer(nn.Module):
    def __init__(self, config: FlintConfig, layer: int, place: Placement):
        super().__init__()
        self.attention = Attention(config, layer, place)
        self.feed_forward = (
            SparseFeedForward(config, layer, place)
            if config.sparse[layer]
            else DenseFeedForward(config, place)
        )

    def forward(
        self, h_TD: torch.Tensor, x_TD: Summand | None, turn: Rotation, batch: Batch
    ) -> tuple[torch.Tensor, Summand]:
        h_TD, x_TD = self.attention(h_TD, x_TD, turn, batch)
        return self.feed_forward(h_TD, x_TD, batch)


class Flint(nn.Module):
    # What transformers calls a tensor in memory, and so in some checkpoints.
    renames = {"self_attn.sinks": "self_attn.softmax_offset"}
    # What transformers has that is no parameter, so that trainers do not send it.
    unsent: tuple[str, ...] = ()

    def __init__(self, config: FlintConfig, place: Placement):
        super().__init__()
        self.config = config
        self.targets = place.targets
        model = place.within("model")
        self.embed = Embedding(config.vocab_size, config.hidden_size, model.within("embed_tokens"))
        places = [model.within(f"layers.{i}") for i in range(config.num_layers)]
        self.layers = nn.ModuleList([Layer(config, i, at) for i, at in enumerate(places)])
        self.norm = RMSNorm(config.hidden_size, model.within("norm"), eps=config.rms_norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size, place)

    def forward(
        self, tokens_T: torch.Tensor, batch: Batch, taps: Taps | None = None
    ) -> torch.Tensor:
        """The normed hidden states [T, D], which `logits` takes."""
        h_TD = self.embed(tokens_T, batch.last_tokens_S)
        turn = rope.rotation(
            batch.positions_T,
            head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=h_TD.dtype,
        )  # fmt: skip
        x_TD = None
        for i, layer in enumerate(self.layers):
            h_TD, x_TD = layer(h_TD, x_TD, turn, batch)
            if taps is not None:
                taps.take(i, h_TD, x_TD)
        assert x_TD is not None, "a model has layers"
        return boundary.add_rmsnorm(h_TD, x_TD, self.norm.weight, eps=self.norm.eps)[1]

    def logits(self, h_TD: torch.Tensor) -> torch.Tensor:
        """FP32 [T, S], of this rank's part of the vocabulary."""
        return self.head(h_TD)
