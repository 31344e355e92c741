"""The program of the process in which chat templates run; `template.py` starts it and asks it.

A template is code that came with a model. Jinja's sandbox keeps it from objects that it must not
reach; time and memory are held by the kernel, since one C call (a product, a join, a repr) can
take any amount of both. Lines of JSON come in and go out; the first brings templates and limits.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import NoReturn, TypeVar

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Ready, as there may be no memory left to make it.
OUT_OF_MEMORY = b'{"error": "it needs too much memory"}\n'
LONGEST_ERROR = 500
Given = TypeVar("Given")


class Generation(Extension):
    """`{% generation %}`, which marks an answer for training: its body is kept as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    raise TemplateError(str(message))


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON as it is, where Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return env


def check_names(tree: nodes.Template):
    """`SecurityError` where a template names a Python internal; Jinja only sees it in use."""
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter)):
        match node:
            case (
                nodes.Getattr(attr=str(name))
                | nodes.Getitem(arg=nodes.Const(value=str(name)))
                | nodes.Filter(name="attr", args=[nodes.Const(value=str(name)), *_])
            ) if name.startswith("__"):
                raise SecurityError(f"line {node.lineno}: it must not reach {name}")


class Renderer:
    """The compiled templates, and the limit on what they may write."""

    def __init__(self, most_characters: int):
        self.most_characters = most_characters
        self.templates: dict[str, Template] = {}

    def compile(self, sources: dict[str, str]) -> dict[str, str]:
        env = environment()
        for name, source in sources.items():
            check_names(env.parse(source))
            self.templates[name] = env.from_string(source)
        return {}

    def render(self, line: bytes) -> dict[str, str]:
        question = json.loads(line)
        text = self.templates[question["name"]].render(question["values"])
        if len(text) > self.most_characters:
            return {"error": f"it writes more than {self.most_characters} characters"}
        return {"text": text}


def words(error: Exception) -> str:
    """An error for people; what the template itself says stands alone."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return text[:LONGEST_ERROR]


def reply(work: Callable[[Given], dict[str, str]], given: Given, seconds: float) -> bytes:
    """The line that answers; work that takes longer than `seconds` ends this process."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            answer = work(given)
        except MemoryError:
            raise
        except Exception as error:
            answer = {"error": words(error)}
        return json.dumps(answer).encode() + b"\n"
    except MemoryError:
        return OUT_OF_MEMORY
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    """Answer each line until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, inside a C call too
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    first = json.loads(questions.readline())
    seconds = first["seconds"]
    if sys.platform == "linux":  # elsewhere the limit cannot be set, and time alone is limited
        resource.setrlimit(resource.RLIMIT_AS, (first["memory"], first["memory"]))
    renderer = Renderer(first["characters"])
    answers.write(reply(renderer.compile, first["templates"], seconds))
    answers.flush()
    while line := questions.readline():
        answers.write(reply(renderer.render, line, seconds))
        answers.flush()


if __name__ == "__main__":
    main()
