"""The bundled model behind `limelight serve`, through the unmodified OpenAI client and by hand."""

import json
import random
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import children, command, serve

from limelight import LLM, SamplingParams

MODEL = "flint-nano"
NO_DRAFTS = {"num_speculative_tokens": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("served"), MODEL, "--max-num-seqs", "32") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


def test_a_chat_streams_the_text_that_it_gives_whole(client):
    settings = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    stream = client.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_bundled_model_adds_and_sorts(client):
    for text, answer in (
        ("What is 17 + 25?", "42"),
        ("What is 60 + 38?", "98"),
    ):
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0
        )
        assert answer in reply.choices[0].message.content


def test_completions_have_logprobs_whose_bytes_spell_the_text(client):
    reply = client.completions.create(
        model=MODEL, prompt="def f(x):\n    return", temperature=0, max_tokens=12, logprobs=3
    )
    choice = reply.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    assert len(choice.logprobs.top_logprobs[0]) == 3
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode().startswith(reply.choices[0].message.content)
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_choices_of_one_seed_differ_and_can_be_repeated(client):
    settings = {"model": MODEL, "prompt": "import ", "n": 3, "temperature": 1, "seed": 5}
    first, again = (client.completions.create(**settings, max_tokens=24) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]


def test_a_second_turn_reuses_the_first_ones_cache(client, server):
    prompt = "x = 1\n" * 1500
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0)
    length = first.usage.prompt_tokens
    started = time.monotonic()
    second = client.completions.create(
        model=MODEL, prompt=prompt + first.choices[0].text + "\ny", max_tokens=1, temperature=0
    )
    assert second.usage.prompt_tokens_details.cached_tokens >= length - 16
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "field, value, param",
    [
        ("prompt", "", "prompt"),
        ("prompt", [1] * 20_000, "prompt"),
        ("prompt", {"a": 1}, "prompt"),
        ("temperature", -1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("n", 0, "n"),
        ("stop", ["x"] * 10_000, "stop"),
        ("max_tokens", 1.5, "max_tokens"),
        ("logit_bias", {"999999": 1}, "logit_bias"),
        ("model", "no-such-model", "model"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_value_is_refused_by_name_and_the_server_goes_on(server, field, value, param):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1} | {field: value}
    started = time.monotonic()
    reply = server.http.post("/v1/completions", json=body)
    assert time.monotonic() - started < 1
    assert reply.status_code == (404 if field == "model" else 400)
    assert reply.json()["error"]["param"] == param
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body, status",
    [
        (b'{"model": "flint-nano", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "flint-nano", "prompt": "\xff\xfe"}', 400),
        (b'{"model": "flint-nano", "prompt": "' + b"x" * 10_000_000 + b'"}', 413),
        (b"[" * 100_000, 400),
        (b"", 400),
    ],
    ids=["NaN", "not UTF-8", "10 MB", "nested", "empty"],
)
def test_a_body_that_cannot_be_read_is_refused(server, body, status):
    headers = {"Content-Type": "application/json"}
    reply = server.http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == status and reply.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200


def ask(client, prompt, length, give_up_after):
    """The answer's text, or None if the client left before its end."""
    stream = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=length, temperature=0, stream=True
    )
    pieces = []
    with stream:
        for chunk in stream:
            pieces.append(chunk.choices[0].text)
            if give_up_after is not None and len(pieces) > give_up_after:
                return None
    return "".join(pieces)


def test_200_requests_at_once_get_what_each_gets_alone(client, server):
    rng = random.Random(8)
    texts = ["import os\n", "def add(a, b):\n", "class Queue:\n    ", "# a comment\n", "x = [1, 2"]
    drawn = [
        (rng.choice(texts) * rng.randint(1, 60) + str(i), rng.randint(1, 24)) for i in range(40)
    ]
    asked = [rng.choice(drawn) for _ in range(200)]
    leave = [rng.randint(0, 5) if rng.random() < 0.25 else None for _ in asked]
    distinct = sorted(set(asked))
    alone_config = {
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "speculative_config": NO_DRAFTS,
    }
    with LLM(model=MODEL, device="cpu", **alone_config) as llm:
        params = [SamplingParams(temperature=0, max_tokens=length) for _, length in distinct]
        answers = llm.generate([prompt for prompt, _ in distinct], params)
    alone = dict(zip(distinct, (answer.outputs[0].text for answer in answers), strict=True))
    with ThreadPoolExecutor(200) as pool:
        results = list(
            pool.map(lambda one: ask(client, *one[0], one[1]), zip(asked, leave, strict=True))
        )
    kept = [i for i, text in enumerate(results) if text is not None]
    assert len(kept) >= 140
    for i in kept:
        assert results[i] == alone[asked[i]]
    assert server.idle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_place_at_once(server, stream):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 5000, "ignore_eos": True, "n": 4}
    host, port = server.url.removeprefix("http://").split(":")
    text = json.dumps(body | {"stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        until(lambda: server.gauge("num_requests_running") == 4)
        received = b""
        while stream and b"data:" not in received:
            # The head may come before the first event.
            received += (piece := sock.recv(65536))
            assert piece
    assert server.idle(within=1.5)


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_taken_port_is_told_before_anything_is_loaded(server):
    port = server.url.rsplit(":", 1)[1]
    started = time.monotonic()
    result = subprocess.run(command(MODEL, "--port", port), capture_output=True, text=True)
    assert result.returncode != 0 and time.monotonic() - started < 10
    assert f"port {port}" in result.stderr and "Traceback" not in result.stderr
    assert "memory plan" not in result.stderr


def test_no_memory_for_the_cache_is_told_with_what_would_fit():
    result = subprocess.run(
        command(MODEL, "--port", "0", "--kv-cache-memory-bytes", "2000000"),
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "--max-model-len" in result.stderr and "memory plan" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_signal_lets_running_requests_end_and_leaves_no_process(tmp_path):
    with serve(tmp_path, MODEL, "--shutdown-timeout", "20", "--max-num-seqs", "4") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        below = children(server.process.pid)
        assert below
        texts = []
        body = {"ignore_eos": True}
        threads = [
            threading.Thread(
                target=lambda: texts.append(
                    client.completions.create(
                        model=MODEL, prompt="x", max_tokens=150, extra_body=body
                    )
                )
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.gauge("num_requests_running") == 3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.http.get("/ready").status_code == 503
        with pytest.raises(openai.APIStatusError):
            client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        for thread in threads:
            thread.join()
        assert [text.usage.completion_tokens for text in texts] == [150] * 3
        assert server.process.wait(5) == 0
    assert not any(alive(pid) for pid in below)


def alive(pid: int) -> bool:
    return subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode == 0


@pytest.mark.slow
def test_memory_stays_flat_over_five_minutes_of_traffic(server, client):
    rng = random.Random(1)
    ends = time.monotonic() + 300
    sizes = []

    def traffic(seed):
        own = random.Random(seed)
        while time.monotonic() < ends:
            prompt = f"{own.random()} " * own.randint(1, 80)
            leave = own.randint(0, 5) if own.random() < 0.2 else None
            ask(client, prompt, own.randint(1, 40), leave)

    threads = [threading.Thread(target=traffic, args=(rng.random(),)) for _ in range(16)]
    for thread in threads:
        thread.start()
    while time.monotonic() < ends:
        time.sleep(10)
        sizes.append(server.resident_bytes())
    for thread in threads:
        thread.join()
    assert server.idle()
    print([size >> 20 for size in sizes])
    # The pool of blocks fills in the first minute; from then on nothing may grow.
    assert max(sizes[-6:]) < 1.02 * max(sizes[6:12])
