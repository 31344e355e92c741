"""Requests of prompts and parameters: what they carry, and what is refused."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tokenizers import pre_tokenizers

from limelight.engine.front import make_requests
from limelight.stats import ModelInfo
from limelight.text.tokenizer import BYTE_OF
from limelight.types import Request, RequestError, SamplingParams

EOS = 256


def info(**changes):
    known = {
        "architecture": "Flint", "vocab_size": 300, "max_model_len": 50, "eos_token_ids": [EOS],
        "block_size": 16, "num_blocks": 9, "dtype": "float32",
    }  # fmt: skip
    return ModelInfo(**(known | changes))


def make(prompt=(1, 2, 3), *, tokenizer=None, model=None, params=None, **fields):
    params = params or SamplingParams(**fields)
    return make_requests("r", list(prompt), params, info=model or info(), tokenizer=tokenizer)


def refused(**given):
    with pytest.raises(RequestError) as caught:
        make(**given)
    return caught.value


def ids_of(text):
    """One token a byte."""
    table = sorted(pre_tokenizers.ByteLevel.alphabet())
    number = {BYTE_OF[character]: i for i, character in enumerate(table)}
    return [number[byte] for byte in text.encode()]


def test_one_choice_has_the_requests_own_id_and_several_have_numbers():
    assert [request.id for request in make()] == ["r"]
    assert [request.id for request in make(n=3)] == ["r-0", "r-1", "r-2"]


def test_a_request_carries_what_it_was_given():
    before = time.monotonic()
    params = SamplingParams(max_tokens=4)
    (request,) = make_requests(
        "r", [5], params, info=info(), tokenizer=None, priority=-3, cache_salt="s"
    )
    assert (request.prompt_token_ids, request.params) == ([5], params)
    assert (request.priority, request.cache_salt, request.max_tokens) == (-3, "s", 4)
    assert before <= request.arrival <= time.monotonic()


def test_one_choice_is_asked_for_the_prompts_logprobs_and_each_only_where_each_tells_them():
    def asked(**how):
        params = SamplingParams(n=3, max_tokens=4, temperature=1.0, prompt_logprobs=2)
        made = make_requests("r", [5], params, info=info(), tokenizer=None, **how)
        return [request.params.prompt_logprobs for request in made]

    assert asked() == [2, None, None]
    assert asked(each_tells_prompt=True) == [2, 2, 2]


def test_each_choice_has_the_next_seed():
    assert [request.seed for request in make(n=3, seed=7)] == [7, 8, 9]
    assert [request.seed for request in make(n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]


def test_without_a_seed_each_choice_has_its_own_random_one():
    seeds = {request.seed for request in make(n=50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**55


@pytest.mark.parametrize(
    ("prompt", "asked", "given"),
    [(3, 16, 16), (3, None, 47), (45, 10, 5), (45, 50, 5), (49, None, 1), (49, 0, 0), (1, 49, 49)],
)
def test_an_answer_has_the_tokens_asked_for_or_the_room_that_is_left(prompt, asked, given):
    assert make([7] * prompt, max_tokens=asked)[0].max_tokens == given


@pytest.mark.parametrize("length", [50, 51, 2500])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length):
    error = refused(prompt=[7] * length)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert f"has {length} tokens" in str(error) and "takes 50 tokens" in str(error)


def test_an_empty_prompt_is_refused():
    assert refused(prompt=[]).param == "prompt"


def test_more_tokens_than_the_model_ever_takes_are_refused():
    error = refused(max_tokens=51)
    assert error.param == "max_tokens" and "51" in str(error) and "50" in str(error)


@pytest.mark.parametrize("token_id", [-1, 300, 2**40, 1.0, True, "1", None, "x" * 10**6], ids=repr)
def test_an_id_outside_the_vocabulary_is_refused(token_id):
    error = refused(prompt=[5, token_id, 5])
    assert error.param == "prompt" and len(str(error)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", [5, 300]), ("allowed_token_ids", [300]), ("logit_bias", {300: 1.0})],
)
def test_ids_in_the_parameters_are_of_the_vocabulary_too(name, value):
    error = refused(**{name: value})
    assert error.param == name and "from 0 to 299" in str(error)
    assert len(make(**{name: value}, model=info(vocab_size=301))) == 1


def test_a_model_without_a_tokenizer_has_no_stop_texts_and_no_bad_words():
    assert refused(stop="x").param == "stop"
    assert refused(bad_words=["x"]).param == "bad_words"
    assert make(stop=[], bad_words=[])[0].bad_words == []


def test_a_bad_word_is_spelled_as_it_is_and_after_a_blank(tokenizer):
    ids = {
        text: tokenizer.encode(text, add_special_tokens=False)
        for text in ("cat", " cat", "x", " x")
    }
    assert [len(one) for one in ids.values()] == [1, 1, 1, 2]
    (request,) = make(tokenizer=tokenizer, bad_words=["cat", " x"])
    # " x" takes one token more than "x", which the ban of "x" covers.
    assert request.bad_words == [ids["cat"], ids[" cat"], ids["x"]]


def test_a_bad_word_that_a_blank_makes_shorter_is_spelled_both_ways():
    class Merging:
        def encode(self, text, *, add_special_tokens):
            return {"flint": [1, 2], " flint": [3]}[text]

    assert make(tokenizer=Merging(), bad_words=["flint"])[0].bad_words == [[1, 2], [3]]


def test_a_bad_word_is_spelled_once_where_a_blank_changes_nothing():
    class Stripping:
        def encode(self, text, *, add_special_tokens):
            return ids_of(text.strip())

    assert make(tokenizer=Stripping(), bad_words=["cat"])[0].bad_words == [ids_of("cat")]


def test_a_bad_word_without_tokens_is_refused(tokenizer):
    assert refused(tokenizer=tokenizer, bad_words=["  "]).param == "bad_words"


def test_a_bad_word_outside_the_models_vocabulary_is_refused(tokenizer):
    error = refused(tokenizer=tokenizer, bad_words=["cat"], model=info(vocab_size=200))
    assert error.param == "bad_words"


def test_the_longest_prompt_is_checked_at_once():
    model = info(max_model_len=262_144)
    start = time.monotonic()
    assert len(make([299] * 262_143, model=model)) == 1
    assert time.monotonic() - start < 1


def test_no_tensor_library_comes_in():
    check = (
        "import sys, limelight.engine.front\n"
        "sys.exit(bool({'torch', 'asyncio', 'jinja2'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", check], cwd=root).returncode == 0


def test_requests_can_be_sent_to_another_process():
    (request,) = make(n=1, seed=2**63 - 1, logit_bias={5: 1.0})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
