"""Beam: a sandwich-norm mixture-of-experts decoder whose residual keeps its variance with depth.

    h <- mix(h, norm(attention(norm(h))));   h <- mix(h, norm(feed_forward(norm(h))))
    mix(h, x) = sqrt((n - 1) / n) h + x / sqrt(n) at the n-th residual add of the network
    logits = 30 tanh(head(norm(h)) / 30)

Window layers rotate queries and keys; full layers know no positions and scale queries by SSMax.
A sigmoid gate, projected from the attention's input, multiplies its output. The first layers are
dense; the others route to experts in groups, with a selection bias and no shared expert.
"""

from dataclasses import dataclass

import torch
from torch import nn

from limelight.models.batch import Batch
from limelight.models.config import LAYER_TYPES, ConfigReader, Json, ModelConfig, read_common
from limelight.models.layers import (
    PROJECTION,
    ZEROS,
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
    Targets,
    whole,
)
from limelight.ops import activation, norm, rope, router
from limelight.ops.activation import swiglu_fp32
from limelight.ops.rope import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamConfig(ModelConfig):
    groups: int
    kept_groups: int
    routed_scale: float
    logit_softcap: float | None

    @classmethod
    def from_dict(cls, json: Json, *, source: str = "config.json") -> "BeamConfig":
        reader = ConfigReader(json, source=source)
        layers = reader.integer("num_hidden_layers", high=1024)
        kinds = reader.choices("layer_types", LAYER_TYPES, length=layers) or [
            "full_attention" if (i + 1) % 6 == 0 or i == layers - 1 else "sliding_attention"
            for i in range(layers)
        ]
        mlps = reader.choices("mlp_layer_types", ("dense", "sparse"), length=layers)
        sparse = [kind == "sparse" for kind in mlps] if mlps else [i >= 3 for i in range(layers)]
        common = read_common(reader, layer_types=kinds, sparse=sparse)
        groups = reader.integer("n_group", 8) if any(sparse) else 1
        kept = reader.integer("topk_group", 4) if any(sparse) else 1
        experts, chosen = common["num_experts"], common["experts_per_token"]
        if any(sparse):
            if experts % groups or experts // groups < 2:
                raise reader.fault("n_group", f"must divide {experts} experts by 2 or more each")
            if kept > groups or chosen > kept * (experts // groups):
                raise reader.fault("topk_group", f"leaves too few experts to choose {chosen} from")
        _require_unrotated_full_layers(reader)
        return cls(
            **common,
            groups=groups,
            kept_groups=kept,
            routed_scale=reader.number("routed_scaling_factor", 2.5),
            logit_softcap=reader.optional_number("final_logit_softcapping"),
        )


def _require_unrotated_full_layers(reader: ConfigReader) -> None:
    parameters = reader.json.get("rope_parameters")
    if isinstance(parameters, dict) and parameters.get("full_attention") is not None:
        raise reader.fault("rope_parameters", "must be null for full_attention")


class Attention(nn.Module):
    def __init__(self, config: BeamConfig, layer: int, place: Placement):
        super().__init__()
        self.layer, self.window = layer, config.windows[layer]
        self.scale = config.head_dim**-0.5
        self.qkvg = HeadProjections(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, place,
            extra=("gate_proj",),
        )  # fmt: skip
        self.qk_norm = QKNorm(self.qkvg, place, eps=config.rms_norm_eps)
        self.gate_bias = PerHead(config.num_heads, self.qkvg.heads, place, exact=False)
        self.o = RowParallelLinear(
            config.num_heads * config.head_dim, self.qkvg.channels, config.hidden_size, place
        )

    def forward(
        self, x_TD: torch.Tensor, turn: Rotation, ssmax_T11: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        qk_TJC, v_TKC, gate_THC = self.qkvg.by_head(x_TD)
        qk_TJC = self.qk_norm(qk_TJC)
        if self.window is not None:
            qk_TJC = rope.rotate(qk_TJC, turn)
        q_THC, k_TKC = qk_TJC.tensor_split((self.qkvg.num_heads,), dim=1)
        if self.window is None:
            q_THC = rope.scale_queries(q_THC, ssmax_T11)
        out_THC = batch.attend(
            self.layer, q_THC, k_TKC, v_TKC, window=self.window, sinks_H=None, scale=self.scale
        )
        out_THC = activation.output_gate(out_THC, gate_THC, self.gate_bias.value_H)
        return self.o(out_THC.flatten(1))

    def targets(self, prefix: str) -> Targets:
        return (
            self.qkvg.targets(prefix)
            | self.o.targets(f"{prefix}.o_proj")
            | self.qk_norm.targets(prefix)
            | {f"{prefix}.gate_bias": self.gate_bias.target(ZEROS)}
        )


class SparseFeedForward(nn.Module):
    def __init__(self, config: BeamConfig, place: Placement):
        super().__init__()
        self.count, self.scale = config.experts_per_token, config.routed_scale
        self.groups, self.kept_groups = config.groups, config.kept_groups
        self.router_ED = place.empty(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.bias_E = place.empty(config.num_experts, dtype=torch.float32)
        self.experts = Experts(
            config.num_experts, config.hidden_size, config.expert_inner_size, place, act=swiglu_fp32
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        scores_TE = router.sigmoid_scores(x_TD, self.router_ED)
        weights_TN, ids_TN = router.grouped_top_experts(
            scores_TE, self.bias_E,
            count=self.count, groups=self.groups, kept_groups=self.kept_groups,
        )  # fmt: skip
        return self.experts(x_TD, weights_TN, ids_TN) * self.scale

    def targets(self, prefix: str) -> Targets:
        return {
            f"{prefix}.gate.weight": whole(self.router_ED, dummy=PROJECTION),
            f"{prefix}.gate.e_score_correction_bias": whole(self.bias_E, dummy=ZEROS),
        } | self.experts.targets(f"{prefix}.experts")


class Layer(nn.Module):
    def __init__(self, config: BeamConfig, layer: int, place: Placement):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_in, self.attention_out = (RMSNorm(size, place, eps=eps) for _ in range(2))
        self.attention = Attention(config, layer, place)
        self.feed_forward_in, self.feed_forward_out = (
            RMSNorm(size, place, eps=eps) for _ in range(2)
        )
        self.feed_forward = (
            SparseFeedForward(config, place)
            if config.sparse[layer]
            else SwiGLU(size, config.inner_size, place, act=swiglu_fp32)
        )
        self.attention_add = 2 * (layer + 1)
        self.feed_forward_add = self.attention_add + 1

    def forward(
        self, h_TD: torch.Tensor, turn: Rotation, ssmax_T11: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        x_TD = self.attention(self.attention_in(h_TD), turn, ssmax_T11, batch)
        h_TD = norm.depth_scaled_add(h_TD, self.attention_out(x_TD), n=self.attention_add)
        x_TD = self.feed_forward(self.feed_forward_in(h_TD))
        return norm.depth_scaled_add(h_TD, self.feed_forward_out(x_TD), n=self.feed_forward_add)

    def targets(self, prefix: str) -> Targets:
        return (
            self.attention_in.targets(f"{prefix}.input_layernorm")
            | self.attention.targets(f"{prefix}.self_attn")
            | self.attention_out.targets(f"{prefix}.post_attention_layernorm")
            | self.feed_forward_in.targets(f"{prefix}.pre_feedforward_layernorm")
            | self.feed_forward.targets(f"{prefix}.mlp")
            | self.feed_forward_out.targets(f"{prefix}.post_feedforward_layernorm")
        )


class Beam(nn.Module):
    renames: dict[str, str] = {}

    def __init__(self, config: BeamConfig, place: Placement):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, place)
        layers = [Layer(config, i, place) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, place, eps=config.rms_norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size, place)

    def forward(self, tokens_T: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The normed hidden states [T, D], which `logits` takes."""
        turn = rope.rotation(
            batch.positions_T, head_dim=self.config.head_dim, theta=self.config.rope_theta
        )
        ssmax_T11 = rope.ssmax_scale(batch.positions_T)
        h_TD = self.embed(tokens_T)
        for layer in self.layers:
            h_TD = layer(h_TD, turn, ssmax_T11, batch)
        return self.norm(h_TD)

    def logits(self, h_TD: torch.Tensor) -> torch.Tensor:
        """FP32 [T, V]."""
        logits_TV = self.head(h_TD)
        cap = self.config.logit_softcap
        return logits_TV if cap is None else activation.softcap(logits_TV, cap=cap)

    def targets(self) -> Targets:
        """Where each tensor of a checkpoint goes, by its name there."""
        targets = (
            self.embed.targets("model.embed_tokens")
            | self.norm.targets("model.norm")
            | self.head.targets("lm_head")
        )
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            targets |= layer.targets(f"model.layers.{i}")
        return targets
