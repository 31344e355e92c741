"""What a client gets wrong: a 400 or 413 that names the field, early, and no trace in the log."""

import asyncio
import itertools
import json
import logging
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_fakes import FakeEngine

from limelight.config import ServerConfig
from limelight.server.messages import read_conversation
from limelight.server.service import QUICK_BODY
from limelight.server.tools import read_tools

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def refused(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert str(Path(__file__).parents[2]) not in answer.text and "Traceback" not in answer.text
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", -1), ("n", 1.5), ("n", True), ("n", 10**6), ("n", 10**30),
        ("temperature", -1), ("temperature", 2.1), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.5), ("min_p", 2), ("top_k", -2),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("seed", 2**63), ("seed", 0.5), ("max_tokens", -5), ("max_tokens", "many"),
        ("min_tokens", 17), ("min_tokens", -1),
        ("stop", ["a"] * 5), ("stop", ["x" * 10_000]), ("stop", [""]), ("stop", 7),
        ("stop_token_ids", [1] * 2000), ("stop_token_ids", [-1]), ("stop_token_ids", [258]),
        ("bad_words", ["x"] * 2000), ("bad_words", [""]), ("bad_words", ["y" * 5000]),
        ("allowed_token_ids", []), ("allowed_token_ids", [10**6]),
        ("allowed_token_ids", [0] * 300_000),
        ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"300": 1}),
        ("logit_bias", {str(i): 1 for i in range(5000)}),
        ("prompt_logprobs", 21), ("prompt_logprobs", -1),
        ("priority", "high"), ("priority", 2**40),
        ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", []), ("cache_salt", "s" * 10**6),
        ("stream", "yes"), ("stream_options", {"include_usage": True}), ("model", 5),
        ("ignore_eos", 1), ("add_special_tokens", "no"), ("request_id", 9),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_bad_value_is_named_before_a_stream_starts(make_api, path, field, value):
    engine = FakeEngine()
    body = {"prompt": "a", "messages": USER, "max_tokens": 16, "stream": field != "stream_options"}
    if field == "prompt_logprobs":
        body["stream"] = False
    error = refused(make_api(engine).post(path, json=body | {field: value}))
    assert error["param"] == field
    assert engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None), ("prompt", []), ("prompt", ""), ("prompt", [[]]), ("prompt", ["a", 1]),
        ("prompt", [1.5]), ("prompt", {"text": "a"}), ("prompt", [258]), ("prompt", [-1]),
        ("prompt", [2**70]), ("prompt", ["a"] * 1025), ("prompt", [[1], ["a"]]),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("echo", "yes"), ("suffix", "end"),
        ("best_of", 2),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_completions_name_what_is_wrong(api, field, value):
    error = refused(api.post(COMPLETION, json={"prompt": "a"} | {field: value}))
    assert error["param"] == field


def test_a_hundred_thousand_prompts_are_refused_at_once(api):
    began = time.perf_counter()
    assert refused(api.complete([["a"]] * 100_000))["param"] == "prompt"
    assert refused(api.complete(["a"] * 1000, n=17))["param"] == "n"
    assert time.perf_counter() - began < 1


def test_many_choices_of_a_long_prompt_are_refused_before_any_is_sent(make_api):
    engine = FakeEngine()
    engine.max_model_len = 2048
    api = make_api(engine)
    assert refused(api.complete([7] * 2000, n=8400, temperature=1))["param"] == "n"
    assert refused(api.complete([[7] * 2000] * 600, n=14, temperature=1))["param"] == "n"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", None), ("messages", "Hi"), ("messages", ["Hi"]),
        ("messages", [{"content": "no role"}]), ("messages", [{"role": 5}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"text": "no type"}]}]),
        ("messages", [{"role": "assistant", "tool_calls": "f"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        ("messages", [{"role": "assistant", "tool_calls":
                       [{"function": {"name": "f", "arguments": "{"}}]}]),
        ("messages", [{"role": "assistant", "tool_calls":
                       [{"function": {"name": "f", "arguments": []}}]}]),
        ("top_logprobs", 10_000), ("top_logprobs", -1), ("logprobs", 3),
        ("tools", [{"type": "web_search"}]), ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]), ("tools", "f"),
        ("chat_template", "{{ 1 }}"), ("reasoning_effort", "huge"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"tokenize": True}), ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"tools": []}), ("chat_template_kwargs", {"documents": []}),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"bos_token": "x"}), ("chat_template_kwargs", {"_x": 1}),
        ("chat_template_kwargs", [1]),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_chat_names_what_is_wrong(make_api, field, value):
    engine = FakeEngine()
    body = {"messages": USER, "logprobs": True} | {field: value}
    assert refused(make_api(engine).post(CHAT, json=body))["param"] == field
    assert engine.requests == []


