"""What /v1/responses says: events, and the whole answer that they add up to."""

import time
from collections.abc import Iterator
from uuid import uuid4

from limelight.engine.front import Delta
from limelight.server.answers import event
from limelight.server.http import Refused
from limelight.server.logprobs import TokenNames, chat_logprobs
from limelight.server.openai import Question
from limelight.server.responses import ResponseFields
from limelight.server.telling import Item, Part, parts, spelling
from limelight.text.tokenizer import Tokenizer
from limelight.types import TokenLogprobs

JSON = dict[str, object]

TYPES = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
IDS = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
# The parts of which items consist, and how their events are called.
TEXTS = {"reasoning": "reasoning_text", "text": "output_text"}
# Why an answer is not whole; OpenAI has no word for one that the server has ended.
REASONS = {"length": "max_output_tokens", "abort": "abort"}


class ResponseAnswer:
    """The answer to a question of /v1/responses as it grows."""

    def __init__(
        self,
        question: Question,
        fields: ResponseFields,
        tokenizer: Tokenizer | None,
        *,
        num_prompt: int,
        tell_cached: bool,
    ):
        self.question = question
        self.fields = fields
        self.num_prompt = num_prompt
        self.tell_cached = tell_cached
        self.names = TokenNames(tokenizer, as_ids=False, skip_special_tokens=True)
        self.items: list[JSON] = []
        self.item: Item | None = None
        self.index = 0  # of the item that is open, or of the next one
        self.status = "in_progress"
        self.cut_by: str | None = None
        self.begun = False
        self.num_events = 0
        self.num_generated = self.num_reasoning = self.num_cached = 0
        self.waiting: list[TokenLogprobs] = []  # of tokens whose text has not come yet
        self.logprobs: list[object] = []  # of the item that is open

    def chunks(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The events that tell a delta."""
        for content in self._events(delta):
            yield self._event(content)

    def last_chunks(self) -> Iterator[bytes]:
        """The whole answer, as the event that ends the stream."""
        yield self._event({"type": f"response.{self.status}", "response": self.whole()})

    def error_chunks(self, refused: Refused) -> Iterator[bytes]:
        """The answer so far and what went wrong, as the event that ends the stream."""
        self.status = "failed"
        code = "invalid_prompt" if refused.status == 400 else "server_error"
        response = {**self.whole(), "error": {"code": code, "message": refused.message}}
        yield self._event({"type": "response.failed", "response": response})

    def add(self, index: int, delta: Delta):
        """Keep a delta for the whole answer."""
        for _ in self._events(delta):
            pass

    def _event(self, content: JSON) -> bytes:
        numbered = {**content, "sequence_number": self.num_events}
        self.num_events += 1
        return event(numbered, name=str(content["type"]))

    def _events(self, delta: Delta) -> Iterator[JSON]:
        if not self.begun:
            self.begun = True
            self.num_cached = delta.num_cached
            yield {"type": "response.created", "response": self.whole()}
            yield {"type": "response.in_progress", "response": self.whole()}
        self.num_generated += delta.num_tokens
        self.num_reasoning += delta.num_reasoning
        self.waiting += delta.logprobs or []
        for part in parts(delta, self.item):
            if self.item is None or not self.item.goes_on(part):
                yield from self._close()
                yield from self._open(part)
            yield from self._say(part)
        if delta.reasoning and not delta.text:
            self.waiting.clear()
        if delta.finish_reason is not None:
            cut = delta.finish_reason != "stop"
            yield from self._close(cut=cut)
            self.status = "incomplete" if cut else "completed"
            self.cut_by = REASONS.get(delta.finish_reason)

    def _open(self, part: Part) -> Iterator[JSON]:
        item = Item(part.kind, IDS[part.kind] + uuid4().hex, part.call, part.name or "")
        self.item, self.logprobs = item, []
        yield self._of_item("response.output_item.added", item=self._told(item, "in_progress"))
        if item.kind != "call":
            yield self._of_part("response.content_part.added", part=self._part(item))

    def _say(self, part: Part) -> Iterator[JSON]:
        item = self.item
        assert item is not None
        logprobs = self._take_logprobs(item, part.text) if item.kind == "text" else []
        item.texts.append(part.text)
        item.whole = item.whole or part.ends
        if item.kind == "call":
            if part.text:
                news = "response.function_call_arguments.delta"
                yield self._of_item(news, item_id=item.id, delta=part.text)
            if part.ends:
                yield from self._close()
            return
        extra: JSON = {"logprobs": logprobs} if item.kind == "text" else {}
        yield self._of_part(f"response.{TEXTS[item.kind]}.delta", delta=part.text, **extra)

    def _close(self, *, cut: bool = False) -> Iterator[JSON]:
        item = self.item
        if item is None:
            return
        cut = not item.whole if item.kind == "call" else cut
        told = self._told(item, "incomplete" if cut else "completed")
        if item.kind == "call":
            # Half the arguments of a call are nothing that a client could work with.
            if not cut:
                done = "response.function_call_arguments.done"
                yield self._of_item(done, item_id=item.id, name=item.name, arguments=item.text)
        else:
            extra: JSON = {"logprobs": self.logprobs} if item.kind == "text" else {}
            yield self._of_part(f"response.{TEXTS[item.kind]}.done", text=item.text, **extra)
            yield self._of_part("response.content_part.done", part=self._part(item))
        yield self._of_item("response.output_item.done", item=told)
        self.item = None
        self.index += 1
        if not (item.kind == "call" and cut):
            self.items.append(told)

    def _of_item(self, type: str, **fields: object) -> JSON:
        return {"type": type, "output_index": self.index, **fields}

    def _of_part(self, type: str, **fields: object) -> JSON:
        assert self.item is not None
        return self._of_item(type, item_id=self.item.id, content_index=0, **fields)

    def _take_logprobs(self, item: Item, text: str) -> list[object]:
        """Those of the tokens that say this text, in the form that texts have."""
        if not self.waiting:
            return []
        data = [self.names.data(entry.token_id) for entry in self.waiting]
        found = spelling(data, text.encode(), last=not item.texts)
        entries = [self.waiting[index] for index in found if data[index]]
        self.waiting = self.waiting[found[-1] + 1 :]
        told = chat_logprobs(entries, self.names, self.question.logprobs or 0)["content"]
        self.logprobs += told
        return told

    def _part(self, item: Item) -> JSON:
        part: JSON = {"type": TEXTS[item.kind], "text": item.text}
        if item.kind == "text":
            part |= {"annotations": [], "logprobs": list(self.logprobs)}
        return part

    def _told(self, item: Item, status: str) -> JSON:
        told: JSON = {"id": item.id, "type": TYPES[item.kind], "status": status}
        if item.kind == "call":
            # The same in each event that tells the item.
            call_id = "call_" + item.id.removeprefix(IDS["call"])
            return told | {"call_id": call_id, "name": item.name, "arguments": item.text}
        content = [] if status == "in_progress" else [self._part(item)]
        if item.kind == "reasoning":
            return told | {"summary": [], "content": content, "encrypted_content": None}
        return told | {"role": "assistant", "content": content}

    def whole(self) -> JSON:
        """The answer as far as it has come; its last state is the whole answer."""
        is_over = self.status in ("completed", "incomplete")
        reason = {"reason": self.cut_by} if self.status == "incomplete" else None
        return {
            "id": self.question.id,
            "object": "response",
            "created_at": self.question.created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "error": None,
            "incomplete_details": reason,
            **self._settings(),
            "output": self.items,
            "usage": self._usage() if is_over else None,
        }

    def _settings(self) -> JSON:
        """What the request asked for, with the defaults where it left them."""
        fields, params = self.fields, self.question.params
        reasoning, text = fields.reasoning, fields.text
        return {
            "model": self.question.model,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "temperature": params.temperature,
            "text": {"format": fields.format, "verbosity": text and text.verbosity},
            "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "user": fields.user,
        }

    def _usage(self) -> JSON:
        return {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {
                "cached_tokens": self.num_cached if self.tell_cached else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.num_generated,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.num_prompt + self.num_generated,
        }
