"""Random response templates: a message that is written by one is what its parser reads."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from response_templates import CUTS, parse, template

words = st.text("abc/|: ", min_size=1, max_size=4).map("<{}>".format)
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
plain = st.characters(codec="utf-8", exclude_characters="<=", exclude_categories=["C", "Z"])
lines = st.text(plain, min_size=1, max_size=8)
names = st.text("fgh_1", min_size=1, max_size=5)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
FUNCTION = {"name": "{name}", "arguments": "{content}"}
inner = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3),
    max_leaves=4,
)


def json_field(opener, closers):
    """Each call an object between marks of its own."""
    field = {"open": opener, "close": closers, "content": "json", "repeats": True}
    field["transform"] = {"type": "function", "function": "{content}"}

    def write(calls):
        bodies = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
        return "".join(opener + body + closers[-1] for body in bodies)

    return field, write


def list_field(opener, closers):
    """One list of all calls, with keys of its own."""
    field = {"open": opener, "close": closers, "content": "json", "transform_each": True}
    field["transform"] = {"function": {"name": "{call}", "arguments": "{with.these}"}}

    def write(calls):
        listed = [{"call": name, "with": {"these": given}} for name, given in calls]
        return opener + json.dumps(listed) + closers[-1] if calls else ""

    return field, write


def named_field(opener, closers, content, args, write_argument):
    """Each call with its name in the opener."""
    pattern = opener[:-1].replace("|", "\\|") + "!(?P<name>\\w+)>"
    field = {"open_pattern": pattern, "close": closers, "repeats": True, "content": content}
    field |= {"content_args": args, "transform": {"type": "function", "function": FUNCTION}}

    def write(calls):
        return "".join(
            f"{opener[:-1]}!{name}>"
            + "".join(write_argument(key, value) for key, value in given.items())
            + closers[-1]
            for name, given in calls
        )

    return field, write


def tags_field(opener, closers):
    args = {"tag_pattern": "<p=(?P<key>\\w+)>(?P<value>.*?)</p>"}
    return named_field(opener, closers, "xml-inline", args, "<p={}>{}</p>".format)


def lines_field(opener, closers):
    args = {"kv_sep": "=", "line_sep": ";\n"}
    return named_field(opener, closers, "kv-lines", args, "{} = {};\n".format)


# kind: (how its field is made, its arguments)
KINDS = {
    "json": (json_field, st.dictionaries(texts, inner, max_size=3)),
    "list": (list_field, st.dictionaries(texts, inner, max_size=3)),
    "tags": (tags_field, st.dictionaries(names, texts, max_size=3)),
    "lines": (lines_field, st.dictionaries(names, lines, max_size=3)),
}


@st.composite
def messages(draw):
    """(template, what is written by it, the thinking, the content and the calls in it)."""
    marks = draw(st.lists(words, min_size=6, max_size=8, unique=True))
    (opens, closes, begins, ends, calls), closers = marks[:5], marks[5:]
    make, arguments = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    field, write = make(calls, closers)
    is_implicit, has_closer = draw(st.booleans()), draw(st.booleans())
    content = {"close": ends} if has_closer or not is_implicit else {}
    fields = {"thinking": {"open": opens, "close": closes}, "tool_calls": field}
    fields["content"] = content if is_implicit else {**content, "open": begins}
    made = draw(st.lists(st.tuples(names, arguments), max_size=3))
    thinking, said = draw(texts), draw(texts)
    answer = [said + (ends if content else "") if is_implicit else begins + said + ends]
    parts = draw(st.permutations([opens + thinking + closes, *answer, write(made)]))
    order = draw(st.permutations(sorted(fields)))
    given = {"start_anchor": "^", "fields": {name: fields[name] for name in order}}
    return template(given), "".join(parts), thinking, said, made


@settings(max_examples=100, deadline=None)
@given(messages())
def test_a_message_that_is_written_by_a_template_is_read_by_it(message):
    made, text, thinking, content, calls = message
    for cut in CUTS:
        assert parse(made, text, "^", cut=cut, tools=TOOLS) == (thinking, content, calls)
