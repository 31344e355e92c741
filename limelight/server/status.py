"""The routes by which a server tells of itself: whether it lives, what it serves, its metrics."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from limelight import __version__
from limelight.metrics import CONTENT_TYPE
from limelight.server.openapi import describe
from limelight.server.service import Service


class StatusRoutes:
    """Answers from what is known of the engine, which is asked nothing for it."""

    def __init__(self, service: Service):
        self.service, self.started = service, int(time.time())

    def routes(self) -> list[Route]:
        """All of them."""
        shown = self.service.config.enable_tokenizer_info_endpoint
        return [
            *([Route("/tokenizer_info", self.tokenizer_info)] if shown else []),
            Route("/finish_session", self.finish_session, methods=["POST"]),
            Route("/v1/models", self.models),
            # A name may have slashes.
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.description),
        ]

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.service.client.status.healthy else 503)

    async def ready(self, request: Request) -> Response:
        client, lifecycle = self.service.client, self.service.lifecycle
        status = client.status
        phase = "paused" if client.state.refusal is not None else status.phase
        phase = "draining" if lifecycle.draining else phase
        content = {"ready": lifecycle.is_ready, "phase": phase, "percent": status.percent}
        return JSONResponse(content, status_code=200 if lifecycle.is_ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.service.lifecycle.num_open})

    async def tokenizer_info(self, request: Request) -> Response:
        prompts = self.service.prompts
        config = {} if prompts.tokenizer is None else prompts.tokenizer.config
        # Where it was made is no one's business.
        private = [name for name in config if name.endswith("_file") or name == "name_or_path"]
        config = {name: value for name, value in config.items() if name not in private}
        if prompts.template is not None:
            config["chat_template"] = prompts.template.sources["default"]
        return JSONResponse({"tokenizer_class": "PreTrainedTokenizerFast", **config})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.render(), media_type=CONTENT_TYPE)

    async def description(self, request: Request) -> Response:
        return JSONResponse(describe())

    async def finish_session(self, request: Request) -> Response:
        # Nothing is kept for a session: X-Session-ID alone says where its requests go.
        return JSONResponse({"status": "finished"})

    async def models(self, request: Request) -> Response:
        self.service.lifecycle.admit()
        names = [*self.service.reader.names, *self.service.adapters.by_name]
        return JSONResponse({"object": "list", "data": list(map(self._told, names))})

    async def model(self, request: Request) -> Response:
        self.service.lifecycle.admit()
        name = request.path_params["name"]
        self.service.reader.check_model(name)
        return JSONResponse(self._told(name))

    def _told(self, name: str) -> dict[str, object]:
        """A name that is served: that of the model, or of an adapter."""
        adapter = self.service.adapters.by_name.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "limelight",
            "root": name if adapter is None else adapter.lora_path,
            "parent": None if adapter is None else self.service.reader.names[0],
            "max_model_len": self.service.client.info.max_model_len,
            "permission": [],
        }
