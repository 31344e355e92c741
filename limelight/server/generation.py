"""The sequences of an HTTP request while the engine works on them, and the room that they take."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from limelight.engine.client import Served
from limelight.engine.front import Choice, Delta
from limelight.metrics import Metrics, SequenceTimes
from limelight.server.http import Refused, without_private
from limelight.server.openai import Question
from limelight.server.preparing import Prepared
from limelight.text.tokenizer import Tokenizer
from limelight.types import Output, Request, RequestError

logger = logging.getLogger(__name__)

BURST = 64  # sequences that are sent at once; others have their turn before the next


class Queue:
    """How much waits: sequences from the door on until their first token, and their prompt tokens.

    Counted here and not by the engine's reports, which a burst of requests would outrun.
    """

    def __init__(self, *, max_requests: int, max_tokens: int | None, metrics: Metrics):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.metrics = metrics
        self.requests = 0
        self.tokens = 0

    def refuse(self, reason: str, most: int):
        """Count and raise a `Refused` (503)."""
        self.metrics.rejected(reason).inc()
        raise Refused(
            503, f"the queue is full: {reason}, at most {most}", code="queue_full", retry_after=1
        )


class Place:
    """The share of one HTTP request in the queue; a context manager that gives it back.

    An empty queue takes any request, or one above a limit could never be served.
    """

    def __init__(self, queue: Queue, num_requests: int):
        if queue.requests and queue.requests + num_requests > queue.max_requests:
            queue.refuse("requests", queue.max_requests)
        queue.requests += num_requests
        self.queue = queue
        self.requests = num_requests
        self.tokens = 0

    def hold(self, num_tokens: int):
        """Take room for the prompts too, now that their length is known; else `Refused` (503)."""
        queue = self.queue
        most = queue.max_tokens
        if most is not None and queue.tokens and queue.tokens + num_tokens > most:
            queue.refuse("tokens", most)
        self.tokens = num_tokens
        queue.tokens += num_tokens

    def release(self, num_requests: int, num_tokens: int):
        """These no longer wait."""
        self.requests -= num_requests
        self.tokens -= num_tokens
        self.queue.requests -= num_requests
        self.queue.tokens -= num_tokens

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *error: object):
        self.release(self.requests, self.tokens)


class Generation:
    """All sequences of one HTTP request; their news come in one stream, as they happen."""

    def __init__(
        self,
        prepared: Prepared,
        question: Question,
        *,
        client: Served,
        tokenizer: Tokenizer | None,
        place: Place,
        metrics: Metrics,
        stop_in_reasoning: bool,
        keep_cut: bool,
    ):
        self.requests = prepared.requests
        self.parsers = prepared.parsers
        self.question = question
        self.stop_in_reasoning = stop_in_reasoning
        self.keep_cut = keep_cut
        self.client = client
        self.tokenizer = tokenizer
        self.place = place
        self.metrics = metrics
        self._news: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    def fail(self, error: Exception):
        """End the stream of news with this error, after those that are already there."""
        self._news.put_nowait(error)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(index of the sequence, its news) until all have ended; closing it aborts those left.

        Raises `EngineDead`, `Refused` for a sequence that failed, or what `fail` was given.
        """
        tasks: list[asyncio.Task[None]] = []
        left = len(self.requests)
        try:
            for index in range(left):
                tasks.append(asyncio.create_task(self._follow(index)))
                if index % BURST == BURST - 1:
                    await asyncio.sleep(0)
            while left:
                news = await self._news.get()
                if isinstance(news, Exception):
                    raise news
                left -= news[1].finish_reason is not None
                yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int):
        request = self.requests[index]
        times = SequenceTimes(
            self.metrics, arrival=request.arrival, num_prompt=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
        )  # fmt: skip
        reason = "abort"
        try:
            # Leaving early, as at a stop text or when cancelled, closes the stream: an abort.
            async with aclosing(self.client.submit(request)) as outputs:
                reason = await self._pass_on(index, outputs, times)
        except Exception as error:
            reason = "error"
            self._news.put_nowait(error)
        finally:
            times.end(reason)

    async def _pass_on(
        self, index: int, outputs: AsyncIterator[Output], times: SequenceTimes
    ) -> str:
        """Pass the news of one sequence on until its end; the reason of the end."""
        request = self.requests[index]
        parser = self.parsers[index] if self.parsers else None
        choice = Choice(
            request, self.tokenizer, parser, tell_reasoning=self.question.include_reasoning,
            stop_in_reasoning=self.stop_in_reasoning, keep_cut=self.keep_cut,
        )  # fmt: skip
        waits, has_called = True, False
        reason = None
        async for output in outputs:
            if waits:
                waits = False
                self.place.release(1, len(request.prompt_token_ids))
            if output.refused is not None:
                raise self._refused(output.refused)
            delta = choice.take(output)
            times.output(
                delta.num_tokens, queued=output.queued_seconds, num_cached=output.num_cached
            )
            if delta.finish_reason == "error":
                raise _failed(request, delta)
            reason = delta.finish_reason
            by_text = reason is not None and output.finish_reason is None
            if by_text and self.client.info.returns_routed_experts:
                delta = await self._settled(choice, delta, outputs)
            self._news.put_nowait((index, delta))
            has_called |= any(piece.ends for piece in delta.calls)
            if by_text:
                break
        assert reason is not None, f"{request.id}: the stream ended without a reason"
        self._note_calls(has_called)
        return reason

    async def _settled(self, choice: Choice, delta: Delta, outputs: AsyncIterator[Output]) -> Delta:
        """The last delta of a choice that a stop text has ended, with the rows of its routing,
        which the engine tells as it ends the sequence."""
        self.client.abort(choice.request.id)
        async for output in outputs:
            if output.finish_reason is not None:
                delta = replace(delta, routed_experts=choice.settle(output))
        return delta

    def _note_calls(self, has_called: bool):
        """Count a choice that was read for calls."""
        if self.question.demand.tools:
            mode = "streaming" if self.question.shared.stream else "non_streaming"
            outcome = "tool_call" if has_called else "no_tool_call"
            self.metrics.calls_read(mode, outcome, self.question.api).inc()

    def _refused(self, what: str) -> RequestError:
        """The engine has found that the answer cannot be held to what was asked for."""
        param = self.question.demanded_by
        if param is None and self.question.params.allowed_token_ids is not None:
            param = "allowed_token_ids"
        return RequestError(what, param=self.question.field_names.get(param, param))


def _failed(request: Request, delta: Delta) -> Refused:
    logger.error("%s failed: %s", request.id, delta.error)
    return Refused(500, without_private(f"the request failed: {delta.error}"))
