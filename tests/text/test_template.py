import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from limelight.text.template import ChatTemplate
from limelight.types import RequestError

# In the manner of published templates: macro, namespace, loop controls, tojson, whitespace control.
LONG = """\
{%- macro shown(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}{%- for part in content if part.type == "text" -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
[bos]{% if tools %}<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{% endif %}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}
  {% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for m in messages %}
    {% if m.role == "skip" %}{% continue %}{% endif %}
<|{{ m.role }}|>
{% if m.role == "assistant" and m.reasoning_content and loop.index0 > ns.last %}
<think>{{ m.reasoning_content.strip() }}</think>
{% endif %}
{{ shown(m.content) if m.content }}
    {% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
    {% endfor %}
{% generation %}{% endgeneration %}
{% endfor %}
{% if documents %}{{ documents | map(attribute="title") | join(", ") }}{% endif %}
{{ "thinks" if enable_thinking is defined and enable_thinking }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
USER = {"role": "user", "content": "Wo ist <b>Müller</b>? \U0001f468"}
CALL = {"function": {"name": "find", "arguments": {"who": "Müller", "n": [1, None, 0.5]}}}
ANSWER = {
    "role": "assistant",
    "content": "Dort.",
    "reasoning_content": " hm\n",
    "tool_calls": [CALL],
}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Sucht <b>& „Leute“"}}]


def made(source, **special_tokens):
    return ChatTemplate({"default": source}, special_tokens=special_tokens, origin=Path("x.jinja"))


def refusal(source, messages=(USER,), **options):
    """What is said against the template or against the messages, and by which error."""
    with pytest.raises(ValueError) as caught:
        made(source).render(list(messages), **options)
    return caught.value


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, ANSWER, PARTS],
        [PARTS, ANSWER],
        [USER, {"role": "skip"}, USER | {"name": None}],
    ],
    ids=["one", "answered", "reasoned", "skipped"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": TOOLS, "add_generation_prompt": True},
        {"documents": [{"title": "x"}, {"title": "y"}], "enable_thinking": True},
    ],
    ids=["bare", "tools", "kwargs"],
)
def test_the_text_is_that_of_transformers(messages, options):
    options = {"add_generation_prompt": False} | options
    expected, _ = render_jinja_template([messages], chat_template=LONG, **options)
    assert made(LONG).render(messages, **options) == expected[0]


@pytest.mark.parametrize("source", [PLAIN, TRIMMED, LONG], ids=["plain", "trimmed", "long"])
@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": "Once upon"},
        {"role": "assistant", "content": "Once upon "},
        {"role": "assistant", "content": "\n Once upon\n\n"},
        {"role": "assistant", "content": "<assistant>Once</assistant>", "reasoning_content": "hm"},
        {"role": "user", "content": "a user's"},
    ],
    ids=["plain", "blank", "lines", "markup", "user"],
)
def test_the_last_message_is_continued_as_transformers_does(source, last):
    messages = [USER, {"role": "assistant", "content": "Once upon"}, last]
    expected, _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True
    )
    text = made(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected[0]
    assert text.endswith(last["content"].strip() if source is TRIMMED else last["content"])


def test_the_last_text_of_several_parts_is_continued():
    text = made(LONG).render([PARTS], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|user|>\nab")


@pytest.mark.parametrize(
    ("source", "messages", "param"),
    [
        (PLAIN, [], "messages"),
        (PLAIN, [{"role": "assistant"}], "messages"),
        (PLAIN, [{"role": "assistant", "content": [{"type": "image"}]}], "messages"),
        ("{{ messages[0].content }}", [USER, ANSWER], "messages"),
    ],
    ids=["none", "no content", "no text", "not shown"],
)
def test_what_cannot_be_continued_is_refused(source, messages, param):
    error = refusal(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert isinstance(error, RequestError) and error.param == param


def test_a_message_is_either_continued_or_answered():
    error = refusal(PLAIN, continue_final_message=True, add_generation_prompt=True)
    assert isinstance(error, RequestError) and error.param == "continue_final_message"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_template_finds_the_reasoning_under_any_of_its_names(name):
    source = (
        "{{ messages[0].reasoning }} {{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    )
    assert made(source).render([{"role": "assistant", name: "hm"}]) == "hm hm hm"


def test_a_template_sees_the_named_tokens():
    assert made("{{ bos_token }}{{ pad_token }}", bos_token="<s>").render([USER]) == "<s>"


def test_a_template_knows_the_date():
    assert made("{{ strftime_now('%Y') }}").render([USER]).startswith("20")


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tokenize",
        "chat_template",
        "self",
        "raise_exception",
        "range",
        "_x",
        "bos_token",
    ],
)
def test_kwargs_replace_nothing_that_is_not_theirs(name):
    with pytest.raises(RequestError, match=name) as caught:
        made(PLAIN, bos_token="<s>").render([USER], **{name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages: roles must alternate"),
        ("{{ messages[0].content.nope.nope }}", "no attribute 'nope'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''['__cla' ~ 'ss__'].mro }}", "unsafe"),
        ("{{ ('' | attr('__cla' ~ 'ss__')).x }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ '{0.__class__.x}'.format(messages) }}", "unsafe"),
    ],
    ids=lambda value: value[:30],
)
def test_what_a_template_refuses_or_may_not_do_is_the_messages_fault(source, words):
    error = refusal(source)
    assert isinstance(error, RequestError) and error.param == "messages"
    assert words in str(error)
    assert "File" not in str(error) and "0x" not in str(error)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "line 1"),
        ("\n{{ x | nope }}", "line 2: No filter named 'nope'"),
        ("{{ messages.__class__ }}", "line 1: it must not reach __class__"),
        ("{{ messages['__class__'] }}", "must not reach __class__"),
        ("{{ messages | attr('__class__') }}", "must not reach __class__"),
        ("{% if 0 %}{{ joiner.__init__.__globals__ }}{% endif %}", "must not reach __"),
        ("{{ 10 ** (10**8) }}", "takes longer"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "Recursion"),
    ],
    ids=lambda value: value[:30],
)
def test_a_bad_template_is_refused_when_it_is_loaded(tmp_path, source, words):
    path = tmp_path / "own.jinja"
    path.write_text(source)
    with pytest.raises(ValueError) as caught:
        ChatTemplate.load(tmp_path, override=path)
    assert str(path) in str(caught.value) and words in str(caught.value)


NAMED = "{% set ns = namespace(a='x', b='xy') %}{% for i in range(50) %}{% set ns.a = "
MACRO = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
LARGE = "{% set n = messages | length %}{% set x = 'a' * (n * 10**6) %}"
BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "product": LARGE + "{{ (x * 1000) | length }}",
    "list": LARGE + "{{ ([n] * (n * 10**9)) | length }}",
    "power": LARGE + "{{ 10 ** (n * 10**8) }}",
    "block": LARGE + "{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endset %}",
    "join": LARGE + "{{ ([x] * 9999) | join | length }}",
    "replace": LARGE + "{{ x | replace('a', 'b' * 1000) | length }}",
    "format": LARGE + "{{ '%2000000000d' % n }}",
    "padding": LARGE + "{{ x.ljust(n * 10**11) | length }}",
    "doubling": NAMED + "ns.a ~ ns.a %}{% endfor %}{{ ns.a | length }}",
    "JSON": NAMED + "[ns.a, ns.a] %}{% endfor %}{{ ns.a | tojson }}",
    "comparison": NAMED + "[ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
    "{{ [ns.a, ns.b] | sort }}",
    "endless recursion": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "wide recursion": MACRO + "{{ m(90) }}",
    "long text": LARGE + "{% for i in range(20) %}{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("bomb", sorted(BOMBS))
def test_a_template_that_takes_too_much_fails_alone_and_soon(bomb, monkeypatch):
    monkeypatch.setattr("limelight.text.template.SECONDS", 0.5)
    template = made("{% if boom %}" + BOMBS[bomb] + "{% endif %}fine")
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        template.render([USER], boom=True)
    assert time.monotonic() - start < 2
    assert caught.value.param == "messages"
    assert template.render([USER]) == "fine"


def test_messages_that_are_not_plain_data_are_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for message in ({"role": "user", "content": object()}, {"role": "user", "content": deep}, "x"):
        assert refusal(PLAIN, [message]).param == "messages"


def test_any_unicode_comes_through():
    text = "a\x00\n\r b\ud800 \U0001f468"
    assert made(PLAIN).render([{"role": "user", "content": text}]) == f"<user>{text}</user>"


def test_a_long_conversation_comes_through():
    text = "é\U0001f468 " * 700_001
    assert made(PLAIN).render([{"role": "user", "content": text}]) == f"<user>{text}</user>"


def test_threads_get_their_own_answers():
    template = made(PLAIN)
    wrong = []

    def ask(name):
        for index in range(50):
            text = template.render([{"role": name, "content": str(index)}])
            if text != f"<{name}>{index}</{name}>":
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(f"user{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def ended(pid):
    """Whether the process ends within five seconds."""
    path = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        # A process that has ended but was not waited for still has a number.
        if not path.exists() or path.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def child_of(template):
    return template._sandbox._process.pid


def test_a_process_that_was_killed_is_replaced():
    template = made(PLAIN)
    pid = child_of(template)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    assert template.render([USER]).startswith("<user>")


def test_no_process_is_left_when_the_template_is_closed_or_forgotten():
    closed, forgotten = made(PLAIN), made(PLAIN)
    pids = [child_of(closed), child_of(forgotten)]
    closed.close()
    del forgotten
    gc.collect()
    assert all(map(ended, pids))


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(0)"])
def test_no_process_is_left_when_the_program_ends(end):
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from limelight.text.template import ChatTemplate\n"
        "t = ChatTemplate({'default': 'x'}, special_tokens={}, origin=Path('x'))\n"
        f"print(t._sandbox._process.pid, flush=True)\n{end}"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    pid = int(done.stdout)
    assert ended(pid)
    assert done.stderr == ""


def test_the_jinja_file_goes_before_the_config_and_ones_own_file_before_both(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert ChatTemplate.load(folder, override=None) is None
    path.write_text(json.dumps(config | {"chat_template": "config{{ eos_token }}"}))
    assert ChatTemplate.load(folder, override=None).render([USER]) == "config<|end|>"
    (folder / "chat_template.jinja").write_text("file{{ bos_token }}")
    assert ChatTemplate.load(folder, override=None).render([USER]) == "file<|user|>"
    (folder / "own.jinja").write_text("own{{ bos_token }}")
    own = ChatTemplate.load(folder, override=folder / "own.jinja")
    assert own.render([USER]) == "own<|user|>"


def test_the_template_for_tools_is_taken_when_there_are_tools(folder):
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    template = ChatTemplate.load(folder, override=None)
    assert (template.render([USER]), template.render([USER], tools=TOOLS)) == ("plain", "tools")
    assert template.render([USER], tools=[]) == "plain"


def test_more_templates_may_stand_beside_the_jinja_file(folder):
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert ChatTemplate.load(folder, override=None).render([USER], tools=TOOLS) == "tools"


@pytest.mark.parametrize("value", [1, {"default": "x"}, [{"name": "default"}], ["x"]], ids=str)
def test_a_config_without_a_proper_template_is_refused(folder, value):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template must be"):
        ChatTemplate.load(folder, override=None)


def test_one_of_several_templates_must_be_the_default(folder):
    listed = [{"name": "rag", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    with pytest.raises(ValueError, match="no template is named default"):
        ChatTemplate.load(folder, override=None)


def test_a_missing_or_unreadable_file_is_named(folder):
    (folder / "latin.jinja").write_bytes(b"\xff")
    for name in ("none.jinja", "latin.jinja", "."):
        with pytest.raises(ValueError, match="cannot read the chat template"):
            ChatTemplate.load(folder, override=folder / name)
