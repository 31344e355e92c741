"""The bundled models, served with their parsers, as OpenAI's client sees them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import openai
import pytest
from served import serve

PARSERS = {"flint-nano": "glm47", "beam-nano": "beam"}


@pytest.fixture(scope="session")
def client_of(tmp_path_factory) -> Iterator[Callable[[str], openai.OpenAI]]:
    """A client of a bundled model, which is served from its first use to the end of all tests."""
    with ExitStack() as stack:

        @cache
        def client_of(model: str) -> openai.OpenAI:
            parsers = ["--reasoning-parser", PARSERS[model], "--tool-call-parser", PARSERS[model]]
            folder = tmp_path_factory.mktemp("served")
            parsers += ["--enable-auto-tool-choice", "--max-num-seqs", "16"]
            server = serve(folder, model, *parsers)
            url = f"{stack.enter_context(server).url}/v1"
            return openai.OpenAI(base_url=url, api_key="none", max_retries=0)

        yield client_of


@pytest.fixture(scope="module", params=PARSERS)
def client(request, client_of) -> openai.OpenAI:
    return client_of(request.param)
