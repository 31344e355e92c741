"""A choice as the engine's outputs come: its texts, its end, and what a parser takes apart."""

import random

import pytest
from test_front import EOS, ids_of, make

from limelight.engine.front import Choice
from limelight.text.parsers import CallPiece, Said
from limelight.types import Output, SamplingParams, TokenLogprobs


def opened(tokenizer, **fields):
    (request,) = make(tokenizer=tokenizer, params=SamplingParams(**fields))
    return Choice(request, tokenizer)


def report(token_id):
    return TokenLogprobs(token_id, -float(token_id), 1, [(token_id, -float(token_id))])


def out(text="", *, ids=None, reports=False, **fields):
    ids = ids_of(text) if ids is None else ids
    logprobs = [report(token_id) for token_id in ids] if reports else None
    return Output(request_id="r", token_ids=ids, logprobs=logprobs, **fields)


def test_a_choice_is_the_sum_of_its_deltas(tokenizer):
    choice = opened(tokenizer, logprobs=1)
    first = choice.take(out("Zwölf", reports=True, num_cached=2, prompt_logprobs=[None, report(1)]))
    last = choice.take(out("!", reports=True, finish_reason="length"))
    assert (first.text, first.finish_reason, first.num_cached) == ("Zwölf", None, 2)
    assert first.prompt_logprobs == choice.prompt_logprobs == [None, report(1)]
    assert (last.text, last.token_ids, last.finish_reason) == ("!", ids_of("!"), "length")
    assert (choice.text, choice.token_ids) == ("Zwölf!", ids_of("Zwölf!"))
    assert choice.logprobs == [report(token_id) for token_id in ids_of("Zwölf!")]
    assert (choice.finish_reason, choice.stop_reason, choice.num_cached) == ("length", None, 2)


def test_without_logprobs_there_are_none(tokenizer):
    choice = opened(tokenizer)
    assert choice.take(out("a", finish_reason="length")).logprobs is None
    assert choice.logprobs is None


def test_a_stop_text_ends_a_choice_though_the_engine_goes_on(tokenizer):
    choice = opened(tokenizer, stop=["END"], logprobs=0)
    assert choice.take(out("alpha E", reports=True)).text == "alpha "
    delta = choice.take(out("ND of", reports=True))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "END")
    assert delta.token_ids == ids_of("ND") and len(delta.logprobs) == 2
    assert (choice.text, choice.token_ids) == ("alpha ", ids_of("alpha END"))
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids


def test_nothing_adds_to_a_choice_that_has_ended(tokenizer):
    choice = opened(tokenizer, stop=["b"])
    choice.take(out("ab"))
    late = choice.take(out("cd", reports=True, finish_reason="abort"))
    assert (late.text, late.token_ids, late.logprobs, late.finish_reason) == ("", [], None, None)
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("a", ids_of("ab"), "stop")


def test_a_stop_text_counts_before_the_engines_own_end(tokenizer):
    choice = opened(tokenizer, stop=["b"])
    delta = choice.take(out("abc", finish_reason="length"))
    assert (delta.finish_reason, delta.stop_reason, choice.token_ids) == ("stop", "b", ids_of("ab"))


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_an_answer_is_among_its_tokens_but_not_in_its_text(tokenizer, skip):
    choice = opened(tokenizer, skip_special_tokens=skip, stop=["c"])
    delta = choice.take(out(ids=[*ids_of("ab"), EOS], finish_reason="stop"))
    assert (delta.text, delta.token_ids[-1], delta.finish_reason) == ("ab", EOS, "stop")
    choice = opened(tokenizer, skip_special_tokens=skip, stop_token_ids=ids_of("c"))
    delta = choice.take(out("abc", finish_reason="stop", stop_reason=ids_of("c")[0]))
    assert (delta.text, delta.stop_reason) == ("ab", ids_of("c")[0])


def test_the_token_that_ends_an_answer_is_shown_on_request(tokenizer):
    fields = {"include_stop_str_in_output": True}
    ended = out(ids=[*ids_of("ab"), EOS], finish_reason="stop")
    assert opened(tokenizer, **fields).take(ended).text == "ab"
    assert opened(tokenizer, **fields, skip_special_tokens=False).take(ended).text == "ab<|end|>"


def test_special_tokens_within_are_shown_on_request(tokenizer):
    within = out(ids=[*ids_of("a"), EOS, *ids_of("b")])
    assert opened(tokenizer, ignore_eos=True).take(within).text == "ab"
    shown = opened(tokenizer, ignore_eos=True, skip_special_tokens=False).take(within)
    assert shown.text == "a<|end|>b"


@pytest.mark.parametrize("reason", ["length", "abort", "stop"])
def test_what_was_held_back_comes_at_the_end(tokenizer, reason):
    choice = opened(tokenizer, stop=["END"])
    assert choice.take(out("a EN")).text == "a "
    delta = choice.take(out(ids=[EOS] if reason == "stop" else [], finish_reason=reason))
    assert (delta.text, delta.finish_reason, choice.text) == ("EN", reason, "a EN")


def test_an_error_ends_a_choice_and_is_kept(tokenizer):
    choice = opened(tokenizer)
    delta = choice.take(out(finish_reason="error", error="no room"))
    assert (delta.error, choice.error, choice.finish_reason) == ("no room", "no room", "error")


