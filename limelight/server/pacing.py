"""When a stream tells its news: several tokens in one chunk, and that it is still there."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import TypeVar

from limelight.engine.front import Delta
from limelight.text.parsers import add_pieces

T = TypeVar("T")


async def paced(
    deltas: AsyncIterator[tuple[int, Delta]], interval: int
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The same news, at least `interval` tokens of a choice at a time, but for its first and last.

    The first comes at once, so that a reader sees that something happens.
    """
    waiting: dict[int, Delta] = {}
    begun: set[int] = set()
    async for index, delta in deltas:
        if index in waiting:
            delta = _joined(waiting.pop(index), delta)
        if index in begun and delta.num_tokens < interval and delta.finish_reason is None:
            waiting[index] = delta
            continue
        begun.add(index)
        yield index, delta


async def with_silences(
    stream: AsyncGenerator[T, None], seconds: float
) -> AsyncGenerator[T | None, None]:
    """The same news, and None whenever `seconds` have brought none."""
    upcoming = asyncio.ensure_future(anext(stream, None))
    try:
        while True:
            await asyncio.wait((upcoming,), timeout=seconds)
            if not upcoming.done():
                yield None
            elif (news := upcoming.result()) is None:
                return
            else:
                upcoming = asyncio.ensure_future(anext(stream, None))
                yield news
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await stream.aclose()


def _joined(first: Delta, then: Delta) -> Delta:
    calls = list(first.calls)
    add_pieces(calls, then.calls)
    logprobs = first.logprobs
    if then.logprobs is not None:
        logprobs = [*(logprobs or []), *then.logprobs]
    return replace(
        then,
        text=first.text + then.text,
        reasoning=first.reasoning + then.reasoning,
        calls=calls,
        num_tokens=first.num_tokens + then.num_tokens,
        num_reasoning=first.num_reasoning + then.num_reasoning,
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
        num_cached=max(first.num_cached, then.num_cached),
    )