def test_top_logprobs_without_logprobs_are_refused(api):
    assert refused(api.chat(top_logprobs=2))["param"] == "top_logprobs"
    assert api.chat(top_logprobs=0).json()["choices"][0]["logprobs"] is None


def test_all_choices_would_be_the_same_at_temperature_0(api):
    assert refused(api.chat(n=2, temperature=0))["param"] == "n"


def test_a_whole_vocabulary_of_logprobs_needs_the_operator(make_api):
    engine = FakeEngine()
    assert make_api(engine, max_logprobs=-1).chat(logprobs=True, top_logprobs=-1).status_code == 200
    assert engine.requests[0].params.logprobs == -1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True), ("length_penalty", 2.0), ("logprob_token_ids", [1]),
        ("functions", [{"name": "f"}]), ("modalities", ["audio"]),
        ("kv_transfer_params", {}), ("prediction", {"type": "content"}), ("watermarking", {}),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_what_is_not_there_yet_is_refused_by_name(api, field, value):
    error = refused(api.chat(**{field: value}))
    assert error["param"] == field
    assert "not supported yet" in error["message"]


def test_neutral_values_and_unknown_fields_are_fine(api):
    answer = api.chat(
        response_format={"type": "text"}, use_beam_search=False, length_penalty=1.0, echo=False,
        structured_outputs=None, thinking_token_budget=None, tool_choice=None, user="u",
        guided_json={"a": 1}, store=True, metadata={"a": "b"}, whatever=[1, {"x": None}],
        stop=None, n=None, stream=None, logit_bias=None, include_reasoning=True,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_named(api, value):
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "temperature": {value}, "n": 1}}'
    answer = api.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert refused(answer)["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b'{"prompt": "a"} x', b'{"prompt": "\xff"}',
        b'{"other": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00 x"}',
        b'{"prompt": ' + b"[" * 100_000, b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 100_000,
        b'{"tools": [' + b'{"a":' * 100_000, b"\xef\xbb\xbf{}", b'{"n": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
def test_a_broken_body_is_a_quick_400(api, path, body):
    began = time.perf_counter()
    answer = api.post(path, content=body, headers={"content-type": "application/json"})
    refused(answer)
    assert time.perf_counter() - began < 1


def test_tens_of_thousands_of_tools_are_read_at_once():
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(30_000)]
    allowed = {"mode": "auto", "tools": tools}
    start = time.monotonic()
    read = read_tools(
        tools, {"type": "allowed_tools", "allowed_tools": allowed},
        ServerConfig(tool_call_parser="glm47", enable_auto_tool_choice=True),
    )  # fmt: skip
    assert time.monotonic() - start < 1 and read.callable == tools


def test_a_large_body_is_read_where_it_holds_up_no_one(api, monkeypatch):
    threads = []

    def read(*fields):
        threads.append(threading.current_thread().name)
        return read_conversation(*fields)

    for module in ("openai", "service"):
        monkeypatch.setattr(f"limelight.server.{module}.read_conversation", read)
    assert api.chat("a").status_code == 200
    long = {"messages": [{"role": "user", "content": "a" * QUICK_BODY}]}
    assert refused(api.post(CHAT, json=long))["code"] == "context_length_exceeded"
    assert api.post("/tokenize", json=long).json()["count"] > QUICK_BODY
    assert [name.startswith("slow") for name in threads] == [False, True, True]


def test_thousands_of_choices_let_others_have_their_turn(make_api):
    engine = FakeEngine()
    transport = httpx.ASGITransport(make_api(engine).app)

    async def most_at_once() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "a", "n": 1000, "max_tokens": 1, "temperature": 1}
            answer = asyncio.create_task(client.post(COMPLETION, json=body))
            counts = [0]
            while not answer.done():
                await asyncio.sleep(0)
                counts.append(len(engine.requests))
            assert (await answer).status_code == 200 and counts[-1] == 1000
            return max(after - before for before, after in itertools.pairwise(counts))

    assert asyncio.run(most_at_once()) <= 64


