"""What the API says of a question: stream chunks and whole answers, made from the same deltas."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

import msgspec

from limelight.engine.front import Delta
from limelight.rl.routing import array, npy
from limelight.server.http import Refused
from limelight.server.logprobs import (
    CompletionLogprobs,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from limelight.server.messages import Conversation
from limelight.server.openai import Question
from limelight.server.prompts import Prompt
from limelight.text.parsers import CallPiece, whole_calls
from limelight.text.tokenizer import Tokenizer
from limelight.types import TokenLogprobs

DONE = b"data: [DONE]\n\n"


def event(content: object, *, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass(slots=True)
class Piece:
    """What a choice says: one delta of it, or all that it has said."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[object]] | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None


def together(pieces: list[Piece]) -> Piece:
    """All that a choice has said, from its pieces in order."""
    whole = Piece(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=[call for piece in pieces for call in piece.calls],
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        prompt_logprobs=next(filter(None, (piece.prompt_logprobs for piece in pieces)), None),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
        routed_experts=pieces[-1].routed_experts,
    )
    for piece in pieces:
        whole.logprobs = joined(whole.logprobs, piece.logprobs)
    return whole


def joined(
    first: dict[str, list[object]] | None, then: dict[str, list[object]] | None
) -> dict[str, list[object]] | None:
    """The lists of `first`, made longer in place by those of `then`."""
    if first is None or then is None:
        return first or then
    for name, values in then.items():
        first[name] += values
    return first


