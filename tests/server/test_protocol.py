"""The server's HTTP beneath its routes: heads of any size, bodies in any pieces, and offers."""

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest
from server_fakes import FakeEngine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


ENDLESS = {
    "request-line": (b"GET /", b"a"),
    "header": (b"GET /health HTTP/1.1\r\nX: ", b"a"),
    "headers": (b"GET /health HTTP/1.1\r\n", b"X: y\r\n"),
    "trailers": (
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"X: y\r\n",
    ),
}


@pytest.mark.parametrize("where", ENDLESS)
def test_an_endless_head_ends_its_connection(live, where):
    server = live()
    head, more = ENDLESS[where]
    with (
        pytest.raises(ConnectionError),
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection,
    ):
        connection.sendall(head)
        for _ in range(64):
            connection.sendall(more * (2**16 // len(more)))
            time.sleep(0.001)
    assert server.get("/health").status_code == 200


def test_a_header_that_is_too_long_is_a_400_also_where_the_whole_request_came_at_once(live):
    server = live()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nX: "
    head += b"a" * 70_000 + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head + BODY)
        received = connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 400") and b"too large" in received
    assert server.engine.requests == [] and server.get("/health").status_code == 200


def test_a_head_that_is_too_long_behind_a_stream_is_no_part_of_its_answer(live):
    server = live(FakeEngine(slow=0.05))
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        received = connection.recv(1000)
        with suppress(OSError):
            connection.sendall(head + b"X: " + b"a" * 70_000 + b"\r\n\r\n")
            while data := connection.recv(1000):
                received += data
    assert received.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" not in received


def test_a_long_head_and_many_small_chunks_are_fine(live):
    server = live()
    body = json.dumps({"prompt": "a", "user": "u" * 30_000}).encode()

    def pieces():
        for at in range(0, len(body), 3):
            yield body[at : at + 3]

    headers = {"content-type": "application/json", "x-long": "a" * 30_000}
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.post(COMPLETION, content=pieces(), headers=headers).status_code == 200


def test_a_body_that_never_comes_ends_its_request(live, monkeypatch):
    monkeypatch.setattr("limelight.server.app.SECONDS_FOR_BODY", 0.2)
    server = live()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head + b"Content-Length: 99\r\n\r\n{")
        received = b""
        while data := connection.recv(1000):
            received += data
    assert received.startswith(b"HTTP/1.1 408") and b"nothing for 0.2 s" in received
    assert server.get("/load").json() == {"server_load": 0}


BODY = json.dumps({"prompt": "a"}).encode()
FRAMED = {
    "whole": (b"Content-Length: %d\r\n\r\n" % len(BODY), BODY),
    "chunks": (
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:]),
    ),
}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("framing", FRAMED)
@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
def test_a_body_behind_an_offer_of_another_protocol_is_read(live, offer, framing, later):
    server = live()
    length, body = FRAMED[framing]
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
        b"Upgrade: %b\r\n" % offer
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        for _ in range(2):
            connection.sendall(head + length + (b"" if later else body))
            if later:
                time.sleep(0.05)
                connection.sendall(body)
            received = b""
            while b"Hello, world!" not in received:
                assert (data := connection.recv(65536)), received
                received += data
            assert received.startswith(b"HTTP/1.1 200")
    assert len(server.engine.requests) == 2


def test_no_one_is_connected_elsewhere(live):
    server = live()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


LAST = {
    "close": b"1.1\r\nConnection: close\r\n",
    "close and an offer": b"1.1\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n",
    "1.0 and an offer": b"1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
}


@pytest.mark.parametrize("how", LAST)
def test_the_last_request_of_a_connection_is_answered_whatever_comes_behind_it(live, how):
    server = live()
    with socket.create_connection(("127.0.0.1", server.port), timeout=3) as connection:
        head = b"GET /health HTTP/" + LAST[how] + b"Host: x\r\n\r\n"
        connection.sendall(head + b"GET /health HTTP/1.1\r\n\r\n")
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 200") and received.count(b"HTTP/1.1") == 1
