"""`limelight bench serve`: what clients of a running server see, by concurrency."""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass

from limelight.bench.sse import Endpoint
from limelight.flags import positive
from limelight.settings import environment

WORDS = ("river", "stone", "seven", "light", "under", "green", "paper", "north", "sound", "early")


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token of a stream, between its chunks and in all, and its tokens."""

    first: float
    gaps: list[float]
    total: float
    num_tokens: int


def add_flags(parser: argparse.ArgumentParser):
    """The flags of this benchmark alone."""
    flag = parser.add_argument
    flag("--url", default="http://127.0.0.1:8000", help="server (default: http://127.0.0.1:8000)")
    flag("--model", help="model to ask for (default: the first that the server lists)")
    flag("--concurrency", type=positive, nargs="+", default=[1, 8], help="clients (default: 1 8)")
    flag("--num-requests", type=positive, default=32, help="requests a level (default: 32)")
    flag("--request-rate", type=float, help="mean new requests a second (default: no limit)")
    flag("--context", type=positive, default=256, help="prompt tokens, or words (default: 256)")
    flag("--max-tokens", type=positive, default=64, help="tokens of each answer (default: 64)")
    flag("--prompts", choices=["ids", "words"], default="ids", help="random ids or random words")
    flag("--vocab-size", type=positive, default=1000, help="ids are below this (default: 1000)")
    flag("--prompt-seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each level of concurrency."""
    return asyncio.run(_sweep(args))


async def _sweep(args: argparse.Namespace) -> list[dict[str, object]]:
    # The key comes from the environment alone: the command is written down with the figures.
    endpoint = Endpoint(args.url.rstrip("/"), environment("api_key"))
    model = args.model or await first_model(endpoint)
    rng = random.Random(args.prompt_seed)
    rows = []
    for concurrency in args.concurrency:
        # One request first, so that no level pays for a connection or a page never touched.
        await ask(endpoint, body_of(args, model, rng))
        bodies = [body_of(args, model, rng) for _ in range(args.num_requests)]
        start = time.perf_counter()
        answers = await ask_all(endpoint, bodies, concurrency, _arrivals(args, rng))
        seconds = time.perf_counter() - start
        label = {"model": model, "batch": concurrency, "context": args.context}
        rows.append(label | figures(answers, seconds))
    return rows


def body_of(args: argparse.Namespace, model: str, rng: random.Random) -> dict[str, object]:
    """A request for a completion of exactly `max_tokens` tokens after a random prompt."""
    words = " ".join(rng.choices(WORDS, k=args.context))
    ids = rng.choices(range(args.vocab_size), k=args.context)
    return {
        "model": model,
        "prompt": ids if args.prompts == "ids" else words,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Without it a token whose text is held back, or has none, would send nothing.
        "return_token_ids": True,
    }


def _arrivals(args: argparse.Namespace, rng: random.Random) -> list[float]:
    """Seconds after the start at which each request may go: at once, or as a Poisson process."""
    moment, moments = 0.0, []
    for _ in range(args.num_requests):
        moments.append(moment)
        moment += rng.expovariate(args.request_rate) if args.request_rate else 0.0
    return moments


async def first_model(endpoint: Endpoint) -> str:
    """The first model that the server lists."""
    match await endpoint.get("/v1/models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ValueError(f"{endpoint.url}/v1/models lists no model; give --model")


async def ask(endpoint: Endpoint, body: dict[str, object]) -> Answer:
    """Send one request and time its stream."""
    start = time.perf_counter()
    moments, num_tokens = [], 0
    async for event in endpoint.post("/v1/completions", body):
        if event.get("choices"):
            moments.append(time.perf_counter())
        match event:
            case {"usage": {"completion_tokens": int(count)}}:
                num_tokens = count
    total = time.perf_counter() - start
    if not moments or not num_tokens:
        raise ValueError(f"{endpoint.url}: an answer without tokens or without usage")
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    return Answer(moments[0] - start, gaps, total, num_tokens)


async def ask_all(
    endpoint: Endpoint, bodies: list[dict[str, object]], concurrency: int, arrivals: list[float]
) -> list[Answer]:
    """Send all, at most `concurrency` at once and none before its arrival."""
    start, waiting = time.perf_counter(), list(zip(bodies, arrivals, strict=True))[::-1]
    answers = []

    async def client():
        while waiting:
            body, arrival = waiting.pop()
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            answers.append(await ask(endpoint, body))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers


def figures(answers: list[Answer], seconds: float) -> dict[str, object]:
    """The row of one level that took `seconds`: times in ms, output tokens a second over all."""
    from limelight.bench.record import spread

    later = [answer for answer in answers if answer.gaps]
    row: dict[str, object] = {
        "ttft_ms": spread([1e3 * answer.first for answer in answers]),
        "e2e_ms": spread([1e3 * answer.total for answer in answers]),
        "tokens_per_s": spread([sum(answer.num_tokens for answer in answers) / seconds]),
    }
    if later:
        row["itl_ms"] = spread([1e3 * gap for answer in later for gap in answer.gaps])
        row["tpot_ms"] = spread(
            [1e3 * (answer.total - answer.first) / (answer.num_tokens - 1) for answer in later]
        )
    return row
