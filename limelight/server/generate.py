"""Token ids in, token ids out: /inference/v1/generate as vLLM has it, and SkyRL's form of it."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import numpy as np

from limelight.engine.front import Delta
from limelight.rl.routing import array, npy, packed
from limelight.server.answers import Piece
from limelight.server.bodies import SharedFields, decode
from limelight.server.http import Refused, clean_request_id
from limelight.server.logprobs import LOWEST, TokenNames, prompt_logprobs
from limelight.server.openai import Question, Reader
from limelight.server.prompts import Prompt
from limelight.stats import ModelInfo
from limelight.types import RequestError, TokenLogprobs

# What a body may ask for that is not there, in itself and in its sampling_params.
NOT_THERE = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body; its sampling_params are those of `SamplingParams`, and more that mean nothing."""

    token_ids: list[int]
    model: str | None = None
    sampling_params: dict[str, object] = {}
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    stream: bool | None = None
    features: object = None
    content_parts: object = None
    kv_transfer_params: object = None
    ec_transfer_params: object = None
    return_sample_support: bool | None = None


def read_generate(reader: Reader, body: bytes, request_id: str) -> Question:
    """The question that a body asks; `RequestError` names the field that is wrong."""
    fields = decode(body, GenerateFields)
    if fields.return_sample_support:
        raise RequestError(
            "return_sample_support is for /skyrl/v1/generate; leave it out here",
            param="return_sample_support",
        )
    return _question(reader, fields, request_id)


def read_skyrl_generate(
    reader: Reader, body: bytes, request_id: str, info: ModelInfo | None
) -> tuple[Question, int | None]:
    """The question, and how many tokens its support may have, where it is to be told.

    The support of a token are those that it was drawn from: the likeliest `top_k`, without what
    min-p and top-p have cut off.
    """
    fields = decode(body, GenerateFields)
    question = _question(reader, fields, request_id)
    if not fields.return_sample_support:
        return question, None
    if info is not None and info.logprobs_mode != "processed_logprobs":
        raise RequestError(
            "return_sample_support needs a server with --logprobs-mode processed_logprobs",
            param="return_sample_support",
        )
    if (top_k := question.params.top_k) <= 1:
        raise RequestError(
            f"return_sample_support needs a top_k of at least 2; got {top_k}", param="top_k"
        )
    reader.check_logprobs("top_k", top_k)
    params = replace(question.params, logprobs=top_k)
    return replace(question, params=params, logprobs=question.logprobs or 0), top_k


def _question(reader: Reader, fields: GenerateFields, request_id: str) -> Question:
    for name in NOT_THERE:
        if getattr(fields, name) is not None:
            raise RequestError(f"{name} is not supported; leave it out", param=name)
    if fields.stream:
        raise RequestError("stream is not supported here; answers come whole", param="stream")
    given = fields.sampling_params
    logprobs = given.get("logprobs")
    if not (logprobs is None or type(logprobs) is int):
        raise RequestError("logprobs must be an integer", param="logprobs")
    own = {
        "model": fields.model, "cache_salt": fields.cache_salt, "priority": fields.priority,
        "request_id": fields.request_id,
    }  # fmt: skip
    about_text = {"stream": None, "stream_options": None, "truncate_prompt_tokens": None}
    shared = decode(msgspec.json.encode(given | about_text | own), SharedFields)
    id = "gen-" + (clean_request_id(shared.request_id) or request_id)
    return reader.token_question(shared, fields.token_ids, logprobs=logprobs, id=id)


