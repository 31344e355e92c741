"""A constraint and a budget leave the tokens that they must, whatever a model would rather say."""

import json
import re
from dataclasses import replace

import pytest
import torch

from limelight.engine.grammar_worker import Vocabulary
from limelight.runner.grammar import LONGEST_REST, Guide
from limelight.runner.sampler import Sampler
from limelight.types import Constraint, Reasoning, Request, SamplingParams

CPU = torch.device("cpu")
TEXTS = ["<eos>", "<think>", "</think>", "<call>", *'ab{}":,1 ', '{"', '":', "ab", "</", ""]
EOS, THINK, END, CALL = range(4)
ID = {text: token_id for token_id, text in enumerate(TEXTS)}
SIZE = len(TEXTS) + 9  # a head may be wider than its tokenizer
MARKS = [THINK, END, CALL]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": OBJECT, "max_whitespace_cnt": 1}
OPEN = Reasoning(starts=[[THINK]], ends=[[END]], ends_kept=[[CALL]], is_open=True)


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


@pytest.fixture(scope="module")
def compiler():
    return Vocabulary([text.encode() for text in TEXTS], SIZE, [EOS]).compiler(MARKS)


class Rows:
    """A sampler and its rows, each with a constraint; logits are random, from a seed."""

    def __init__(self, compiler):
        self.compiler, self.grammars = compiler, {}
        self.sampler = Sampler(
            vocab_size=SIZE, eos_token_ids=[EOS], device=CPU, grammars=self.grammars
        )

    def admit(self, slot, form, *, output=(), reasoning=None, waits=False, bad_words=(), **params):
        tag, request_id = json.dumps({"type": "structural_tag", "format": form}), f"r{slot}"
        if form is not None:
            self.grammars[request_id] = self.compiler.compile_structural_tag(tag)
        request = Request(
            id=request_id, prompt_token_ids=[5], params=SamplingParams(**params), max_tokens=99,
            seed=slot, bad_words=list(bad_words), reasoning=reasoning,
            constraint=None if form is None else Constraint(tag=tag, after_reasoning=waits),
        )  # fmt: skip
        self.sampler.admit(slot, request, list(output))

    def step(self, slots, position, *, seed=0, liked=None):
        generator = torch.Generator().manual_seed(1000 * seed + position)
        logits = torch.randn(len(slots), SIZE, generator=generator) * 3
        if liked is not None:
            logits[:, liked] = 50.0
        return self.sampler.choose(logits, slots, [position] * len(slots))

    def allowed(self, slot):
        """Which tokens can come next: each is drawn when it is by far the likeliest."""
        output, found = list(self.sampler.rules[slot].output), set()
        rules = self.sampler.rules[slot]
        for token_id in range(SIZE):
            self.sampler.admit(slot, rules.request, output)
            choice = self.step([slot], 3, liked=token_id)[0]
            if choice.token_ids == [token_id]:
                found.add(token_id)
        self.sampler.admit(slot, rules.request, output)
        return found


def text_of(token_ids):
    return "".join(TEXTS[token_id] for token_id in token_ids)


def test_what_is_drawn_fits_at_any_temperature(compiler):
    for seed in range(30):
        rows = Rows(compiler)
        rows.admit(0, regex("(ab|ba){1,4}"), temperature=2.0)
        while EOS not in (output := rows.sampler.rules[0].output):
            assert rows.step([0], len(output), seed=seed)[0].token_ids
        assert re.fullmatch("(ab|ba){1,4}", text_of(output[:-1]))


def test_after_the_last_token_of_a_grammar_only_an_end_comes(compiler):
    rows = Rows(compiler)
    rows.admit(0, regex("ab"), output=[ID["a"]], stop_token_ids=[ID["}"]])
    assert rows.allowed(0) == {ID["b"]}
    rows.admit(0, regex("ab"), output=[ID["ab"]], stop_token_ids=[ID["}"]])
    assert rows.allowed(0) == {EOS, ID["}"]}
    # An overlapped step may come once more after it.
    rows.admit(0, regex("ab"), output=[ID["ab"], EOS])
    assert rows.step([0], 3)[0].token_ids


@pytest.mark.parametrize(
    "params",
    [{"ignore_eos": True}, {"min_tokens": 9}, {"allowed_token_ids": [ID["a"], ID["b"]]}],
    ids=["ignore_eos", "min_tokens", "allowed"],
)
def test_where_no_end_may_come_the_answer_is_whole_without_one(compiler, params):
    rows = Rows(compiler)
    rows.admit(0, regex("ab"), output=[ID["a"]], **params)
    assert not rows.step([0], 3, liked=ID["b"])[0].is_whole
    choice = rows.step([0], 4)[0]
    assert choice.is_whole and choice.refused is None


