"""The config.json of a new drafter: what was asked for, and for the rest what suits the target."""

from math import gcd

from limelight.models.beam import BeamConfig
from limelight.models.config import ModelConfig
from limelight.models.dflash2_config import BEAM, QWEN, DFlash2Config
from limelight.training.settings import DraftSettings

MOST_LAYERS = 5
USUAL_WINDOW = 2048
RANKS = (16, 256)
USUAL_CANDIDATES, USUAL_GROUP = 16, 16


def config_json(
    settings: DraftSettings, target: ModelConfig, *, pad_token: int | None
) -> dict[str, object]:
    """In the published spelling; `ValueError` for a shape that cannot be."""
    layers = settings.layers or min(MOST_LAYERS, -(-target.num_layers // 3))
    hidden, block = target.hidden_size, settings.num_speculative_tokens + 1
    json: dict[str, object] = {
        "architectures": [BEAM if isinstance(target, BeamConfig) else QWEN],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": settings.inner_size or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": settings.heads or target.num_heads,
        # Keys and values lie in the target's cache, in blocks of its shape.
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta},
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": settings.window or _window(target, block),
        "is_causal": False,
        "num_target_layers": target.num_layers,
        "target_hidden_size": hidden,
        "block_size": block,
        "dflash_config": _drafting(settings, target, pad_token),
    }
    DFlash2Config.from_dict(json, source="the drafter's shape").check_target(target)
    return json


def _drafting(
    settings: DraftSettings, target: ModelConfig, pad_token: int | None
) -> dict[str, object]:
    mask = settings.mask_token if settings.mask_token is not None else pad_token
    if mask is None:
        raise ValueError("the target has no pad_token_id: give --mask-token, a token id")
    (low, high), hidden = RANKS, target.hidden_size
    softcap = target.logit_softcap if isinstance(target, BeamConfig) else None
    return {
        "target_layer_ids": _taps(settings, target),
        "mask_token_id": mask,
        "block_size": settings.num_speculative_tokens + 1,
        "selector_rank": settings.rank or min(high, max(low, hidden // 8)),
        "selector_top_k": settings.top_k or min(USUAL_CANDIDATES, target.vocab_size),
        "conv_kernel_size": settings.conv_taps,
        "conv_group_size": settings.conv_group or gcd(USUAL_GROUP, hidden),
        "final_logit_softcapping": softcap,
    }


def _taps(settings: DraftSettings, target: ModelConfig) -> list[int]:
    """From the second layer to the third from the end, where there are as many."""
    if settings.taps is not None:
        return settings.taps
    last = target.num_layers - 1
    first, end = min(1, last), max(min(1, last), last - 2)
    count = min(MOST_LAYERS, max(1, target.num_layers // 2))
    steps = max(1, count - 1)
    return sorted({round(first + (end - first) * i / steps) for i in range(count)})


def _window(target: ModelConfig, block: int) -> int:
    windows = [window for window in target.windows if window is not None]
    return max(min(windows, default=USUAL_WINDOW), block)
