"""The routes of --enable-rl: who may call them, what they order, and what they answer."""

import pytest
from server_fakes import FakeEngine

from limelight.config import EngineConfig
from limelight.engine.client import OrderFailed
from limelight.orders import (
    AbortRequests,
    EngineState,
    FinishUpdate,
    InitTransfer,
    NameVersion,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartUpdate,
    UpdateWeights,
    WakeUp,
)
from limelight.server.control import GETS, POSTS


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def api(make_api, engine):
    return make_api(engine, enable_rl=True)


@pytest.mark.parametrize(
    ("call", "body", "order", "answer"),
    [
        ("/pause", None, Pause("abort", True), {"status": "paused"}),
        ("/pause?mode=keep&clear_cache=false", None, Pause("keep", False), {"status": "paused"}),
        ("/pause?wait_for_inflight_requests=1", None, Pause("wait"), {"status": "paused"}),
        ("/resume", None, Resume(), {"status": "resumed"}),
        ("/sleep", None, Sleep(2), {"status": "sleeping", "level": 2}),
        (
            "/sleep?level=1&tags=weights&tags=kv_cache&mode=keep", None,
            Sleep(1, "keep", ["weights", "kv_cache"]), {"status": "sleeping", "level": 1},
        ),
        ("/wake_up?tags=weights", None, WakeUp(["weights"]),
         {"status": "awake", "tags": ["weights"]}),
        ("/wake_up", None, WakeUp(), {"status": "awake", "tags": []}),
        ("/reset_prefix_cache", None, ResetPrefixCache(), {"success": True}),
        ("/reset_prefix_cache", {"reset_running_requests": True}, ResetPrefixCache(True),
         {"success": True}),
        ("/reset_prefix_cache?reset_running_requests=true", None, ResetPrefixCache(True),
         {"success": True}),
        ("/init_weight_transfer_engine", {"init_info": {"a": 1}}, InitTransfer({"a": 1}),
         {"message": "Weight transfer initialized"}),
        ("/start_weight_update", {"is_checkpoint_format": True}, StartUpdate(),
         {"message": "Weight update started"}),
        ("/update_weights", {"update_info": {"names": []}}, UpdateWeights({"names": []}),
         {"message": "Weights updated"}),
        ("/finish_weight_update", {"weight_version": 7}, FinishUpdate("7"),
         {"message": "Weight update finished", "num_missing": 4}),
        ("/finish_weight_update", None, FinishUpdate(),
         {"message": "Weight update finished", "num_missing": 4}),
        ("/update_weight_version", {"new_version": "v9"}, NameVersion("v9"),
         {"success": True, "new_version": "v9"}),
        ("/abort_requests", {}, AbortRequests(), {"status": "aborted", "aborted": 3}),
        ("/release_kv_cache_memory", None, Sleep(1, "abort", ["kv_cache"]),
         {"status": "sleeping", "tags": ["kv_cache"]}),
        (
            "/collective_rpc",
            {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": True}},
            Sleep(1, "keep", [], keeps_cache=True), {"results": [None]},
        ),
        (
            "/collective_rpc", {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": None}},
            WakeUp(), {"results": [None]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_call_orders_one_thing_and_answers_with_json_of_known_length(
    api, engine, call, body, order, answer
):
    engine.results = [{"missing": 4, "aborted": 3, "level": getattr(order, "level", None)}]
    given = {} if body is None else {"json": body}
    told = api.post(call, **given)
    assert (told.status_code, told.json(), engine.orders) == (200, answer, [order])
    assert told.headers["content-type"] == "application/json"
    assert int(told.headers["content-length"]) == len(told.content)


def test_an_adapter_in_memory_is_discarded_for_there_is_none(api, engine):
    body = {"method": "skyrl_discard_in_memory_lora", "kwargs": {"lora_name": "skyrl-lora"}}
    assert api.post("/collective_rpc", json=body).json() == {"results": [None]}
    assert engine.orders == []


def test_requests_are_aborted_by_the_ids_that_clients_know(api, engine):
    engine.results = [{"aborted": 1}]
    api.post("/abort_requests", json={"request_ids": ["a"]})
    api.post("/abort_requests", json={"request_ids": []})
    known = AbortRequests(["a", "chatcmpl-a", "cmpl-a", "gen-a", "resp_a", "msg_a"])
    assert engine.orders == [known, AbortRequests([])]


def test_no_api_takes_an_answer_that_was_aborted_for_one_that_is_full(make_api):
    engine = FakeEngine()
    engine.script = lambda request: engine.told_to_end.add(request.id) or [72] * 9
    api, chat = make_api(engine), {"messages": [{"role": "user", "content": "Hi"}]}
    [choice] = api.post("/v1/chat/completions", json=chat).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("H", "abort")
    message = api.post("/v1/messages", json=chat | {"max_tokens": 50}).json()
    assert (message["content"][0]["text"], message["stop_reason"]) == ("H", "pause_turn")
    response = api.post("/v1/responses", json={"input": "Hi"}).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "abort"}


def test_weights_that_sleep_already_stay_at_their_level(api, engine):
    engine.results = [{"level": 1}]
    assert api.post("/sleep?level=2").json() == {"status": "sleeping", "level": 1}


def test_how_the_engine_stands_is_told_without_asking_it(api, engine):
    engine.state = EngineState(
        paused="keep", asleep=["kv_cache"], updating=True, weight_version="7"
    )
    assert api.get("/is_paused").json() == {"is_paused": True}
    assert api.get("/is_sleeping").json() == {"is_sleeping": True}
    told = {"weight_version": "7", "updating": True, "incomplete": None}
    assert api.get("/weight_info").json() == told
    assert api.post("/wake_up?tags=weights").json()["status"] == "sleeping"
    assert engine.orders == [WakeUp(["weights"])]


def test_the_world_has_all_ranks_of_all_engines(make_api):
    engine = EngineConfig(tensor_parallel_size=2)
    api = make_api(enable_rl=True, data_parallel_size=3, engine_config=engine)
    assert api.get("/get_world_size").json() == {"world_size": 6}
    assert api.get("/get_world_size?include_dp=false").json() == {"world_size": 2}


def test_server_info_has_what_trainers_read(make_api):
    transfer = {"backend": "nccl"}
    room = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
    engine = EngineConfig(
        weight_transfer_config=transfer, logprobs_mode="processed_logprobs", **room
    )
    api = make_api(enable_rl=True, engine_config=engine)
    told = api.get("/server_info?config_format=json").json()["vllm_config"]
    assert told["weight_transfer_config"] == transfer
    assert told["lora_config"] == {"max_lora_rank": 8, "max_loras": 3}
    assert told["model_config"]["dtype"] == "torch.float32"
    assert told["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert told["parallel_config"]["data_parallel_size"] == 1
    assert isinstance(api.get("/server_info").json()["vllm_config"], str)


def test_server_info_keeps_secrets_and_places(make_api):
    engine = EngineConfig(
        prefix_hash_seed="secret", enable_lora=True, lora_modules=["one=/secret/one"],
        tokenizer="/secret/tokenizer",
    )  # fmt: skip
    told = make_api(enable_rl=True, engine_config=engine).get("/server_info").text
    assert "secret" not in told and "max_num_seqs" in told


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        ("/pause?mode=later", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/pause", {"clear_cache": [True]}, "clear_cache"),
        ("/pause", {"clear_cache": {}}, "clear_cache"),
        ("/sleep?level=3", None, "level"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/update_weights", {"update_info": 3}, "update_info"),
        ("/update_weight_version", {}, "new_version"),
        ("/abort_requests", {"request_ids": "all"}, "request_ids"),
        ("/weight_checker", {"action": "guess"}, "action"),
        ("/weight_checker", {"action": "compare"}, "baseline"),
        ("/weight_checker", {"action": "compare", "baseline": {"tensors": [1]}}, "baseline"),
        ("/collective_rpc", {"method": "eval", "kwargs": {"x": "1"}}, "method"),
        ("/collective_rpc", {"method": "skyrl_set_lora_receive_target"}, "method"),
        (
            "/collective_rpc",
            {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": 1}},
            "kwargs",
        ),
        ("/start_draft_weight_update", None, None),
        ("/fetch_weights", {"target_version": 1}, None),
    ],
)
def test_a_mistake_is_400_with_its_name_and_orders_nothing(api, engine, call, body, param):
    told = api.post(call, **({} if body is None else {"json": body}))
    assert (told.status_code, told.json()["error"]["param"]) == (400, param)
    assert engine.orders == []


@pytest.mark.parametrize("content", [b"{", b"[]", b'"text"', b"\xff"])
def test_a_body_that_is_no_object_is_400(api, content):
    told = api.post("/pause", content=content)
    assert told.status_code == 400 and told.json()["error"]["message"]


@pytest.mark.parametrize(("refused", "status"), [(True, 400), (False, 500)])
def test_what_the_engine_says_no_to_is_told_in_its_words(api, engine, refused, status):
    engine.order_fault = OrderFailed("no weight update is open", refused=refused)
    told = api.post("/update_weights", json={"update_info": {}})
    assert told.status_code == status
    assert told.json()["error"]["message"] == "no weight update is open"


def test_weights_are_compared_with_what_was_told_before(api, engine):
    engine.results = [{"tensors": {"a": "01", "b": "02"}}]
    told = api.post("/weight_checker", json={"action": "checksum"}).json()
    assert told["tensors"] == {"a": "01", "b": "02"} and told["checksum"] == f"{3:016x}"
    same = api.post("/weight_checker", json={"action": "compare", "baseline": told}).json()
    assert same == {"action": "compare", "success": True, "different": []}
    other = {"action": "compare", "baseline": {"a": "01", "b": "03"}}
    told = api.post("/weight_checker", json=other).json()
    assert told == {"action": "compare", "success": False, "different": ["b"]}


def test_engines_with_different_weights_are_not_alike(api, engine):
    engine.results = [{"tensors": {"a": "01"}}, {"tensors": {"a": "02"}}]
    assert not api.post("/weight_checker", json={"action": "checksum"}).json()["success"]


@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_without_enable_rl_there_is_no_control(make_api, path):
    method = "GET" if path in GETS else "POST"
    assert make_api().request(method, path).status_code == 404


@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_control_needs_the_admin_key_where_there_is_one(make_api, path):
    api = make_api(enable_rl=True, api_key=["user"], admin_api_key=["admin"])
    method = "GET" if path in GETS else "POST"
    assert api.request(method, path).status_code == 401
    user = {"Authorization": "Bearer user"}
    assert api.request(method, path, headers=user).status_code == 401
    admin = {"Authorization": "Bearer admin"}
    assert api.request(method, path, headers=admin).status_code != 401
    assert api.get("/v1/models", headers=admin).status_code == 401


def test_an_admin_key_alone_leaves_all_else_open(make_api):
    api = make_api(enable_rl=True, admin_api_key=["admin"])
    assert api.complete().status_code == 200 and api.post("/pause").status_code == 401


def test_a_foreign_page_in_a_browser_may_not_control(make_api, engine):
    api = make_api(engine, enable_rl=True, allowed_origins=["http://mine"])
    told = api.post("/pause", headers={"Origin": "http://theirs"})
    assert told.status_code == 403 and engine.orders == []
    assert api.post("/pause", headers={"Origin": "http://mine"}).status_code == 200


@pytest.mark.parametrize(
    "state",
    [
        EngineState(asleep=["kv_cache"]),
        EngineState(paused="abort"),
        EngineState(paused="wait"),
        EngineState(draining=True),
        EngineState(incomplete="a weight update failed"),
    ],
)
def test_no_one_is_served_while_the_engine_cannot(make_api, state):
    api = make_api(FakeEngine(state=state), enable_rl=True)
    told = api.complete()
    assert told.status_code == 503 and told.json()["error"]["code"] == "engine_paused"
    # What needs no engine goes on.
    assert api.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
    assert api.get("/v1/models").status_code == 200 and api.get("/health").status_code == 200
    ready = api.get("/ready")
    assert (ready.status_code, ready.json()["phase"]) == (503, "paused")


@pytest.mark.parametrize("state", [EngineState(paused="keep"), EngineState(updating=True)])
def test_during_a_pause_that_keeps_requests_queue(make_api, state):
    assert make_api(FakeEngine(state=state)).complete().status_code == 200
