"""The HTTP server: its routes, and its life from the first listen to the exit code. No torch."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from limelight.config import EngineConfig, ServerConfig
from limelight.engine.client import Served
from limelight.engine.replicas import Replicas
from limelight.parallel.torchrun import Torchrun
from limelight.server.adapters import NamedAdapters
from limelight.server.anthropic import Told
from limelight.server.control import GETS, POSTS, ControlRoutes
from limelight.server.http import Call, Refused, read_body, until_gone
from limelight.server.lifecycle import SECONDS_TO_TELL, Life
from limelight.server.middleware import Exchange, Keys
from limelight.server.openai import Reader
from limelight.server.page import Page
from limelight.server.prompts import Prompts
from limelight.server.service import Service
from limelight.server.startup import (
    address,
    allow_connections,
    example,
    listen,
    load_texts,
)
from limelight.server.status import StatusRoutes
from limelight.text.answer_form import AnswerForm
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer

ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/skyrl/v1/load_lora_adapter")
SECONDS_FOR_BODY = 60.0
# By which routes are there.
FLAGS = dict.fromkeys((*GETS, *POSTS), "--enable-rl")
FLAGS["/tokenizer_info"] = "--enable-tokenizer-info-endpoint"
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


def create_app(
    client: Served,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    config: ServerConfig,
    *,
    model: str,
    defaults: dict[str, float | int] | None = None,
    form: AnswerForm | None = None,
    engine: EngineConfig | None = None,
) -> Starlette:
    """The ASGI app around an engine, which need not be ready yet; `state.lifecycle` can end it.

    `model` is the name where the config gives none; `defaults` are the model's own SamplingParams;
    `form` is that of its answers, if the config names a parser; `engine` is told to trainers, and
    has the adapters that there are at the start.
    """
    if not all((*(config.api_key or ()), *(config.admin_api_key or ()))):
        raise ValueError("an api_key is empty, which would let everyone in")
    names = config.served_model_name or [model]
    known = () if engine is None else engine.adapters
    named = NamedAdapters(client, names, known, may=config.allow_runtime_lora_updating)
    reader = Reader(names, config, defaults or {}, named.by_name)
    service = Service(client, Prompts(tokenizer, template), reader, config, form, named)
    routes, admin = _routes(service), frozenset(ADAPTERS)
    if config.enable_rl:
        control = ControlRoutes(client, service.lifecycle, engine or EngineConfig(), config)
        routes += (added := control.routes())
        admin |= frozenset(route.path for route in added)
    paths = frozenset(route.path for route in routes)
    echo_id = config.enable_request_id_headers
    middleware = [
        Middleware(
            Exchange, metrics=service.metrics, paths=paths, echo_id=echo_id,
            shapes=dict.fromkeys(MESSAGES, Told),
        )
    ]  # fmt: skip
    if config.api_key or config.admin_api_key:
        keys = {"keys": config.api_key or [], "admin_keys": config.admin_api_key or []}
        middleware.append(Middleware(Keys, **keys, admin_paths=admin))
    if config.allowed_origins:
        # Around all else: errors need the headers too, and a preflight brings no key.
        middleware.insert(0, _cors(config.allowed_origins))
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _raise}
    )
    app.router.redirect_slashes = False
    app.state.lifecycle = service.lifecycle
    return app


def _cors(origins: list[str]) -> Middleware:
    # Keys travel in a header, so no credentials in the sense of CORS are ever needed.
    return Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
        allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
    )  # fmt: skip


async def _raise(request: Request, error: Exception) -> Response:
    """Leave the router's errors to `Exchange`, as all others."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    path = request.url.path
    there = "GET /openapi.json lists the routes"
    if allowed or path in FLAGS:
        there = f"it takes {allowed}" if allowed else f"it needs a server with {FLAGS[path]}"
    text = f"there is no {request.method} {path[:100]} here; {there}"
    raise Refused(error.status_code, text, allow=allowed)


class Post:
    """A route that takes JSON: admits it, reads it, and stops when the client leaves."""

    def __init__(
        self,
        service: Service,
        answer: Callable[[Call, Send], Coroutine[object, object, None]],
    ):
        self.service = service
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        with self.service.lifecycle.open_request():
            most = self.service.config.max_body_bytes
            body = await read_body(scope, receive, most, seconds=SECONDS_FOR_BODY)
            call = Call.read(body, scope["state"]["request_id"], Headers(scope=scope))
            await until_gone(self.answer(call, send), receive)


def _routes(service: Service) -> list[Route]:
    posts = {
        "/v1/chat/completions": service.chat,
        "/v1/completions": service.completion,
        "/v1/responses": service.response,
        MESSAGES[0]: service.message,
        MESSAGES[1]: service.count_tokens,
        "/inference/v1/generate": service.generate,
        "/skyrl/v1/generate": service.skyrl_generate,
        "/v1/chat/completions/render": service.render,
        "/tokenize": service.tokenize,
        "/detokenize": service.detokenize,
        ADAPTERS[0]: service.adapters.load,
        ADAPTERS[1]: service.adapters.unload,
        ADAPTERS[2]: service.adapters.replace,
    }
    return [
        Route("/", Page(), methods=["GET"]),
        *(Route(path, Post(service, answer), methods=["POST"]) for path, answer in posts.items()),
        *StatusRoutes(service).routes(),
    ]


def run(
    engine_config: EngineConfig, server_config: ServerConfig, torchrun: Torchrun | None = None
) -> int:
    """Serve until a signal or the engine's end; 0 after a signal, 1 after a failure.

    The port is taken before anything is loaded. With `torchrun` this is its rank 0. Raises
    `ValueError` for a taken port, a missing model, or a broken tokenizer or template.
    """
    if engine_config.weight_transfer_config is not None and not server_config.enable_rl:
        raise ValueError("--weight-transfer-config needs --enable-rl, which lets trainers in")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s server: %(message)s")
    allow_connections()
    sock = listen(server_config.host, server_config.port)
    with sock:
        texts = load_texts(engine_config, server_config)
        model = (server_config.served_model_name or [engine_config.model])[0]
        url = address(sock)
        print(f"limelight: loading {model}; listening on {url}, a page is there too", flush=True)

        async def main() -> int:
            client = Replicas(
                engine_config,
                count=server_config.data_parallel_size, restarts=server_config.restart_engine,
                torchrun=torchrun,
            )  # fmt: skip
            app = create_app(
                client, texts.tokenizer, texts.template, server_config,
                model=model, defaults=texts.defaults, form=texts.form, engine=engine_config,
            )  # fmt: skip
            life = Life(
                client, app.state.lifecycle, seconds_to_drain=server_config.shutdown_timeout,
                # The other machines have ended already, and torchrun waits for this one.
                seconds_after_death=None if torchrun is None else SECONDS_TO_TELL,
            )  # fmt: skip
            return await life.serve(app, sock, example(url, model, texts, server_config))

        with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
            return runner.run(main())
