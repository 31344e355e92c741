"""One step of the engine: what the runner is asked to do, and what it answers. No torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from limelight.types import Request, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a slot this step: all that the runner must know of it until it leaves.

    `output_token_ids` is not empty when it comes back from a preemption.
    """

    slot: int
    request: Request
    output_token_ids: list[int]
    adapter_slot: int = 0  # where its adapter is; 0: it has none


@dataclass(frozen=True, slots=True)
class AdapterMove:
    """What happens to an adapter before a step: it is placed in a slot of the device, or dropped
    from host memory."""

    kind: Literal["place", "drop"]
    adapter_id: int
    slot: int = 0


# What is made for each sequence of each step is not frozen: that would take four times as long.
@dataclass(slots=True)
class Grant:
    """What the scheduler gives one sequence this step: compute `num_tokens` positions from `start`.

    `tables[g]` is (first index, block ids): the entries of group g's block table that changed since
    the last grant, or nothing if none did. With `samples` the last position yields the next token.
    The last `num_drafts` positions are those of drafts, of which fewer may be verified. Behind
    drafts of a step under way it may start up to `unsure` positions later than at `start`.
    """

    slot: int
    start: int
    num_tokens: int
    tables: list[tuple[int, list[int]]]
    samples: bool
    num_drafts: int = 0
    unsure: int = 0


@dataclass(frozen=True, slots=True)
class Trim:
    """Verify the `budget` likeliest drafts of a step, by sigmoid(slope * log odds + intercept)."""

    budget: int
    slope: float
    intercepts: list[float]  # by place


class StepKind(StrEnum):
    """Steps that take times of their own."""

    PLAIN = "plain"  # one token of each sequence
    DRAFTED = "drafted"  # and drafts, or where sequences stand is known on the device alone
    PROMPT = "prompt"  # some rows are a prompt's


@dataclass(frozen=True, slots=True)
class Together:
    """What engines that share experts agreed on for one step: how many rows each has, and the size
    of the CUDA graph that all replay, if they do, and whether it is one of `decodes` alone."""

    rows: list[int]
    graph: int | None = None
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine; with no token ids but admissions', so it can be made a step early.

    The `moves` of adapters come first of all. With `drafts` it ends with drafts for the next; all
    those it has itself are verified, or what `trim` leaves of them. If `timed`, its parts are.
    """

    admissions: list[Admission] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    trim: Trim | None = None
    drafts: bool = False
    together: Together | None = None
    moves: list[AdapterMove] = field(default_factory=list)
    timed: bool = False

    @property
    def tells_of_drafts(self) -> bool:
        """Whether its result tells anything about drafts, or about what they cost."""
        return self.timed or self.drafts or self.trim is not None

    @property
    def num_read(self) -> int:
        """Tokens of all its sequences, those of this step among them."""
        return sum([grant.start + grant.num_tokens for grant in self.grants])

    @property
    def is_plain(self) -> bool:
        """Whether it has and makes no drafts, and where each sequence stands is known."""
        return not self.drafts and not any([g.num_drafts or g.unsure for g in self.grants])

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one token, and gets one."""
        return all(grant.num_tokens == 1 and grant.samples for grant in self.grants)

    @property
    def kind(self) -> StepKind:
        """The way in which it runs."""
        if any(g.num_tokens - g.num_drafts > 1 or not g.samples for g in self.grants):
            return StepKind.PROMPT
        return StepKind.PLAIN if self.is_plain else StepKind.DRAFTED

    @property
    def num_tokens(self) -> int:
        return sum([grant.num_tokens for grant in self.grants])

    @property
    def num_rows(self) -> int:
        """Rows that the model computes: its tokens, but for drafts that are not verified."""
        offered = sum([grant.num_drafts for grant in self.grants])
        kept = offered if self.trim is None else min(self.trim.budget, offered)
        return self.num_tokens - offered + kept


@dataclass(slots=True)
class Sampled:
    """What one grant gave: tokens where it samples, log-probabilities where they were asked for.

    `prompt_logprobs` are those of positions start + 1 .. start + num_tokens as far as the prompt
    goes. `error` (what failed) and `refused` (what is wrong with the request) end this sequence
    alone. With `is_whole` no token follows: the constraint is fulfilled and lets nothing follow.

    `num_accepted` of `num_verified` drafts stood, and come first in `token_ids`.
    """

    slot: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    refused: str | None = None
    is_whole: bool = False
    num_verified: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts that a step made for the next one: of these slots, with these log odds by place, FP32
    [slots, N]."""

    slots: list[int]
    odds_BN: "np.ndarray"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step took (milliseconds), for how many rows, drafting sequences, and tokens read."""

    kind: StepKind
    verify_ms: float
    rows: int
    context: int
    draft_ms: float | None = None  # None: nothing was drafted
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """One `Sampled` for each grant of the plan, in its order; new drafts; times if asked for; and
    for how long the host waited for it."""

    sampled: list[Sampled]
    drafted: Drafted | None = None
    times: StepTimes | None = None
    waited_ms: float = 0.0
