"""What a user may choose about the training of a drafter; each field is a flag of its command."""

from dataclasses import dataclass
from typing import Literal

from limelight.settings import setting

COUNTS = (
    "num_speculative_tokens", "layers", "window", "heads", "inner_size", "rank", "top_k",
    "conv_taps", "conv_group", "max_tokens", "steps", "anchors", "tokens", "save_every",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """The shape of a drafter, what it learns from, and for how long."""

    data: str | None = setting(None, "JSON lines of prompts or messages, for the target to answer")
    out: str | None = setting(None, "folder to be made: config.json and model.safetensors")
    num_speculative_tokens: int = setting(7, "tokens drafted at once: a block is one more")
    layers: int | None = setting(None, "layers (default: a third of the target's, at most 5)")
    taps: list[int] | None = setting(
        None, "layers of the target to read, from 0 on (default: at most 5, evenly)"
    )
    window: int | None = setting(
        None, "tokens that attention reaches back (default: the target's own window, else 2048)"
    )
    heads: int | None = setting(None, "query heads (default: as many as the target's)")
    inner_size: int | None = setting(None, "channels of a feed-forward (default: 3 hidden sizes)")
    rank: int | None = setting(
        None, "size of the selector's codes (default: an eighth of the hidden size, 16 to 256)"
    )
    top_k: int | None = setting(None, "candidates of a place (default: 16)")
    conv_taps: int = setting(2, "rows that a convolution joins")
    conv_group: int | None = setting(
        None, "channels that share the change of a kernel (default: 16, or a divisor of it)"
    )
    mask_token: int | None = setting(
        None, "token id that stands for a place to fill (default: the target's pad_token_id)"
    )
    temperature: list[float] | None = setting(
        None, "temperatures of the target's answers, each prompt at each (default: 0 1)"
    )
    max_tokens: int = setting(512, "longest answer of the target")
    steps: int = setting(5000, "updates of the weights")
    rate: float = setting(1e-3, "highest learning rate")
    anchors: int = setting(512, "most blocks of a step")
    tokens: int = setting(8192, "most tokens of documents that a step reads")
    features: Literal["auto", "keep", "compute"] = setting(
        "auto", "keep: the target reads each document once; compute: at each step (less memory); "
        "auto: keep what fits a quarter of the free memory"
    )  # fmt: skip
    save_every: int = setting(500, "steps between checkpoints, from which a killed run goes on")
    training_seed: int = setting(0, "of new weights, sampled answers and chosen blocks")

    def __post_init__(self):
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"rate must be above 0 and at most 1; got {self.rate}")
        if any(warmth < 0.0 for warmth in self.temperature or []):
            raise ValueError(f"temperature must not be negative; got {self.temperature}")

    @property
    def temperatures(self) -> list[float]:
        return [0.0, 1.0] if self.temperature is None else self.temperature
