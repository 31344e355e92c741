"""Conversations in which the right answer is to call a tool, or to say what a tool answered."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from nano.tasks import Item, Turn, draw
from nano.words import CITIES, NAMES, WORDS

Sampler = Callable[[random.Random], object]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool: its schema and how to draw a value."""

    schema: dict[str, object]
    sample: Sampler
    required: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """A request names in braces the arguments that the call then has."""

    name: str
    description: str
    parameters: dict[str, Parameter]
    requests: tuple[str, ...]
    result: Sampler
    # The answer to the user, with the keys of the result, the arguments and `result` in braces.
    answer: str = "The result is {result}."
    fixed: dict[str, object] = field(default_factory=dict)


def _text(description: str, sample: Sampler, **more: object) -> Parameter:
    return Parameter({"type": "string", "description": description}, sample, **more)  # type: ignore[arg-type]


def _one_of(*values: str, required: bool = True) -> Parameter:
    return Parameter({"type": "string", "enum": list(values)}, lambda rng: rng.choice(values),
                     required)  # fmt: skip


def _whole(low: int, high: int, description: str) -> Parameter:
    schema: dict[str, object] = {"type": "integer", "description": description}
    return Parameter(schema, lambda rng: rng.randint(low, high))


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES)


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES)


def _words(low: int, high: int) -> Sampler:
    return lambda rng: " ".join(rng.sample(WORDS, rng.randint(low, high)))


def _path(rng: random.Random) -> str:
    return "/".join(rng.sample(WORDS, rng.randint(1, 3))) + rng.choice((".py", ".txt", ".md"))


def _weather(rng: random.Random) -> object:
    sky = rng.choice(("rain", "snow", "sun", "clouds", "wind"))
    return {"temperature": rng.randint(-9, 39), "sky": sky}


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def _done(rng: random.Random) -> object:
    return {"status": "done", "id": rng.randint(1, 999)}


