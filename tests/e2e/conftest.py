"""The bundled models, served with their parsers, as OpenAI's client sees them."""

import openai
import pytest
from served import serve

PARSERS = {"flint-nano": "glm47", "beam-nano": "beam"}


@pytest.fixture(scope="session", params=PARSERS)
def client(request, tmp_path_factory):
    parser = PARSERS[request.param]
    flags = ["--reasoning-parser", parser, "--tool-call-parser", parser]
    flags += ["--enable-auto-tool-choice"]
    with serve(tmp_path_factory.mktemp("served"), request.param, *flags) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