def test_deep_tools_that_are_still_json_do_no_harm(api):
    deep: dict = {}
    for _ in range(300):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    assert api.chat(tools=tools).status_code in (200, 400)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_another_content_type_is_refused(api, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = api.post(CHAT, content=json.dumps({"messages": USER}), headers=headers)
    assert "Content-Type" in refused(answer)["message"]


def test_a_charset_in_the_content_type_is_fine(api):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = api.post(CHAT, content=json.dumps({"messages": USER}), headers=headers)
    assert answer.status_code == 200


def test_a_large_body_is_refused_with_and_without_a_length(make_api):
    api = make_api(max_body_bytes=1000)
    headers = {"content-type": "application/json"}
    read = 0

    async def pieces():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b" " * 100

    assert refused(api.post(CHAT, content=b" " * 1001, headers=headers), 413)["code"] == 413
    refused(api.post(CHAT, content=pieces(), headers=headers), 413)
    assert read <= 12, "reading stops at the limit"


@pytest.mark.parametrize("length", [99, 100, 101, 5000])
def test_the_limit_of_prompt_and_answer_is_told_in_numbers(make_api, length):
    engine = FakeEngine(lambda request: [65] * 200)
    api = make_api(engine)
    for prompt in ("a" * length, [65] * length):
        began = time.perf_counter()
        answer = api.complete(prompt, max_tokens=10)
        assert time.perf_counter() - began < 1
        if length < 100:
            assert answer.json()["usage"]["completion_tokens"] == 1, "the room that is left"
            continue
        error = refused(answer)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert str(length) in error["message"] and "100" in error["message"]
    if length >= 100:
        assert refused(api.chat("a" * length))["param"] == "messages"


def test_without_max_tokens_a_chat_gets_the_rest_of_the_limit(make_api):
    engine = FakeEngine(lambda request: [65] * 200)
    usage = make_api(engine).chat("a" * 60).json()["usage"]
    assert usage["total_tokens"] == 100


def test_parts_that_are_not_text_are_refused(api):
    for part in (
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "video_url", "video_url": {"url": "file:///etc/hostname"}},
    ):
        messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
        error = refused(api.post(CHAT, json={"messages": messages}))
        assert error["param"] == "messages" and part["type"] in error["message"]


def test_an_unknown_model_is_a_404_that_lists_those_that_exist(make_api):
    api = make_api(served_model_name=["first", "second"])
    error = refused(api.chat(model="third"), 404)
    assert error["param"] == "model"
    assert "first, second" in error["message"]
    assert api.chat(model="second").json()["model"] == "first"


def test_a_refused_request_is_one_line_in_the_log_without_a_trace(api, caplog):
    caplog.set_level(logging.INFO)
    api.chat(n=0)
    api.complete("a" * 200)
    api.get("/nowhere%0A2026%20forged%20line")
    lines = [record for record in caplog.records if record.name.startswith("limelight")]
    assert len(lines) == 3
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in lines)
    assert "400" in lines[0].getMessage() and "n must be" in lines[0].getMessage()
    assert "404" in lines[2].getMessage()


def test_a_fault_of_ours_is_a_500_without_its_text(make_api, caplog):
    def broken(request):
        raise KeyError("secret detail")

    answer = make_api(FakeEngine(broken)).chat()
    error = refused(answer, 500)
    assert "secret" not in error["message"]
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/nope", 404, None),
        ("GET", CHAT, 405, {"POST"}),
        ("POST", "/v1/models", 405, {"GET", "HEAD"}),
        ("POST", "/health", 405, {"GET", "HEAD"}),
    ],
)
def test_router_errors_have_the_same_shape_and_name_the_route(api, method, path, status, allowed):
    answer = api.request(method, path)
    error = refused(answer, status)
    told = answer.headers.get("allow")
    assert (told and set(told.split(", "))) == allowed
    assert f"{method} {path} " in error["message"]
    assert (told or "/openapi.json") in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "flag"),
    [("POST", "/pause", "--enable-rl"), ("GET", "/tokenizer_info", "--enable-tokenizer-info")],
)
def test_a_route_that_takes_a_flag_names_it(api, method, path, flag):
    assert f"needs a server with {flag}" in refused(api.request(method, path), 404)["message"]
