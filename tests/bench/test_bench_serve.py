import asyncio
import json
import random
import time

import pytest

from limelight import cli
from limelight.bench import serve
from limelight.bench.sse import Endpoint

CHUNK = {"choices": [{"index": 0, "text": "a"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


class Server:
    """Answers every completion with `events`; knows its requests and how many were open at once."""

    def __init__(self, events=(CHUNK, CHUNK, CHUNK, USAGE, b"[DONE]"), *, status="200 OK", cut=9):
        self.events, self.status, self.cut = events, status, cut
        self.requests, self.open, self.most = [], 0, 0

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        self.open += 1
        self.most = max(self.most, self.open)
        if head.startswith("GET /v1/models"):
            text = json.dumps({"data": [{"id": "tiny"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        else:
            self.requests.append((head, json.loads(body)))
            writer.write(f"HTTP/1.1 {self.status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            await self._stream(writer)
        self.open -= 1
        writer.close()

    async def _stream(self, writer):
        stream = b"".join(map(event, self.events))
        for start in range(0, len(stream), self.cut):
            part = stream[start : start + self.cut]
            writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def with_server(server, use):
    """Run `use(url)` against the server on a fresh port."""

    async def both():
        listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            return await use(f"http://127.0.0.1:{port}")

    return asyncio.run(asyncio.wait_for(both(), 20))


def sweep(server, *argv):
    return with_server(
        server, lambda url: serve._sweep(cli.parse(["bench", "serve", "--url", url, *argv]))
    )


def ask(server, body=None):
    return with_server(server, lambda url: serve.ask(Endpoint(url), body or {}))


@pytest.mark.parametrize("cut", [1, 7, 4096])
def test_a_stream_is_read_however_it_is_cut(cut):
    answer = ask(Server(cut=cut))
    assert answer.num_tokens == 3
    assert len(answer.gaps) == 2
    assert 0 < answer.first <= answer.first + sum(answer.gaps) <= answer.total


def test_a_sweep_has_a_row_a_level_and_keeps_to_its_concurrency():
    server = Server()
    rows = sweep(
        server, "--concurrency", "1", "3", "--num-requests", "7", "--context", "11",
        "--max-tokens", "3", "--vocab-size", "50",
    )  # fmt: skip
    assert [(row["model"], row["batch"], row["context"]) for row in rows] == [
        ("tiny", 1, 11),
        ("tiny", 3, 11),
    ]
    for row in rows:
        assert row["ttft_ms"]["n"] == row["tpot_ms"]["n"] == row["e2e_ms"]["n"] == 7
        assert row["itl_ms"]["n"] == 14
    assert 1 < server.most <= 3
    # A request to warm up and seven timed ones, at each level.
    assert len(server.requests) == 2 * 8
    body = server.requests[0][1]
    assert len(body["prompt"]) == 11
    assert max(body["prompt"]) < 50
    assert body["stream"] and body["ignore_eos"] and body["max_tokens"] == 3


def test_prompts_may_be_words():
    server = Server()
    sweep(server, "--prompts", "words", "--context", "4", "--num-requests", "1", "--model", "m")
    assert len(server.requests[0][1]["prompt"].split()) == 4
    assert server.requests[0][1]["model"] == "m"


def test_no_request_goes_before_its_arrival():
    async def timed(url):
        start = time.perf_counter()
        answers = await serve.ask_all(Endpoint(url), [{}, {}, {}], 3, [0.0, 0.1, 0.2])
        return time.perf_counter() - start, answers

    seconds, answers = with_server(Server(), timed)
    assert len(answers) == 3
    assert seconds >= 0.2
    assert all(answer.first < seconds - 0.1 for answer in answers)


def test_arrivals_come_at_the_rate_asked_for_or_at_once():
    def arrivals(*argv):
        return serve._arrivals(cli.parse(["bench", "serve", *argv]), random.Random(2))

    assert arrivals("--num-requests", "3") == [0.0, 0.0, 0.0]
    moments = arrivals("--num-requests", "1001", "--request-rate", "50")
    assert moments[0] == 0.0 and moments == sorted(moments)
    assert moments[-1] == pytest.approx(20, rel=0.15)


def test_the_key_of_the_environment_is_brought(monkeypatch):
    monkeypatch.setenv("LIMELIGHT_API_KEY", "sesame")
    server = Server()
    sweep(server, "--num-requests", "1", "--concurrency", "1")
    assert "Authorization: Bearer sesame\r\n" in server.requests[0][0]


def test_a_refusal_is_told_in_the_servers_words():
    refusal = Server([{"error": {"message": "no such model"}}], status="404 Not Found")
    with pytest.raises(ValueError, match="404 Not Found.*no such model"):
        ask(refusal)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([CHUNK, {"error": {"message": "out of memory"}}], "out of memory"),
        ([CHUNK, CHUNK], "broke off"),
        ([b"[DONE]"], "without tokens"),
        ([CHUNK, b"[DONE]"], "without usage"),
    ],
)
def test_a_stream_that_went_wrong_is_not_a_figure(events, words):
    with pytest.raises(ValueError, match=words):
        ask(Server(events))


def test_a_url_must_be_one():
    with pytest.raises(ValueError, match="127.0.0.1:8000"):
        Endpoint("localhost:8000")
