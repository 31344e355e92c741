"""How each family writes a conversation: its tokens, its template, what it learns, what it says."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano.tasks import Item, Json

SHIPPED = Path(__file__).parents[1] / "limelight" / "nano"
END = "<|endoftext|>"


@dataclass(frozen=True)
class Segment:
    """A piece of a document, and how much predicting its tokens counts."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, taken apart. `calls` has (tool, arguments as texts)."""

    content: str
    calls: list[tuple[str, dict[str, str]]]


@dataclass(frozen=True)
class Family:
    """One of the two chat formats. `written_end` closes an answer of the past in the template."""

    name: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    written_end: str
    answer_stop: str
    call_stop: str
    content_pattern: str
    call_pattern: str
    argument_pattern: str

    @property
    def folder(self) -> Path:
        return SHIPPED / self.name

    @cached_property
    def template(self):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string((self.folder / "chat_template.jinja").read_text())

    def prompt(
        self, messages: list[Json], tools: list[Json] | None = None, *, thinking: bool = False
    ) -> str:
        return self.template.render(
            messages=messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking
        )

    def segments(self, item: Item, *, thinking: bool, opened: bool = True) -> list[Segment]:
        """The conversation with each answer of the assistant counted, with its thoughts or without.

        Unless `opened`, the model itself opens its thoughts: where the template leaves that to it.
        """
        messages = item.messages if thinking else [_without_thoughts(m) for m in item.messages]
        whole = self.template.render(messages=messages, tools=item.tools)
        stop = self._stop(messages[-1])
        whole = whole.removesuffix(self.written_end).removesuffix(stop) + stop
        segments, at = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.prompt(messages[:i], item.tools, thinking=thinking and opened)
            until = self.template.render(messages=messages[: i + 1], tools=item.tools)
            assert whole.startswith(prompt) and until.startswith(prompt)
            stop = self._stop(message)
            end = len(until.removesuffix(self.written_end).removesuffix(stop))
            end += len(stop) if whole.startswith(stop, end) else 0
            segments += [
                Segment(whole[at : len(prompt)], 0.0),
                Segment(whole[len(prompt) : end], 1.0),
            ]
            at = end
        return segments

    def _stop(self, message: dict[str, object]) -> str:
        return self.call_stop if message.get("tool_calls") else self.answer_stop

    def parse(self, text: str) -> Answer:
        """An answer as generated after a prompt of this family, without its stop token."""
        calls = [
            (match["name"].strip(), {found["key"]: found["value"]
                             for found in re.finditer(self.argument_pattern, match["body"], re.S)})
            for match in re.finditer(self.call_pattern, text, re.S)
        ]  # fmt: skip
        found = re.search(self.content_pattern, text, re.S)
        return Answer(found["content"] if found else text, calls)


def _without_thoughts(message: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


FLINT = Family(
    name="flint-nano",
    special=(END, "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    added=("<think>", "</think>", "<tool_call>", "</tool_call>",
           "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    written_end="",
    answer_stop="<|user|>",
    call_stop="<|observation|>",
    content_pattern="</think>(?P<content>.*)",
    call_pattern=r"<tool_call>(?P<name>[^<]+)(?P<body>.*?)</tool_call>",
    argument_pattern=r"<arg_key>(?P<key>.*?)</arg_key><arg_value>(?P<value>.*?)</arg_value>",
)  # fmt: skip
BEAM = Family(
    name="beam-nano",
    special=(END, "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
             "<|call|>", "<|return|>"),
    added=(),
    written_end="<|end|>",
    answer_stop="<|return|>",
    call_stop="<|call|>",
    content_pattern=r"<\|channel\|>final<\|message\|>(?P<content>.*)",
    call_pattern=r" to=(?P<name>[^\s<]+)<\|channel\|>analysis <\|constrain\|>xml<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|$)",
    argument_pattern=r'<rfl:parameter name="(?P<key>[^"]+)">\n(?P<value>.*?)\n</rfl:parameter>',
)  # fmt: skip
FAMILIES = {family.name: family for family in (FLINT, BEAM)}
