import json
from random import Random

import jsonschema
import pytest
from grammar_walks import compiled, flint, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import rooted, schemas

from limelight.text.demand import answer_format, not_in_json
from limelight.types import Constraint, RequestError

TOKENIZER = flint()


@pytest.mark.parametrize("strict", [False, True])
@given(schema=schemas.map(rooted), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_the_grammar_of_a_schema_allows_is_valid(strict, schema, seed):
    asked = {"name": "a", "schema": schema, "strict": strict}
    try:
        format = answer_format({"type": "json_schema", "json_schema": asked}, None)
    except RequestError as error:
        assert "no JSON is valid" in str(error), error
        return
    tag = json.dumps({"type": "structural_tag", "format": format})
    grammar = compiled(Constraint(tag=tag, marks=list(not_in_json(TOKENIZER))))
    for index in range(2):
        ids = walk(TOKENIZER, grammar, Random(seed + index), most=30)
        if ids is not None:
            text = TOKENIZER.decode(ids, skip_special_tokens=False)
            jsonschema.validate(json.loads(text), schema)
