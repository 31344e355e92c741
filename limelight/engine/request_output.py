"""What `LLM` gives back: the answers to a prompt, in the shape of vLLM's objects."""

from dataclasses import dataclass, field

import numpy as np

from limelight.text.messages import Message
from limelight.text.parsers import ToolCall, message_of
from limelight.types import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = list[dict[int, Logprob] | None]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt; `error` has the words for finish_reason "error".

    Where parsers take answers of chats apart, `text` is the content alone, beside `reasoning` and
    `tool_calls`. With `enable_return_routed_experts`, `routed_experts` has expert ids [rows,
    layers, chosen]: a row for each token of the prompt (from `routed_experts_prompt_start` on) and
    of the answer but its last.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    routed_experts: np.ndarray | None = None

    @property
    def message(self) -> Message:
        """The answer as a message that can join the conversation; results name its calls by id."""
        return message_of(self.text, self.reasoning or "", self.tool_calls)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the chosen tokens' log-probabilities, where they were asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(candidates[token].logprob for token, candidates in pairs if candidates)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
