"""/v1/completions: whole answers, prompts in all forms, echo and log-probabilities."""

import threading

import pytest
from server_fakes import END, FakeEngine, events, ids

from limelight.server.logprobs import prompt_logprobs


def test_a_completion_has_openai_s_shape(api):
    answer = api.complete("Once", max_tokens=50).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"]) == (0, "Hello, world!")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 14,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_max_tokens_is_16_unless_given(make_api):
    engine = FakeEngine(lambda request: ids("x" * 60))
    answer = make_api(engine).complete().json()
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert engine.aborted == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([7, 8], [[7, 8]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
    ],
    ids=["text", "texts", "ids", "lists-of-ids"],
)
def test_every_form_of_prompt_is_read(make_api, prompt, expected):
    engine = FakeEngine()
    answer = make_api(engine).complete(prompt).json()
    assert sorted(request.prompt_token_ids for request in engine.requests) == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_choices_are_numbered_prompt_by_prompt(make_api):
    engine = FakeEngine(lambda request: [*request.prompt_token_ids, ord("0") + request.seed])
    answer = make_api(engine).complete(["a", "b"], n=3, seed=0).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert len({request.id for request in engine.requests}) == 6
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 18


def test_echo_puts_the_prompt_before_the_answer(api):
    assert api.complete("Once ", echo=True).json()["choices"][0]["text"] == "Once Hello, world!"
    assert api.complete(ids("Ids "), echo=True).json()["choices"][0]["text"] == "Ids Hello, world!"


def test_the_prompt_alone_can_be_scored(make_api):
    engine = FakeEngine()
    answer = make_api(engine).complete("añb", echo=True, logprobs=1, max_tokens=0).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("añb", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xb1", "b"],
        "token_logprobs": [None, -0.25, -0.25, -0.25],
        "top_logprobs": [
            None,
            {"bytes:\\xc3": -0.25},
            {"bytes:\\xb1": -0.25},
            {"b": -0.25},
        ],
        "text_offset": [0, 1, 2, 2],
    }
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.requests[0].max_tokens == 0


def test_echoed_logprobs_go_on_into_the_answer(api):
    logprobs = api.complete("ab", echo=True, logprobs=2, max_tokens=2).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["a", "b", "H", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][2] == {"H": -0.25, "I": -9999.0}


def test_max_tokens_0_needs_something_to_tell(api):
    answer = api.complete(max_tokens=0)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_each_choice_has_the_logprobs_of_its_prompt_which_are_computed_once(make_api):
    engine = FakeEngine()
    answer = make_api(engine).complete(["ab", "cd"], prompt_logprobs=0, n=2, temperature=1)
    keys = [[*choice["prompt_logprobs"][1]] for choice in answer.json()["choices"]]
    assert keys == [["98"], ["98"], ["100"], ["100"]]
    asked = [request.params.prompt_logprobs for request in engine.requests]
    assert sorted(asked, key=str) == [0, 0, None, None]
    echoed = make_api().complete("ab", echo=True, logprobs=1, n=2, temperature=1).json()["choices"]
    assert [choice["logprobs"]["tokens"][:2] for choice in echoed] == [["a", "b"]] * 2


def test_a_long_prompts_logprobs_are_told_where_they_hold_up_no_one(api, monkeypatch):
    threads = []
    monkeypatch.setattr("limelight.server.service.QUICK_PROMPT", 4)

    def told(*entries):
        threads.append(threading.current_thread().name)
        return prompt_logprobs(*entries)

    monkeypatch.setattr("limelight.server.answers.prompt_logprobs", told)
    for prompt, slow in (("ab", False), ("abcdef", True)):
        [choice] = api.complete(prompt, prompt_logprobs=1).json()["choices"]
        assert len(choice["prompt_logprobs"]) == len(prompt)
        assert threads.pop().startswith("slow") == slow and not threads
        streamed = {"stream": True, "echo": True, "logprobs": 1}
        assert api.complete(prompt, **streamed).text.endswith("data: [DONE]\n\n")


def test_many_choices_do_not_each_tell_a_long_prompt(api, monkeypatch):
    monkeypatch.setattr("limelight.server.preparing.MOST_TOLD_AGAIN", 12)
    for n, status in ((3, 200), (4, 400)):
        answer = api.complete("ab", n=n, temperature=1, prompt_logprobs=2)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "prompt_logprobs"


