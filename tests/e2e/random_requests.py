"""Random requests of tools and formats, and what is wrong with their answers.

The schemas are those of `random_schemas` that a strict tool may have for either model.
"""

import json

import jsonschema
from grammar_walks import flint
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from random_schemas import DEFS, objects, schemas
from template_grammars import made

from limelight.text.demand import Demand
from limelight.text.glm_grammar import glm_constraint
from limelight.types import RequestError

QUESTIONS = ("What is the weather in Oslo?", "Plan a trip.", "What is 17 + 25?", "Go on.")
CHOICES = ("fine", "nothing at all", '"quoted"')
MOST_TOKENS = 400
TOKENIZER = flint()


def is_held(parameters: dict) -> bool:
    """Whether both models keep strict tools to all that the schema says."""
    tools = [{"name": "f", "parameters": parameters, "strict": True}]
    try:
        glm_constraint(Demand(tools=tools), reasons=True, open=False, tokenizer=TOKENIZER)
        made("bundled", tools=tools)
    except RequestError:
        return False
    return True


def requests() -> st.SearchStrategy[dict]:
    whole = objects(schemas).map(lambda schema: {**schema, "$defs": DEFS})
    parameters = whole.filter(is_held)
    function = {"strict": st.booleans()}
    functions = st.fixed_dictionaries(function, optional={"parameters": parameters})
    format_ = st.one_of(
        parameters.map(lambda schema: _json_schema({"name": "s", "schema": schema})),
        parameters.map(
            lambda schema: _json_schema({"name": "s", "schema": schema, "strict": True})
        ),
        st.just({"response_format": {"type": "json_object"}}),
        st.just({"structured_outputs": {"choice": CHOICES}}),
        st.just({"structured_outputs": {"regex": "[a-c]{2,5}(-[0-9]+)?"}}),
    )
    return st.builds(
        _request,
        functions=st.lists(functions, max_size=3),
        choice=st.sampled_from((None, "auto", "auto", "required", "required", "named", "none")),
        format=st.one_of(st.just({}), st.just({}), format_),
        parallel=st.sampled_from((None, True, False)),
        thinking=st.booleans(),
        budget=st.sampled_from((0, 1, 5, 20, 20, None)),
        stream=st.booleans(),
        question=st.sampled_from(QUESTIONS),
        seed=st.integers(0, 2**31),
    )


def drawn(number: int) -> list[dict]:
    """So many requests, the same ones every time."""
    found: list[dict] = []

    @seed(number)
    @settings(max_examples=number, phases=[Phase.generate], database=None, deadline=None)
    @given(requests())
    def draw(request: dict):
        found.append(request)

    draw()
    return found[:number]


def _json_schema(named: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _request(*, functions, choice, format, parallel, thinking, budget, stream, question, seed):
    named = [{"name": f"f_{i}", **one} for i, one in enumerate(functions)]
    body = {
        "messages": [{"role": "user", "content": question}],
        "chat_template_kwargs": {"enable_thinking": thinking},
        "temperature": 1.5, "max_tokens": MOST_TOKENS, "stream": stream, "seed": seed, **format,
    }  # fmt: skip
    if thinking and budget is not None:
        body["thinking_token_budget"] = budget
    if named:
        body["tools"] = [{"type": "function", "function": one} for one in named]
        if parallel is not None:
            body["parallel_tool_calls"] = parallel
        if choice is not None:
            one = {"type": "function", "function": {"name": "f_0"}}
            body["tool_choice"] = one if choice == "named" else choice
    return body


def faults(body: dict, answer: dict, *, any_order: bool) -> list[str]:
    """What is wrong with an answer: its calls as (name, arguments), content and finish reason.

    `any_order`: tools that are not strict may leave required arguments out.
    """
    functions = {one["function"]["name"]: one["function"] for one in body.get("tools", [])}
    choice, calls, content = body.get("tool_choice", "auto"), answer["calls"], answer["content"]
    forced, is_cut = choice == "required" or isinstance(choice, dict), answer["reason"] == "length"
    found = [f"a call of {name!r}" for name, _ in calls if name not in functions]
    if choice == "none" or not functions:
        found += ["a call that was not asked for"] * bool(calls)
    if len(calls) > 1 and (isinstance(choice, dict) or body.get("parallel_tool_calls") is False):
        found.append("several calls")
    if forced and not calls and not is_cut:
        found.append("no call")
    if forced and content:
        found.append("content beside a forced call")
    for name, text in calls:
        function = functions.get(name, {})
        schema = function.get("parameters", {"maxProperties": 0})
        if any_order and not function.get("strict"):
            schema = {**schema, "required": []}
        found += _unlike(schema, text)
    if not calls and not is_cut and not forced:
        found += _unformatted(body, content)
    return found


def _unformatted(body: dict, content: str) -> list[str]:
    if (form := body.get("response_format")) is not None:
        return _unlike(form.get("json_schema", {}).get("schema", {"type": "object"}), content)
    asked = body.get("structured_outputs", {})
    if "choice" in asked:
        return [] if content in asked["choice"] else [f"no choice: {content!r}"]
    if "regex" in asked:
        return _unlike({"type": "string", "pattern": f"^{asked['regex']}$"}, json.dumps(content))
    return []


def _unlike(schema: dict, text: str) -> list[str]:
    """What is wrong with a JSON text; formats count."""
    checker = jsonschema.FormatChecker()
    try:
        value = json.loads(text, parse_constant=int)
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return [f"{str(error).splitlines()[0]}: {text}"]
    return []
