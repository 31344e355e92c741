"""Bodies in, JSON and errors out, at the level of ASGI messages. Knows nothing of models."""

import asyncio
import logging
import re
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from limelight.engine.client import EngineDead
from limelight.types import RequestError

logger = logging.getLogger(__name__)

REPLICA = "X-data-parallel-rank"
LONGEST_MESSAGE = 500
LONGEST_REQUEST_ID = 64
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Addresses and file paths tell an attacker about the machine and a user nothing.
_PRIVATE = re.compile(r"0x[0-9a-fA-F]+|(?:/[\w.+-]+){2,}")


class Refused(Exception):
    """An answer that is an error: HTTP status, text, and the seconds after which to try again, or
    the methods that would do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message[:LONGEST_MESSAGE]
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    @property
    def body(self) -> dict[str, object]:
        """The error in OpenAI's shape; `code` is the HTTP status where there is no better one."""
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "Error"),
                "param": self.param,
                "code": self.code or self.status,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status == 408:  # what still comes of this request is no new one
            return {"connection": "close"}
        if self.allow is not None:
            return {"allow": self.allow}
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


@dataclass(frozen=True, slots=True)
class Call:
    """What a client sends to a route: a body, and in its headers what becomes of the answer."""

    body: bytes
    id: str
    session: str | None = None  # its requests go to one engine
    replica: int | None = None  # or they name one

    @classmethod
    def read(cls, body: bytes, request_id: str, headers: Headers) -> "Call":
        """`RequestError` for a replica that is no number."""
        replica = headers.get(REPLICA)
        if replica is not None and not re.fullmatch("[0-9]{1,9}", replica):
            raise RequestError(f"{REPLICA} must be a number; got {replica[:20]!r}", param=REPLICA)
        session = headers.get("X-Session-ID")
        return cls(body, request_id, session, None if replica is None else int(replica))


class Gone(Exception):
    """The client has closed the connection: there is no one to answer."""


def refusal(error: Exception) -> Refused:
    """What the client is told of an error; the trace of one of our own goes to the log."""
    match error:
        case Refused():
            return error
        case RequestError():
            return Refused(400, str(error), param=error.param, code=error.code)
        case EngineDead():
            return Refused(503, "the engine has died that had this request", retry_after=10)
    logger.error("a request met a fault of the server", exc_info=error)
    return Refused(500, "the server met an internal error; its log says more")


def clean_request_id(given: str | None) -> str:
    """What a client calls its request, less what is unsafe in ids, logs and headers."""
    return re.sub(r"[^A-Za-z0-9._-]", "", (given or "")[:LONGEST_REQUEST_ID])


def without_private(text: str) -> str:
    """`text` without addresses and file paths."""
    return _PRIVATE.sub("...", text)


async def read_body(scope: Scope, receive: Receive, limit: int, *, seconds: float) -> bytes:
    """The body of a JSON request, of at most `limit` bytes; reading stops at the first too many.

    Raises `RequestError` for another media type or bytes that are not UTF-8, `Gone`, and `Refused`
    also where nothing comes for `seconds`, or not all within ten times as long: a client may have
    vanished without a word.
    """
    try:
        async with asyncio.timeout(10 * seconds):
            return await _read_body(scope, receive, limit, seconds)
    except TimeoutError as error:
        why = f"nothing for {seconds:g} s, or not all within {10 * seconds:g} s"
        raise Refused(408, f"the body did not come: {why}") from error


async def _read_body(scope: Scope, receive: Receive, limit: int, seconds: float) -> bytes:
    headers = Headers(scope=scope)
    # A browser sends other types, or none, to foreign sites without asking them first.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("the Content-Type header must be application/json")
    declared = headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    more = True
    while more and size <= limit:
        async with asyncio.timeout(seconds):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        size = max(size, len(body))
        more = message.get("more_body", False)
    if size > limit:
        raise Refused(413, f"the body is larger than {limit} bytes; see --max-body-bytes")
    _check_utf8(body)
    return bytes(body)


def _check_utf8(body: bytearray):
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {error.start} is wrong") from error


async def send_bytes(
    send: Send, status: int, body: bytes, *, media: str, headers: dict[str, str] | None = None
):
    """A whole answer."""
    fields = {"content-type": media, "content-length": str(len(body)), **(headers or {})}
    await start(send, status, fields)
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, headers: dict[str, str]):
    """The status line and the headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_json(
    send: Send, content: object, *, status: int = 200, headers: dict[str, str] | None = None
):
    """A whole answer in JSON."""
    body = msgspec.json.encode(content)
    await send_bytes(send, status, body, media="application/json", headers=headers)


async def send_refused(send: Send, refused: Refused):
    """An error as an answer."""
    await send_json(send, refused.body, status=refused.status, headers=refused.headers)


async def until_gone(work: Coroutine[object, object, None], receive: Receive):
    """Run `work`; when the client closes the connection first, cancel it and raise `Gone`."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnect(receive: Receive):
    while (await receive())["type"] != "http.disconnect":
        pass
