"""Fixtures around the scripted engine: a tiny model folder, the app in process, live servers."""

from pathlib import Path

import pytest
from server_fakes import MODEL, Api, FakeEngine, LiveServer, write_model

from limelight.config import ServerConfig
from limelight.server.app import create_app
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def template(model_folder: Path):
    template = ChatTemplate.load(model_folder, override=None)
    yield template
    template.close()


@pytest.fixture
def make_api(tokenizer: Tokenizer, template: ChatTemplate):
    """Builds an `Api` around an engine; config fields by keyword."""

    def make(
        engine: FakeEngine | None = None,
        *,
        defaults=None,
        texts=True,
        form=None,
        engine_config=None,
        **config,
    ) -> Api:
        app = create_app(
            engine or FakeEngine(), tokenizer if texts else None, template if texts else None,
            ServerConfig(**config), model=MODEL, defaults=defaults, form=form,
            engine=engine_config,
        )  # fmt: skip
        return Api(app)

    return make


@pytest.fixture
def api(make_api) -> Api:
    return make_api()


@pytest.fixture
def live(tokenizer: Tokenizer, template: ChatTemplate):
    """Builds a `LiveServer`; all are gone when the test ends."""
    servers = []

    def make(engine: FakeEngine | None = None, **config) -> LiveServer:
        server = LiveServer(engine or FakeEngine(), tokenizer, template, ServerConfig(**config))
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()
