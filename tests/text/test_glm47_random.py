import json
from pathlib import Path

import pytest
from glm47_answers import TAGS, said
from hypothesis import given, settings
from hypothesis import strategies as st

import limelight.nano
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer

FLINT = Path(limelight.nano.__path__[0]) / "flint-nano"


@pytest.fixture(scope="module")
def flint():
    return Tokenizer.load(FLINT)


@pytest.fixture(scope="module")
def template():
    made = ChatTemplate.load(FLINT, override=None)
    yield made
    made.close()


LETTERS = st.sampled_from(
    [*"ab \n<>/_|ä\U0001f468", "think", "tool_call", "arg_key", "<a", "</", "1"]
)
texts = st.lists(LETTERS, max_size=12).map("".join).filter(lambda t: not any(m in t for m in TAGS))
scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts
numbers = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    "text": ({"type": "string"}, texts),
    "count": ({"type": "integer"}, st.integers()),
    "share": ({"type": "number"}, numbers),
    "flag": ({"type": "boolean"}, st.booleans()),
    "maybe": ({"type": ["integer", "null"]}, st.none() | st.integers()),
    "list": ({"type": "array"}, st.lists(scalars, max_size=4)),
    "deep": (
        {"properties": {"n": {"anyOf": [{"type": "number"}, {"type": "string"}]}}},
        st.fixed_dictionaries({"n": numbers | texts}, optional={"more": scalars}),
    ),
}  # fmt: skip
KNOWN = {"type": "object", "properties": {key: schema for key, (schema, _) in VALUES.items()}}
EVERY = [
    {"type": "function", "function": {"name": name, "parameters": KNOWN}} for name in ("f", "f_2")
]
made_calls = st.lists(
    st.tuples(
        st.sampled_from(["f", "f_2"]),
        st.fixed_dictionaries({}, optional={key: values for key, (_, values) in VALUES.items()}),
    ),
    max_size=3,
)


@given(thought=texts, content=texts, calls=made_calls, thinks=st.booleans(), step=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_a_message_that_the_template_writes_is_read_back(
    flint, template, thought, content, calls, thinks, step
):
    question = {"role": "user", "content": "Well?"}
    asked = template.render([question], tools=EVERY, enable_thinking=thinks)
    answer = {
        "role": "assistant",
        "content": content,
        "reasoning_content": thought if thinks else "",
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    whole = template.render([question, answer], tools=EVERY, add_generation_prompt=False)
    if thinks and not thought:
        whole = whole.replace("<|assistant|>", "<|assistant|><think>")
    assert whole.startswith(asked)
    prompt_ids = flint.encode(asked, add_special_tokens=False)
    ids = flint.encode(whole[len(asked) :], add_special_tokens=False)
    reasoning, said_content, made = said(flint, ids, prompt=prompt_ids, tools=EVERY, step=step)
    assert reasoning == (thought.rstrip() if thinks else "")
    assert said_content == (content.rstrip() if calls else content)
    assert [(name, json.loads(arguments)) for name, arguments in made] == calls
