"""A server on a real port: clients that leave, queues, drains, deaths, and OpenAI's own client."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from server_fakes import FakeEngine, events, ids, wait_until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def client_of(server, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, **options)


def test_the_official_client_gets_chats_and_streams(live):
    client = client_of(live(api_key=["key"]))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, world!"
    assert chunks[-1].usage.completion_tokens == 14
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_official_client_gets_completions(live):
    client = client_of(live())
    answer = client.completions.create(
        model="tiny", prompt=["ab", "c"], n=2, temperature=1, logprobs=1, echo=True, max_tokens=2
    )
    assert [choice.text for choice in answer.choices] == ["abHe", "abHe", "cHe", "cHe"]
    assert answer.choices[2].logprobs.text_offset == [0, 1, 2]
    stream = client.completions.create(model="tiny", prompt=[97], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world!"


def test_the_official_client_understands_the_errors(live):
    engine = FakeEngine()
    server = live(engine, api_key=["key"])
    client = client_of(server)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a" * 500)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine.die_after = 3
    with pytest.raises(openai.APIError, match="died"):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    with pytest.raises(openai.InternalServerError) as down:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert down.value.status_code == 503


@contextmanager
def raw_request(server, path: str, body: dict):
    """A connection that has sent a request and reads nothing yet."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("hold", [True, False], ids=["queued", "running"])
def test_a_client_that_leaves_ends_its_work_within_a_step(live, stream, hold):
    engine = FakeEngine(lambda request: ids("x" * 10_000), slow=0.01, hold=hold)
    engine.max_model_len = 20_000
    server = live(engine)
    body = {"messages": MESSAGES, "n": 4, "stream": stream}
    with raw_request(server, CHAT, body) as connection:
        wait_until(lambda: len(engine.running) == 4)
        if stream and not hold:
            assert connection.recv(100)
    wait_until(lambda: not engine.running and not server.life.lifecycle.num_open, seconds=1)
    assert len(engine.aborted) == 4
    ended = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 4.0'
    assert ended in server.get("/metrics").text


def test_twenty_clients_that_leave_at_once_leave_nothing_behind(live):
    engine = FakeEngine(lambda request: ids("x" * 10_000), slow=0.01)
    engine.max_model_len = 20_000
    server = live(engine, max_num_queued_reqs=20)
    body = {"prompt": "a", "max_tokens": 5000}
    with ThreadPoolExecutor(20) as threads:

        def visit(_):
            with raw_request(server, COMPLETION, body):
                time.sleep(0.1)

        list(threads.map(visit, range(20)))
    wait_until(lambda: not engine.running, seconds=1)
    engine.script = lambda request: ids("ok")
    assert server.post(COMPLETION, json={"prompt": ["a"] * 20}).status_code == 200


def test_a_request_that_ends_by_itself_sends_no_abort(live):
    engine = FakeEngine()
    server = live(engine)
    for stream in (False, True):
        server.post(CHAT, json={"messages": MESSAGES, "stream": stream, "n": 2, "temperature": 1})
    assert engine.aborted == []


def test_the_queue_is_bounded_and_says_when_to_come_back(live):
    engine = FakeEngine(hold=True)
    server = live(engine, max_num_queued_reqs=3)
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(server.post, COMPLETION, json={"prompt": "a"}) for _ in range(8)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 5)
        for answer in filter(lambda answer: answer.done(), answers):
            refused = answer.result()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "queue_full"
        engine.hold = False
        statuses = sorted(answer.result().status_code for answer in answers)
    assert statuses == [200] * 3 + [503] * 5
    assert server.post(COMPLETION, json={"prompt": ["a"] * 3}).status_code == 200
    rejected = 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="requests"} 5.0'
    assert rejected in server.get("/metrics").text


def test_waiting_prompt_tokens_are_bounded_too(live):
    engine = FakeEngine(hold=True)
    server = live(engine, max_num_queued_tokens=50)
    with ThreadPoolExecutor(2) as threads:
        # Alone it may be longer than the limit, or it could never be served.
        first = threads.submit(server.post, COMPLETION, json={"prompt": "a" * 60})
        wait_until(lambda: engine.running)
        assert server.post(COMPLETION, json={"prompt": "b"}).status_code == 503
        engine.hold = False
        assert first.result().status_code == 200
    assert server.post(COMPLETION, json={"prompt": "b"}).status_code == 200