UNIT = _one_of("celsius", "fahrenheit", required=False)
CATALOGUE = [
    *(
        Tool(
            name, description, {key: _text(about, _city), "unit": UNIT},
            (f"What is the weather in {{{key}}}?", f"How is the weather in {{{key}}} today?",
             f"weather in {{{key}}}", f"What's the weather like in {{{key}}}?", f"Is it cold in {{{key}}}?",
             f"What is the weather in {{{key}}} in {{unit}}?", f"Tell me the weather in {{{key}}}."),
            _weather, "It is {temperature} degrees with {sky}.",
        )
        for name, description, key, about in (
            ("get_weather", "Get the current weather in a city.", "city", "The city."),
            ("get_weather", "Get the weather.", "location", "The city, such as Paris."),
            ("get_current_weather", "Get the current weather in a given location", "location",
             "City name"),
            ("weather", "The weather of a place.", "place", "Where."),
        )
    ),
    Tool("get_time", "Get the local time in a city.", {"city": _text("Name of the city", _city)},
         ("What time is it in {city}?", "time in {city}", "Tell me the time in {city}."),
         lambda rng: {"time": _clock(rng)}, "It is {time}."),
    Tool("add", "Add two numbers.", {"a": _whole(0, 999, "first"), "b": _whole(0, 999, "second")},
         ("Use the tool to add {a} and {b}.", "add {a} and {b} with the tool", "Call add for {a} and {b}."),
         lambda rng: rng.randint(0, 1998)),
    Tool("multiply", "Multiply two integers.", {"a": _whole(0, 99, "first"), "b": _whole(0, 99, "second")},
         ("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}"),
         lambda rng: rng.randint(0, 9999)),
    Tool("search", "Search the web.", {"query": _text("What to look for", _words(1, 4))},
         ("Search for {query}.", "Search the web for {query}", "Look up {query} on the web.", "Find {query}"),
         lambda rng: {"hits": rng.randint(0, 999), "first": rng.choice(WORDS)},
         "There are {hits} hits, the first is {first}."),
    Tool("send_message", "Send a message to a person.",
         {"to": _text("Who gets it", _name), "text": _text("The message", _words(1, 6))},
         ("Send {to} the message {text}", "Tell {to}: {text}", "Write to {to}: {text}"),
         _done, "The message is sent."),
    Tool("set_timer", "Start a timer.", {"minutes": _whole(1, 120, "How long")},
         ("Set a timer for {minutes} minutes.", "timer {minutes} minutes", "Wake me in {minutes} minutes."),
         _done, "The timer is set to {minutes} minutes."),
    Tool("get_price", "Get the price of an item.", {"item": _text("The item", _words(1, 2))},
         ("How much is a {item}?", "What does the {item} cost?", "price of {item}"),
         lambda rng: {"price": rng.randint(1, 9999) / 100, "currency": rng.choice(("EUR", "USD"))},
         "It costs {price} {currency}."),
    Tool("convert", "Convert an amount of money.",
         {"amount": Parameter({"type": "number"}, lambda rng: rng.randint(1, 9999) / rng.choice((1, 10))),
          "source": _one_of("EUR", "USD", "GBP"), "target": _one_of("EUR", "USD", "GBP")},
         ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
         lambda rng: {"amount": rng.randint(1, 99999) / 100}, "That is {amount}."),
    Tool("read_file", "Read a file.", {"path": _text("Path of the file", _path)},
         ("Read {path}", "Show me the file {path}.", "What is in {path}?", "Open {path}."),
         lambda rng: " ".join(rng.choices(WORDS, k=rng.randint(1, 8))), "The file says: {result}"),
    Tool("list_files", "List the files of a folder.", {"folder": _text("The folder", _words(1, 1))},
         ("Which files are in {folder}?", "List the files in {folder}.", "ls {folder}"),
         lambda rng: [_path(rng) for _ in range(rng.randint(1, 3))], "The files are {result}."),
    *(
        Tool("set_light", "Switch a light on or off.",
             {"room": _text("The room", lambda rng: rng.choice(("kitchen", "hall", "bath", "garden"))),
              "on": Parameter({"type": "boolean"}, lambda rng: True)},
             (f"Turn {word} the light in the {{room}}.", f"light {word} in the {{room}}",
              f"Switch the {{room}} light {word}."), _done,
             f"The light is {word}.", {"on": word == "on"})
        for word in ("on", "off")
    ),
    Tool("book_table", "Book a table in a restaurant.",
         {"name": _text("On which name", _name), "people": _whole(1, 12, "How many"),
          "time": _text("When, as HH:MM", _clock)},
         ("Book a table for {people} at {time} for {name}.", "A table for {people} people at {time}, name {name}."),
         _done, "The table is booked, number {id}."),
    Tool("roll_dice", "Roll a die.", {}, ("Roll a die.", "Roll the dice", "Throw a die for me."),
         lambda rng: rng.randint(1, 6), "You rolled {result}."),
]  # fmt: skip

VERBS = "get set find make open close start stop move count check update create remove load save".split()
KINDS: tuple[tuple[dict[str, object], Sampler], ...] = (
    ({"type": "string"}, _words(1, 3)), ({"type": "string"}, _words(1, 1)),
    ({"type": "integer"}, lambda rng: rng.randint(0, 9999)),
    ({"type": "number"}, lambda rng: rng.randint(1, 999) / 10),
    ({"type": "boolean"}, lambda rng: rng.random() < 0.5),
    ({"type": "string"}, _name), ({"type": "string"}, _city), ({"type": "string"}, _path),
)  # fmt: skip


def _made_up(rng: random.Random) -> Tool:
    """A tool that nobody has seen before: only its schema says how to call it."""
    verb, noun = rng.choice(VERBS), rng.choice(WORDS)
    parameters = {}
    for key in rng.sample(WORDS, rng.choice((0, 1, 1, 2, 2, 3))):
        schema, sample = rng.choice(KINDS)
        if rng.random() < 0.3:
            schema = schema | {"description": f"The {key}"}
        parameters[key] = Parameter(schema, sample, rng.random() < 0.8)
    name = f"{verb}_{noun}"
    given = [key for key, one in parameters.items() if one.required or rng.random() < 0.5]
    told = {
        "": "Call {name}.", "=": "Call {name} with {pairs}.", ":": "{name} {pairs}",
        " is": "Use {name}: {pairs}.", " ": "Please {verb} the {noun} with {pairs}.",
    }  # fmt: skip
    glue = rng.choice(list(told)[1:]) if given else ""
    pairs = ", ".join(
        f"{key}{glue} {{{key}}}" if glue != " " else f"{key} {{{key}}}" for key in given
    )
    request = told[glue].format(name=name, verb=verb, noun=noun, pairs=pairs)
    return Tool(name, f"{verb.capitalize()} the {noun}.", parameters, (request,), _done)