class GenerateAnswer:
    """The answer as it grows: for each choice its tokens, and the weights that made them.

    `encode` makes JSON of the experts that its tokens went to, where they are returned; `support`
    is how many tokens are told that each was drawn from.
    """

    def __init__(
        self,
        question: Question,
        prompts: list[Prompt],
        encode: Callable[[np.ndarray], object] = npy,
        support: int | None = None,
    ):
        self.question, self.prompts, self.encode = question, prompts, encode
        self.support = support
        count = question.num_sequences
        self.routed_experts: list[object] = [None] * count
        self.pieces = [Piece() for _ in range(count)]
        self.supports: list[list[list[int]]] = [[] for _ in range(count)]
        self.logprobs: list[list[object]] = [[] for _ in range(count)]
        self.versions: list[list[dict[str, object]]] = [[] for _ in range(count)]
        self.num_cached = 0

    def chunks(self, index: int, delta: Delta) -> Iterable[bytes]:
        """None: answers come whole."""
        raise AssertionError("read_generate refuses streams")

    def last_chunks(self) -> Iterable[bytes]:
        raise AssertionError("read_generate refuses streams")

    def error_chunks(self, refused: Refused) -> Iterable[bytes]:
        raise AssertionError("read_generate refuses streams")

    def add(self, index: int, delta: Delta) -> None:
        piece, versions = self.pieces[index], self.versions[index]
        start = len(piece.token_ids)
        piece.token_ids += delta.token_ids
        if delta.weight_version is not None:
            versions.append({"version": delta.weight_version, "start": start, "end": start})
        if versions:
            versions[-1]["end"] = len(piece.token_ids)
        piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.routed_experts is not None:
            self.routed_experts[index] = self.encode(array(delta.routed_experts))
        if delta.prompt_logprobs is not None:
            names = TokenNames(None, as_ids=True, skip_special_tokens=False)
            count = self.question.params.prompt_logprobs or 0
            piece.prompt_logprobs = prompt_logprobs(delta.prompt_logprobs, names, count)
        if self.question.logprobs is not None:
            top = self.question.logprobs
            self.logprobs[index] += [_told(entry, top) for entry in delta.logprobs or ()]
        if self.support is not None:
            self.supports[index] += [
                _support(entry, self.support) for entry in delta.logprobs or ()
            ]
        self.num_cached = max(self.num_cached, delta.num_cached)

    def whole(self) -> object:
        num_prompt = len(self.prompts[0].token_ids)
        num_generated = sum(len(piece.token_ids) for piece in self.pieces)
        return {
            "request_id": self.question.id,
            "id": self.question.id,
            "object": "generate",
            "created": self.question.created,
            "model": self.question.model,
            "choices": [self._choice(index) for index in range(len(self.pieces))],
            "prompt_logprobs": self.pieces[0].prompt_logprobs,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_generated,
                "total_tokens": num_prompt + num_generated,
                "prompt_tokens_details": {"cached_tokens": self.num_cached},
            },
        }

    def _choice(self, index: int) -> dict[str, object]:
        piece = self.pieces[index]
        asked = self.question.logprobs is not None
        support = None
        if self.support is not None:
            rows = np.array(self.supports[index], dtype=np.int32).reshape(-1, self.support)
            support = packed(rows)
        return {
            "index": index,
            "token_ids": piece.token_ids,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "logprobs": {"content": self.logprobs[index]} if asked else None,
            "routed_experts": self.routed_experts[index],
            "rollout_sample_support": support,
            "weight_versions": self.versions[index],
        }


def _told(entry: TokenLogprobs, top: int) -> dict[str, object]:
    """A token as vLLM 0.30 tells it, and as 0.33 does."""
    likely = entry.top if top == -1 else entry.top[:top]
    ranked = enumerate(likely, 1)
    return {
        **_token(entry.token_id, entry.logprob, entry.rank),
        "top_logprobs": [_token(id, logprob, rank) for rank, (id, logprob) in ranked],
    }


def _support(entry: TokenLogprobs, size: int) -> list[int]:
    """What a token was drawn from, the likeliest first, and -1 in the places that are left."""
    ids = [id for id, logprob in entry.top[:size] if logprob > float("-inf")]
    return ids + [-1] * (size - len(ids))


def _token(id: int, logprob: float, rank: int) -> dict[str, object]:
    return {
        "token": f"token_id:{id}", "token_id": id, "logprob": max(logprob, LOWEST), "rank": rank,
    }  # fmt: skip
