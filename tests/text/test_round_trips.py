"""Random conversations, written by a bundled model's chat template and read back by its parser."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limelight.checkpoint import BUNDLED
from limelight.engine.front import Choice
from limelight.text.answer_form import Asked, find_form, usual_format
from limelight.text.parsers import whole_calls
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import Output, Request, SamplingParams

MODELS = {"flint-nano": "FlintForCausalLM", "beam-nano": "BeamForCausalLM"}
texts = st.text(st.characters(codec="utf-8", exclude_characters="<", exclude_categories=["Cs"]),
                max_size=15)  # fmt: skip
names = st.text("abcxyz_0123456789", min_size=1, max_size=6)
inner = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3),
    max_leaves=4,
)
VALUES = {
    "string": texts,
    "integer": st.integers(-(10**25), 10**25),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "array": st.lists(inner, max_size=3),
    "object": st.dictionaries(texts, inner, max_size=3),
}
some_tools = st.dictionaries(
    names, st.dictionaries(names, st.sampled_from(sorted(VALUES)), max_size=4), min_size=1,
    max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """(tokenizer, chat template, form of the answers) of a bundled model."""
    folder = BUNDLED / request.param
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder, override=None)
    name = usual_format(MODELS[request.param], folder)
    yield tokenizer, template, find_form(
        name, reasoning=True, calls=True, folder=folder, tokenizer=tokenizer, template=template
    )  # fmt: skip
    template.close()


@st.composite
def calls(draw, tools):
    """A few calls of these tools, each with some of its arguments."""
    made = []
    for name in draw(st.lists(st.sampled_from(sorted(tools)), max_size=3)):
        keys = [key for key in tools[name] if draw(st.booleans())]
        made.append((name, {key: draw(VALUES[tools[name][key]]) for key in keys}))
    return made


def message(reasoning, content, made):
    listed = [
        {"id": f"{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(made)
    ]
    answer = {"role": "assistant", "content": content}
    answer |= {"reasoning": reasoning} if reasoning else {}
    return answer | ({"tool_calls": listed} if made else {})


@st.composite
def conversations(draw):
    """(tools, messages that end with a question or a result, the answer to them)."""
    tools = draw(some_tools)
    messages = []
    for _ in range(draw(st.integers(0, 2))):
        made = draw(calls(tools))
        messages.append({"role": "user", "content": draw(texts)})
        messages.append(message(draw(texts), draw(texts), made))
        messages += [{"role": "tool", "tool_call_id": "0", "content": draw(texts)} for _ in made]
    if not messages or draw(st.booleans()):
        messages.append({"role": "user", "content": draw(texts)})
    return tools, messages, (draw(texts), draw(texts), draw(calls(tools)))


def described(tools):
    return [
        {"type": "function", "function": {
            "name": name,
            "parameters": {
                "type": "object", "properties": {k: {"type": kind} for k, kind in given.items()},
            },
        }}
        for name, given in tools.items()
    ]  # fmt: skip


def read(form, tokenizer, asked, ids, groups):
    """(reasoning, content, calls) of an answer whose tokens come in groups of random sizes."""
    params = SamplingParams(max_tokens=None)
    request = Request(
        id="r", prompt_token_ids=asked.token_ids, params=params, max_tokens=9**9, seed=0
    )
    choice = Choice(request, tokenizer, form.parser(asked))
    end, at = tokenizer.eos_token_ids[0], 0
    while at < len(ids):
        size = groups.choice([1, 1, 2, 3, 7, len(ids)])
        choice.take(Output(request_id="r", token_ids=ids[at : at + size]))
        at += size
    choice.take(Output(request_id="r", token_ids=[end], finish_reason="stop"))
    found = [(call.name, json.loads(call.arguments)) for call in whole_calls(choice.calls)]
    return choice.reasoning, choice.text, found


@given(conversations(), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_an_answer_of_any_conversation_comes_back(model, conversation, thinks, groups):
    tokenizer, template, form = model
    tools, messages, (reasoning, content, made) = conversation
    reasoning = reasoning.strip() if thinks else ""
    kwargs = {"enable_thinking": bool(reasoning)}
    asked = template.render(messages, tools=described(tools), **kwargs)
    whole = template.render(
        [*messages, message(reasoning, content, made)], tools=described(tools),
        add_generation_prompt=False, **kwargs,
    )  # fmt: skip
    assert whole.startswith(asked)
    prompt_ids = tokenizer.encode(asked, add_special_tokens=False)
    ids = tokenizer.encode(whole[len(asked) :], add_special_tokens=False)
    given = Asked(token_ids=prompt_ids, tools=described(tools), template_kwargs=kwargs)
    said = read(form, tokenizer, given, ids, groups)
    assert said[0] == reasoning
    assert said[1] == content or (made and said[1].strip() == content.strip())
    assert said[2] == made


@given(conversations(), st.randoms(use_true_random=False), st.data())
@settings(max_examples=40, deadline=None)
def test_an_answer_cut_anywhere_is_a_beginning_with_whole_calls_alone(
    model, conversation, groups, data
):
    tokenizer, template, form = model
    tools, messages, (_, content, made) = conversation
    asked = template.render(messages, tools=described(tools))
    whole = template.render(
        [*messages, message("", content, made)], tools=described(tools),
        add_generation_prompt=False,
    )  # fmt: skip
    ids = tokenizer.encode(whole[len(asked) :], add_special_tokens=False)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    given = Asked(
        token_ids=tokenizer.encode(asked, add_special_tokens=False), tools=described(tools)
    )
    request = Request(
        id="r", prompt_token_ids=given.token_ids, params=SamplingParams(max_tokens=None),
        max_tokens=len(ids), seed=0,
    )  # fmt: skip
    choice = Choice(request, tokenizer, form.parser(given))
    while len(ids) > 1:
        size = groups.randint(1, len(ids) - 1)
        choice.take(Output(request_id="r", token_ids=ids[:size]))
        ids = ids[size:]
    choice.take(Output(request_id="r", token_ids=ids, finish_reason="length"))
    found = [(call.name, json.loads(call.arguments)) for call in whole_calls(choice.calls)]
    assert found == made[: len(found)]
    assert content.strip().startswith(choice.text.strip().rstrip("\ufffd"))
