"""What the routes do: a body in, an answer out through `send`."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
from starlette.types import Send

from limelight.config import ServerConfig
from limelight.engine.client import Served
from limelight.engine.front import Delta
from limelight.metrics import Metrics
from limelight.rl.routing import envelope
from limelight.server.adapters import NamedAdapters
from limelight.server.answers import Answer, Teller
from limelight.server.anthropic import read_message
from limelight.server.anthropic_answer import MessageAnswer
from limelight.server.bodies import DetokenizeFields, TokenizeFields, decode
from limelight.server.generate import GenerateAnswer, read_generate, read_skyrl_generate
from limelight.server.generation import Generation, Place, Queue
from limelight.server.http import Call, refusal, send_bytes, send_json, start
from limelight.server.lifecycle import Lifecycle
from limelight.server.messages import Conversation, ConversationFields, read_conversation
from limelight.server.openai import Question, Reader
from limelight.server.pacing import paced, with_silences
from limelight.server.parsing import Handler
from limelight.server.preparing import prepare
from limelight.server.prompts import Prompt, Prompts
from limelight.server.responses import read_response
from limelight.server.responses_answer import ResponseAnswer
from limelight.stats import ModelInfo
from limelight.text.answer_form import AnswerForm

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
# Makes what tells the answer to a question with these prompts.
MakeTeller = Callable[[Question, list[Prompt]], Teller]

# Bodies up to this size have threads of their own, so that the large ones, which take half a second
# a megabyte to be tokenized, hold up only each other.
QUICK_BODY = 2**17
# Tokens of a prompt that are told with their log-probabilities at once.
QUICK_PROMPT = 512
NUM_THREADS = 2
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
# A proxy that buffers would hold the stream back.
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Service:
    """One model behind the routes."""

    def __init__(
        self,
        client: Served,
        prompts: Prompts,
        reader: Reader,
        config: ServerConfig,
        form: AnswerForm | None,
        adapters: NamedAdapters,
    ):
        needed = config.answer_format is not None
        assert needed == (form is not None), "the flags ask for another parser"
        self.client = client
        self.adapters = adapters
        self.prompts = prompts
        self.reader = reader
        self.config = config
        self.handler = Handler(form, prompts.tokenizer, config)
        self.quick_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quick")
        self.slow_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="slow")
        self.metrics = Metrics(
            reader.names[0], stats=lambda: client.stats, info=self._info,
            state=lambda: client.state,
        )  # fmt: skip
        self.lifecycle = Lifecycle(client, self.metrics)
        self.queue = Queue(
            max_requests=config.max_num_queued_reqs, max_tokens=config.max_num_queued_tokens,
            metrics=self.metrics,
        )  # fmt: skip

    def _info(self) -> ModelInfo | None:
        return self.client.info if self.client.status.phase == "ready" else None

    async def chat(self, call: Call, send: Send):
        """/v1/chat/completions"""
        await self.ask(await self._read(call, self.reader.chat), call, send)

    async def completion(self, call: Call, send: Send):
        """/v1/completions"""
        await self.ask(await self._read(call, self.reader.completion), call, send)

    async def generate(self, call: Call, send: Send):
        """/inference/v1/generate"""
        await self.ask(read_generate(self.reader, call.body, call.id), call, send, GenerateAnswer)

    async def skyrl_generate(self, call: Call, send: Send):
        """/skyrl/v1/generate: the same, with routed experts as SkyRL reads them."""
        question, support = read_skyrl_generate(self.reader, call.body, call.id, self._info())
        await self.ask(
            question, call, send, partial(GenerateAnswer, encode=envelope, support=support)
        )

    async def render(self, call: Call, send: Send):
        """/v1/chat/completions/render: the prompt of a chat, as `generate` takes it."""
        question = await self._read(call, self.reader.chat, generates=False)
        [prompt] = await self._in_thread(
            len(call.body), self.prompts.read, question.source,
            add_special_tokens=question.add_special_tokens,
        )  # fmt: skip
        params = asdict(question.params)
        del params["structured_outputs"]
        answer = {
            "request_id": question.id, "model": question.model, "token_ids": prompt.token_ids,
            "sampling_params": params, "cache_salt": question.shared.cache_salt,
            "priority": question.shared.priority, "features": None,
        }  # fmt: skip
        await send_json(send, answer)

    async def response(self, call: Call, send: Send):
        """/v1/responses"""
        question, fields = await self._read(call, partial(read_response, self.reader))

        def tell(question: Question, prompts: list[Prompt]) -> Teller:
            return ResponseAnswer(
                question, fields, self.prompts.tokenizer,
                num_prompt=len(prompts[0].token_ids),
                tell_cached=self.config.enable_prompt_tokens_details,
            )  # fmt: skip

        await self.ask(question, call, send, tell)

    async def message(self, call: Call, send: Send):
        """/v1/messages"""
        question = await self._read(call, partial(read_message, self.reader))

        def tell(question: Question, prompts: list[Prompt]) -> Teller:
            return MessageAnswer(
                question,
                num_prompt=len(prompts[0].token_ids),
                tell_cached=self.config.enable_prompt_tokens_details,
            )

        await self.ask(question, call, send, tell)

    async def count_tokens(self, call: Call, send: Send):
        """/v1/messages/count_tokens"""
        read = partial(read_message, self.reader, counts=True)
        question = await self._read(call, read, generates=False)
        [prompt] = await self._in_thread(
            len(call.body), self.prompts.read, question.source, add_special_tokens=False
        )
        await send_json(send, {"input_tokens": len(prompt.token_ids)})

    async def tokenize(self, call: Call, send: Send):
        """/tokenize, of a prompt or of a conversation."""
        await send_json(send, await self._in_thread(len(call.body), self._tokenized, call.body))

    def _tokenized(self, body: bytes) -> dict[str, object]:
        fields = decode(body, TokenizeFields)
        self.reader.check_model(fields.model)
        source: Conversation | list[str | list[int]]
        source = [fields.prompt or ""]
        if fields.prompt is None:
            source = read_conversation(decode(body, ConversationFields), self.config)
        special = fields.add_special_tokens
        special = isinstance(source, list) if special is None else special
        [prompt] = self.prompts.read(source, add_special_tokens=special)
        answer: dict[str, object] = {
            "count": len(prompt.token_ids),
            "max_model_len": self.client.info.max_model_len,
            "tokens": prompt.token_ids,
            "token_strs": None,
        }
        if fields.return_token_strs:
            answer["token_strs"] = self.prompts.token_texts(prompt.token_ids)
        return answer

    async def detokenize(self, call: Call, send: Send):
        """/detokenize"""
        fields = decode(call.body, DetokenizeFields)
        self.reader.check_model(fields.model)
        await send_json(
            send,
            {"prompt": await self._in_thread(len(call.body), self.prompts.text, fields.tokens)},
        )

    async def ask(
        self, question: Question, call: Call, send: Send, make_teller: MakeTeller | None = None
    ):
        """Answer a question that came in a call, told as one of the APIs does."""
        self.lifecycle.admit_generation()
        with Place(self.queue, question.num_sequences) as place:
            prepared = await self._in_thread(
                len(call.body),
                prepare,
                question,
                call,
                self.prompts,
                self.handler,
                self.client.info,
            )
            place.hold(sum(len(request.prompt_token_ids) for request in prepared.requests))
            self.metrics.choices.observe(question.params.n)
            teller = (make_teller or self._openai_teller)(question, prepared.prompts)
            generation = Generation(
                prepared, question, client=self.client, tokenizer=self.prompts.tokenizer,
                place=place, metrics=self.metrics,
                stop_in_reasoning=self.config.stop_in_reasoning,
                keep_cut=self.config.keep_cut_calls,
            )  # fmt: skip
            with self.lifecycle.running(generation):
                async with aclosing(generation.deltas()) as deltas:
                    if not question.shared.stream:
                        await self._send_whole(teller, deltas, send)
                        return
                    interval = question.shared.stream_interval or self.config.stream_interval
                    chunks = self._chunks(teller, paced(deltas, interval))
                    seconds = self.config.sse_keep_alive_interval
                    stream: AsyncGenerator[bytes | None, None]
                    stream = with_silences(chunks, seconds) if seconds else chunks
                    async with aclosing(stream):
                        await _send_stream(teller, stream, send)

    def _openai_teller(self, question: Question, prompts: list[Prompt]) -> Teller:
        return Answer(
            question, prompts, self.prompts.tokenizer,
            tell_cached=self.config.enable_prompt_tokens_details,
            reasoning_names=self._reasoning_names(question),
            tell_routed=self.client.info.returns_routed_experts,
        )  # fmt: skip

    def _reasoning_names(self, question: Question) -> tuple[str, ...]:
        """Under which names the answer tells its reasoning; none where it is not told apart."""
        if question.kind != "chat" or self.config.reasoning_parser is None:
            return ()
        both = self.config.reasoning_content
        return ("reasoning", "reasoning_content") if both else ("reasoning",)

    async def _send_whole(
        self, teller: Teller, deltas: AsyncIterator[tuple[int, Delta]], send: Send
    ):
        is_long = False
        async for index, delta in deltas:
            is_long |= _is_long(delta)
            await self._told(_is_long(delta), teller.add, index, delta)
        body = await self._told(is_long, lambda: msgspec.json.encode(teller.whole()))
        await send_bytes(send, 200, body, media="application/json")

    async def _chunks(
        self, teller: Teller, deltas: AsyncGenerator[tuple[int, Delta], None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, where there are any to tell."""
        async with aclosing(deltas):
            async for index, delta in deltas:
                chunks = await self._told(_is_long(delta), _joined, teller.chunks, index, delta)
                if chunks:
                    yield chunks

    async def _read(
        self, call: Call, read: Callable[[bytes, str], T], *, generates: bool = True
    ) -> T:
        """What a body says; of one that is not quick to read, in a thread."""
        if len(call.body) <= QUICK_BODY:
            return read(call.body, call.id)
        if not generates:
            return await self._in_thread(len(call.body), read, call.body, call.id)
        # Reading may wait for that of others: who is to be refused is so before.
        self.lifecycle.admit_generation()
        with Place(self.queue, 1):
            return await self._in_thread(len(call.body), read, call.body, call.id)

    async def _told(
        self, is_long: bool, tell: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Tell news, in a thread if they are long."""
        if not is_long:
            return tell(*args, **kwargs)
        return await self._in_thread(QUICK_BODY + 1, tell, *args, **kwargs)

    async def _in_thread(
        self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function in a thread, chosen by the size of the body that it works on."""
        threads = self.quick_threads if size <= QUICK_BODY else self.slow_threads
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, call)


def _is_long(delta: Delta) -> bool:
    """Whether it has a long prompt's log-probabilities, which take a second to tell."""
    return len(delta.prompt_logprobs or ()) > QUICK_PROMPT


def _joined(chunks: Callable[[int, Delta], Iterable[bytes]], index: int, delta: Delta) -> bytes:
    return b"".join(chunks(index, delta))


async def _send_stream(teller: Teller, stream: AsyncIterator[bytes | None], send: Send):
    """Stream the answer; what goes wrong before its first bytes is raised, later it is an event."""
    started = False
    try:
        async for news in stream:
            if not started:
                started = True
                await start(send, 200, STREAM_HEADERS)
            chunks = KEEP_ALIVE if news is None else news
            await send({"type": "http.response.body", "body": chunks, "more_body": True})
        last = b"".join(teller.last_chunks())
    except Exception as error:
        if not started:
            raise
        refused = refusal(error)
        logger.warning("%s: the stream ended early: %s", teller.question.id, refused.message)
        last = b"".join(teller.error_chunks(refused))
    await send({"type": "http.response.body", "body": last})
