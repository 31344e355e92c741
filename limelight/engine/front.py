"""What stands between a user and the engine: requests checked on the way in, answers as they grow.

The server and `LLM` share it; it knows nothing of HTTP, of processes or of tensors.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from limelight.engine.reading import ParsedReader, PlainReader, Reading, Veil
from limelight.stats import ModelInfo
from limelight.text.parsers import AnswerParser, CallPiece
from limelight.text.tokenizer import Tokenizer
from limelight.types import (
    INT64,
    Constraint,
    FinishReason,
    Output,
    Reasoning,
    Request,
    RequestError,
    RoutedExperts,
    SamplingParams,
    TokenLogprobs,
)


def make_requests(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    priority: int = 0,
    cache_salt: str = "",
    constraint: Constraint | None = None,
    reasoning: Reasoning | None = None,
    each_tells_prompt: bool = False,
) -> list[Request]:
    """The `params.n` sequences of one question, ready for the engine.

    Their ids are `request_id`, or `request_id`-0 and so on. The answer is cut to the room that the
    prompt leaves; choice i has the seed `params.seed` + i. Only the first is asked for the prompt's
    log-probabilities, unless `each_tells_prompt`: whoever is has to compute it anew. Raises
    `RequestError`.
    """
    max_tokens = _resolve_max_tokens(len(prompt_token_ids), params, info)
    _check_ids("prompt", prompt_token_ids, info)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_ids(name, getattr(params, name) or (), info)
    if tokenizer is None and params.stop_texts:
        raise RequestError("stop texts need a tokenizer, and this model has none", param="stop")
    if tokenizer is None and constraint is not None:
        raise RequestError("a constraint needs a tokenizer, and this model has none")
    _check_routed_start(params.routed_experts_prompt_start, len(prompt_token_ids), info)
    bad_words = _bad_word_ids(params.bad_words or [], tokenizer, info)
    arrival = time.monotonic()
    rest = params if each_tells_prompt else replace(params, prompt_logprobs=None)
    return [
        Request(
            id=request_id if params.n == 1 else f"{request_id}-{index}",
            prompt_token_ids=prompt_token_ids,
            params=rest if index else params,
            max_tokens=max_tokens,
            seed=_seed(params, index),
            bad_words=bad_words,
            priority=priority,
            cache_salt=cache_salt,
            arrival=arrival,
            constraint=constraint,
            reasoning=reasoning,
        )
        for index in range(params.n)
    ]


def _check_ids(name: str, token_ids: Iterable[int], info: ModelInfo):
    for token_id in token_ids:
        if type(token_id) is not int:
            raise RequestError(f"{name}: {token_id!r:.50} is not a token id", param=name)
        if not 0 <= token_id < info.vocab_size:
            raise RequestError(
                f"{name}: token id {token_id} is out of the vocabulary; "
                f"ids go from 0 to {info.vocab_size - 1}",
                param=name,
            )


def _check_routed_start(start: int | None, num_prompt: int, info: ModelInfo):
    name = "routed_experts_prompt_start"
    if start is not None and not info.returns_routed_experts:
        raise RequestError(f"{name} needs --enable-return-routed-experts", param=name)
    if start is not None and start > num_prompt:
        raise RequestError(
            f"{name} must be from 0 to the {num_prompt} tokens of the prompt, got {start}",
            param=name,
        )


def _resolve_max_tokens(num_prompt: int, params: SamplingParams, info: ModelInfo) -> int:
    """How many tokens the answer may have; a prompt must leave room for one."""
    limit = info.max_model_len
    if num_prompt == 0:
        raise RequestError("the prompt is empty", param="prompt")
    if num_prompt >= limit:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; this model takes {limit} tokens of prompt and "
            f"answer together, so at most {limit - 1} of prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    room = limit - num_prompt
    if params.max_tokens is None:
        return room
    if params.max_tokens > limit:
        raise RequestError(
            f"max_tokens {params.max_tokens} is more than the {limit} tokens of prompt and answer "
            "together that this model takes",
            param="max_tokens",
        )
    return min(params.max_tokens, room)


def _seed(params: SamplingParams, index: int) -> int:
    if params.seed is None:
        return secrets.randbits(63)
    return (params.seed + index + INT64) % (2 * INT64) - INT64


def _bad_word_ids(
    words: list[str], tokenizer: Tokenizer | None, info: ModelInfo
) -> list[list[int]]:
    """The ids that spell each word at a text's start, and those that spell it after a blank.

    The second only where they do not end with the first, whose ban covers them.
    """
    if not words:
        return []
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this model has none", param="bad_words")
    spelled = []
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not bare:
            raise RequestError(f"bad_words: {word!r:.50} has no tokens", param="bad_words")
        after_blank = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        spelled.append(bare)
        if after_blank[-len(bare) :] != bare:
            spelled.append(after_blank)
    for ids in spelled:
        _check_ids("bad_words", ids, info)
    return spelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one output adds to a choice; `text` may lag behind `token_ids` and `logprobs`.

    `num_tokens` were generated, `num_reasoning` of them as reasoning.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    error: str | None = None
    refused: str | None = None  # what is wrong with the request, as the engine found out
    routed_experts: RoutedExperts | None = None  # of the whole choice, with its last delta
    weight_version: str | None = None  # of the weights, where it is another than before


class Choice:
    """One answer as it grows; its fields are the sum of the deltas that `take` gave.

    Without a tokenizer `text` stays empty. With a parser `text` is the content alone, beside
    `reasoning` and `calls`; without `tell_reasoning` that, its tokens and their log-probabilities
    are left out. `num_cached` is in prompt tokens.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        parser: AnswerParser | None = None,
        *,
        tell_reasoning: bool = True,
        stop_in_reasoning: bool = False,
        keep_cut: bool = False,
    ):
        self.request = request
        self.token_ids: list[int] = []
        self.calls: list[CallPiece] = []
        self.num_tokens = 0
        self.num_reasoning = 0
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached = 0
        self.error: str | None = None
        self.routed_experts: RoutedExperts | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._include_stop = request.params.include_stop_str_in_output
        self._veil = None if parser is None or tell_reasoning else Veil()
        self._reader: PlainReader | ParsedReader | None = None
        if parser is not None:
            assert tokenizer is not None, "a parser reads text"
            self._reader = ParsedReader(
                tokenizer, request.params, parser,
                stop_in_reasoning=stop_in_reasoning, keep_cut=keep_cut,
            )  # fmt: skip
        elif tokenizer is not None:
            self._reader = PlainReader(tokenizer, request.params)

    @property
    def text(self) -> str:
        """All text so far."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        self._reasoning = ["".join(self._reasoning)]
        return self._reasoning[0]

    def take(self, output: Output) -> Delta:
        """Add what the engine made; once the choice has ended, nothing adds to it any more.

        A stop text ends it here, with finish_reason "stop": the engine is then to be told.
        """
        assert output.request_id == self.request.id, f"{output.request_id} is another request"
        if self.finish_reason is not None:
            return Delta()
        reading = self._read(output)
        stopped = reading.stop is not None
        token_ids = output.token_ids[: reading.num_tokens]
        logprobs = None if output.logprobs is None else output.logprobs[: reading.num_tokens]
        if self._veil is not None:
            ended = stopped or output.finish_reason is not None
            token_ids, logprobs = self._veil.take(token_ids, logprobs, reading.reasons, ended=ended)
        delta = Delta(
            text=reading.text,
            reasoning=reading.reasoning if self._veil is None else "",
            calls=reading.calls,
            num_tokens=reading.num_tokens,
            num_reasoning=reading.num_reasoning,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason="stop" if stopped else output.finish_reason,
            stop_reason=reading.stop if stopped else output.stop_reason,
            num_cached=output.num_cached,
            error=output.error,
            refused=output.refused,
            routed_experts=self._routed(output, self.num_tokens + reading.num_tokens),
            weight_version=output.weight_version,
        )
        self._add(delta)
        return delta

    def settle(self, output: Output) -> RoutedExperts | None:
        """What the engine's last output adds to a choice that a stop text has ended."""
        self.routed_experts = self._routed(output, self.num_tokens)
        return self.routed_experts

    def _routed(self, output: Output, num_tokens: int) -> RoutedExperts | None:
        """The rows of the tokens that count; the last one was never computed."""
        if output.routed_experts is None:
            return None
        start = self.request.params.routed_experts_prompt_start or 0
        return output.routed_experts.first(
            len(self.request.prompt_token_ids) - start + num_tokens - 1
        )

    def _read(self, output: Output) -> Reading:
        token_ids, reason = output.token_ids, output.finish_reason
        if self._reader is None:
            return Reading(len(token_ids))
        # The token that ended the answer is no part of its text, as little as a stop text.
        ended_by_token = reason == "stop" and not self._include_stop
        num_said = max(0, len(token_ids) - ended_by_token)
        return self._reader.read(token_ids, num_said=num_said, reason=reason)

    def _add(self, delta: Delta):
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self.calls += delta.calls
        self.token_ids += delta.token_ids
        self.num_tokens += delta.num_tokens
        self.num_reasoning += delta.num_reasoning
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached = max(self.num_cached, delta.num_cached)
        self.error = delta.error or delta.refused
        self.routed_experts = delta.routed_experts
