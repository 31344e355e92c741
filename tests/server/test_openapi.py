"""/openapi.json: a description of the routes that is true, and that a fuzzer can work from."""

import hypothesis
import jsonschema
import pytest
import schemathesis
from server_fakes import FakeEngine, FakeForm
from test_fuzz import VALID

from limelight.config import ServerConfig
from limelight.server.app import create_app
from limelight.server.openapi import describe


def test_every_route_is_described_and_needs_no_key(make_api):
    api = make_api(api_key=["key"])
    answer = api.get("/openapi.json")
    assert answer.status_code == 200 and answer.json() == describe()
    described = set(answer.json()["paths"])
    # The page is for people.
    assert {route.path_format for route in api.app.routes} - {"/"} == described


@pytest.mark.parametrize("path", VALID)
def test_the_body_of_a_route_is_described(path):
    document = describe()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = body | {"components": document["components"]}
    check = jsonschema.Draft202012Validator(schema)
    check.validate(VALID[path])
    # All that the valid bodies hold is known by name, and a wrong type does not pass.
    assert VALID[path].keys() <= body["properties"].keys()
    assert not check.is_valid({**VALID[path], "model": 5})
    for name in body["required"]:
        assert not check.is_valid({key: VALID[path][key] for key in VALID[path] if key != name})


@pytest.mark.slow
def test_no_body_that_a_fuzzer_makes_of_the_description_is_a_fault_of_the_server(
    tokenizer, template
):
    config = ServerConfig(
        reasoning_parser="glm47", tool_call_parser="glm47", enable_auto_tool_choice=True
    )
    # As little as can be: a body may ask for thousands of choices.
    engine = FakeEngine(lambda request: [])
    app = create_app(engine, tokenizer, template, config, model="tiny", form=FakeForm())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= VALID.keys()
    for operation in operations:
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        if operation.method == "get":
            modes = modes[:1]
        for mode in modes:
            run(operation.as_strategy(generation_mode=mode))


SETTINGS = hypothesis.settings(
    max_examples=100, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip


def run(cases: hypothesis.strategies.SearchStrategy):
    @SETTINGS
    @hypothesis.given(cases)
    def ask(case):
        answer = case.call(timeout=120)
        assert answer.status_code < 500, answer.text

    ask()
