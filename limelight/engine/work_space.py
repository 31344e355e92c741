"""An upper bound of what one step holds beside weights and cache."""

import math
from typing import TYPE_CHECKING

from limelight.config import EngineConfig
from limelight.models.loader import Model
from limelight.ops import decode, next_power_of_2, paging
from limelight.ops.fp4 import FP4
from limelight.ops.kept import KEPT_BYTES
from limelight.ops.lora import Adapted
from limelight.parallel.expert_mesh import MOST_GATHERED, ExpertMesh
from limelight.runner.graphs import MOST_ROWS_WITH_A_PROMPT

if TYPE_CHECKING:
    from limelight.engine.startup import Resolved


def work_space(
    config: EngineConfig, found: "Resolved", outline: Model, experts: ExpertMesh | None
) -> int:
    """Bytes, of a step with as many tokens as there can be."""
    exchanged = _of_exchange(experts, found, config.max_num_batched_tokens)
    return _of_step(config, found) + _unpacked(config, outline, found) + exchanged


def _of_step(config: EngineConfig, found: "Resolved") -> int:
    model = found.shape
    width = 8 * model.hidden_size + 6 * max(
        model.inner_size, model.experts_per_token * (model.expert_inner_size + model.hidden_size)
    )
    tokens = min(config.max_num_batched_tokens, model.max_positions)
    # References, which a CPU runs, take several times as much for a share.
    shares = config.tensor_parallel_size if found.device.type == "cuda" else 1
    row = 4 * math.ceil(model.vocab_size / shares)
    logits = 3 * row * max(config.max_num_seqs, 256)
    if found.drafter is not None:
        logits = max(logits, row * found.drafter.logit_rows(config))
    if found.device.type == "cuda":
        # What graphs compute is in memory of their own.
        tokens += 0 if config.enforce_eager else min(tokens, MOST_ROWS_WITH_A_PROMPT)
        return found.dtype.itemsize * tokens * width + logits + _of_mixed_attention(config, found)
    attention = paging.work_space(
        max_len=found.max_model_len,
        heads=model.num_heads, kv_heads=model.num_kv_heads, head_dim=model.head_dim,
    )  # fmt: skip
    return 4 * tokens * width + logits + attention + KEPT_BYTES


def _of_mixed_attention(config: EngineConfig, found: "Resolved") -> int:
    """Sums of parts of keys in a graph with prompts, which has room for all sequences."""
    if config.enforce_eager:
        return 0
    model, seqs = found.shape, config.max_num_seqs + 1
    drafts = 0 if found.drafter is None else found.drafter.num_drafts
    queries = min(next_power_of_2(1 + drafts), paging.FEW_QUERIES)
    kv_heads = -(-model.num_kv_heads // config.tensor_parallel_size)
    heads = -(-model.num_heads // config.tensor_parallel_size)
    tiles = [decode.tile_of(seqs * kv_heads, window=None, fp8=fp8) for fp8 in (False, True)]
    parts = max(tile.splits for tile in tiles)
    return 4 * seqs * queries * heads * parts * (model.head_dim + 2)


def _unpacked(config: EngineConfig, outline: Model, found: "Resolved") -> int:
    """Of the two largest NVFP4 matrices, of routed and shared experts: unpacked for many rows, in
    graphs too."""
    held = [w for module in outline.modules() for w in vars(module).values()]
    packed = [w for w in (w.base if type(w) is Adapted else w for w in held) if type(w) is FP4]
    if found.device.type == "cpu":
        return 0
    sizes = sorted({math.prod(weight.shape) for weight in packed})
    return found.dtype.itemsize * sum(sizes[-2:]) * (1 if config.enforce_eager else 2)


def _of_exchange(experts: ExpertMesh | None, found: "Resolved", tokens: int) -> int:
    """Bytes that a step of so many tokens on each rank may need for rows of others: at worst all
    of them choose the same experts."""
    if experts is None:
        return 0
    model, rows = found.shape, experts.share(tokens)
    many = 0 if rows <= MOST_GATHERED else -(-rows // experts.chunks(rows))
    rows = max(many, min(rows, MOST_GATHERED))
    pairs = experts.size * rows * model.experts_per_token
    width = 3 * model.hidden_size + 3 * model.expert_inner_size
    returned = 2 * rows * model.experts_per_token * model.hidden_size
    return found.dtype.itemsize * (pairs * width + returned)
