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
        return [
            Route("/finish_session", self.finish_session, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
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

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.render(), media_type=CONTENT_TYPE)

    async def description(self, request: Request) -> Response:
        return JSONResponse(describe())

    async def finish_session(self, request: Request) -> Response:
        # Nothing is kept for a session: X-Session-ID alone says where its requests go.
        return JSONResponse({"status": "finished"})

    async def models(self, request: Request) -> Response:
        self.service.lifecycle.admit()
        names, adapters = self.service.reader.names, self.service.adapters.by_name
        data = [self._model(name, root=name) for name in names]
        for name, adapter in adapters.items():
            data.append(self._model(name, root=adapter.lora_path, parent=names[0]))
        return JSONResponse({"object": "list", "data": data})

    def _model(self, name: str, *, root: str, parent: str | None = None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "limelight",
            "root": root,
            "parent": parent,
            "max_model_len": self.service.client.info.max_model_len,
            "permission": [],
        }