def test_prompt_logprobs_are_by_token_id_and_start_with_null(api):
    first, second = api.complete("ab", prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -9999.0, "rank": 2, "decoded_token": "c"},
    }


def test_token_ids_are_returned_on_request(api):
    choice = api.complete("ab", return_token_ids=True, max_tokens=3).json()["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == ids("Hel")


def test_tokens_can_be_called_by_their_ids(api):
    body = {"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1}
    logprobs = api.complete("a", **body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:72"]
    assert logprobs["top_logprobs"] == [{"token_id:72": -0.25}]


def test_a_stop_text_ends_the_answer_and_the_work(make_api):
    engine = FakeEngine(lambda request: ids("alpha END OF beta"))
    answer = make_api(engine).complete(stop=["END OF", "OF be"], max_tokens=40).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("alpha ", "stop")
    assert choice["stop_reason"] == "END OF"
    assert answer["usage"]["completion_tokens"] == len("alpha END OF")
    assert len(engine.aborted) == 1 and not engine.running


def test_special_tokens_of_the_tokenizer_are_added_by_default(make_api):
    engine = FakeEngine()
    api = make_api(engine)
    api.complete("a<|start|>b")
    assert engine.requests[0].prompt_token_ids == [97, 257, 98]


def test_a_special_token_adds_no_bytes_to_the_text(make_api):
    engine = FakeEngine(lambda request: [72, END, 73])
    answer = make_api(engine).complete(ignore_eos=True, logprobs=0, max_tokens=3).json()
    choice = answer["choices"][0]
    assert choice["text"] == "HI"
    assert choice["logprobs"]["tokens"] == ["H", "<|end|>", "I"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]


def test_a_model_without_a_tokenizer_takes_and_gives_ids(make_api):
    api = make_api(texts=False)
    choice = api.complete([5, 6], return_token_ids=True, logprobs=0, max_tokens=2).json()[
        "choices"
    ][0]
    assert (choice["text"], choice["token_ids"]) == ("", ids("He"))
    assert choice["logprobs"]["tokens"] == ["token_id:72", "token_id:101"]
    for answer, param in [(api.complete("text"), "prompt"), (api.chat(), "messages")]:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_failed_sequence_is_an_error_of_its_request_alone(make_api):
    engine = FakeEngine(error="logits are not finite; see 0x7f00 in /srv/model/x.py")
    api = make_api(engine)
    answer = api.complete(n=2, temperature=1)
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert "logits are not finite" in message
    assert "0x7f00" not in message and "/srv" not in message
    engine.error = None
    assert api.complete().status_code == 200


def test_sampling_comes_from_the_request_then_the_model_then_neutral(make_api):
    engine = FakeEngine()
    api = make_api(engine, defaults={"temperature": 0.6, "top_k": 20})
    api.complete()
    api.complete(temperature=0.1, top_k=0)
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k) == (0.1, 0)


def test_the_engine_gets_what_the_body_says(make_api):
    engine = FakeEngine()
    make_api(engine).complete(
        "a", stop="zz", min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5, seed=11,
        repetition_penalty=1.1, stop_token_ids=[3], logit_bias={"5": -1.5}, min_tokens=2,
        allowed_token_ids=[1, 2], bad_words=["no"], priority=-3, cache_salt="s",
    )  # fmt: skip
    [request] = engine.requests
    params = request.params
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (params.repetition_penalty, params.min_tokens, params.stop_texts) == (1.1, 2, ["zz"])
    assert (params.logit_bias, params.allowed_token_ids) == ({5: -1.5}, [1, 2])
    assert (request.seed, request.priority, request.cache_salt) == (11, -3, "s")
    assert ids("no") in request.bad_words


def test_a_stream_says_what_the_whole_answer_says(make_api):
    text = "alpha \N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL} नमस्ते \U0001d11e END OF beta"
    api = make_api(FakeEngine(lambda request: ids(text)), max_logprobs=2)
    body = {"stop": ["END OF"], "max_tokens": 90, "logprobs": 2, "echo": True}
    whole = api.complete("Once ", **body).json()["choices"][0]
    *chunks, done = events(api.complete("Once ", stream=True, **body))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert whole["text"] == "Once " + text[: text.index("END")]
    assert not any("\ufffd" in choice["text"] for choice in choices)
    for name, values in whole["logprobs"].items():
        pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [value for piece in pieces for value in piece[name]] == values
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "END OF"
