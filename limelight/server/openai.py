"""From an OpenAI body to a `Question`: what to generate, and how to tell it.

Everything that can be judged without a tokenizer is judged here, before anything is built.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from limelight.config import ServerConfig
from limelight.server.bodies import (
    NOT_YET,
    ChatFields,
    CompletionFields,
    SharedFields,
    StreamOptions,
    check_counts,
    check_max_tokens,
    check_sizes,
    decode,
    refuse_not_yet,
    renamed,
)
from limelight.server.http import Refused, clean_request_id
from limelight.server.messages import Conversation, ConversationFields, read_conversation
from limelight.text.demand import Demand
from limelight.types import LoRARequest, RequestError, SamplingParams

MAX_PROMPTS = 1024
MAX_SEQUENCES = 16_384
MAX_PRIORITY = 2**31 - 1
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "n", "seed", "min_tokens", "stop", "stop_token_ids", "bad_words",
    "allowed_token_ids", "logit_bias", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "routed_experts_prompt_start",
)  # fmt: skip


class Served(TypedDict):
    """Who is to answer."""

    model: str
    adapter_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An HTTP request for text, checked: what to generate, and how to tell it.

    `source` is a conversation or prompts as texts and token ids. `params` and `demand`, but for the
    content's format in `shared`, are what to compute, `logprobs` and `shared` what to tell;
    `field_names` are the body's names of what is called otherwise elsewhere.
    """

    kind: Literal["chat", "completion"]
    api: Literal["chat_completions", "responses", "other"]  # as metrics tell it
    id: str
    model: str
    shared: SharedFields
    source: Conversation | list[str | list[int]]
    params: SamplingParams
    logprobs: int | None
    include_usage: bool
    demand: Demand = field(default_factory=Demand)
    budget: int | None = None  # of tokens of reasoning
    adapter_id: int = 0  # as `Request` has it
    echo: bool = False
    include_reasoning: bool = True
    field_names: dict[str | None, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        if self.num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"n times the number of prompts must be at most {MAX_SEQUENCES}", param="n"
            )

    @property
    def num_sequences(self) -> int:
        prompts = len(self.source) if isinstance(self.source, list) else 1
        return prompts * self.params.n

    @property
    def demanded_by(self) -> str | None:
        """The field that holds the answer to a form."""
        if self.demand.is_forced:
            return "tool_choice"
        for name in ("structured_outputs", "response_format"):
            if getattr(self.shared, name) not in (None, {"type": "text"}):
                return name
        return "tools" if self.demand.tools else None

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its own; a chat template has already written them."""
        wanted = self.shared.add_special_tokens
        return self.kind == "completion" if wanted is None else wanted

    @property
    def continuous_usage(self) -> bool:
        options = self.shared.stream_options or StreamOptions()
        return self.include_usage and bool(options.continuous_usage_stats)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads bodies against what the server offers: names, limits and sampling defaults.

    A name may be that of one of the `adapters`, which come and go.
    """

    names: list[str]
    config: ServerConfig
    defaults: dict[str, float | int]
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)

    def chat(self, body: bytes, request_id: str) -> Question:
        """A body of /v1/chat/completions; `RequestError` names the field that is wrong."""
        refuse_not_yet(body, NOT_YET)
        own = decode(body, ChatFields)
        name = "max_tokens" if own.max_completion_tokens is None else "max_completion_tokens"
        shared = decode(body, SharedFields)
        return self.chat_question(
            shared,
            own,
            decode(body, ConversationFields),
            api="chat_completions",
            id="chatcmpl-" + (clean_request_id(shared.request_id) or request_id),
            field_names={"prompt": "messages", "max_tokens": name},
        )

    def chat_question(
        self,
        shared: SharedFields,
        own: ChatFields,
        conversation: ConversationFields,
        *,
        api: Literal["chat_completions", "responses", "other"],
        id: str,
        field_names: dict[str | None, str],
    ) -> Question:
        """A chat from its fields, whichever API they came by; `RequestError` names the wrong one.

        What the body calls otherwise, the error names as `field_names` says.
        """
        with renamed(field_names):
            self._check(shared)
            self._check_chat(own)
            logprobs = (own.top_logprobs or 0) if own.logprobs else None
            max_tokens = shared.max_tokens
            if own.max_completion_tokens is not None:
                max_tokens = own.max_completion_tokens
            check_max_tokens(field_names.get("max_tokens", "max_tokens"), max_tokens, 1)
            source = read_conversation(conversation, self.config)
            return Question(
                kind="chat",
                api=api,
                id=id,
                **self._served(shared),
                shared=shared,
                source=source,
                params=self._params(shared, max_tokens, logprobs, shared.prompt_logprobs),
                logprobs=logprobs,
                include_usage=self._include_usage(shared),
                demand=source.demand(self.config),
                budget=_budget(shared),
                echo=bool(own.echo),
                include_reasoning=own.include_reasoning is not False,
                field_names=field_names,
            )

    def completion(self, body: bytes, request_id: str) -> Question:
        """A body of /v1/completions; `RequestError` names the field that is wrong."""
        refuse_not_yet(body, NOT_YET)
        shared = decode(body, SharedFields)
        self._check(shared)
        own = decode(body, CompletionFields)
        self.check_logprobs("logprobs", own.logprobs)
        max_tokens = 16 if shared.max_tokens is None else shared.max_tokens
        # Nothing to generate makes sense only where the prompt itself is asked for.
        tells_prompt = own.echo or shared.prompt_logprobs is not None
        check_max_tokens("max_tokens", max_tokens, 0 if tells_prompt else 1)
        prompt_logprobs = shared.prompt_logprobs
        if own.echo and own.logprobs is not None:
            counts = (own.logprobs, prompt_logprobs or 0)
            prompt_logprobs = -1 if -1 in counts else max(counts)
        return Question(
            kind="completion",
            api="other",
            id="cmpl-" + (clean_request_id(shared.request_id) or request_id),
            **self._served(shared),
            shared=shared,
            source=_prompts(own.prompt),
            params=self._params(shared, max_tokens, own.logprobs, prompt_logprobs),
            logprobs=own.logprobs,
            include_usage=self._include_usage(shared),
            budget=_budget(shared),
            echo=bool(own.echo),
        )

    def token_question(
        self, shared: SharedFields, token_ids: list[int], *, logprobs: int | None, id: str
    ) -> Question:
        """Token ids to go on from, without `max_tokens` as far as the model reaches."""
        self._check(shared)
        self.check_logprobs("logprobs", logprobs)
        least = 0 if shared.prompt_logprobs is not None else 1
        check_max_tokens("max_tokens", shared.max_tokens, least)
        with renamed({"prompt": "token_ids"}):
            return Question(
                kind="completion",
                api="other",
                id=id,
                **self._served(shared),
                shared=shared,
                source=[token_ids],
                params=self._params(shared, shared.max_tokens, logprobs, shared.prompt_logprobs),
                logprobs=logprobs,
                include_usage=False,
                budget=_budget(shared),
                field_names={"prompt": "token_ids"},
            )

    def _check(self, shared: SharedFields):
        self.check_model(shared.model)
        self.check_logprobs("prompt_logprobs", shared.prompt_logprobs)
        check_sizes(shared)
        check_counts(shared)
        if shared.stream_options is not None and not shared.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if shared.stream and shared.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if abs(shared.priority) > MAX_PRIORITY:
            raise RequestError(f"priority must be within {MAX_PRIORITY} of 0", param="priority")

    def _check_chat(self, own: ChatFields):
        if own.top_logprobs and not own.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        self.check_logprobs("top_logprobs", own.top_logprobs)
        if own.include_reasoning is False and self.config.reasoning_parser is None:
            raise RequestError(
                "include_reasoning: false needs a server with --reasoning-parser",
                param="include_reasoning",
            )

    def _served(self, shared: SharedFields) -> Served:
        """The name that an answer tells, and which adapter gives it."""
        model = shared.model
        if model is None or model in self.names:
            return {"model": self.names[0], "adapter_id": 0}
        # It may have been unloaded while a thread was reading the body.
        if (adapter := self.adapters.get(model)) is None:
            raise self._not_served(model)
        return {"model": adapter.lora_name, "adapter_id": adapter.lora_int_id}

    def check_model(self, model: str | None):
        """`Refused` (404) unless this name is served; none at all means the model itself."""
        if model is not None and model not in self.names and model not in self.adapters:
            raise self._not_served(model)

    def _not_served(self, model: str) -> Refused:
        there = ", ".join([*self.names, *self.adapters])
        return Refused(
            404, f"there is no model {model[:100]!r} here; there is {there}",
            param="model", code="model_not_found",
        )  # fmt: skip

    def check_logprobs(self, name: str, count: int | None):
        most = self.config.max_logprobs
        if count is None or most == -1 and count >= -1:
            return
        if not 0 <= count <= most:
            raise RequestError(
                f"{name} must be from 0 to {most} (see --max-logprobs), got {count}", param=name
            )

    def _include_usage(self, shared: SharedFields) -> bool:
        options = shared.stream_options or StreamOptions()
        asked = options.include_usage or self.config.enable_force_include_usage
        return bool(shared.stream and asked)

    def _params(
        self,
        shared: SharedFields,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        given = {name: getattr(shared, name) for name in SAMPLING}
        values = self.defaults | {name: value for name, value in given.items() if value is not None}
        make: Callable[..., SamplingParams] = SamplingParams
        params = make(
            **values, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        if params.n > 1 and params.temperature == 0:
            raise RequestError(
                "n must be 1 at temperature 0: all choices would be the same", param="n"
            )
        return params


def _budget(shared: SharedFields) -> int | None:
    budget = shared.thinking_token_budget
    return None if budget in (None, -1) else budget


def _prompts(prompt: str | list[int | str | list[int]] | None) -> list[str | list[int]]:
    """The prompts in whichever of the four forms they came."""
    if prompt is None:
        raise RequestError("prompt is missing", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if len(kinds) != 1:
        text = "prompt must be a text, token ids, or a non-empty list of texts or of token ids"
        raise RequestError(text, param="prompt")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    return prompt  # type: ignore[return-value]
