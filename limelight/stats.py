"""What the engine tells of itself: of its model, and after each step how it stands."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What became of drafts since the start, and what is expected of the next ones."""

    steps: int = 0  # verifications of a sequence with a draft at least
    drafted: int = 0
    offered: int = 0  # that could have been verified
    verified: int = 0
    accepted: int = 0
    verified_at: list[int] = field(default_factory=list)  # by place in the block
    accepted_at: list[int] = field(default_factory=list)
    predicted: float = 0.0  # how many were expected to be accepted
    budget: int = 0  # of the last step, as are the other rows
    rows: int = 0
    drafting: bool = True
    slope: float = 0.0
    intercepts: list[float] = field(default_factory=list)
    synthetic: bool = False  # accepted at rates that were told, not by what the models say


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's state after a step, for metrics and for admission at the door."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    cache_usage: float = 0.0  # share of the KV blocks in use, 0 to 1
    preemptions: int = 0  # since the start, as all below
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    steps: int = 0
    step_tokens: int = 0
    speculation: SpeculationStats | None = None  # None: nothing is drafted
    expert_tokens: list[int] = field(default_factory=list)  # of all layers, where they are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front must know of the loaded model."""

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    dtype: str
    returns_routed_experts: bool = False
    logprobs_mode: str = "raw_logprobs"
    # The modules whose weights are held in each format, where some are quantized.
    quantized: dict[str, list[str]] | None = None
