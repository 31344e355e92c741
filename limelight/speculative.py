"""What a user may choose about drafting: the object of --speculative-config, in vLLM's keys."""

import difflib
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar

MOST_DRAFTS = 15
NO_DRAFTS: dict[str, object] = {"num_speculative_tokens": 0}
MOST_SPREAD = 10


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter works beside the model, and how; `num_speculative_tokens` 0 means none.

    With the rejection method "synthetic" drafts are accepted at told rates, whatever the model
    says: for benchmarks of speed, whose text means nothing. As vLLM's, each rate is that of a draft
    and all before it together, so that none is above the one before; `limelight bench spec` writes
    such rates down. `synthetic_spread`, which vLLM does not have, tells how unlike drafts are
    (`ops/synthetic.py`); 0: all of one place have the same chance.
    """

    model: str | None = None
    method: str = "dflash"
    num_speculative_tokens: int | None = None  # None: as many as the drafter was trained for
    enable_adaptive_verification: bool = False
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_spread: float | None = None  # None: as drafters have it that were measured
    attention_backend: str | None = None
    kv_cache_dtype: str = "auto"
    draft_tensor_parallel_size: int | None = None
    revision: str | None = None
    load_format: str | None = None  # None: as the model's

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "method": ("dflash",),
        "draft_sample_method": ("greedy", "probabilistic"),
        "rejection_sample_method": ("standard", "synthetic"),
        "load_format": ("auto", "safetensors", "dummy"),
    }
    TYPES: ClassVar[dict[str, type]] = {
        "num_speculative_tokens": int,
        "enable_adaptive_verification": bool,
        "draft_tensor_parallel_size": int,
        "synthetic_acceptance_rates": list,
        "synthetic_spread": float,
    }

    @classmethod
    def of(cls, given: dict[str, object]) -> "SpeculativeConfig":
        """`ValueError` names the key that is at fault."""
        names = [item.name for item in fields(cls)]
        for key, value in given.items():
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(names)}"
                raise ValueError(f"--speculative-config has no key {key!r}{hint}")
            expected = cls.TYPES.get(key, str)
            whole = expected is float and type(value) is int
            if value is not None and type(value) is not expected and not whole:
                raise ValueError(
                    f"--speculative-config: {key} must be {expected.__name__}; got {value!r}"
                )
        return cls(**given)  # type: ignore[arg-type]

    def __post_init__(self):
        for key, options in self.CHOICES.items():
            value = getattr(self, key)
            if value is not None and value not in options:
                raise ValueError(
                    f"--speculative-config: {key} must be one of {', '.join(options)}; "
                    f"got {value!r}"
                )
        count, ranks = self.num_speculative_tokens, self.draft_tensor_parallel_size
        if count is not None and not 0 <= count <= MOST_DRAFTS:
            raise ValueError(
                f"--speculative-config: num_speculative_tokens must be 0 (no drafts) to "
                f"{MOST_DRAFTS}; got {count}"
            )
        if count != 0 and not self.model:
            raise ValueError("--speculative-config needs model, the drafter's folder or hub id")
        if ranks is not None and ranks < 1:
            raise ValueError(
                f"--speculative-config: draft_tensor_parallel_size must be at least 1; got {ranks}"
            )
        self._check_rates()

    def _check_rates(self):
        rates = self.synthetic_acceptance_rates
        if (rates is not None) != (self.rejection_sample_method == "synthetic"):
            raise ValueError(
                "--speculative-config: rejection_sample_method synthetic and "
                "synthetic_acceptance_rates need each other"
            )
        spread = self.synthetic_spread
        if spread is not None and (rates is None or not 0 <= spread <= MOST_SPREAD):
            raise ValueError(
                f"--speculative-config: synthetic_spread must be from 0 to {MOST_SPREAD} and needs "
                f"synthetic_acceptance_rates; got {spread}"
            )
        if rates is None:
            return
        if not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in rates):
            raise ValueError(
                f"--speculative-config: synthetic_acceptance_rates must be from 0 to 1: {rates}"
            )
        if any(after > before for before, after in pairwise(rates)):
            raise ValueError(
                f"--speculative-config: each of synthetic_acceptance_rates counts a draft and all "
                f"before it, so none may be above the one before: {rates}"
            )
        if len(rates) != (self.num_speculative_tokens or len(rates)):
            raise ValueError(
                f"--speculative-config: {len(rates)} synthetic_acceptance_rates for "
                f"{self.num_speculative_tokens} drafts"
            )
