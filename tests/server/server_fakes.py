"""A scripted engine, a byte-level tokenizer and servers around them."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from limelight.config import ServerConfig
from limelight.engine.client import EngineDead, EngineStatus, OrderFailed
from limelight.orders import EngineState, Order
from limelight.server.app import create_app
from limelight.server.lifecycle import Life
from limelight.server.startup import address, listen
from limelight.stats import EngineStats, ModelInfo
from limelight.text.answer_form import Asked
from limelight.text.demand import Demand
from limelight.text.parsers import CallPiece, Said
from limelight.types import Constraint, Output, Reasoning, Request, RoutedExperts, TokenLogprobs

MODEL = "tiny"
END = 256
START = 257
TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
)


def write_model(folder: Path) -> Path:
    """A folder with a tokenizer whose token n is byte n, and with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _byte_of(character: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(character) if ord(character) < 256 else others[ord(character) - 256]


def ids(text: str) -> list[int]:
    return list(text.encode())


@dataclass(eq=False)
class FakeEngine:
    """Says what `script` says of a request, one token a step, and ends with the end token.

    Flags may be set from another thread: `slow` seconds a step, `hold` stops all progress.
    `die_after` that many tokens of a request, or after `die`, all is over.
    """

    script: Callable[[Request], list[int]] = lambda request: ids("Hello, world!")
    slow: float = 0.0
    hold: bool = False
    die_after: int | None = None
    phase: str = "ready"
    healthy: bool = True
    error: str | None = None
    refused: str | None = None
    max_model_len: int = 100
    routed: bool = False  # row i of the experts that it tells is filled with i
    logprobs_mode: str = "raw_logprobs"
    requests: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    speaking: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    told_to_end: set[str] = field(default_factory=set)
    closed: bool = False
    stats: tuple[EngineStats, ...] = (
        EngineStats(running=3, waiting=2, cache_usage=0.25, steps=7, step_tokens=9),
    )

    state: EngineState = EngineState()
    orders: list[Order] = field(default_factory=list)
    results: list[dict[str, object]] = field(default_factory=lambda: [{}])
    order_fault: OrderFailed | None = None

    async def order(self, order: Order) -> list[dict[str, object]]:
        self.orders.append(order)
        if self.order_fault is not None:
            raise self.order_fault
        return self.results

    @property
    def info(self) -> ModelInfo:
        assert self.phase == "ready", "not ready"
        return ModelInfo(
            architecture="Tiny", vocab_size=258, max_model_len=self.max_model_len,
            eos_token_ids=[END], block_size=16, num_blocks=64, dtype="float32",
            returns_routed_experts=self.routed, logprobs_mode=self.logprobs_mode,
        )  # fmt: skip

    @property
    def status(self) -> EngineStatus:
        healthy = self.healthy and self.phase != "dead"
        return EngineStatus(self.phase, 40.0, healthy, "scripted")

    def die(self):
        self.phase = "dead"

    async def start(self):
        pass

    async def close(self):
        self.closed = True

    def abort(self, request_id: str):
        self.told_to_end.add(request_id)

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        self.running.add(request.id)
        finished = False
        try:
            script = [*self.script(request), END]
            for step, token_id in enumerate(script, 1):
                if self.die_after is not None and step > self.die_after:
                    self.die()
                await self._step()
                reason = "length" if step >= request.max_tokens or step == len(script) else None
                ends = token_id == END and not request.params.ignore_eos
                reason = "stop" if ends and request.max_tokens else reason
                self.speaking.add(request.id)
                finished = bool(reason or self.error or self.refused)
                yield self._output(request, step, token_id, reason)
                if finished:
                    return
                if request.id in self.told_to_end:
                    finished = True
                    yield self._aborted(request, step)
                    return
        finally:
            self.running.discard(request.id)
            if not finished:
                self.aborted.append(request.id)

    async def _step(self):
        await asyncio.sleep(self.slow)
        while self.hold and self.phase != "dead":
            await asyncio.sleep(0.005)
        if self.phase == "dead":
            raise EngineDead("segfault at 0xdeadbeef in /opt/secret/engine.py")

    def _output(self, request: Request, step: int, token_id: int, reason: str | None) -> Output:
        params = request.params
        wants = step == 1 and params.prompt_logprobs is not None
        prompt = [guess(i, params.prompt_logprobs or 0) for i in request.prompt_token_ids[1:]]
        return Output(
            request_id=request.id,
            token_ids=[token_id][: request.max_tokens],
            logprobs=None if params.logprobs is None else [guess(token_id, params.logprobs)],
            prompt_logprobs=[None, *prompt] if wants else None,
            finish_reason="error" if self.error or self.refused else reason,
            error=self.error,
            refused=self.refused,
            num_cached=min(5, len(request.prompt_token_ids) - 1),
            queued_seconds=0.001,
            routed_experts=self._routed(request, step) if reason else None,
        )

    def _aborted(self, request: Request, step: int) -> Output:
        # The engine has gone on for a token meanwhile.
        return Output(
            request_id=request.id, token_ids=[], finish_reason="abort",
            routed_experts=self._routed(request, step + 1),
        )  # fmt: skip

    def _routed(self, request: Request, made: int) -> RoutedExperts | None:
        first = request.params.routed_experts_prompt_start or 0
        rows = range(first, len(request.prompt_token_ids) + made - 1)
        data = b"".join(bytes([i] * 6) for i in rows)
        return (
            RoutedExperts(data=data, shape=(len(rows), 3, 2), dtype="uint8")
            if self.routed
            else None
        )


def guess(token_id: int, top: int) -> TokenLogprobs:
    """The token is likeliest; the one after it is impossible."""
    likely = [(token_id, -0.25), ((token_id + 1) % 256, float("-inf")), (0, -9.0)]
    return TokenLogprobs(token_id, -0.25, 1, likely[:top])


class FakeParser:
    """Reads `(thoughts)`, `[name arguments]` and else content; `begun` is the answer so far."""

    def __init__(self, begun: str = "", *, reads_calls: bool = True):
        self.where = "content"
        self.call = ""
        self.num_calls = 0
        self.opens = {"(": "reasoning", "[": "call"} if reads_calls else {"(": "reasoning"}
        for character in begun:
            self._take(character)

    def feed(self, text: str, token_id: int) -> Said:
        parts = [self._take(character) for character in text]
        return Said(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            [call for part in parts for call in part.calls],
            int(any(part.reasoning for part in parts)),
        )

    def finish(self, reason: str) -> Said:
        if self.where == "call":
            return Said(cut="[" + self.call)
        return Said(content="~") if self.where == "content" and reason == "stop" else Said()

    def _take(self, character: str) -> Said:
        if self.where == "content" and character in self.opens:
            self.where, self.call = self.opens[character], ""
        elif (self.where, character) == ("call", "]"):
            self.where = "content"
            self.num_calls += 1
            name, _, arguments = self.call.partition(" ")
            at = self.num_calls - 1
            last = CallPiece(at, None, arguments or "{}", ends=True)
            return Said(calls=[CallPiece(at, name), last])
        elif (self.where, character) == ("reasoning", ")"):
            self.where = "content"
        elif self.where == "call":
            self.call += character
        elif self.where == "reasoning":
            return Said(reasoning=character)
        else:
            return Said(content=character)
        return Said()


class FakeForm:
    """Answers as `FakeParser` reads them; keeps what it was asked. A constraint is the demand."""

    def __init__(self, begun: str = ""):
        self.begun = begun
        self.asked: list[Asked] = []
        self.demands: list[Demand] = []

    def parser(self, asked: Asked) -> FakeParser:
        self.asked.append(asked)
        return FakeParser(self.begun, reads_calls=bool(asked.tools))

    def constraint(self, asked: Asked, demand: Demand, *, budget: int | None = None):
        self.demands.append(demand)
        if not demand.tools and demand.content is None:
            return None
        opened = asked.token_ids[-1:] == ids("(")
        return Constraint(tag=json.dumps(asdict(demand)), after_reasoning=opened)

    def reasoning(self, asked: Asked, *, budget: int | None = None) -> Reasoning:
        opened = asked.token_ids[-1:] == ids("(")
        return Reasoning(
            starts=[ids("(")], ends=[ids(")")], is_open=opened, budget=budget, forced_end=ids(")")
        )


class Api:
    """The app in process: requests without a socket, each in an event loop of its own."""

    def __init__(self, app):
        self.app = app

    def request(self, method: str, path: str, **fields) -> httpx.Response:
        return asyncio.run(self._request(method, path, fields))

    async def _request(self, method: str, path: str, fields: dict) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://limelight") as client:
            return await client.request(method, path, **fields)

    def get(self, path: str, **fields) -> httpx.Response:
        return self.request("GET", path, **fields)

    def post(self, path: str, **fields) -> httpx.Response:
        return self.request("POST", path, **fields)

    def chat(self, text: str = "Hi", **fields) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", json=body)

    def complete(self, prompt: object = "Once", **fields) -> httpx.Response:
        return self.post("/v1/completions", json={"prompt": prompt, **fields})


class LiveServer:
    """A real server on a fresh port, with its whole life in a thread."""

    def __init__(self, engine, tokenizer, template, config: ServerConfig):
        self.engine = engine
        self.exit_code: int | None = None
        self._socket = listen("127.0.0.1", 0)
        self.url = address(self._socket)
        self.port = self._socket.getsockname()[1]
        self.app = create_app(engine, tokenizer, template, config, model=MODEL)
        self.life = Life(engine, self.app.state.lifecycle, seconds_to_drain=config.shutdown_timeout)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        wait_until(lambda: self.get("/version").status_code == 200)

    async def _main(self):
        self.loop = asyncio.get_running_loop()
        self.exit_code = await self.life.serve(self.app, self._socket, "curl")

    def signal(self):
        """What SIGTERM does."""
        self.loop.call_soon_threadsafe(self.life.stop)

    def get(self, path: str, **fields) -> httpx.Response:
        return httpx.get(self.url + path, **fields)

    def post(self, path: str, **fields) -> httpx.Response:
        return httpx.post(self.url + path, **fields)

    def close(self):
        self.engine.hold = False
        while self.thread.is_alive():
            self.signal()
            self.thread.join(0.2)


def wait_until(condition: Callable[[], object], seconds: float = 5.0):
    """Poll until the condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[object]:
    """The data of a stream's events, parsed but for [DONE]."""
    return list(map(parse_event, filter(None, response.text.split("\n\n"))))


def parse_event(text: str) -> object:
    data = text.splitlines()[-1].removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)
