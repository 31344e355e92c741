import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limelight.text.stream import TextStream


class Spelled:
    """A vocabulary of the given texts, one token each: what `TextStream` asks of a tokenizer."""

    special_ids = frozenset()
    drops_first_blank = False

    def __init__(self, *tokens):
        self.tokens = [token if isinstance(token, bytes) else token.encode() for token in tokens]
        self.calls = 0

    def token_bytes(self, token_id):
        self.calls += 1
        return self.tokens[token_id]


def open_stream(tokenizer, *stop, include_stop=False, skip_special_tokens=True, min_tokens=0):
    return TextStream(
        tokenizer,
        stop=list(stop),
        include_stop=include_stop,
        skip_special_tokens=skip_special_tokens,
        min_tokens=min_tokens,
    )


def run(tokens, *stop, step=1, **options):
    """(deltas, tokens counted, stop text) of the tokens, `step` of them a push."""
    stream = open_stream(Spelled(*tokens), *stop, **options)
    deltas, counted = [], 0
    for start in range(0, len(tokens), step):
        delta = stream.push(list(range(len(tokens)))[start : start + step])
        deltas.append(delta.text)
        counted += delta.num_tokens
        if delta.stop is not None:
            return deltas, counted, delta.stop
    return [*deltas, stream.finish()], counted, None


@given(
    steps=st.lists(st.lists(st.integers(0, 999), max_size=7), max_size=12),
    skip=st.booleans(),
    stop=st.sampled_from([[], ["qqqq"], ["the qqqq", "é\U0001f468q"]]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_streamed_is_what_decoding_the_whole_gives(tokenizer, steps, skip, stop):
    steps = [[token_id % tokenizer.vocab_size for token_id in step] for step in steps]
    stream = open_stream(tokenizer, *stop, skip_special_tokens=skip)
    deltas = [stream.push(step) for step in steps]
    assert [(delta.num_tokens, delta.stop) for delta in deltas] == [(len(s), None) for s in steps]
    text = "".join(delta.text for delta in deltas) + stream.finish()
    assert text == tokenizer.decode(sum(steps, []), skip_special_tokens=skip)


def test_a_character_comes_whole_with_its_last_byte():
    family = "\U0001f468‍\U0001f469".encode()
    deltas, _, _ = run([family[i : i + 1] for i in range(len(family))])
    assert [text for text in deltas if text] == ["\U0001f468", "‍", "\U0001f469"]
    assert [i for i, text in enumerate(deltas) if text] == [3, 6, 10]


def test_bad_bytes_show_once_they_cannot_become_a_character():
    # C3 may still begin a character, E2 28 cannot any more, FF never could.
    assert run([b"\xc3", b"\xa9", b"\xe2", b"(", b"\xff", "x"])[0] == [
        "",
        "é",
        "",
        "�(",
        "�",
        "x",
        "",
    ]


def test_a_character_cut_by_the_end_shows_as_one_replacement():
    assert run(["a", b"\xf0\x9f\x91"])[0] == ["a", "", "�"]


def test_a_character_does_not_wait_for_the_end_of_a_run_of_byte_tokens():
    deltas, _, _ = run([bytes([byte]) for byte in "éé".encode()])
    assert deltas == ["", "é", "", "é", ""]


def test_each_token_is_looked_up_once():
    tokenizer = Spelled(*["ab "] * 500)
    stream = open_stream(tokenizer, "b c", "abc")
    for token_id in range(500):
        stream.push([token_id])
    assert tokenizer.calls == 500


@pytest.mark.parametrize("step", [1, 2, 9])
@pytest.mark.parametrize(
    ("tokens", "stop", "text", "counted", "met"),
    [
        (["alpha ", "EN", "D", " OF", " beta"], ["END OF", "OF be"], "alpha ", 4, "END OF"),
        (["alpha END", " OF", " beta", "x"], ["OF be"], "alpha END ", 3, "OF be"),
        (["alpha END OF beta"], ["END OF", "OF be"], "alpha ", 1, "END OF"),
        (["alpha END OF beta", "x"], ["OF be", "END"], "alpha ", 1, "END"),
        (["alpha ", "END", " OF"], ["ENDING"], "alpha END OF", 3, None),
        (["END", "ING"], ["ENDING", "END"], "", 1, "END"),
        (["ENDING", "x"], ["END", "ENDING"], "", 1, "ENDING"),
        (["abc", "d", "e"], ["abcd", "bc"], "a", 1, "bc"),
        (["abcd", "e"], ["bc", "abcd"], "", 1, "abcd"),
        (["a", "a", "a", "b"], ["aab"], "a", 4, "aab"),
        (["aba", "ba", "c"], ["abac"], "ab", 3, "abac"),
        (["x", "\n\n", "y"], ["\n\n", "\n"], "x", 2, "\n\n"),
        (["é", b"\xc3", b"\xa9", "x"], ["éx"], "é", 4, "éx"),
        (["a", "END"], ["D"], "aEN", 2, "D"),
    ],
)  # fmt: skip
def test_a_stop_text_ends_the_text_before_it(tokens, stop, text, counted, met, step):
    deltas, num_tokens, found = run(tokens, *stop, step=step)
    assert ("".join(deltas), num_tokens, found) == (text, counted, met)


def test_a_possible_beginning_is_held_back_then_sent_whole():
    assert run(["a", " E", "N", "D", "s"], "END OF")[0] == ["a", " ", "", "", "ENDs", ""]


def test_a_possible_beginning_is_sent_at_the_end():
    assert run(["a", " EN"], "END")[0] == ["a", " ", "EN"]


def test_the_stop_text_itself_is_kept_on_request_and_nothing_behind_it():
    deltas, counted, _ = run(["a", " E", "ND of"], "END", include_stop=True)
    assert (deltas, counted) == (["a", " ", "END"], 3)


def test_after_a_stop_text_nothing_counts():
    stream = open_stream(Spelled("a", "b"), "a")
    assert stream.push([0, 1]).num_tokens == 1
    after = stream.push([1])
    assert (after.text, after.num_tokens, after.stop, stream.finish()) == ("", 0, None, "")


def test_the_first_min_tokens_tokens_complete_no_stop_text():
    assert run(["a", "b", "c", "b"], "b", min_tokens=2) == (["a", "b", "c", ""], 4, "b")
    # One that began among them may be completed by a later one.
    assert run(["a", "b", "c"], "bc", min_tokens=2) == (["a", "", ""], 3, "bc")


PIECES = st.text("ab", min_size=1, max_size=4)


@given(
    tokens=st.lists(PIECES, max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 4),
    step=st.integers(1, 5),
)
@settings(max_examples=500, deadline=None)
def test_stop_texts_are_found_as_a_plain_search_finds_them(
    tokens, stop, include_stop, min_tokens, step
):
    deltas, counted, met = run(
        tokens, *stop, step=step, include_stop=include_stop, min_tokens=min_tokens
    )
    text, expected = "", None
    for index, token in enumerate(tokens):
        before, text = text, text + token
        ends = [
            (at, -len(one))
            for one in stop
            for at in range(len(text))
            if text.startswith(one, at) and at + len(one) > len(before)
        ]
        if ends and index >= min_tokens:
            start, length = min(ends)
            end = start - length
            expected = (text[: end if include_stop else start], index + 1, text[start:end])
            break
    assert ("".join(deltas), counted, met) == (expected or (text, len(tokens), None))


@given(tokens=st.lists(PIECES, max_size=12), stop=st.lists(st.text("abc", min_size=2, max_size=5)))
@settings(max_examples=300, deadline=None)
def test_what_is_held_back_is_just_the_longest_beginning_of_a_stop_text(tokens, stop):
    stream = open_stream(Spelled(*tokens), *stop)
    text = sent = ""
    for index, token in enumerate(tokens):
        delta = stream.push([index])
        text, sent = text + token, sent + delta.text
        if delta.stop is not None:
            return
        held = [one[:k] for one in stop for k in range(len(one)) if text.endswith(one[:k])]
        assert text == sent + max(held, key=len, default="")
