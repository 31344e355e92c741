"""Routed experts come with the last of an answer, one row a token, however the answer ends."""

import base64
import io
import json

import numpy as np
import pytest
from server_fakes import FakeEngine, ids


def rows(choice) -> list[int]:
    """The number of each row, by which the scripted engine fills it."""
    array = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert array.shape[1:] == (3, 2) and array.dtype == np.uint8
    assert (array == array[:, :1, :1]).all()
    return array[:, 0, 0].tolist()


@pytest.fixture
def api(make_api):
    return make_api(FakeEngine(lambda request: ids("alpha END OF beta"), routed=True))


def events(answer):
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line[6:])["choices"]]


@pytest.mark.parametrize("first", [None, 0, 2, 4])
def test_a_completion_has_a_row_for_each_token_but_its_last(api, first):
    answer = api.complete("abcd", max_tokens=5, routed_experts_prompt_start=first, n=2,
                          temperature=1.0).json()  # fmt: skip
    for choice in answer["choices"]:
        assert rows(choice) == list(range(first or 0, 4 + 5 - 1))


def test_a_chat_and_streams_have_them_in_the_end_alone(api):
    [choice] = api.chat(max_tokens=5).json()["choices"]
    whole = rows(choice)
    *others, last = events(api.chat(max_tokens=5, stream=True))
    assert rows(last) == whole and last["finish_reason"] == "length"
    assert not any("routed_experts" in choice for choice in others)
    *others, last = events(api.complete("abcd", max_tokens=5, stream=True))
    assert rows(last) == list(range(8))
    assert not any("routed_experts" in choice for choice in others)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_text_leaves_the_rows_of_the_tokens_that_count(api, stream):
    body = {"stop": ["END OF"], "max_tokens": 40, "stream": stream, "return_token_ids": True}
    answer = api.complete("abcd", **body)
    choice = events(answer)[-1] if stream else answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert rows(choice) == list(range(4 + len("alpha END OF") - 1))


@pytest.mark.parametrize("first", [5, -1, 1.5, "1"], ids=str)
def test_a_start_outside_the_prompt_is_refused(api, first):
    answer = api.complete("abcd", routed_experts_prompt_start=first)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "routed_experts_prompt_start"


def test_an_engine_that_returns_none_says_so_when_asked(make_api):
    api = make_api()
    answer = api.complete("abcd", routed_experts_prompt_start=0)
    assert answer.status_code == 400
    assert "--enable-return-routed-experts" in answer.json()["error"]["message"]
    assert "routed_experts" not in api.complete("abcd").json()["choices"][0]


def test_token_routes_tell_them_each_in_its_own_encoding(api):
    """vLLM's as a .npy file; SkyRL's as an envelope, whose data its reader cuts out of the body."""
    body = {
        "token_ids": [1, 2, 3, 4],
        "sampling_params": {"max_tokens": 5, "routed_experts_prompt_start": 1},
    }
    answer = api.post("/inference/v1/generate", json=body).json()
    assert rows(answer["choices"][0]) == list(range(1, 8))
    told = api.post("/skyrl/v1/generate", json=body)
    envelope = told.json()["choices"][0]["routed_experts"]
    assert (envelope["shape"], envelope["dtype"]) == ([7, 3, 2], "uint8")
    cut = told.content.split(b'"routed_experts":{"data":"')[1].split(b'"')[0]
    assert list(base64.b64decode(cut)) == [i for i in range(1, 8) for _ in range(6)]
