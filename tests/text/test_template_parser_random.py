"""Random templates and answers, against the rules said plainly and against the library."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from response_templates import (
    CUTS,
    JSONS,
    PROMPTS,
    TEMPLATES,
    TOOLS,
    joined,
    parse,
    parser,
    template,
)
from transformers.utils.chat_parsing import ResponseParser

from limelight.checkpoint import BUNDLED
from limelight.text.response_template import ResponseTemplate
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer

FREE = settings(deadline=None)  # of other work on the machine


def naive(made, text):
    """Reasoning and content by the rules, on the whole text, a region at a time."""
    out, at, empty, region = {"thinking": "", "content": ""}, 0, None, made.implicit
    while True:
        watched = [(False, region, region.closer)] if region and region.closer else []
        if region is made.implicit:
            watched += [(True, f, f.opener) for f in made.fields.values() if f.opener]
        found = []
        for opens, field, mark in watched:
            match = mark.pattern.search(text, at)
            if match and match.end() == at == empty:
                match = mark.pattern.search(text, at + 1) if at < len(text) else None
            if match:
                found.append((match.start(), -match.end(), not opens, field.name, opens, field))
        start, end, *_, opens, field = min(found) if found else (len(text), 0, False, None)
        if region:
            out[region.name] += text[at:start]
        if field is None:
            return out["thinking"], out["content"]
        at = -end
        empty = at if start == at else empty
        region = field if opens else made.implicit


ATOM = st.sampled_from(
    ["a", "b", "ab", "[ab]", ".", r"\w", r"\s", r"\n", r"\b", r"\B", "$", "(?m:$)", "^", r"\Z"]
)
REGEX = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "??", "*?", "+?", "{2,3}", "?+"])).map(
            "(?:{0[0]}){0[1]}".format
        ),
        st.tuples(st.sampled_from(["(?=", "(?!", "(?<=", "(?<!", "(?>"]), inner).map(
            "{0[0]}{0[1]})".format
        ),
    ),
    max_leaves=6,
)
MARK = REGEX.map(lambda pattern: {"pattern": pattern}) | st.lists(
    st.text("ab \n", min_size=1, max_size=3), min_size=1, max_size=3
).map(lambda literals: {"literals": literals})


def keyed(key, mark):
    return {f"{key}_pattern": mark["pattern"]} if "pattern" in mark else {key: mark["literals"]}


@settings(max_examples=300, deadline=None)
@given(MARK, MARK, MARK, MARK, st.booleans(), st.text("ab \n", max_size=12))
def test_no_pattern_gives_more_or_less_for_how_the_text_is_cut(o1, c1, o2, c2, implicit, text):
    fields = {"thinking": keyed("open", o1) | keyed("close", c1), "content": keyed("close", c2)}
    if not implicit:
        fields["content"] |= keyed("open", o2)
    try:
        made = template({"start_anchor": "^", "fields": fields})
    except ValueError:
        assume(False)
    expected = naive(made, text)
    for cut in CUTS:
        assert parse(made, text, "^", cut=cut)[:2] == expected


def fragments(made):
    """Texts made of marks, pieces of marks and other characters."""
    marks = ["{", "}", '"name": "now"', "=", "x", " ", "\n", "é", '{"name": "add"}', "x=1"]
    for field in made.fields.values():
        for mark in (field.opener, field.closer):
            marks += mark.literals if mark else ()
    marks += [" to=now<|channel|>analysis <|constrain|>xml<|message|>", "[[do now]]"]
    piece = st.sampled_from(marks).flatmap(
        lambda mark: (
            st.integers(0, len(mark)).map(lambda cut: mark[cut:] or mark)
            | st.integers(1, len(mark)).map(lambda cut: mark[:cut])
        )
    )
    return st.lists(st.sampled_from(marks) | piece, max_size=12).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@FREE
@given(data=st.data())
def test_no_text_gives_more_or_less_for_how_it_is_cut(name, data):
    text, prompt = data.draw(fragments(TEMPLATES[name])), data.draw(fragments(TEMPLATES[name]))
    switches = st.fixed_dictionaries({"reasoning": st.booleans(), "calls": st.booleans()})
    given = data.draw(switches) | {"reason": data.draw(st.sampled_from(["stop", "length"]))}
    first, *others = [parse(name, text, PROMPTS[name] + prompt, cut=cut, **given) for cut in CUTS]
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", TEMPLATES)
@FREE
@given(data=st.data())
def test_any_text_gives_what_the_library_gives(name, data):
    text = data.draw(fragments(TEMPLATES[name]))
    assume("<|end|>" not in text[-40:])  # what ends before the next message is whole for us
    library = ResponseParser(JSONS[name], prefix=PROMPTS[name])
    try:
        events = library.feed(text) + library.finalize()[1]
    except (ValueError, KeyError, TypeError):
        assume(False)  # it refuses the answer for one malformed call
    shown, calls = {"thinking": "", "content": ""}, []
    for event in events:
        if event["type"] == "region_chunk" and event["field"] in shown:
            shown[event["field"]] += event["text"]
        if event["type"] == "region_close" and event["field"] == "tool_calls":
            function = event["value"]["function"]
            if isinstance(function, dict) and "name" in function:
                calls.append((function["name"], function.get("arguments", {})))
    assert parse(name, text) == (shown["thinking"], shown["content"], calls)


SAFE = st.text(st.characters(exclude_characters="<[", codec="utf-8"), max_size=20)
NAME = st.sampled_from(["add", "move", "get_weather", "now"])
KEY = st.text("abcxyz_", min_size=1, max_size=5).filter(lambda key: key not in "ab x y")
VALUE = st.recursive(
    SAFE | st.integers() | st.booleans() | st.none(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(SAFE, v, max_size=3),
    max_leaves=5,
)


@FREE
@given(SAFE, SAFE, st.lists(st.tuples(NAME, st.dictionaries(KEY, VALUE, max_size=3)), max_size=3))
def test_a_json_message_comes_back(thinking, content, calls):
    text = f"<think>{thinking}</think>{content}" + "".join(
        f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"
        for name, arguments in calls
    )
    for cut in CUTS:
        assert parse("implicit", text + "<|eot|>", cut=cut) == (thinking, content, calls)


LINE = st.text(st.characters(exclude_characters="<[=", exclude_categories=["C", "Z"]),
               min_size=1, max_size=9)  # fmt: skip


@FREE
@given(SAFE, SAFE, st.lists(st.tuples(NAME, st.dictionaries(LINE, LINE, max_size=3)), max_size=3))
def test_a_message_with_lines_comes_back(thinking, content, calls):
    text = f"[[t]]{thinking}[[/t]]" + "".join(
        f"[[do {name}]]" + "\n".join(f"{k}={v}" for k, v in arguments.items()) + "[[/do]]"
        for name, arguments in calls
    )
    text += f"[[a]]{content}[[/a]]"
    assume(all(not key.isdigit() and key not in "abxy" for _, given in calls for key in given))
    for cut in CUTS:
        assert parse("lines", text, cut=cut) == (thinking, content, calls)


@pytest.fixture(scope="module")
def beam():
    folder = BUNDLED / "beam-nano"
    chat = ChatTemplate.load(folder, override=None)
    yield ResponseTemplate.load(folder), chat, Tokenizer.load(folder)
    chat.close()


@FREE
@given(
    thinking=SAFE.filter(bool),
    content=SAFE,
    calls=st.lists(
        st.tuples(NAME, st.dictionaries(KEY, VALUE.filter(lambda v: v != ""), max_size=3)),
        max_size=3,
    ),
    thinks=st.booleans(),
)
def test_a_message_of_the_bundled_model_comes_back(beam, thinking, content, calls, thinks):
    made, chat, tokenizer = beam
    schema = {"type": ["string", "integer", "boolean", "null", "array", "object"]}
    tools = [
        {"type": "function", "function": {
            "name": name, "parameters": {"properties": dict.fromkeys(arguments, schema)}}}
        for name, arguments in calls
    ]  # fmt: skip
    tools = list({tool["function"]["name"]: tool for tool in tools}.values())
    calls = [call for call in calls if list(call[1]) == _keys(tools, call[0])]
    user = {"role": "user", "content": "?"}
    written = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    answer = {"role": "assistant", "content": content, "reasoning": thinking}
    answer |= {"tool_calls": written} if calls else {}
    prompt = chat.render([user], tools=tools or TOOLS, enable_thinking=thinks)
    whole = chat.render([user, answer], tools=tools or TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    ids = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    texts = texts if "".join(texts) == whole[len(prompt) :] else [whole[len(prompt) :]]
    parsed = parser(made, prompt, tools=tools or TOOLS)
    said = [parsed.feed(text, i) for text, i in zip(texts, ids, strict=False)]
    reasoning, shown, given = joined([*said, parsed.finish("stop")])
    assert (reasoning, shown) == (thinking, content)
    for (name, arguments), (got_name, got) in zip(calls, given, strict=True):
        assert got_name == name
        for key, value in arguments.items():
            kept = got[key]
            assert kept == value or isinstance(value, str) and kept == json.loads(value)


def _keys(tools, name):
    [found] = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    return list(found["parameters"]["properties"])
