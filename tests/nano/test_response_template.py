"""Beam's response template, in tokenizer_config.json, takes apart what its chat template writes."""

import random

import pytest
from transformers import AutoTokenizer

from nano.chat import BEAM
from nano.conversations import from_turns
from nano.tasks import Item, sort
from nano.tools import call_tools


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BEAM.folder)


def parsed(tokenizer, item: Item, *, thinking: bool) -> dict:
    """What transformers makes of the last answer of `item`, given the prompt before it."""
    *before, answer = BEAM.segments(item, thinking=thinking)
    prompt = "".join(segment.text for segment in before)
    return tokenizer.parse_response(answer.text, prefix=prompt, tools=item.tools)


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
def test_calls_come_back_with_names_thoughts_and_typed_arguments(tokenizer, thinking):
    rng = random.Random(3)
    items = [call_tools(rng, goes_on=False) for _ in range(40)]
    assert any(len(item.messages[-1]["tool_calls"]) > 1 for item in items)
    for item in items:
        written, read = item.messages[-1], parsed(tokenizer, item, thinking=thinking)
        assert read["tool_calls"] == written["tool_calls"]
        assert read.get("thinking") == (written["reasoning_content"] if thinking else None)


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
def test_an_answer_comes_back_as_content(tokenizer, thinking):
    turn = sort(random.Random(4), count=5)
    read = parsed(tokenizer, from_turns([turn]), thinking=thinking)
    assert read["content"] == turn.answer
    assert read.get("thinking") == (turn.reasoning if thinking else None)
