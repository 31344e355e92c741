"""Adapters over HTTP: which names are served, loaded, replaced and unloaded, as vLLM has it."""

import asyncio
from dataclasses import dataclass, field

import pytest
from server_fakes import MODEL, Api, FakeEngine

from limelight.config import EngineConfig, ServerConfig
from limelight.engine.client import AdapterLost, OrderFailed
from limelight.orders import Order, UnloadAdapter
from limelight.server.app import create_app
from limelight.server.openai import Reader
from limelight.types import LoRARequest

ROUTES = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/skyrl/v1/load_lora_adapter"]


@dataclass(eq=False)
class AdaptedEngine(FakeEngine):
    """Takes adapters whose folder is not called broken."""

    loaded: list[LoRARequest] = field(default_factory=list)
    unloaded: list[int] = field(default_factory=list)

    async def order(self, order: Order) -> list[dict[str, object]]:
        await asyncio.sleep(0)
        if isinstance(order, UnloadAdapter):
            self.unloaded.append(order.adapter_id)
        elif order.adapter.lora_path.endswith("broken"):
            raise OrderFailed("adapter_config.json: use_dora is not supported", refused=True)
        elif order.adapter.lora_path.endswith("torn"):
            raise AdapterLost("it was unloaded from all")
        else:
            self.loaded.append(order.adapter)
        return [{}]


@pytest.fixture
def served(tokenizer, template, tmp_path):
    """An `Api` with the adapter `first`, and its engine."""

    def make(may: bool = True) -> Api:
        engine = AdaptedEngine()
        config = ServerConfig(allow_runtime_lora_updating=may)
        app = create_app(
            engine, tokenizer, template, config,
            model=MODEL,
            engine=EngineConfig(enable_lora=True, lora_modules=["first=/adapters/first"]),
        )  # fmt: skip
        api = Api(app)
        api.engine = engine
        return api

    return make


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "torn").mkdir()
    return str(tmp_path)


def load(api, name, path, **fields):
    body = {"lora_name": name, "lora_path": path, **fields}
    return api.post("/v1/load_lora_adapter", json=body)


def unload(api, name, **fields):
    return api.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


def names(api):
    return [model["id"] for model in api.get("/v1/models").json()["data"]]


def test_adapters_are_models_with_a_parent(served):
    api = served()
    own, first = api.get("/v1/models").json()["data"]
    assert own["parent"] is None
    assert first["id"] == "first" and first["parent"] == MODEL
    assert first["root"] == "/adapters/first"
    assert api.get("/v1/models/first").json() == first


def test_a_request_names_its_adapter_on_every_route(served):
    api = served()
    bodies = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/responses": {"input": "Hi"},
        "/inference/v1/generate": {"token_ids": [72, 105]},
        "/skyrl/v1/generate": {"token_ids": [72, 105]},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    }
    for path, body in bodies.items():
        answer = api.post(path, json={"model": "first", **body})
        assert answer.status_code == 200 and answer.json()["model"] == "first"
        assert api.engine.requests[-1].adapter_id == 1
        assert api.post(path, json={"model": MODEL, **body}).json()["model"] == MODEL
        assert api.engine.requests[-1].adapter_id == 0
        assert api.post(path, json={"model": "none", **body}).status_code == 404


def test_an_adapter_that_goes_while_its_request_is_read_is_a_404(served, monkeypatch):
    api = served()
    monkeypatch.setattr(Reader, "_check_chat", lambda reader, own: reader.adapters.pop("first"))
    body = {"model": "first", "messages": [{"role": "user", "content": "Hi"}]}
    answer = api.post("/v1/chat/completions", json=body)
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    assert api.engine.requests == []


def test_an_adapter_is_loaded_and_unloaded(served, folder):
    api = served()
    answer = load(api, "second", folder)
    assert answer.text == "Success: LoRA adapter 'second' added successfully."
    assert api.engine.loaded == [LoRARequest("second", 2, folder)]
    assert names(api) == [MODEL, "first", "second"]
    api.complete(model="second")
    assert api.engine.requests[-1].adapter_id == 2
    assert unload(api, "second").text == "Success: LoRA adapter 'second' removed successfully."
    assert api.engine.unloaded == [2] and names(api) == [MODEL, "first"]
    assert api.complete(model="second").status_code == 404
    # A new one of that name is another adapter.
    load(api, "second", folder)
    assert api.engine.loaded[-1].lora_int_id == 3


def test_a_name_is_taken_twice_only_in_place(served, folder):
    api = served()
    answer = load(api, "first", folder)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name"
    assert load(api, MODEL, folder).status_code == 400
    assert not api.engine.loaded
    assert load(api, "first", folder, load_inplace=True).status_code == 200
    assert api.engine.loaded == [LoRARequest("first", 1, folder, load_inplace=True)]


@pytest.mark.parametrize("name, status, param", [
    ("nowhere", 404, "lora_path"), ("broken", 400, "lora_path"),
    ("n" * 5000, 404, "lora_path"), ("\0", 404, "lora_path"),
])  # fmt: skip
def test_an_adapter_that_cannot_be_read_is_not_there(served, folder, name, status, param):
    api = served()
    answer = load(api, "second", f"{folder}/{name}")
    assert answer.status_code == status and answer.json()["error"]["param"] == param
    assert names(api) == [MODEL, "first"]


def test_an_adapter_that_the_engines_have_lost_has_no_name_any_more(served, folder):
    api = served()
    answer = load(api, "first", f"{folder}/torn", load_inplace=True)
    assert answer.status_code == 500 and "unloaded" in answer.json()["error"]["message"]
    assert names(api) == [MODEL] and load(api, "first", folder).status_code == 200


def test_what_is_not_loaded_cannot_be_unloaded(served):
    api = served()
    assert unload(api, "second").status_code == 404
    assert unload(api, "first", lora_int_id=7).status_code == 404
    assert unload(api, "first", lora_int_id=1).status_code == 200


def test_skyrl_replaces_its_adapter_under_the_same_number(served, folder):
    api = served()
    for _ in range(2):
        answer = api.post("/skyrl/v1/load_lora_adapter", json={"lora_path": folder})
        assert answer.json() == {
            "status": "success", "lora_name": "skyrl-lora", "lora_int_id": 2,
        }  # fmt: skip
    answer = api.post("/skyrl/v1/load_lora_adapter", json={"in_memory": True})
    assert answer.status_code == 400 and "in_memory" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_without_permission_adapters_stay_as_they_are(served, folder, path):
    api = served(may=False)
    answer = api.post(path, json={"lora_name": "first", "lora_path": folder})
    assert answer.status_code == 403 and "VLLM_ALLOW" in answer.json()["error"]["message"]
    assert names(api) == [MODEL, "first"]


def test_the_permission_may_come_from_the_environment_of_a_published_command(monkeypatch):
    from limelight.cli import configs_of, parse

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    args = [
        "serve",
        "flint-nano",
        "--enable-lora",
        "--lora-modules",
        "a=/x",
        '{"name":"b","path":"/y"}',
    ]
    engine, server = configs_of(parse([*args, "--max-loras", "2", "--fully-sharded-loras"]))
    assert server.allow_runtime_lora_updating
    assert engine.adapters == [LoRARequest("a", 1, "/x"), LoRARequest("b", 2, "/y")]