def test_a_dead_engine_answers_everyone_and_ends_the_server(live, monkeypatch):
    monkeypatch.setattr("limelight.server.lifecycle.SECONDS_AFTER_DEATH", 1.0)
    engine = FakeEngine(lambda request: ids("x" * 10_000), slow=0.01)
    engine.max_model_len = 20_000
    server = live(engine)
    with ThreadPoolExecutor(8) as threads:
        body = {"prompt": "a", "max_tokens": 9000, "stream": True}
        streams = [threads.submit(server.post, COMPLETION, json=body) for _ in range(4)]
        wait_until(lambda: len(engine.speaking) == 4)
        time.sleep(0.1)
        engine.die()
        for stream in streams:
            *chunks, last = events(stream.result(5))
            assert len(chunks) > 2 and "[DONE]" not in chunks
            assert "died" in last["error"]["message"]
        assert server.get("/health").status_code == 503
        assert server.post(COMPLETION, json={"prompt": "a"}).status_code == 503
    server.thread.join(5)
    assert server.exit_code == 1 and engine.closed


def test_a_hung_engine_shows_in_health_and_the_server_still_answers(live):
    engine = FakeEngine(hold=True)
    server = live(engine)
    engine.healthy = False
    with httpx.Client(base_url=server.url) as client:
        began = time.perf_counter()
        assert client.get("/health").status_code == 503
        assert time.perf_counter() - began < 0.1
        engine.healthy = True
        assert client.get("/health").status_code == 200
    assert server.thread.is_alive()


def start_streams(server, engine, threads, count: int = 3):
    body = {"messages": MESSAGES, "stream": True}
    streams = [threads.submit(server.post, CHAT, json=body) for _ in range(count)]
    wait_until(lambda: len(engine.speaking) == count)
    time.sleep(0.05)
    return streams


def test_a_silent_stream_sends_comments_that_clients_skip(live):
    engine = FakeEngine(lambda request: ids("ab"), slow=0.5)
    server = live(engine, sse_keep_alive_interval=0.1)
    body = {"messages": MESSAGES, "stream": True}
    text = server.post(CHAT, json=body).text
    assert text.startswith(": keep-alive\n\n") and text.count(": keep-alive\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n")
    stream = client_of(server).chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, n=2, temperature=1
    )
    said = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert sorted("".join(said)) == ["a", "a", "b", "b"]
    engine.refused = "no token is left"
    assert "no token is left" in server.post(CHAT, json=body).text
    assert server.post(CHAT, json=body | {"n": 0}).status_code == 400


def test_tokens_that_a_stream_keeps_to_itself_are_no_news(live):
    server = live(FakeEngine(lambda request: ids("a" * 12), slow=0.1), sse_keep_alive_interval=0.25)
    # It may become a stop string.
    body = {"messages": MESSAGES, "stream": True, "stop": ["a" * 20]}
    assert server.post(CHAT, json=body).text.count(": keep-alive\n\n") >= 2


def test_a_client_that_leaves_a_silent_stream_ends_its_request(live):
    engine = FakeEngine(hold=True)
    server = live(engine, sse_keep_alive_interval=0.05)
    with httpx.stream(
        "POST", server.url + CHAT, json={"messages": MESSAGES, "stream": True}
    ) as got:
        texts = got.iter_text()
        assert next(texts) == ": keep-alive\n\n"
        assert server.get("/load").json() == {"server_load": 1}
    wait_until(lambda: engine.aborted)
    wait_until(lambda: server.get("/load").json() == {"server_load": 0})


@pytest.mark.slow
def test_an_idle_connection_is_kept_for_the_next_request(live):
    server = live()
    with socket.create_connection(("127.0.0.1", server.port), timeout=3) as connection:
        for pause in (7, 0):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(pause)