def told_call(piece: CallPiece) -> dict[str, object]:
    """A piece of a call as a stream tells it; the first one has its id, its type and its name."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {
        "index": piece.index,
        "id": f"chatcmpl-tool-{uuid4().hex}",
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }


def told_calls(pieces: list[CallPiece]) -> list[dict[str, object]]:
    """The calls that the pieces add up to, as a whole answer tells them."""
    calls = []
    for whole in whole_calls(pieces):
        call = told_call(CallPiece(whole.index, whole.name, whole.arguments))
        del call["index"]
        calls.append(call)
    return calls


class Teller(Protocol):
    """Tells the answer to `question` in the words of one API, streamed or whole."""

    question: Question

    def chunks(self, index: int, delta: Delta) -> Iterable[bytes]:
        """The events that tell a delta of the choice `index`; none if it has nothing to say."""
        ...

    def last_chunks(self) -> Iterable[bytes]:
        """The events after the last choice has ended."""
        ...

    def error_chunks(self, refused: Refused) -> Iterable[bytes]:
        """The events that end a stream which has begun and then failed."""
        ...

    def add(self, index: int, delta: Delta) -> None:
        """Keep a delta for the whole answer."""
        ...

    def whole(self) -> object:
        """The answer, as JSON, once all choices have ended."""
        ...


class Answer:
    """The answer to one question as it grows; sequences are numbered prompt * n + choice.

    Reasoning is told under each of `reasoning_names`; with none it is not told apart.
    """

    def __init__(
        self,
        question: Question,
        prompts: list[Prompt],
        tokenizer: Tokenizer | None,
        *,
        tell_cached: bool,
        reasoning_names: tuple[str, ...],
        tell_routed: bool = False,
    ):
        self.question = question
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.tell_cached, self.tell_routed = tell_cached, tell_routed
        self.reasoning_names = reasoning_names
        params = question.params
        self.names = TokenNames(
            tokenizer,
            as_ids=bool(question.shared.return_tokens_as_token_ids),
            skip_special_tokens=params.skip_special_tokens,
        )
        count = question.num_sequences
        self.pieces: list[list[Piece]] = [[] for _ in range(count)]
        self.completion_logprobs = [
            CompletionLogprobs(self.names, question.logprobs or 0) for _ in range(count)
        ]
        self.begun = [False] * count
        self.called = [False] * count
        self.num_generated = [0] * count
        self.num_reasoning = [0] * count
        self.num_cached = [0] * count

    def piece(self, index: int, delta: Delta) -> Piece:
        """What the API says of a delta; the first one of a choice also has its echoed prompt."""
        question = self.question
        self.num_cached[index] = max(self.num_cached[index], delta.num_cached)
        piece = Piece(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if delta.routed_experts is not None:
            piece.routed_experts = npy(array(delta.routed_experts))
        if question.echo and not self.begun[index]:
            piece.text = self._echoed(index)
            piece.logprobs = self._echoed_logprobs(index, delta)
        self.begun[index] = True
        if question.shared.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            piece.prompt_logprobs = prompt_logprobs(
                delta.prompt_logprobs, self.names, question.shared.prompt_logprobs
            )
        piece.text += delta.text
        piece.reasoning, piece.calls = delta.reasoning, delta.calls
        self.called[index] |= any(call.ends for call in delta.calls)
        is_named = question.demand.choice == "named"
        if self.called[index] and delta.finish_reason == "stop" and not is_named:
            piece.finish_reason = "tool_calls"
        piece.token_ids = delta.token_ids
        self.num_generated[index] += delta.num_tokens
        self.num_reasoning[index] += delta.num_reasoning
        if question.logprobs is not None and delta.logprobs:
            piece.logprobs = joined(piece.logprobs, self._logprobs(index, delta.logprobs))
        return piece

    def _logprobs(self, index: int, entries: list[TokenLogprobs]) -> dict[str, list[object]]:
        if self.question.kind == "chat":
            return chat_logprobs(entries, self.names, self.question.logprobs or 0)
        return self.completion_logprobs[index].take(entries)

    def _echoed(self, index: int) -> str:
        """What an answer repeats: its prompt, or of a chat the begun answer that it continues."""
        source = self.question.source
        if not isinstance(source, Conversation):
            return self._prompt_text(index)
        last = source.messages[-1]
        return str(last["content"]) if last["role"] == "assistant" else ""

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompt(index)
        if prompt.text is not None:
            return prompt.text
        if self.tokenizer is None:
            return ""
        skip = self.question.params.skip_special_tokens
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)

    def _prompt_told(self, index: int) -> dict[str, object]:
        """The prompt, as far as it is to be told."""
        told: dict[str, object] = {}
        if self.question.shared.return_token_ids:
            told["prompt_token_ids"] = self._prompt(index).token_ids
        if self.question.shared.return_prompt_text:
            told["prompt_text"] = self._prompt_text(index)
        return told

    def _echoed_logprobs(self, index: int, delta: Delta) -> dict[str, list[object]] | None:
        if self.question.logprobs is None or self.question.kind == "chat":
            return None
        entries = [entry for entry in delta.prompt_logprobs or () if entry is not None]
        shape = self.completion_logprobs[index]
        return joined(shape.first(self._prompt(index).token_ids[0]), shape.take(entries))

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.question.params.n]

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The events that tell a delta; none if it has nothing to say."""
        first = not self.begun[index]
        piece = self.piece(index, delta)
        if first and self.question.kind == "chat":
            yield self._chunk(index, self._chat_delta(index, {"role": "assistant", "content": ""}))
        text = piece.text or piece.reasoning or piece.calls
        says = text or piece.finish_reason or piece.logprobs
        if says or (self.question.shared.return_token_ids and piece.token_ids):
            yield self._chunk(index, self._told_delta(index, piece, first))

    def _chat_delta(self, index: int, delta: dict[str, object]) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _told_delta(self, index: int, piece: Piece, first: bool) -> dict[str, object]:
        if self.question.kind == "chat":
            choice = self._chat_delta(index, self._news(piece))
        else:
            choice = {"index": index, "text": piece.text}
            if first:
                choice |= self._prompt_told(index)
        choice["logprobs"] = piece.logprobs
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
            choice |= self._routed_told(piece)
        if self.question.shared.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _routed_told(self, piece: Piece) -> dict[str, object]:
        return {"routed_experts": piece.routed_experts} if self.tell_routed else {}

    def _news(self, piece: Piece) -> dict[str, object]:
        news: dict[str, object] = {}
        if piece.reasoning:
            news.update(dict.fromkeys(self.reasoning_names, piece.reasoning))
        if piece.text:
            news["content"] = piece.text
        if piece.calls:
            news["tool_calls"] = list(map(told_call, piece.calls))
        return news

    def _chunk(self, index: int, choice: dict[str, object]) -> bytes:
        content = self._envelope(chunk=True)
        content["choices"] = [choice]
        delta = choice.get("delta")
        if isinstance(delta, dict) and "role" in delta:
            content |= self._prompt_told(index)
        if self.question.continuous_usage:
            content["usage"] = self._usage(
                len(self._prompt(index).token_ids), self.num_generated[index],
                self.num_cached[index], self.num_reasoning[index],
            )  # fmt: skip
        return event(content)

    def last_chunks(self) -> Iterator[bytes]:
        """The events after the last choice has ended."""
        if self.question.include_usage:
            yield event({**self._envelope(chunk=True), "choices": [], "usage": self.usage()})
        yield DONE

    def error_chunks(self, refused: Refused) -> Iterator[bytes]:
        """The error, without [DONE], which would tell a client that all went well."""
        yield event(refused.body, name="error")

    def add(self, index: int, delta: Delta):
        """Keep a delta for the whole answer."""
        self.pieces[index].append(self.piece(index, delta))

    def whole(self) -> dict[str, object]:
        """The answer once all choices have ended."""
        content = self._envelope(chunk=False)
        choices = [together(pieces) for pieces in self.pieces]
        for index, choice in enumerate(choices):
            # The first of a prompt's choices tells it for all.
            choice.prompt_logprobs = choices[index - index % self.question.params.n].prompt_logprobs
        content["choices"] = [self._choice(*numbered) for numbered in enumerate(choices)]
        content["usage"] = self.usage()
        content["service_tier"] = content["system_fingerprint"] = None
        if self.question.kind == "chat":
            content["prompt_logprobs"] = choices[0].prompt_logprobs
            content |= self._prompt_told(0)
        return content

    def _choice(self, index: int, piece: Piece) -> dict[str, object]:
        choice: dict[str, object] = {"index": index}
        if self.question.kind == "chat":
            choice["message"] = self._message(piece)
        else:
            choice["text"] = piece.text
            choice["prompt_logprobs"] = piece.prompt_logprobs
            choice |= self._prompt_told(index)
        choice["logprobs"] = piece.logprobs
        choice["finish_reason"] = piece.finish_reason
        choice["stop_reason"] = piece.stop_reason
        choice |= self._routed_told(piece)
        if self.question.shared.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _message(self, piece: Piece) -> dict[str, object]:
        calls = told_calls(piece.calls)
        is_forced = self.question.demand.is_forced
        says_else = bool(calls) and not is_forced or bool(piece.reasoning) and not calls
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if says_else and not piece.text else piece.text,
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
            **dict.fromkeys(self.reasoning_names, piece.reasoning or None),
        }
        if calls:
            message["tool_calls"] = calls
        return message

    def _envelope(self, *, chunk: bool) -> dict[str, object]:
        kind = "text_completion"
        if self.question.kind == "chat":
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.question.id,
            "object": kind,
            "created": self.question.created,
            "model": self.question.model,
        }

    def usage(self) -> dict[str, object]:
        """The tokens of the whole answer; each prompt counts once, whatever n is."""
        n = self.question.params.n
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_cached, num_reasoning = sum(self.num_cached[::n]), sum(self.num_reasoning)
        return self._usage(num_prompt, sum(self.num_generated), num_cached, num_reasoning)

    def _usage(
        self, num_prompt: int, num_generated: int, num_cached: int, num_reasoning: int
    ) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
        if self.tell_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if self.reasoning_names:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage
