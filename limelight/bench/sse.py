"""A small HTTP client on asyncio: a JSON GET, and a POST whose answer is a stream of events.

The benchmark reads a server through as little Python as it can, so that its own cost stays below
what it measures.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

LARGEST_HEAD = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to ask; `url` is http or https, with a path before `/v1` if there is one."""

    url: str
    api_key: str | None = None

    def __post_init__(self):
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not a URL such as http://127.0.0.1:8000")

    async def get(self, path: str) -> object:
        """The JSON at `path`; `ValueError` with the server's words if the status is not 200."""
        reader, writer = await self._send("GET", path, b"")
        try:
            return json.loads(b"".join([part async for part in _body(reader)]))
        finally:
            writer.close()

    async def post(self, path: str, body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        """The events that answer `body`, as they come, until `[DONE]`.

        Raises `ValueError` if the status is not 200, an event is an error, or the end is missing.
        """
        reader, writer = await self._send("POST", path, json.dumps(body).encode())
        buffer = b""
        try:
            async for part in _body(reader):
                *lines, buffer = (buffer + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:"):
                        continue
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(f"{self.url}{path}: {event['error']}")
                    yield event
            raise ValueError(f"{self.url}{path}: the stream broke off")
        finally:
            writer.close()

    async def _send(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(
            parts.hostname, port, ssl=secure, limit=LARGEST_HEAD
        )
        head = [
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        status = (await reader.readline()).decode("latin-1").strip()
        if status.split(" ")[1:2] != ["200"]:
            answer = b"".join([part async for part in _body(reader)])
            writer.close()
            raise ValueError(f"{self.url}{path}: {status}: {answer.decode(errors='replace')}")
        return reader, writer


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Read the headers, then the parts of the body as they come."""
    chunked, left = False, None
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").strip().partition(":")
        chunked |= name.lower() == "transfer-encoding" and "chunked" in value.lower()
        if name.lower() == "content-length":
            left = int(value)
    try:
        if chunked:
            while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif left is not None:
            yield await reader.readexactly(left)
        else:
            while part := await reader.read(2**16):
                yield part
    except asyncio.IncompleteReadError as error:
        raise ValueError("the server broke off its answer") from error
