"""What stands around every route: who may ask, and what is noted of each exchange. Pure ASGI."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limelight.metrics import Metrics
from limelight.server.http import Gone, Refused, clean_request_id, refusal, send_refused

logger = logging.getLogger(__name__)

# Probes and scrapers carry no key, dashboards for vLLM read /metrics without one, and the page at /
# asks its reader for the key.
OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/ping", "/version", "/load", "/metrics", "/openapi.json"}
)
# Makes an error one that another API tells.
Shape = Callable[[Refused], Refused]
CLIENT_GONE = 499  # as nginx logs it; never sent
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


class Keys:
    """Lets in only requests with one of the keys, but for preflights and the open paths.

    Where there are `admin_keys`, `admin_paths` need one of them; without `keys` the others need
    none.
    """

    def __init__(
        self, app: ASGIApp, *, keys: list[str], admin_keys: list[str], admin_paths: frozenset[str]
    ):
        self.app, self.admin_paths = app, admin_paths
        self.digests, self.admin_digests = (
            [sha256(key.encode()).digest() for key in each] for each in (keys, admin_keys)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        if scope["type"] == "http" and not self._admits(scope):
            raise Refused(
                401, "give a valid key in the header Authorization: Bearer KEY, or in x-api-key",
                code="invalid_api_key",
            )  # fmt: skip
        await self.app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return True
        digests = self.digests
        if self.admin_digests and scope["path"] in self.admin_paths:
            digests = self.admin_digests
        if not digests:
            return True
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Anthropic's clients have a header of their own.
        bearer = key.strip() if scheme.lower() == "bearer" else ""
        given = [sha256(key.encode()).digest() for key in (bearer, headers.get("x-api-key", ""))]
        # All keys are compared, in constant time each, so that timing tells nothing.
        matches = [hmac.compare_digest(one, other) for one in given for other in digests]
        return any(matches)


class Exchange:
    """Turns what the routes raise into answers, and notes each exchange in the log and the metrics.

    Sets `state.request_id`, which the routes read. `shapes` has the paths whose errors are told in
    another shape than OpenAI's.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        paths: frozenset[str],
        echo_id: bool,
        shapes: dict[str, Shape],
    ):
        self.app = app
        self.metrics = metrics
        self.shapes = shapes
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
            reshape = self.shapes.get(scope["path"])
            await send_refused(noting_send, refused if reshape is None else reshape(refused))
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