def test_where_the_answer_may_go_on_it_does_so_instead_of_ending_too_early(compiler):
    rows = Rows(compiler)
    rows.admit(0, regex("a+"), output=[ID["a"]], ignore_eos=True)
    assert rows.allowed(0) == {ID["a"]}
    rows.admit(0, regex("a+"), output=[ID["a"]], ignore_eos=True, stop_token_ids=[ID["b"]])
    assert rows.allowed(0) == {ID["a"], ID["b"]}


def test_bans_that_leave_nothing_before_the_end_are_an_error_of_that_row_alone(compiler):
    rows = Rows(compiler)
    rows.admit(0, regex("ab"), allowed_token_ids=[ID["1"]])
    rows.admit(1, regex("ab"))
    first, second = rows.step([0, 1], 3)
    assert first.refused == "no token is allowed here" and second.token_ids


@pytest.mark.parametrize("before", range(4))
def test_the_grammar_gets_exactly_what_follows_the_end_of_reasoning(compiler, before):
    rows = Rows(compiler)
    output = [ID["a"]] * before + [END, ID["{"], ID['"'], ID["a"], ID['"']]
    rows.admit(0, JSON, output=output, reasoning=OPEN, waits=True)
    assert rows.allowed(0) == {ID[":"], ID[" "]}
    rows.admit(0, JSON, output=output[: before + 1], reasoning=OPEN, waits=True)
    assert rows.allowed(0) == {ID["{"], ID['{"']}


def test_reasoning_is_free_but_for_what_the_answer_cannot_begin_with(compiler):
    rows, tokens = Rows(compiler), set(range(SIZE))
    rows.admit(0, JSON, reasoning=OPEN, waits=True)
    assert rows.allowed(0) == tokens - {CALL, EOS}
    call = {"type": "sequence", "elements": [{"type": "token", "token": CALL}, regex("ab")]}
    rows.admit(0, call, reasoning=OPEN, waits=True)
    assert rows.allowed(0) == tokens - {EOS}
    rows.admit(0, call, output=[ID["a"], CALL], reasoning=OPEN, waits=True)
    assert rows.allowed(0) == {ID["a"], ID["ab"]}
    rows.admit(0, regex("(ab)?"), reasoning=OPEN, waits=True)
    assert rows.allowed(0) == tokens - {CALL}


def test_with_reasoning_closed_in_the_prompt_the_first_token_is_the_answers(compiler):
    rows = Rows(compiler)
    closed = Reasoning(starts=[[THINK]], ends=[[END]], is_open=False)
    rows.admit(0, JSON, reasoning=closed, waits=True)
    assert rows.allowed(0) == {ID["{"], ID['{"']}


def test_marks_are_no_text_even_in_a_string_of_any_characters(compiler):
    rows = Rows(compiler)
    rows.admit(0, {"type": "json_schema", "json_schema": {"type": "string"}}, output=[ID['"']])
    assert rows.allowed(0).isdisjoint(MARKS) and ID["</"] in rows.allowed(0)
    assert max(rows.allowed(0)) < len(TEXTS)


def test_a_budget_goes_before_every_other_rule(compiler):
    rows = Rows(compiler)
    spent = Reasoning(starts=[[THINK]], ends=[[END]], is_open=True, budget=1, forced_end=[END])
    rows.admit(
        0, JSON, reasoning=spent, waits=True, bad_words=[[END]], allowed_token_ids=[ID["a"]],
        logit_bias={END: -100.0},
    )  # fmt: skip
    assert rows.allowed(0) == {ID["a"]}
    rows.step([0], 3, liked=ID["a"])
    assert rows.allowed(0) == {END}


def test_a_forced_end_that_the_constraint_forbids_ends_that_row_alone(compiler):
    rows = Rows(compiler)
    spent = Reasoning(starts=[[THINK]], ends=[[END]], is_open=True, budget=0, forced_end=[END])
    rows.admit(0, regex("(ab){9}"), reasoning=spent)
    rows.admit(1, regex("(ab){9}"))
    while (choices := rows.step([0, 1], 3))[0].token_ids:
        assert len(rows.sampler.rules[0].output) <= LONGEST_REST
    first, second = choices
    assert f"does not allow the token {END}" in first.refused and second.token_ids
    assert first.error is None


BYTES = [b"<eos>", b"</think>", b"a", *(bytes([b]) for b in b"\xf0\x9f\x98\x80\xc3\xa9")]
EMOJI = [3, 4, 5, 6]


