"""What is no text of an answer, whatever its grammar says."""

import numpy as np
import pytest
import xgrammar
from grammar_walks import flint

from limelight.checkpoint import BUNDLED
from limelight.engine.grammar_worker import Vocabulary
from limelight.text.answer_form import Asked, TemplateForm, plain_constraint
from limelight.text.demand import Demand, answer_format
from limelight.text.tokenizer import Tokenizer
from limelight.types import Reasoning

BOUNDED = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}},
           "required": ["a"]}  # fmt: skip
CONTROLS = {*range(0x20)} - {*b"\n\r"}


def next_tokens(constraint, tokenizer, text):
    """Which tokens a constraint lets follow a text."""
    size = tokenizer.vocab_size
    tokens = [tokenizer.token_bytes(i) for i in range(size)]
    compiler = Vocabulary(tokens, size, tokenizer.eos_token_ids).compiler(constraint.marks)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(constraint.tag))
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept_token(token_id)
    bits = xgrammar.allocate_token_bitmask(1, size)
    matcher.fill_next_token_bitmask(bits)
    allowed = np.unpackbits(bits.numpy().view(np.uint8)[0], bitorder="little")[:size].nonzero()[0]
    return {int(token_id) for token_id in allowed}


def has_controls(token_ids, tokenizer):
    return any(not CONTROLS.isdisjoint(tokenizer.token_bytes(i)) for i in token_ids)


@pytest.mark.parametrize(
    "asked, text",
    [
        ({"regex": "[^b]{3,40}"}, ""),
        ({"json": BOUNDED}, '{"a": "'),
        ({"json_object": True}, '{"a": "'),
    ],
    ids=["regex", "bounded", "object"],
)
def test_a_special_token_is_no_text_of_a_plain_answer(asked, text):
    tokenizer = flint()
    (think,) = tokenizer.encode("<think>", add_special_tokens=False)
    demand = Demand(content=answer_format(None, asked))
    reasoning = Reasoning(starts=[[think]], ends=[[9]], is_open=False)
    allowed = next_tokens(plain_constraint(demand, tokenizer, reasoning), tokenizer, text)
    assert len(allowed) > 1000
    assert not allowed & (tokenizer.special_ids | {think}) - set(tokenizer.eos_token_ids)
    assert "json" not in asked or not has_controls(allowed, tokenizer)
    assert think in next_tokens(plain_constraint(demand, tokenizer), tokenizer, text)


def test_a_structural_tag_of_the_user_may_have_special_tokens():
    tokenizer = flint()
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "<|user|>"}}
    demand = Demand(content=answer_format(tag, None))
    (user,) = tokenizer.encode("<|user|>", add_special_tokens=False)
    assert user in next_tokens(plain_constraint(demand, tokenizer), tokenizer, "")


@pytest.mark.parametrize("forced", [False, True], ids=["format", "call"])
def test_texts_of_bounded_length_have_no_control_characters_by_a_template_either(forced):
    folder = BUNDLED / "beam-nano"
    tokenizer = Tokenizer.load(folder)
    form = TemplateForm(tokenizer, folder, calls=True, always=True)
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"o": BOUNDED}}}
    content = answer_format(None, {"json": BOUNDED})
    demand = Demand(tools=[tool], choice="required") if forced else Demand(content=content)
    prompt = "<|start|>assistant<|channel|>analysis<|message|>x"
    asked = Asked(token_ids=tokenizer.encode(prompt, add_special_tokens=False))
    constraint = form.constraint(asked, demand)
    assert constraint.after_reasoning
    opener = "<|channel|>final<|message|>"
    if forced:
        opener = ' to=f<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="o">\n'
    allowed = next_tokens(constraint, tokenizer, opener + '{"a": "')
    assert len(allowed) > 1000 and not has_controls(allowed, tokenizer)
    plain = form.constraint(asked, Demand())
    assert plain.marks == [] and has_controls(
        next_tokens(plain, tokenizer, "<|channel|>final<|message|>"), tokenizer
    )
