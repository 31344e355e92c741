"""The other routes, keys, origins and ids of requests."""

import pytest
from server_fakes import FakeEngine, events

from limelight import __version__


def test_health_is_about_the_engine_and_ready_about_requests(make_api):
    engine = FakeEngine(phase="loading")
    api = make_api(engine)
    assert (api.get("/health").status_code, api.get("/health").content) == (200, b"")
    answer = api.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "phase": "loading", "percent": 40.0}
    engine.phase = "ready"
    assert api.get("/ready").status_code == 200
    assert api.get("/ready").json()["ready"] is True
    engine.healthy = False
    for path in ("/health", "/ping", "/ready"):
        assert api.get(path).status_code == 503
    assert api.post("/ping").status_code == 503
    engine.healthy = True
    engine.die()
    assert api.get("/health").status_code == 503
    assert api.get("/ready").json()["phase"] == "dead"


def test_ping_and_version_answer(api):
    assert api.get("/ping").status_code == api.post("/ping").status_code == 200
    assert api.get("/version").json() == {"version": __version__}


def test_models_lists_every_name_with_the_length(make_api):
    answer = make_api(served_model_name=["a", "b"]).get("/v1/models").json()
    assert answer["object"] == "list"
    assert [(model["id"], model["max_model_len"]) for model in answer["data"]] == [
        ("a", 100),
        ("b", 100),
    ]
    assert {model["object"] for model in answer["data"]} == {"model"}


def test_a_model_is_told_by_its_name_which_may_have_slashes(make_api):
    api = make_api(served_model_name=["org/a", "b"])
    for one in api.get("/v1/models").json()["data"]:
        assert api.get(f"/v1/models/{one['id']}").json() == one
    answer = api.get("/v1/models/c")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("phase", ["starting", "loading", "dead"])
def test_requests_before_and_after_the_engine_are_told_to_come_back(make_api, phase):
    engine = FakeEngine(phase=phase)
    api = make_api(engine)
    for answer in (api.chat(), api.complete(stream=True), api.get("/v1/models")):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    assert engine.requests == []


