"""uvicorn's HTTP protocol, bounded: without a key anyone may send a request line or headers."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Bytes of a request that are not its body: the request line, headers, trailers.
MAX_HEAD = 2**16
# A chunked body is framed; even chunks of one byte need no more than this for each.
FRAME_BYTES = 8


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request has too much beside its body.

    uvicorn keeps headers of any size, and joins a request line in quadratic time. A subclass, since
    the parser calls the methods of the object that made it.
    """

    num_body = 0
    num_other = 0

    def on_message_begin(self) -> None:
        self.num_other = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self.num_body += len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        num_body = self.num_body
        super().data_received(data)
        self.num_other += len(data) - (self.num_body - num_body) * (1 + FRAME_BYTES)
        if self.num_other <= MAX_HEAD:
            return
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The request line and headers are too large.")
        else:
            self.transport.close()
