"""Token ids in and out, by the routes of vLLM and SkyRL."""

import base64

import numpy as np
import pytest
from server_fakes import END, MODEL, FakeEngine, ids

BOTH = pytest.mark.parametrize("path", ["/inference/v1/generate", "/skyrl/v1/generate"])


def generate(api, path="/inference/v1/generate", token_ids=(5, 6, 7), **fields):
    sampling = fields.pop("sampling_params", {})
    body = {"model": MODEL, "token_ids": list(token_ids), "sampling_params": sampling, **fields}
    return api.post(path, json=body)


@BOTH
def test_the_answer_has_the_tokens_the_end_token_among_them(api, path):
    answer = generate(api, path).json()
    [choice] = answer["choices"]
    assert choice["token_ids"] == [*ids("Hello, world!"), END]
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert choice["routed_experts"] is None and choice["rollout_sample_support"] is None


@BOTH
def test_log_probabilities_are_told_in_the_words_of_both_versions(api, path):
    sampling = {"logprobs": 1, "max_tokens": 2, "temperature": 1.0, "top_k": -1, "min_tokens": 1}
    [choice] = generate(api, path, sampling_params=sampling).json()["choices"]
    assert choice["finish_reason"] == "length"
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        one = {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": -0.25, "rank": 1}
        assert entry == {**one, "top_logprobs": [one]}


@BOTH
def test_what_skyrl_makes_of_its_defaults_is_understood(make_api, path):
    sampling = {
        "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True,
        "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "logprobs": 1, "stop": None,
    }  # fmt: skip
    api = make_api(engine := FakeEngine())
    answer = generate(api, path, model=MODEL, sampling_params=sampling, cache_salt="3")
    assert answer.status_code == 200, answer.text
    params = engine.requests[0].params
    assert (params.min_tokens, params.top_k, params.logprobs) == (1, -1, 1)


def test_without_max_tokens_the_answer_may_fill_the_context(make_api):
    api = make_api(engine := FakeEngine(max_model_len=90))
    generate(api)
    assert engine.requests[0].max_tokens == 90 - 3


def test_the_chosen_token_alone_is_told_for_logprobs_0(api):
    [choice] = generate(api, sampling_params={"logprobs": 0}).json()["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


def test_all_choices_and_the_prompt_are_told(api):
    sampling = {"n": 3, "prompt_logprobs": 1, "output_kind": 2, "temperature": 1.0}
    answer = generate(api, sampling_params=sampling).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["6"]["rank"] == 1
    assert answer["usage"]["prompt_tokens"] == 3


def test_the_salt_reaches_the_engine(make_api):
    api = make_api(engine := FakeEngine())
    generate(api, cache_salt="policy-7")
    assert engine.requests[0].cache_salt == "policy-7"


def support(api, **sampling):
    path = "/skyrl/v1/generate"
    sampling = {"max_tokens": 3, "temperature": 1.0, **sampling}
    return generate(api, path, sampling_params=sampling, return_sample_support=True)


def test_the_tokens_that_each_was_drawn_from_are_told(make_api):
    """A row a token, the likeliest first, without those that were cut off; then -1."""
    api = make_api(FakeEngine(logprobs_mode="processed_logprobs"))
    [choice] = support(api, top_k=4).json()["choices"]
    told = choice["rollout_sample_support"]
    assert list(told) == ["data", "shape", "dtype"]
    rows = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
    assert rows.dtype == np.int32
    assert rows.tolist() == [[token_id, 0, -1, -1] for token_id in choice["token_ids"]]
    for entry in choice["logprobs"]["content"]:
        assert entry["logprob"] == -0.25 and entry["top_logprobs"] == []


@pytest.mark.parametrize(
    ("mode", "sampling", "param"),
    [
        ("raw_logprobs", {"top_k": 4}, "return_sample_support"),
        ("processed_logprobs", {}, "top_k"),
        ("processed_logprobs", {"top_k": 1}, "top_k"),
        ("processed_logprobs", {"top_k": 21}, "top_k"),
    ],
)
def test_a_support_that_has_no_bound_or_is_not_known_is_refused(make_api, mode, sampling, param):
    answer = support(make_api(FakeEngine(logprobs_mode=mode)), **sampling)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_an_unknown_model_is_404(api):
    answer = generate(api, model="other")
    assert answer.status_code == 404 and "other" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [258]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"features": {"image": 1}}, "features"),
        ({"stream": True}, "stream"),
        ({"return_sample_support": True}, "return_sample_support"),
        ({"sampling_params": {"routed_experts_prompt_start": 0}}, "routed_experts_prompt_start"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"logprobs": True}}, "logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_answered_is_400_with_its_name(api, fields, param):
    answer = generate(api, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_render_gives_what_generate_takes(make_api):
    api = make_api(engine := FakeEngine())
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "cache_salt": "s"}
    rendered = api.post("/v1/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == ids("<user>Hi<assistant>")
    answer = api.post("/inference/v1/generate", json=rendered)
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].prompt_token_ids == rendered["token_ids"]
    assert engine.requests[0].max_tokens == 3


def test_a_session_may_be_finished(api):
    assert api.post("/finish_session?session_id=7").status_code == 200
