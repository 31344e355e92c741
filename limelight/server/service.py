"""What the routes do: a body in, an answer out through `send`."""

import asyncio
import copy
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import ParamSpec, TypeVar

from starlette.types import Send

from limelight.config import ServerConfig
from limelight.engine.client import EngineClient
from limelight.engine.front import Delta, make_requests
from limelight.metrics import Metrics
from limelight.server.answers import Answer, event
from limelight.server.bodies import DetokenizeFields, TokenizeFields, decode
from limelight.server.generation import Generation, Place, Queue
from limelight.server.http import refusal, send_json, start
from limelight.server.lifecycle import Lifecycle
from limelight.server.messages import Conversation, read_conversation
from limelight.server.openai import Question, Reader
from limelight.server.parsing import MakeParser
from limelight.server.prompts import Prompt, Prompts
from limelight.text.parsers import AnswerParser
from limelight.types import ModelInfo, Request, RequestError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Bodies up to this size have threads of their own, so that the large ones, which take a second a
# megabyte, hold up only each other.
QUICK_BODY = 2**17
NUM_THREADS = 2
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
        client: EngineClient,
        prompts: Prompts,
        reader: Reader,
        config: ServerConfig,
        make_parser: MakeParser | None,
    ):
        needed = config.answer_format is not None
        assert needed == (make_parser is not None), "the flags ask for another parser"
        self.client = client
        self.prompts = prompts
        self.reader = reader
        self.config = config
        self.make_parser = make_parser
        self.quick_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quick")
        self.slow_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="slow")
        self.metrics = Metrics(reader.names[0], stats=lambda: client.stats, info=self._info)
        self.lifecycle = Lifecycle(client, self.metrics)
        self.queue = Queue(
            max_requests=config.max_num_queued_reqs, max_tokens=config.max_num_queued_tokens,
            metrics=self.metrics,
        )  # fmt: skip

    def _info(self) -> ModelInfo | None:
        return self.client.info if self.client.status.phase == "ready" else None

    async def chat(self, body: bytes, request_id: str, send: Send):
        """/v1/chat/completions"""
        await self._answer(self.reader.chat(body, request_id), len(body), send)

    async def completion(self, body: bytes, request_id: str, send: Send):
        """/v1/completions"""
        await self._answer(self.reader.completion(body, request_id), len(body), send)

    async def tokenize(self, body: bytes, request_id: str, send: Send):
        """/tokenize, of a prompt or of a conversation."""
        fields = decode(body, TokenizeFields)
        self.reader.check_model(fields.model)
        source: Conversation | list[str | list[int]]
        source = [fields.prompt or ""]
        if fields.prompt is None:
            source = read_conversation(body, self.config)
        special = fields.add_special_tokens
        [prompt] = await self._in_thread(
            len(body),
            self.prompts.read,
            source,
            add_special_tokens=isinstance(source, list) if special is None else special,
        )
        answer: dict[str, object] = {
            "count": len(prompt.token_ids),
            "max_model_len": self.client.info.max_model_len,
            "tokens": prompt.token_ids,
            "token_strs": None,
        }
        if fields.return_token_strs:
            answer["token_strs"] = self.prompts.token_texts(prompt.token_ids)
        await send_json(send, answer)

    async def detokenize(self, body: bytes, request_id: str, send: Send):
        """/detokenize"""
        fields = decode(body, DetokenizeFields)
        self.reader.check_model(fields.model)
        await send_json(
            send, {"prompt": await self._in_thread(len(body), self.prompts.text, fields.tokens)}
        )

    async def _answer(self, question: Question, size: int, send: Send):
        with Place(self.queue, question.num_sequences) as place:
            prompts, requests, parsers = await self._in_thread(size, self._prepare, question)
            place.hold(sum(len(request.prompt_token_ids) for request in requests))
            self.metrics.choices.observe(question.params.n)
            answer = Answer(
                question, prompts, self.prompts.tokenizer,
                tell_cached=self.config.enable_prompt_tokens_details,
                reasoning_names=self._reasoning_names(question),
            )  # fmt: skip
            generation = Generation(
                requests, parsers, client=self.client, tokenizer=self.prompts.tokenizer,
                place=place, metrics=self.metrics, tell_reasoning=question.include_reasoning,
            )  # fmt: skip
            with self.lifecycle.running(generation):
                async with aclosing(generation.deltas()) as deltas:
                    tell = _send_stream if question.shared.stream else _send_whole
                    await tell(answer, deltas, send)

    def _reasoning_names(self, question: Question) -> tuple[str, ...]:
        """Under which names the answer tells its reasoning; none where it is not told apart."""
        if question.kind != "chat" or self.config.reasoning_parser is None:
            return ()
        both = self.config.reasoning_content
        return ("reasoning", "reasoning_content") if both else ("reasoning",)

    def _prepare(
        self, question: Question
    ) -> tuple[list[Prompt], list[Request], list[AnswerParser]]:
        # Two clients may choose the same X-Request-Id; the engine must still tell them apart.
        unique = f"{question.id}-{uuid.uuid4().hex[:8]}"
        try:
            prompts = self.prompts.read(
                question.source, add_special_tokens=question.add_special_tokens
            )
            requests = [
                request
                for index, prompt in enumerate(prompts)
                for request in make_requests(
                    f"{unique}-{index}", prompt.token_ids, question.params,
                    info=self.client.info, tokenizer=self.prompts.tokenizer,
                    priority=question.shared.priority, cache_salt=question.shared.cache_salt or "",
                )
            ]  # fmt: skip
        except RequestError as error:
            param = question.field_names.get(error.param, error.param)
            raise RequestError(str(error), param=param, code=error.code) from error
        source, make = question.source, self.make_parser
        if make is None or not isinstance(source, Conversation):
            return prompts, requests, []
        # The prompt is read once, however many answers it gets.
        parser = make(prompts[0], source)
        return prompts, requests, [parser, *(copy.deepcopy(parser) for _ in requests[1:])]

    async def _in_thread(
        self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function in a thread, chosen by the size of the body that it works on."""
        threads = self.quick_threads if size <= QUICK_BODY else self.slow_threads
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, call)


async def _send_whole(answer: Answer, deltas: AsyncIterator[tuple[int, Delta]], send: Send):
    async for index, delta in deltas:
        answer.add(index, delta)
    await send_json(send, answer.whole())


async def _send_stream(answer: Answer, deltas: AsyncIterator[tuple[int, Delta]], send: Send):
    """Stream the answer; what goes wrong before its first event is raised, later it is an event."""
    started = False
    try:
        async for index, delta in deltas:
            chunks = b"".join(answer.chunks(index, delta))
            if chunks and not started:
                started = True
                await start(send, 200, STREAM_HEADERS)
            if chunks:
                await send({"type": "http.response.body", "body": chunks, "more_body": True})
        last = b"".join(answer.last_chunks())
    except Exception as error:
        if not started:
            raise
        refused = refusal(error)
        logger.warning("%s: the stream ended early: %s", answer.question.id, refused.message)
        # Without [DONE], which would tell a client that all went well.
        last = event(refused.body, name="error")
    await send({"type": "http.response.body", "body": last})
