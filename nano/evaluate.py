"""Scores on a fixed set of questions that were never trained on, answered greedily.

`python -m nano.evaluate flint-nano` asks the shipped model through `limelight.LLM`.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tokenizers

from limelight.checkpoint import BUNDLED_NAMES
from nano import tasks
from nano.chat import FAMILIES, Family
from nano.conversations import far_lookup, from_turns
from nano.tasks import Item, Json, Turn, draw
from nano.tokenizers import load
from nano.tools import call_tools

Generate = Callable[[list[list[int]], int], list[list[int]]]
LOOKUP_LINES, FIRST_LINES, FAR = 243, 25, 1500


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how long the answer may be, and what is right."""

    task: str
    prompt: str
    max_tokens: int
    item: Item


def _single(make: Callable[[random.Random], Turn]) -> Callable[[random.Random], Item]:
    return lambda rng: from_turns([make(rng)])


MAKERS: dict[str, tuple[Callable[[random.Random], Item], int, int, bool]] = {
    # task: (maker, how many, tokens an answer, thinking)
    "sort": (_single(lambda rng: tasks.sort(rng, count=5)), 200, 24, False),
    "sum": (_single(lambda rng: tasks.add(rng, digits=2)), 200, 8, False),
    "lookup": (lambda rng: far_lookup(rng, lines=LOOKUP_LINES, at_most=FIRST_LINES), 100, 8, False),
    "tool": (lambda rng: call_tools(rng, goes_on=False), 200, 128, False),
    "copy": (_single(tasks.copy), 100, 64, False),
    "json": (_single(tasks.fill_json), 100, 96, False),
    "pick": (_single(tasks.pick), 100, 32, False),
    "think sum": (_single(lambda rng: tasks.add(rng, digits=2)), 100, 96, True),
}


def questions(family: Family, *, limit: int | None = None) -> list[Question]:
    """The fixed set: always the same conversations, each once; the first `limit` of each task."""
    found = []
    for task, (make, count, max_tokens, thinking) in MAKERS.items():
        count = min(count, limit or count)
        rng = random.Random(task)
        seen: set[str | None] = set()
        while len(seen) < count:
            item = draw(partial(make, rng), held_out=True)
            if item.key not in seen:
                seen.add(item.key)
                prompt = family.prompt(item.messages[:-1], item.tools, thinking=thinking)
                found.append(Question(task, prompt, max_tokens, item))
    return found


def _is_well_formed(calls: list[tuple[str, dict[str, str]]], item: Item) -> bool:
    """Whether each call names a tool of the request, with keys and values of its schema."""
    tools = {tool["function"]["name"]: tool["function"] for tool in item.tools or []}
    for name, arguments in calls:
        if name not in tools:
            return False
        parameters = tools[name].get("parameters", {"properties": {}})
        if (
            not set(parameters.get("required", []))
            <= set(arguments)
            <= set(parameters["properties"])
        ):
            return False
        if not all(_fits(value, parameters["properties"][key]) for key, value in arguments.items()):
            return False
    return bool(calls)


def _fits(text: str, schema: Json) -> bool:
    kind = schema["type"]
    if kind == "string":
        return text in schema.get("enum", [text])
    try:
        value = json.loads(text)
    except ValueError:
        return False
    kinds = {"integer": (int,), "number": (int, float), "boolean": (bool,)}
    return isinstance(value, kinds[kind]) and isinstance(value, bool) == (kind == "boolean")


def _grade(family: Family, question: Question, text: str) -> dict[str, bool]:
    """Marks for one answer, which has ended by itself."""
    answer = family.parse(text)
    right = question.item.messages[-1]
    if "tool_calls" not in right:
        return {question.task: answer.content.strip() == right["content"]}
    wanted = [
        (call["function"]["name"],
         {key: value if isinstance(value, str) else json.dumps(value)
          for key, value in call["function"]["arguments"].items()})
        for call in right["tool_calls"]
    ]  # fmt: skip
    return {"tool, well-formed": _is_well_formed(answer.calls, question.item),
            "tool, as asked": answer.calls == wanted}  # fmt: skip


def score(
    family: Family,
    tokenizer: tokenizers.Tokenizer,
    generate: Generate,
    *,
    show: int = 0,
    limit: int | None = None,
) -> dict[str, float]:
    """The share of right answers by task; prints `show` wrong ones of each."""
    stops = {
        tokenizer.token_to_id(tag)
        for tag in (family.special[0], family.answer_stop, family.call_stop)
    }
    marks: dict[str, list[bool]] = {}
    asked = questions(family, limit=limit)
    for task, (_, _, max_tokens, _) in MAKERS.items():
        mine = [question for question in asked if question.task == task]
        prompts = [tokenizer.encode(one.prompt, add_special_tokens=False).ids for one in mine]
        if task == "lookup":
            assert min(map(len, prompts)) - FIRST_LINES * 7 > FAR
        shown = 0
        for question, ids in zip(mine, generate(prompts, max_tokens), strict=True):
            ended = bool(ids) and ids[-1] in stops
            text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
            for name, mark in _grade(family, question, text).items():
                marks.setdefault(name, []).append(mark and ended)
                if shown < show and not (mark and ended):
                    shown += 1
                    print(f"{name}: {question.prompt[-200:]!r} -> {text!r}")
    return {name: sum(each) / len(each) for name, each in marks.items()}


def table(scores: dict[str, float]) -> str:
    return "\n".join(f"{name:20} {100 * share:5.1f} %" for name, share in scores.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=BUNDLED_NAMES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--limit", type=int, help="ask only so many questions of each task")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print of each task")
    args = parser.parse_args()
    from limelight import LLM, SamplingParams

    settings = {"dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype}
    with LLM(args.model, device=args.device, **settings) as llm:

        def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            answers = [one.outputs[0] for one in llm.generate(prompts, params)]
            if errors := [one.error for one in answers if one.error]:
                raise RuntimeError(errors[0])
            return [one.token_ids for one in answers]

        family = FAMILIES[args.model.removesuffix("-nvfp4")]
        print(table(score(family, load(family.folder), generate, show=args.show, limit=args.limit)))


if __name__ == "__main__":
    main()