def test_texts_become_tokens_and_come_back(api):
    answer = api.post("/tokenize", json={"prompt": "añ", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 100,
        "tokens": [97, 195, 177],
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xb1"],
    }
    assert api.post("/detokenize", json={"tokens": [97, 195, 177]}).json() == {"prompt": "añ"}


def test_a_conversation_can_be_tokenized_as_a_chat_would_see_it(make_api):
    engine = FakeEngine()
    api = make_api(engine)
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"mood": "odd"},
    }
    tokens = api.post("/tokenize", json=body).json()["tokens"]
    api.post("/v1/chat/completions", json=body)
    assert engine.requests[0].prompt_token_ids == tokens
    assert bytes(tokens).decode() == "[tool f]<user>Hi<assistant>(odd)"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_tokens_routes_name_what_is_wrong(api, path, body, param):
    answer = api.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer ", "Basic alpha", "alpha", "Bearer alph\xe4"]
)
def test_routes_that_cost_something_want_a_key(make_api, path, header):
    engine = FakeEngine()
    api = make_api(engine, api_key=["alpha", "beta"])
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = api.post(path, json={"prompt": "a", "tokens": [1]}, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "alpha" not in answer.text and engine.requests == []


def test_each_key_opens_and_unknown_paths_are_closed_too(make_api):
    api = make_api(api_key=["alpha", "beta"])
    for key in ("alpha", "beta"):
        headers = {"authorization": f"Bearer {key}"}
        assert api.get("/v1/models", headers=headers).status_code == 200
    for path in ("/v1/models", "/nowhere", "/health/", "http://limelight//health"):
        assert api.get(path).status_code == 401


def test_an_empty_key_is_refused_at_start(make_api):
    with pytest.raises(ValueError, match="api_key is empty"):
        make_api(api_key=["alpha", ""])


def test_probes_need_no_key(make_api):
    api = make_api(api_key=["alpha"])
    for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
        assert api.get(path).status_code == 200


ORIGIN = "https://app.example"


def preflight(api, origin: str):
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return api.request("OPTIONS", "/v1/chat/completions", headers=headers)


def test_a_preflight_needs_no_key_and_only_listed_origins_pass(make_api):
    api = make_api(api_key=["alpha"], allowed_origins=[ORIGIN])
    answer = preflight(api, ORIGIN)
    assert answer.status_code in (200, 204)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in preflight(api, "https://evil.example").headers


def test_the_tokenizer_is_told_where_that_is_allowed(make_api, tokenizer, template, monkeypatch):
    assert make_api().get("/tokenizer_info").status_code == 404
    monkeypatch.setitem(tokenizer.config, "vocab_file", "/home/someone/vocab.json")
    told = make_api(enable_tokenizer_info_endpoint=True).get("/tokenizer_info").json()
    assert told["eos_token"] == "<|end|>" and told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told["chat_template"] == template.sources["default"] and "vocab_file" not in told
    bare = make_api(enable_tokenizer_info_endpoint=True, texts=False, api_key=["a"])
    assert bare.get("/tokenizer_info").status_code == 401
    headers = {"authorization": "Bearer a"}
    assert "chat_template" not in bare.get("/tokenizer_info", headers=headers).json()


def test_streams_and_errors_carry_the_allowing_header(make_api):
    api = make_api(allowed_origins=[ORIGIN])
    closed = make_api(allowed_origins=[ORIGIN], api_key=["alpha"])
    headers = {"origin": ORIGIN}
    body = {"messages": [{"role": "user", "content": "a"}]}
    path = "/v1/chat/completions"
    for answer, status in [
        (api.post(path, json=body | {"stream": True}, headers=headers), 200),
        (api.post(path, json=body | {"n": 0}, headers=headers), 400),
        (api.get("/nowhere", headers=headers), 404),
        (closed.post(path, json=body, headers=headers), 401),
    ]:
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
    evil = api.post(path, json=body, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in evil.headers


def test_any_origin_never_goes_with_credentials(make_api):
    api = make_api(allowed_origins=["*"])
    answer = api.get("/v1/models", headers={"origin": ORIGIN, "cookie": "a=b"})
    assert "access-control-allow-credentials" not in answer.headers
    assert "access-control-allow-credentials" not in preflight(api, ORIGIN).headers


def test_without_a_list_no_origin_is_allowed(api):
    answer = api.get("/v1/models", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


def test_the_request_s_own_id_is_used_but_cleaned(make_api):
    engine = FakeEngine()
    api = make_api(engine, enable_request_id_headers=True)
    given = "job-7.a_b\t{}/../é" + "x" * 200
    headers = {"x-request-id": given.encode("latin-1")}
    body = {"messages": [{"role": "user", "content": "a"}]}
    answers = [api.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
    clean = answers[0].headers["x-request-id"]
    assert clean.startswith("job-7.a_b..") and len(clean) <= 64
    assert [answer.json()["id"] for answer in answers] == [f"chatcmpl-{clean}"] * 2
    assert engine.requests[0].id != engine.requests[1].id, "the engine must tell them apart"
    assert api.chat(n=0).headers["x-request-id"], "errors carry an id too"
    assert api.chat(request_id="mine").json()["id"] == "chatcmpl-mine"


def test_ids_are_not_echoed_unless_asked_for(api):
    assert "x-request-id" not in api.chat().headers


def test_a_refusal_before_the_first_token_is_no_stream(make_api):
    engine = FakeEngine(error="no room")
    answer = make_api(engine).chat(stream=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the request failed: no room"


def test_a_stream_that_fails_later_ends_with_an_error_event(make_api):
    engine = FakeEngine(die_after=2)
    *chunks, last = events(make_api(engine).chat(stream=True))
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", "H", "e"]
    assert last["error"]["code"] == 503
    assert "0xdeadbeef" not in str(last) and "secret" not in str(last)


def test_headers_say_which_engine_is_to_answer(make_api):
    engine = FakeEngine()
    api = make_api(engine)
    headers = {"X-Session-ID": "trajectory 7", "X-data-parallel-rank": "1"}
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": ["Once", "Twice"], "n": 2}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ):
        engine.requests.clear()
        assert api.post(path, json=fields, headers=headers).status_code == 200
        assert {(one.session, one.replica) for one in engine.requests} == {("trajectory 7", 1)}
    api.chat()
    assert (engine.requests[-1].session, engine.requests[-1].replica) == (None, None)


@pytest.mark.parametrize("rank", [b"-1", b"one", b"1.5", b"", "\u0663".encode()])
def test_a_rank_that_is_no_number_is_refused(api, rank):
    headers = [(b"X-data-parallel-rank", rank)]
    answer = api.post("/v1/completions", json={"prompt": "Once"}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-data-parallel-rank"
