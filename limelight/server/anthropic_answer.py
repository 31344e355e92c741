"""What /v1/messages says: events, and the whole message that they add up to."""

from collections.abc import Iterator
from uuid import uuid4

import msgspec

from limelight.engine.front import Delta
from limelight.server.answers import event
from limelight.server.anthropic import Told
from limelight.server.http import Refused
from limelight.server.openai import Question
from limelight.server.telling import Item, Part, parts

JSON = dict[str, object]

# For each kind of block: its type, where its text stands, and the same of its deltas.
BLOCKS = {
    "reasoning": ("thinking", "thinking", "thinking_delta", "thinking"),
    "text": ("text", "text", "text_delta", "text"),
    "call": ("tool_use", "input", "input_json_delta", "partial_json"),
}


class MessageAnswer:
    """The answer to a question of /v1/messages as it grows."""

    def __init__(self, question: Question, *, num_prompt: int, tell_cached: bool):
        self.question = question
        self.num_prompt = num_prompt
        self.tell_cached = tell_cached
        self.begun = False
        self.blocks: list[JSON] = []
        self.item: Item | None = None
        self.index = 0  # of the block that is open, or of the next one
        self.has_called = False
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.num_generated = self.num_reasoning = self.num_cached = 0

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The events that tell a delta."""
        return map(_event, self._events(delta))

    def last_chunks(self) -> Iterator[bytes]:
        """Why and after how many tokens the answer ended."""
        delta = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
        yield _event({"type": "message_delta", "delta": delta, "usage": self._usage()})
        yield _event({"type": "message_stop"})

    def error_chunks(self, refused: Refused) -> Iterator[bytes]:
        """What went wrong, as the event that ends the stream."""
        yield _event(Told(refused).body)

    def add(self, index: int, delta: Delta):
        """Keep a delta for the whole answer."""
        for _ in self._events(delta):
            pass

    def _events(self, delta: Delta) -> Iterator[JSON]:
        if not self.begun:
            self.begun = True
            self.num_cached = delta.num_cached if self.tell_cached else 0
            yield {"type": "message_start", "message": self.whole()}
        self.num_generated += delta.num_tokens
        self.num_reasoning += delta.num_reasoning
        for part in parts(delta, self.item):
            if self.item is None or not self.item.goes_on(part):
                yield from self._close()
                yield from self._open(part)
            yield from self._say(part)
        if delta.finish_reason is not None:
            yield from self._close()
            self._end(delta)

    def _open(self, part: Part) -> Iterator[JSON]:
        prefix = "toolu_" if part.kind == "call" else ""
        self.item = Item(part.kind, prefix + uuid4().hex, part.call, part.name or "")
        block = _told(self.item, {} if part.kind == "call" else "")
        yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def _say(self, part: Part) -> Iterator[JSON]:
        item = self.item
        assert item is not None
        item.texts.append(part.text)
        item.whole = item.whole or part.ends
        if part.text:
            _, _, kind, name = BLOCKS[item.kind]
            delta = {"type": kind, name: part.text}
            yield {"type": "content_block_delta", "index": self.index, "delta": delta}
        if part.ends:
            self.has_called = True
            yield from self._close()

    def _close(self) -> Iterator[JSON]:
        item = self.item
        if item is None:
            return
        if item.kind == "reasoning":
            # There is nothing to sign, but some clients drop thoughts that come without it.
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": self.index, "delta": delta}
        yield {"type": "content_block_stop", "index": self.index}
        self.item = None
        self.index += 1
        if item.kind != "call":
            self.blocks.append(_told(item, item.text))
        elif item.whole:
            # Half the input of a call is nothing that a client could work with.
            self.blocks.append(_told(item, msgspec.json.decode(item.text or "{}")))

    def _end(self, delta: Delta):
        if delta.finish_reason == "abort":
            # The server has ended it; who sends it back lets the answer go on.
            self.stop_reason = "pause_turn"
        elif delta.finish_reason != "stop":
            self.stop_reason = "max_tokens"
        elif self.has_called:
            self.stop_reason = "tool_use"
        elif isinstance(delta.stop_reason, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self.stop_reason = "end_turn"

    def whole(self) -> JSON:
        """The message as far as it has come; its last state is the whole answer."""
        return {
            "id": self.question.id,
            "type": "message",
            "role": "assistant",
            "model": self.question.model,
            "content": self.blocks,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> JSON:
        return {
            # Tokens that the cache gave are not counted twice.
            "input_tokens": self.num_prompt - self.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached,
            "output_tokens": self.num_generated,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning},
        }


def _event(content: JSON) -> bytes:
    return event(content, name=str(content["type"]))


def _told(item: Item, content: object) -> JSON:
    kind, name, _, _ = BLOCKS[item.kind]
    told: JSON = {"type": kind, name: content}
    if item.kind == "call":
        told |= {"id": item.id, "name": item.name}
    if item.kind == "reasoning":
        told["signature"] = ""
    return told