def test_without_a_tokenizer_there_are_ids_alone():
    choice = opened(None, logprobs=0)
    delta = choice.take(out("abc", reports=True, finish_reason="length"))
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("", ids_of("abc"), 3)
    assert (choice.text, choice.finish_reason) == ("", "length")


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_does_not_depend_on_how_its_tokens_come(tokenizer, seed):
    rng = random.Random(seed)
    ids = [rng.choice([*ids_of("aé b"), rng.randrange(262)]) for _ in range(40)]
    fields = {"stop": ["a ", "bb"], "skip_special_tokens": bool(seed % 2), "min_tokens": seed % 5}
    whole = opened(tokenizer, **fields)
    whole.take(out(ids=ids, reports=True, finish_reason="length"))
    pieces = opened(tokenizer, **fields)
    rest, texts = ids, []
    while rest and pieces.finish_reason is None:
        size = rng.randrange(1, 6)
        reason = "length" if len(rest) <= size else None
        texts.append(pieces.take(out(ids=rest[:size], reports=True, finish_reason=reason)).text)
        rest = rest[size:]
    assert "".join(texts) == pieces.text == whole.text
    assert (pieces.token_ids, pieces.logprobs) == (whole.token_ids, whole.logprobs)
    assert (pieces.finish_reason, pieces.stop_reason) == (whole.finish_reason, whole.stop_reason)


class Marks:
    """Reads `(thoughts)`, `[calls]` and else content; holds a closing mark back by one token."""

    def __init__(self):
        self.where, self.held, self.opens = "content", "", {"(": "reasoning", "[": "calls"}

    def feed(self, text, token_id):
        pieces, self.held = self.held + text, ""
        if pieces.endswith(")"):
            pieces, self.held = pieces[:-1], ")"
        said = {"reasoning": "", "content": "", "calls": ""}
        for character in pieces:
            if self.where == "content" and character in self.opens:
                self.where = self.opens[character]
            elif self.where != "content" and character in ")]":
                self.where = "content"
            else:
                said[self.where] += character
        calls = [CallPiece(0, name, "{}") for name in said["calls"]]
        return Said(said["reasoning"], said["content"], calls, int(bool(said["reasoning"])))

    def finish(self, reason):
        return Said(content=self.held if self.where == "content" else "")


def parsed(tokenizer, *, tell_reasoning=True, **fields):
    request = opened(tokenizer, **fields).request
    return Choice(request, tokenizer, Marks(), tell_reasoning=tell_reasoning)


def fed(choice, ids, size, *, finish="length"):
    rest = ids
    while choice.finish_reason is None:
        group, rest = rest[:size], rest[size:]
        choice.take(out(ids=group, reports=True, finish_reason=None if rest else finish))
    return choice


def fields_of(choice):
    names = ("text", "reasoning", "calls", "num_tokens", "num_reasoning", "token_ids", "logprobs")
    return [getattr(choice, name) for name in (*names, "finish_reason", "stop_reason")]


def test_a_parser_takes_an_answer_apart(tokenizer):
    choice = parsed(tokenizer, logprobs=0)
    first = choice.take(out("(wé", reports=True))
    assert (first.reasoning, first.text, first.num_reasoning) == ("wé", "", 2)
    last = choice.take(out("y)no[f]w", reports=True, finish_reason="length"))
    assert (last.reasoning, last.text, last.calls) == ("y", "now", [CallPiece(0, "f", "{}")])
    assert (choice.reasoning, choice.text, choice.num_reasoning) == ("wéy", "now", 3)
    assert len(choice.token_ids) == len(choice.logprobs) == choice.num_tokens == 12


@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.parametrize("text", ["(ab END)c E[f]x END y", "(a)b)", "(never closed", "[f]", "(é)"])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_an_answer_that_is_parsed_does_not_depend_on_how_its_tokens_come(
    tokenizer, tell, text, finish
):
    ids = [*ids_of(text), EOS] if finish == "stop" else ids_of(text)
    fields = {"stop": ["END"], "tell_reasoning": tell, "logprobs": 0}
    whole = fields_of(fed(parsed(tokenizer, **fields), ids, 99, finish=finish))
    for size in (1, 2, 3, 7):
        assert fields_of(fed(parsed(tokenizer, **fields), ids, size, finish=finish)) == whole


def test_a_stop_text_inside_reasoning_or_before_min_tokens_stops_nothing(tokenizer):
    choice = fed(parsed(tokenizer, stop=["x"], min_tokens=5), ids_of("(x)xyxz"), 9)
    assert (choice.reasoning, choice.text, choice.stop_reason) == ("x", "xy", "x")
    assert (choice.num_tokens, choice.finish_reason) == (6, "stop")
    choice = fed(parsed(tokenizer, stop=["b)"]), ids_of("ab)"), 1)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a", "stop", "b)")


def test_half_a_character_at_the_end_of_reasoning_counts_once(tokenizer):
    choice = fed(parsed(tokenizer), ids_of("(a\N{GRINNING FACE}")[:-1], 2)
    assert (choice.reasoning, choice.num_reasoning) == ("a\ufffd", 2)


def test_hidden_reasoning_takes_its_tokens_along_but_not_those_of_calls(tokenizer):
    choice = parsed(tokenizer, tell_reasoning=False, logprobs=0)
    fed(choice, [*ids_of("a(why)[f]"), EOS], 1, finish="stop")
    assert (choice.reasoning, choice.num_tokens, choice.num_reasoning) == ("", 10, 3)
    assert choice.token_ids == [*ids_of("a)[f]"), EOS]
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids


def test_a_request_of_another_choice_is_our_own_mistake(tokenizer):
    with pytest.raises(AssertionError):
        opened(tokenizer).take(Output(request_id="other", token_ids=[]))
