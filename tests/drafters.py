"""Tiny drafters, and caches for their contexts without an engine: shared by tests."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from limelight.cache.groups import plan_groups
from limelight.cache.storage import BlockShape, KVStorage
from limelight.models.batch import Paged, PagedBlocks
from limelight.models.dflash2 import DFlash2, Ends
from limelight.models.dflash2_config import DFlash2Config
from limelight.models.layers import Embedding, LMHead, Placement
from limelight.ops.paging import PagedLayout
from limelight.parallel.mesh import Mesh

CPU = Placement(Mesh.single(), torch.float32, torch.device("cpu"))
DRAFTING = {
    "target_layer_ids": [0, 3, 6],
    "mask_token_id": 95,
    "block_size": 8,
    "selector_rank": 10,
    "selector_top_k": 8,
    "conv_kernel_size": 3,
    "conv_group_size": 12,
    "final_logit_softcapping": 30.0,
    "output_multiplier": 0.7,
    "input_embedding_scale": 1.3,
}
CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": 32,
    "is_causal": False,
    "num_target_layers": 7,
    "dflash_config": DRAFTING,
}
FEATURES = 3 * 48


def config_json(*, drafting: dict | None = None, **changes: object) -> dict:
    """The config above with some keys changed; None takes a key away."""
    inner = {k: v for k, v in (DRAFTING | (drafting or {})).items() if v is not None}
    outer = CONFIG | {"dflash_config": inner} | changes
    return {key: value for key, value in outer.items() if value is not None}


def randomize(model: torch.nn.Module, seed: int = 0, *, size: float = 0.25) -> None:
    """Norms near 1, everything else of a size that keeps all parts of the network at work."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, target in model.targets.items():
            mean, std = (1.0, 0.2) if "norm" in name else (0.0, size)
            if "base_kernel" in name:
                mean = 0.4
            if "codebook" in name or "hidden_projection" in name:
                std = 0.4
            value = torch.empty(target.into.shape).normal_(mean, std, generator=generator)
            target.into.copy_(value)


def make_ends(config: DFlash2Config, place: Placement = CPU, like: Ends | None = None) -> Ends:
    """An embedding and a head as a target has them, or this rank's part of another's."""
    place = replace(place, targets={})
    ends = Ends(
        Embedding(config.vocab_size, config.hidden_size, place),
        LMHead(config.hidden_size, config.vocab_size, place),
    )
    generator = torch.Generator().manual_seed(7)
    shape = (config.vocab_size, config.hidden_size)
    embedding, head = (std * torch.randn(shape, generator=generator) for std in (1.0, 0.7))
    if like is not None:
        embedding, head = like.embed.weight, like.head.weight
    ends.embed.weight.copy_(embedding)
    ends.head.weight.copy_(head[ends.head.first :][: len(ends.head.weight)])
    return ends


def make_drafter(json_: dict, place: Placement = CPU) -> DFlash2:
    config = DFlash2Config.from_dict(json_)
    model = DFlash2(config, replace(place, targets={}), make_ends(config, place))
    randomize(model)
    return model.eval()


def weights_of(model: DFlash2) -> dict[str, torch.Tensor]:
    """Its tensors by their names in a checkpoint."""
    return {
        name: target.into.detach().contiguous().clone() for name, target in model.targets.items()
    }


def write_drafter(folder: Path, json_: dict | None = None) -> dict[str, torch.Tensor]:
    """Save a random drafter; returns its tensors."""
    json_ = json_ or config_json()
    tensors = weights_of(make_drafter(json_))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json_))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return tensors


@dataclass
class Cache:
    """Scattered blocks for sequences of up to `longest` tokens."""

    model: DFlash2
    count: int
    longest: int = 700
    block_size: int = 16
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        config = self.model.config
        groups = plan_groups(config.windows)
        self.width = -(-self.longest // self.block_size)
        total = len(groups) * self.count * self.width
        rows = max(len(group.layers) for group in groups)
        shape = BlockShape(
            rows, self.block_size, self.model.stack.heads.keys, config.head_dim, self.dtype
        )
        device = torch.device(self.device)
        self.storage = KVStorage(groups, shape, total, device)
        order = 1 + torch.randperm(total, generator=torch.Generator().manual_seed(3))
        tables = order.to(torch.int32).view(len(groups), self.count, self.width)
        self.tables_GSN = tables.to(device)

    def slots(self, sequence: int, positions_T: torch.Tensor) -> list[torch.Tensor]:
        """Of one sequence's positions, in each group."""
        blocks_GT = self.tables_GSN[:, sequence][:, positions_T // self.block_size].long()
        return list(blocks_GT * self.block_size + positions_T % self.block_size)

    def paged(
        self, slots_GT: list[torch.Tensor], lens_B: torch.Tensor, rows_B: torch.Tensor | None = None
    ) -> Paged:
        whole = torch.arange(self.count, dtype=torch.int32, device=self.device)
        layouts = [
            PagedLayout(
                tables_SN=self.tables_GSN[g],
                rows_B=whole if rows_B is None else rows_B,
                seq_lens_B=lens_B.to(torch.int32),
                starts_B=torch.zeros(len(lens_B) + 1, dtype=torch.int32, device=self.device),
                slots_T=slots_GT[g],
                block_size=self.block_size,
                window=group.window,
                few=len(lens_B),
                max_query=16,
                max_len=self.longest,
            )
            for g, group in enumerate(self.storage.groups)
        ]
        return Paged(layouts, self.storage.group_of_layer, self.storage.caches)

    def fill(self, sequence: int, taps_TF: torch.Tensor, first: int = 0) -> None:
        """Context from position `first` on."""
        positions_T = torch.arange(first, first + len(taps_TF), device=self.device)
        lens_B = torch.zeros(self.count, dtype=torch.int32, device=self.device)
        paged = self.paged(self.slots(sequence, positions_T), lens_B)
        slots = [paged.layouts[group].slots_T for group in paged.group_of_layer]
        self.model.fill(taps_TF, positions_T, slots, paged.caches)

    def blocks(self, contexts: list[int | None], rows: int, limit: int = 2**30) -> PagedBlocks:
        """A block behind each sequence's context; None is padding."""
        positions, slots, lens = [], [], []
        for sequence, context in enumerate(contexts):
            real_Q = torch.arange(rows, device=self.device) + (context or 0)
            positions_Q = real_Q.clamp(max=limit - 1)
            at = self.slots(sequence, positions_Q)
            hidden_Q = (real_Q >= limit) | (context is None)
            slots.append([one.masked_fill(hidden_Q, -1) for one in at])
            positions.append(positions_Q)
            lens.append(0 if context is None else min(context + rows, limit))
        slots_GT = [torch.cat(group) for group in zip(*slots, strict=True)]
        lens_B = torch.tensor(lens, device=self.device)
        return PagedBlocks(torch.cat(positions), rows, self.paged(slots_GT, lens_B))