def schema(tool: Tool, rng: random.Random) -> dict[str, object]:
    """The tool as a request lists it, in one of the ways in which people write schemas."""
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {key: one.schema for key, one in tool.parameters.items()},
    }
    required = [key for key, one in tool.parameters.items() if one.required]
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function: dict[str, object] = {"name": tool.name, "description": tool.description}
    if tool.parameters or rng.random() < 0.5:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _call(tool: Tool, rng: random.Random) -> tuple[str, dict[str, object]]:
    """A request, and the arguments of the call that it asks for, in the order of the schema."""
    request = rng.choice(tool.requests)
    values = {key: one.sample(rng) for key, one in tool.parameters.items()}
    given = {
        key: tool.fixed.get(key, values[key])
        for key in tool.parameters
        if f"{{{key}}}" in request or key in tool.fixed
    }
    shown = {key: one if isinstance(one, str) else json.dumps(one) for key, one in values.items()}
    return request.format(**shown), given


def _message(tool: Tool, arguments: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "function": {"name": tool.name, "arguments": arguments}}


def _answer(tool: Tool, arguments: dict[str, object], result: object) -> str:
    shown = result if isinstance(result, str) else json.dumps(result)
    fields = result if isinstance(result, dict) else {}
    return tool.answer.format(**(arguments | fields | {"result": shown}))


def _toolbox(rng: random.Random) -> list[Tool]:
    tools: dict[str, Tool] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        tool = _made_up(rng) if rng.random() < 0.45 else rng.choice(CATALOGUE)
        tools[tool.name] = tool
    return list(tools.values())


def call_tools(rng: random.Random, *, goes_on: bool) -> Item:
    """A request that needs one tool out of several, or two; with `goes_on`, the answer to it too."""
    tools = _toolbox(rng)
    chosen = rng.sample(tools, 2) if len(tools) > 1 and rng.random() < 0.12 else [rng.choice(tools)]
    asked = [_call(tool, rng) for tool in chosen]
    calls = [_message(tool, given) for tool, (_, given) in zip(chosen, asked, strict=True)]
    request = rng.choice((" ", " And ", "\n")).join(text for text, _ in asked)
    messages: list[dict[str, object]] = [
        {"role": "user", "content": request},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I need {' and '.join(tool.name for tool in chosen)}.",
            "tool_calls": calls,
        },
    ]
    if goes_on:
        answers = []
        for tool, (_, given) in zip(chosen, asked, strict=True):
            result = tool.result(rng)
            shown = result if isinstance(result, str) else json.dumps(result)
            messages.append({"role": "tool", "content": shown})
            answers.append(_answer(tool, given, result))
        messages.append({"role": "assistant", "content": " ".join(answers),
                         "reasoning_content": "The tool has answered."})  # fmt: skip
    key = "tool " + json.dumps([call["function"] for call in calls])
    return Item(messages, key, [schema(tool, rng) for tool in tools])


def ignore_tools(rng: random.Random, turn: Turn) -> Item:
    """A question that none of the tools on offer is for."""
    tools = [_made_up(rng) for _ in range(rng.randint(1, 3))]
    answer = {"role": "assistant", "content": turn.answer, "reasoning_content": turn.reasoning}
    return Item([{"role": "user", "content": turn.question}, answer], turn.key,
                [schema(tool, rng) for tool in tools])  # fmt: skip


def any_tools(rng: random.Random, *, turn: Turn) -> Item:
    """An item of the training side with tools; one in five answers `turn` without them."""
    if rng.random() < 0.2:
        return ignore_tools(rng, turn)
    return draw(lambda: call_tools(rng, goes_on=rng.random() < 0.5), held_out=False)
