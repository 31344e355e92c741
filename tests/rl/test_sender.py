"""A trainer's side of weight transfer: what it makes of servers that are none."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from limelight.rl.sender import SendFailed, WeightSender


@pytest.fixture
def url_that_answers():
    """Makes servers whose answer to everything are these bytes."""
    servers = []

    def make(answer: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


HEAD = b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [HEAD.replace(b"99", b"6") + b"<html>", HEAD.replace(b"99", b"2") + b"[]", HEAD, b"what?\r\n"],
    ids=["no JSON", "no object", "cut", "no HTTP"],
)
def test_an_answer_that_cannot_be_read_is_a_failure_and_not_passed_over(url_that_answers, answer):
    with pytest.raises(SendFailed, match="/get_world_size"):
        WeightSender(url_that_answers(answer), backend="gloo", device="cpu", seconds=5)
