"""What stands around every route: who may ask, and what is noted of each exchange. Pure ASGI."""

import hmac
import logging
import re
import time
import uuid
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limelight.metrics import Metrics
from limelight.server.http import Gone, Refused, clean_request_id, refusal, send_refused

logger = logging.getLogger(__name__)

# Probes and scrapers carry no key, and dashboards for vLLM read /metrics without one.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
CLIENT_GONE = 499  # as nginx logs it; never sent
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


class Keys:
    """Lets in only requests with one of the keys, but for preflights and the open paths."""

    def __init__(self, app: ASGIApp, *, keys: list[str]):
        self.app = app
        self.digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        if scope["type"] == "http" and not self._admits(scope):
            raise Refused(
                401, "give a valid key in the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )  # fmt: skip
        await self.app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = sha256(key.strip().encode()).digest()
        # All keys are compared, in constant time each, so that timing tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self.digests]
        return scheme.lower() == "bearer" and any(matches)


class Exchange:
    """Turns what the routes raise into answers, and notes each exchange in the log and the metrics.

    Sets `state.request_id`, which the routes read.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: frozenset[str], echo_id: bool):
        self.app = app
        self.metrics = metrics
        self.paths = paths
        self.echo_id = echo_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        given = clean_request_id(Headers(scope=scope).get("x-request-id"))
        request_id = given or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_GONE

        async def noting_send(message: Message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.echo_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        reason = ""
        try:
            await self.app(scope, receive, noting_send)
        except Gone:
            status = CLIENT_GONE
        except Exception as error:
            refused = refusal(error)
            reason = refused.message
            await send_refused(noting_send, refused)
        finally:
            self._note(scope, status, time.perf_counter() - began, request_id, reason)

    def _note(self, scope: Scope, status: int, seconds: float, request_id: str, reason: str):
        path = scope["path"]
        if path in OPEN_PATHS:
            return
        handler = path if path in self.paths else "none"
        self.metrics.http(handler, scope["method"], status, seconds)
        line = f"{scope['method']} {path[:200]} {status} {seconds:.3f}s {request_id} {reason}"
        logger.info("%s", _UNPRINTABLE.sub("?", line).rstrip())
