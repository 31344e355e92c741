"""Beam: a sandwich-norm mixture-of-experts decoder whose residual keeps its variance with depth.

    h <- mix(h, norm(attention(norm(h))));   h <- mix(h, norm(feed_forward(norm(h))))
    mix(h, x) = sqrt((n - 1) / n) h + x / sqrt(n) at the n-th residual add of the network
    logits = 30 tanh(head(norm(h)) / 30)

Window layers rotate queries and keys; full layers know no positions and scale queries by SSMax.
A sigmoid gate, projected from the attention's input, multiplies its output. The first layers are
dense; the others route to experts in groups, with a selection bias and no shared expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from limelight.models.batch import Batch
from limelight.models.config import LAYER_TYPES, ConfigReader, Json, ModelConfig, read_common
from limelight.models.dummy import PROJECTION, ZEROS
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
from limelight.ops import boundary, norm, rope, router
from limelight.ops.boundary import Summand
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
        self.gate_bias = PerHead(
            "gate_bias", config.num_heads, self.qkvg.heads, place, exact=False, dummy=ZEROS
        )
        self.o = RowParallelLinear(
            "o_proj", config.num_heads * config.head_dim, self.qkvg.channels, config.hidden_size,
            place,
        )  # fmt: skip

    def forward(
        self, y_TD: torch.Tensor, turn: Rotation, ssmax_T: torch.Tensor, batch: Batch
    ) -> Summand:
        full = self.window is None
        out_TN = batch.attend(
            self.layer, self.qkvg(y_TD), self.qk_norm.weight_2C,
            heads=self.qk_norm.heads, window=self.window, scale=self.scale,
            turn=None if full else turn, ssmax_T=ssmax_T if full else None,
            gate_bias_H=self.gate_bias.value_H,
        )  # fmt: skip
        return self.o(out_TN)


class DenseFeedForward(nn.Module):
    def __init__(self, config: BeamConfig, place: Placement):
        super().__init__()
        self.mlp = SwiGLU(config.hidden_size, config.inner_size, place, fp32=True)

    def forward(self, y_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.mlp(y_TD)


class SparseFeedForward(nn.Module):
    def __init__(self, config: BeamConfig, layer: int, place: Placement):
        super().__init__()
        self.layer, self.count = layer, config.experts_per_token
        self.groups, self.kept_groups = config.groups, config.kept_groups
        gate, exact = place.within("gate"), torch.float32
        self.router_ED = gate.whole(
            "weight", config.num_experts, config.hidden_size, dtype=exact, dummy=PROJECTION
        )
        self.bias_E = gate.whole(
            "e_score_correction_bias", config.num_experts, dtype=exact, dummy=ZEROS
        )
        self.experts = Experts(
            config.num_experts, config.hidden_size, config.expert_inner_size,
            place.within("experts"), fp32=True, scale=config.routed_scale,
        )  # fmt: skip

    def forward(self, y_TD: torch.Tensor, batch: Batch) -> Summand:
        weights_TN, ids_TN = router.route(
            y_TD, self.router_ED, self.bias_E,
            count=self.count, groups=self.groups, kept_groups=self.kept_groups,
            routed=batch.routed(self.layer),
        )  # fmt: skip
        return self.experts(y_TD, weights_TN, ids_TN)


class Layer(nn.Module):
    def __init__(self, config: BeamConfig, layer: int, place: Placement):
        super().__init__()
        size = config.hidden_size

        def normed(name: str) -> RMSNorm:
            return RMSNorm(size, place.within(f"{name}_layernorm"), eps=config.rms_norm_eps)

        self.attention_in, self.attention_out = normed("input"), normed("post_attention")
        self.attention = Attention(config, layer, place.within("self_attn"))
        self.feed_forward_in = normed("pre_feedforward")
        self.feed_forward_out = normed("post_feedforward")
        mlp = place.within("mlp")
        self.feed_forward = (
            SparseFeedForward(config, layer, mlp)
            if config.sparse[layer]
            else DenseFeedForward(config, mlp)
        )
        self.attention_add = 2 * (layer + 1)
        self.feed_forward_add = self.attention_add + 1

    def forward(
        self,
        h_TD: torch.Tensor,
        y_TD: torch.Tensor,
        turn: Rotation,
        ssmax_T: torch.Tensor,
        batch: Batch,
        following: RMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream h and its norm y, which the sublayer reads; `following` is the next norm."""
        eps = following.eps
        x_TD = self.attention(y_TD, turn, ssmax_T, batch)
        h_TD, y_TD = boundary.sandwich(
            h_TD, x_TD, self.attention_out.weight, self.feed_forward_in.weight,
            n=self.attention_add, eps=eps,
        )  # fmt: skip
        x_TD = self.feed_forward(y_TD, batch)
        return boundary.sandwich(
            h_TD, x_TD, self.feed_forward_out.weight, following.weight,
            n=self.feed_forward_add, eps=eps,
        )  # fmt: skip


class Beam(nn.Module):
    renames: dict[str, str] = {}
    # No parameter in transformers, so that trainers do not send it.
    unsent = ("mlp.gate.e_score_correction_bias",)

    def __init__(self, config: BeamConfig, place: Placement):
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
        turn = rope.rotation(
            batch.positions_T,
            head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=torch.float32,
        )  # fmt: skip
        ssmax_T = rope.ssmax(batch.positions_T)
        h_TD = self.embed(tokens_T, batch.last_tokens_S)
        norms = [*self._input_norms(), self.norm]
        y_TD = norm.rmsnorm(h_TD, norms[0].weight, eps=norms[0].eps)
        for i, (layer, following) in enumerate(zip(self.layers, norms[1:], strict=True)):
            h_TD, y_TD = layer(h_TD, y_TD, turn, ssmax_T, batch, following)
            if taps is not None:
                taps.take(i, h_TD)
        return y_TD

    def _input_norms(self) -> Iterator[RMSNorm]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer.attention_in

    def logits(self, h_TD: torch.Tensor) -> torch.Tensor:
        """FP32 [T, S], of this rank's part of the vocabulary."""
        return self.head(h_TD, cap=self.config.logit_softcap)
