"""uvicorn's HTTP protocol, bounded, and deaf to clients that would rather speak another one."""

import asyncio
from array import array

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Bytes of a request that are not its body: the request line, headers, trailers.
MAX_HEAD = 2**16
# A chunked body is framed; even chunks of one byte need no more than this for each.
FRAME_BYTES = 8
# By which a client, such as Java's own, offers to go on in HTTP/2 or as a web socket. Connection
# stays: it may ask for an end as well, and without these means no offer.
OFFERS = (b"upgrade", b"http2-settings")


class Parser(httptools.HttpRequestParser):
    """Has a request with an offer parsed anew without it, for such a one it takes to have no body.

    Whoever makes an offer must be content if nobody takes it up.
    """

    def __init__(self, protocol: "BoundedProtocol"):
        super().__init__(protocol)
        self.protocol = protocol
        # As uvicorn has it: what comes behind the last request of a connection does not harm it.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self.protocol.begin_anew(bytes(data)[error.args[0] :])


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request has too much beside its body.

    uvicorn keeps headers of any size, and joins a request line in quadratic time. A subclass, since
    the parser calls the methods of the object that made it.
    """

    num_body = 0
    num_other = 0
    has_head = False  # that of the request that is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = Parser(self)

    def begin_anew(self, rest: bytes) -> None:
        """Parse the request whose head was just read without its offer, and then `rest`."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("this server is no proxy")
        version = self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in OFFERS]
        self.parser = Parser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def on_message_begin(self) -> None:
        self.num_other = 0
        self.has_head = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self.has_head = True

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self.num_body += len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        num_body = self.num_body
        super().data_received(data)
        self.num_other += len(data) - (self.num_body - num_body) * (1 + FRAME_BYTES)
        if self.num_other <= MAX_HEAD:
            return
        cycle = self.cycle
        # Of a request behind another one, what is sent would be taken for the other's answer.
        own = self.has_head and not self.pipeline and not (cycle and cycle.response_started)
        if own or cycle is None or cycle.response_complete:
            if own and cycle is not None:
                cycle.disconnected = True  # or it would still be answered, though to no one
            self.send_400_response("The request line and headers are too large.")
        else:
            self.transport.close()
