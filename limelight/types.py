"""The nouns that travel between the stations of a request's life. No torch here.

`Request -> Sequence -> StepPlan -> (Batch) -> StepResult -> Output`; those of one step are in
`steps.py`, and `models/batch.py` has `Batch`.
All but `Sequence` are frozen, and all but `Sequence` can cross a process border as msgpack.
"""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class RequestError(ValueError):
    """A user's mistake: what is wrong, which parameter holds it, and a short code for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class DeviceLost(Exception):
    """The device takes no more work from this process; the text says why."""


def _check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False):
    """Refuse anything that is not a number of [low, high], or ]low, high] if `open_low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise RequestError(f"{name} must be a number, got {value!r:.50}", param=name)
    if value < low or value > high or (open_low and value == low):
        bounds = f"{'above' if open_low else 'at least'} {low} and at most {high}"
        raise RequestError(f"{name} must be {bounds}, got {value!r:.50}", param=name)


def _check_integer(name: str, value: int, low: int, high: int):
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r:.50}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, got {value!r:.50}", param=name)


MAX_CHOICES = 16_384
INT64 = 2**63
# More room than any model has; the engine clamps to what is left of its own length.
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must be, by one of these, named as vLLM's: `json` is a schema or its text."""

    json: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, object] | None = None

    @property
    def given(self) -> dict[str, object]:
        """What is set, by its name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end; names and defaults as vLLM's.

    `logprobs=n` reports the n likeliest tokens beside the chosen one (0: the chosen one alone,
    -1: the whole vocabulary). Whether these are the model's own or those of what the token was
    drawn from, the engine's `logprobs_mode` says. `stop` and `bad_words` are texts; the front turns
    `bad_words` into ids.
    `structured_outputs` is for `LLM`, which makes a `Constraint` of it. Of routed experts, where
    they are returned, those of the prompt from `routed_experts_prompt_start` on are.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: as many as fit
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    routed_experts_prompt_start: int | None = None

    def __post_init__(self):
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_integer("top_k", self.top_k, -1, MAX_TOKENS)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _check_integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.seed is not None:
            _check_integer("seed", self.seed, -INT64, INT64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0, MAX_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
                    param="min_tokens",
                )
        if self.routed_experts_prompt_start is not None:
            _check_integer(
                "routed_experts_prompt_start", self.routed_experts_prompt_start, 0, MAX_TOKENS
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_integer(name, count, -1, MAX_TOKENS)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                "structured_outputs must be StructuredOutputsParams", param="structured_outputs"
            )
        self._check_lists()

    def _check_lists(self):
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            if texts is None or (name == "stop" and isinstance(texts, str) and texts):
                continue
            if not isinstance(texts, (list, tuple)) or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise RequestError(f"{name} must be a list of non-empty strings", param=name)
        for name in ("stop_token_ids", "allowed_token_ids"):
            token_ids = getattr(self, name) or []
            if not isinstance(token_ids, (list, tuple)):
                raise RequestError(f"{name} must be a list of token ids", param=name)
            for token_id in token_ids:
                _check_integer(name, token_id, 0, MAX_TOKENS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must name at least one token", param="allowed_token_ids"
            )
        if not isinstance(self.logit_bias, dict | None):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_integer("logit_bias", token_id, 0, MAX_TOKENS)
            _check_number("logit_bias", bias, -100.0, 100.0)

    @property
    def stop_texts(self) -> list[str]:
        """`stop` as a list, whatever form it was given in."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def needs_history(self) -> bool:
        """Whether the choice of a token depends on how often each token has come before."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer may be: `tag` is a structural tag of xgrammar, as JSON text.

    It holds from the first token, or `after_reasoning` from where reasoning has ended, which takes
    the request's `reasoning` to know. `marks` are tokens that are no text: the spelling of one in
    the tag does not allow it, only its id in a format `token` does.
    """

    tag: str
    after_reasoning: bool = False
    # For a vocabulary given to xgrammar with a byte 0xff before these tokens, which no text has.
    marks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How reasoning begins and ends in token ids, where the prompt leaves it, and its budget.

    `starts` and `ends` are sequences of ids, any of which begins or ends it; `ends_kept` end it too
    and belong to what follows, such as the opener of a call. Once `budget` tokens of reasoning were
    made (`num_tokens` of them in the prompt), `forced_end` is what follows.
    """

    starts: list[list[int]]
    ends: list[list[int]]
    is_open: bool
    ends_kept: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    budget: int | None = None
    forced_end: list[int] = field(default_factory=list)


MAX_ADAPTER_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, its id (from 1 on) and the folder it is read from; vLLM's fields.

    With `load_inplace` it may take the place of one with the same id.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self):
        _check_integer("lora_int_id", self.lora_int_id, 1, MAX_ADAPTER_ID)
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise RequestError(f"{name} must be a text that is not empty", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate: a request with `n` choices reaches the engine as n of these.

    `max_tokens` is resolved (it fits the model's length), `seed` is this choice's own, and
    `bad_words` are token ids. `arrival` is `time.monotonic()`, comparable across processes.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    bad_words: list[list[int]] = field(default_factory=list)
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    priority: int = 0  # a lower number goes first
    cache_salt: str = ""
    adapter_id: int = 0  # of its LoRA adapter, which the engine has; 0: none
    arrival: float = 0.0
    session: str | None = None  # where there are several engines: one of its own
    replica: int | None = None  # or which of them


@dataclass(eq=False, slots=True)
class Sequence:
    """A request inside the engine: what has been generated, computed and given to it.

    `num_computed` positions have their keys and values in the cache, and of the `num_unsure` behind
    them that steps under way compute as drafts those that stand will. `block_tables[g][i]` is the
    block of group g that holds positions [i * block_size, (i + 1) * block_size), or None once the
    window has left it behind.
    """

    request: Request
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_unsure: int = 0
    num_drafts: int = 0  # that wait on the device to be verified
    num_cached: int = 0  # positions that the prefix cache gave at the first admission
    slot: int | None = None  # its row in the runner, while it runs
    block_tables: list[list[int | None]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # chained, one a full block
    num_published: int = 0  # leading blocks that the prefix cache knows
    num_shared: int = 0  # leading positions that another sequence had before, cached or not
    num_preemptions: int = 0
    adapter_version: int = 0  # by which its blocks are found
    num_overtaken: int = 0  # steps for which it found no slot for its adapter
    # False: its keys and values are of several weights, or were to be forgotten.
    publishes: bool = True
    weight_version: str | None = None  # of its last token
    first_scheduled: float | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, and of the likeliest ones.

    `rank` counts from 1. `top` has (token id, log-probability), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts that tokens went to: ids [rows, layers, chosen] in C order, of type `dtype`.

    A row for each token from the first that was asked for to the one before the last; a column for
    each layer, zeros for dense ones.
    """

    data: bytes
    shape: tuple[int, int, int]
    dtype: str

    def first(self, rows: int) -> "RoutedExperts":
        """The first `rows` of them."""
        count = self.shape[0]
        kept = max(0, rows)
        if kept >= count:
            return self
        size = len(self.data) // count
        return RoutedExperts(
            data=self.data[: kept * size], shape=(kept, *self.shape[1:]), dtype=self.dtype
        )


@dataclass(slots=True, kw_only=True)  # not frozen, like `steps.Grant`
class Output:
    """News of one request: the tokens of one step, and the reason if these were its last.

    `prompt_logprobs` starts with None (nothing predicts the first token) and comes once, whole.
    `stop_reason` is the stop token's id, or None for an end-of-sequence token. With finish_reason
    "error", `error` tells what failed, and `refused` instead what is wrong with the request.
    `weight_version` is that of the weights, where it is another than that of the tokens before.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: str | None = None
    num_cached: int = 0
    queued_seconds: float = 0.0  # from arrival to the first grant
    routed_experts: RoutedExperts | None = None  # with the last one, where they are kept
    weight_version: str | None = None