def test_a_draining_server_finishes_what_runs_and_refuses_the_rest(live):
    engine = FakeEngine(lambda request: ids("x" * 40), slow=0.02)
    server = live(engine, shutdown_timeout=20)
    with ThreadPoolExecutor(8) as threads:
        streams = start_streams(server, engine, threads)
        server.signal()
        wait_until(lambda: server.get("/ready").status_code == 503)
        assert server.get("/ready").json()["phase"] == "draining"
        assert server.get("/health").status_code == 200
        refused = server.post(CHAT, json={"messages": MESSAGES})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        for stream in streams:
            assert events(stream.result(10))[-1] == "[DONE]"
    began = time.monotonic()
    server.thread.join(5)
    assert server.exit_code == 0 and engine.closed
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("signals", [1, 2], ids=["timeout", "second-signal"])
def test_what_does_not_end_in_time_ends_with_an_error_event(live, signals):
    engine = FakeEngine(lambda request: ids("x" * 80), slow=0.1)
    server = live(engine, shutdown_timeout=0.3 if signals == 1 else 20)
    with ThreadPoolExecutor(4) as threads:
        streams = start_streams(server, engine, threads)
        waiting = threads.submit(server.post, CHAT, json={"messages": MESSAGES})
        wait_until(lambda: len(engine.running) == 4)
        began = time.monotonic()
        for _ in range(signals):
            server.signal()
        for stream in streams:
            *chunks, last = events(stream.result(5))
            assert "[DONE]" not in chunks and chunks[0]["choices"]
            assert "shutting down" in last["error"]["message"]
        assert waiting.result(5).status_code == 503
    server.thread.join(5)
    assert server.exit_code == 0
    assert time.monotonic() - began < 2
    assert len(engine.aborted) == 4


def test_no_address_in_a_request_is_ever_contacted(live):
    """An image, a file, a schema or a tool may name one; this server opens no connection."""
    server = live()
    contacts = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}/x"

        def accept():
            try:
                while True:
                    contacts.append(listener.accept())
            except OSError:
                pass

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        reference = {"type": "object", "properties": {"a": {"$ref": url}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": reference, "url": url}}
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "file_url", "file_url": {"url": "file:///etc/hostname"}},
        ]
        bodies = [{"messages": [{"role": "user", "content": [part]}]} for part in parts]
        bodies += [
            {"messages": MESSAGES, "tools": [tool]},
            {"messages": MESSAGES, "documents": [{"url": url}], "user": url, "request_id": url},
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "schema": reference}},
        ]
        headers = {"x-request-id": url, "referer": url, "x-forwarded-host": f"127.0.0.1:{port}"}
        statuses = [server.post(CHAT, json=body, headers=headers).status_code for body in bodies]
        assert statuses == [400, 400, 200, 200, 400]
        time.sleep(0.2)
        assert contacts == []
        with socket.create_connection(("127.0.0.1", port)):
            wait_until(lambda: contacts)


def test_a_body_of_300_megabytes_is_refused_without_being_kept(live):
    server = live()
    before = resident_bytes()

    def pieces():
        for _ in range(300):
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    began = time.perf_counter()
    with raw_request_of_length(server, 300 * 2**20) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert time.perf_counter() - began < 1
    assert server.post(CHAT, content=pieces(), headers=headers).status_code == 413
    assert resident_bytes() - before < 100 * 2**20


@contextmanager
def raw_request_of_length(server, length: int):
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head.encode() + b"{")
        yield connection


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_long_texts_hold_up_no_one_else(live, tokenizer, monkeypatch):
    go_on = threading.Event()
    encode = tokenizer.encode

    def slow_encode(text: str, **options):
        if len(text) > 10_000:
            assert go_on.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    server = live()
    with ThreadPoolExecutor(5) as threads:
        body = {"prompt": "word " * 50_000}
        long = [threads.submit(server.post, "/tokenize", json=body, timeout=30) for _ in range(5)]
        try:
            time.sleep(0.2)
            assert server.post(COMPLETION, json={"prompt": "a"}).status_code == 200
            assert not any(answer.done() for answer in long)
        finally:
            go_on.set()
        assert [answer.result().json()["count"] for answer in long] == [250_000] * 5
