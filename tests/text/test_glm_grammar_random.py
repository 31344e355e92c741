import json
from random import Random

import jsonschema
import pytest
from glm47_answers import CLOSED, parse
from grammar_walks import compiled, flint, walk
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_schemas import DEFS, objects, schemas

from limelight.text.demand import Demand
from limelight.text.glm_grammar import glm_constraint
from limelight.types import RequestError

TOKENIZER = flint()
parameters = objects(schemas).map(lambda schema: {**schema, "$defs": DEFS})


def calls_of(tool, choice, seed):
    """The arguments of the calls in a few answers that the grammar allows."""
    demand = Demand(tools=[tool, {"name": "f_2"}], choice=choice)
    constraint = glm_constraint(demand, reasons=True, open=False, tokenizer=TOKENIZER)
    grammar = compiled(constraint)
    for index in range(2):
        ids = walk(TOKENIZER, grammar, Random(seed + index), most=40)
        if ids is None:
            continue
        tools = [{"type": "function", "function": one} for one in demand.tools]
        reasoning, content, made, _ = parse(TOKENIZER, ids, prompt=CLOSED, tools=tools)
        opener = TOKENIZER.encode("<tool_call>", add_special_tokens=False)[0]
        assert len(made) == ids.count(opener)
        assert reasoning == ""
        assert choice == "auto" or (made and content == "")
        yield from (json.loads(arguments) for name, arguments in made if name == "f")


def is_held(parameters):
    """Whether every condition is enforced; some beside each other cannot be told in a text."""
    demand = Demand(tools=[{"name": "f", "parameters": parameters, "strict": True}])
    try:
        glm_constraint(demand, reasons=True, open=False, tokenizer=TOKENIZER)
    except RequestError as error:
        refused = ("no JSON is valid", "told apart", "another type", "written")
        assert any(word in str(error) for word in refused), error
        return False
    return True


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("strict", [False, True])
@given(parameters=parameters, seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_calls_that_the_grammar_allows_are_read_back_valid(strict, choice, parameters, seed):
    assume(is_held(parameters))
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    kept = parameters if strict else {**parameters, "required": []}
    for arguments in calls_of(tool, choice, seed):
        jsonschema.validate(arguments, kept)