@pytest.mark.parametrize("budget", range(9))
def test_a_forced_end_waits_for_the_end_of_a_character(budget):
    thought = regex("[^<]*")
    end, rest = {"type": "const_string", "value": "</think>"}, regex("a")
    tag = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [thought, end, rest]},
    }
    grammar = (
        Vocabulary(BYTES, len(BYTES), [0]).compiler([]).compile_structural_tag(json.dumps(tag))
    )
    request = Request(
        id="r", prompt_token_ids=[2], params=SamplingParams(), max_tokens=99, seed=0,
        constraint=Constraint(tag=json.dumps(tag)),
        reasoning=Reasoning(starts=[], ends=[[1]], is_open=True, budget=budget, forced_end=[1]),
    )  # fmt: skip
    guide, made = Guide(request, grammar, eos_token_ids=[0], output=[]), []
    for token_id in [2, *EMOJI, 2, 7, 8, 2, 2]:
        if guide.forced is None:
            guide.accept(token_id)
            made.append(token_id)
    assert guide.forced == 1
    Guide(request, grammar, eos_token_ids=[0], output=made)
    b"".join(BYTES[token_id] for token_id in made).decode()  # whole characters
    assert budget <= len(made) <= budget + LONGEST_REST
    for token_id in (1, 2, 0):
        assert guide.refused is None
        guide.accept(token_id)
    assert guide.has_ended and guide.refused is None


def test_a_constraint_that_cannot_be_followed_ends_its_row_alone(compiler):
    rows = Rows(compiler)
    for slot in range(3):
        rows.admit(slot, regex("(ab){9}"))
    rows.sampler.rules[0].guide.accept(ID["}"])
    # A matcher that has ended says nothing any more.
    matcher = rows.sampler.rules[1].guide.matcher
    assert all(matcher.accept_token(token_id) for token_id in [ID["ab"]] * 9 + [EOS])
    choices = rows.step([0, 1, 2], 3)
    assert all(choice.refused and choice.error is None for choice in choices[:2])
    assert choices[2].token_ids and TEXTS[choices[2].token_ids[0]] in ("a", "ab")


@pytest.mark.parametrize("budget", [None, 0, 2])
def test_a_second_thought_leaves_the_constraint_on(compiler, budget):
    """Where the grammar lets one begin, it holds that as well, and so does the budget."""
    again = [{"type": "token", "token": THINK}, regex("a*"), {"type": "token", "token": END}]
    form = {"type": "sequence", "elements": [*again, regex("ba")]}
    rows, reasoning = Rows(compiler), replace(OPEN, budget=budget, forced_end=[END])
    before = [ID["b"]] * (budget or 0) + [END]
    rows.admit(0, form, output=before, reasoning=reasoning, waits=True)
    assert rows.allowed(0) == {THINK}
    rows.admit(0, form, output=[*before, THINK], reasoning=reasoning, waits=True)
    assert rows.allowed(0) == ({END} if budget == 0 else {ID["a"], END})
    rows.admit(0, form, output=[*before, THINK, END], reasoning=reasoning, waits=True)
    assert rows.allowed(0) == {ID["b"]}
    rows.admit(0, regex("ba"), output=before, reasoning=reasoning, waits=True)
    assert rows.allowed(0) == {ID["b"]}


def test_drafts_are_tried_on_a_fork_and_taken_back_with_it(compiler):
    budgeted = replace(OPEN, budget=3, forced_end=[END])
    rows = Rows(compiler)
    rows.admit(0, JSON, output=[ID["a"]], reasoning=budgeted, waits=True)
    guide = rows.sampler.rules[0].guide
    drafts = [END, ID['{"'], ID["a"], ID['":'], ID["1"], ID["}"], EOS, ID["b"], ID["b"]]
    fork = guide.fork()
    for draft in drafts:
        fork.accept(draft)
    # What follows the end is no part of the answer, and no fault.
    assert fork.has_ended and fork.refused is None
    wrong = guide.fork()
    for draft in (END, ID["{"], ID["}"]):
        wrong.accept(draft)
    assert wrong.refused is not None
    # The guide stands where it stood: two thoughts are left, then the end comes.
    assert guide.thoughts.is_open and guide.thoughts.num_tokens == 1 and guide.forced is None
    for token_id in (ID["b"], ID["b"]):
        assert guide.forced is None and guide.refused is None
        guide.accept(token_id)
    assert guide.forced == END
    guide.accept(END)
    assert guide.needs_mask and guide.fork().needs_mask


def test_a_row_without_a_constraint_does_not_notice_the_others(compiler):
    for logprobs in (None, 2):
        rows = Rows(compiler)
        rows.admit(0, None, temperature=1.0, logprobs=logprobs)
        rows.admit(1, regex("(ab|ba){1,4}"), temperature=1.0)
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(1, SIZE, generator=generator)
        alone = rows.sampler.choose(logits, [0], [5])
        assert rows.sampler.choose(logits.expand(2, -1), [0, 1], [5, 5])[:1] == alone
