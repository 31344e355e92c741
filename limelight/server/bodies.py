"""The bodies of requests: OpenAI's fields and vLLM's beside them, their types and their limits.

Unknown fields are ignored; fields that ask for what is not there yet are refused by name.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import msgspec

from limelight.types import MAX_TOKENS, RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TEXT = 1024  # characters of a stop text, a bad word or a salt
# Most entries of a list.
LONGEST = {
    "stop": 4, "stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 1024,
    "allowed_token_ids": 2**18,
}  # fmt: skip
# Fields of features that are not there, and the values that do not ask for them.
NOT_YET: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "web_search_options": (),
}
# vLLM's former names of structured_outputs.
FORMER = (
    "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern",
)  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    add_special_tokens: bool | None = None
    response_format: object = None
    structured_outputs: object = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """What only chat has beside its conversation."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    """What only completions have."""

    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize, beside the conversation that it may have instead of a prompt."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """The fields of `kind` in a JSON object; `RequestError` names the one of a wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = re.search(r"\$\.(\w+)|required field `(\w+)`", str(error))
        raise RequestError(str(error), param=found and (found[1] or found[2])) from error
    except msgspec.DecodeError as error:
        raise _malformed(body, error) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


@contextmanager
def renamed(names: dict[str | None, str]) -> Iterator[None]:
    """Errors name fields as the body does: `names` has those that are called otherwise there."""
    try:
        yield
    except RequestError as error:
        param, text = names.get(error.param, error.param), str(error)
        if error.param and param and re.match(rf"{error.param}\b", text):
            text = param + text.removeprefix(error.param)
        raise RequestError(text, param=param, code=error.code) from error


def _malformed(body: bytes, error: msgspec.DecodeError) -> RequestError:
    # Python writes NaN and Infinity, which JSON does not have; name the field that holds one.
    found = re.search(r"\(byte (\d+)\)", str(error))
    before = body[: int(found[1])][-200:] if found else b""
    field_name = re.search(rb'"(\w+)"\s*:\s*-?$', before)
    if found and field_name and body[int(found[1]) :].startswith((b"NaN", b"Infinity", b"I")):
        name = field_name[1].decode()
        return RequestError(f"{name} must be a finite number", param=name)
    return RequestError(f"the body is not valid JSON: {error}")


def refuse_not_yet(body: bytes, fields: dict[str, tuple[object, ...]]):
    present = decode(body, dict[str, msgspec.Raw])
    for name in FORMER:
        if name in present:
            logger.warning("%s is ignored; structured_outputs is what it is called now", name)
    for name in fields.keys() & present.keys():
        value = decode(bytes(present[name]), object)
        if value is not None and value not in fields[name]:
            raise RequestError(f"{name} is not supported yet; leave it out", param=name)


def check_sizes(shared: SharedFields):
    for name, most in LONGEST.items():
        values = getattr(shared, name)
        if values is not None and not isinstance(values, str) and len(values) > most:
            raise RequestError(f"{name} takes at most {most} entries", param=name)
    for name in ("stop", "bad_words"):
        texts = getattr(shared, name) or ()
        for text in (texts,) if isinstance(texts, str) else texts:
            if len(text) > MAX_TEXT:
                raise RequestError(f"{name}: texts of at most {MAX_TEXT} characters", param=name)
    salt = shared.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_TEXT:
        raise RequestError(f"cache_salt must have 1 to {MAX_TEXT} characters", param="cache_salt")


def check_counts(shared: SharedFields):
    """Counts that say how to read or tell; those that say how to sample check themselves."""
    least = {"thinking_token_budget": -1, "stream_interval": 1, "truncate_prompt_tokens": -1}
    for name, low in least.items():
        value = getattr(shared, name)
        if value is not None and not low <= value <= MAX_TOKENS:
            raise RequestError(f"{name} must be from {low} to {MAX_TOKENS}", param=name)
    if shared.truncate_prompt_tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )


def check_max_tokens(name: str, value: int | None, least: int):
    if value is not None and value < least:
        raise RequestError(f"{name} must be at least {least}, got {value}", param=name)
