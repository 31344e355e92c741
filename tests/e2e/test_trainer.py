"""A trainer drives a served model over HTTP and gloo: new weights, pauses and sleep, in traffic."""

import concurrent.futures
import threading
import time

import httpx
import pytest
from served import serve
from trainers import BUNDLED, perturbed, tensors_of

from limelight import LLM, SamplingParams
from limelight.rl.sender import SendFailed, WeightSender

TRANSFER = '{"backend": "gloo", "timeout": 20}'
# Two blocks and more begin alike.
BEGINNING = list(range(300, 340))
PROMPTS = [[5, 6, 7, 8], list(range(40, 90)), [*BEGINNING, 7, 7], [*BEGINNING, 9]]
LONG = 150
GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return perturbed(tmp_path_factory.mktemp("other") / "model")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--device", "cpu", "--enable-rl", "--weight-transfer-config", TRANSFER)
    plain = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with serve(tmp_path_factory.mktemp("log"), "flint-nano", *flags, *plain) as server:
        yield server


@pytest.fixture(scope="module")
def expected(other):
    """What fresh engines say with the bundled weights and with the others."""
    return {path: fresh(path) for path in (str(BUNDLED / "flint-nano"), str(other))}


def fresh(model):
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    with LLM(model=model, device="cpu", dtype="float32") as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params)]


def ask(server, ids, **sampling):
    body = {"token_ids": ids, "sampling_params": GREEDY | sampling}
    told = server.http.post("/inference/v1/generate", json=body)
    assert told.status_code == 200, told.text
    return told.json()["choices"][0]


def answers(server):
    return [ask(server, ids)["token_ids"] for ids in PROMPTS]


def order(server, call, body=None, *, status=200):
    told = server.http.post(call, **({} if body is None else {"json": body}))
    assert told.status_code == status, told.text
    return told.json()


def send(server, folder, **options):
    with WeightSender(server.url, backend="gloo", device="cpu", seconds=20, **options) as sender:
        sender.send(tensors_of(folder).items(), version=folder.name)


def test_new_weights_are_served_at_once_and_old_ones_again(server, other, expected):
    bundled = BUNDLED / "flint-nano"
    assert answers(server) == expected[str(bundled)]
    before = order(server, "/weight_checker", {"action": "checksum"})
    send(server, other)
    # The same prompts: what the cache has of them is of the old weights.
    assert answers(server) == expected[str(other)] != expected[str(bundled)]
    changed = order(server, "/weight_checker", {"action": "compare", "baseline": before})
    assert len(changed["different"]) == len(before["tensors"])
    [span] = ask(server, PROMPTS[0])["weight_versions"]
    assert span == {"version": "model", "start": 0, "end": 12}
    send(server, bundled, packed=False)
    assert answers(server) == expected[str(bundled)]
    assert order(server, "/weight_checker", {"action": "compare", "baseline": before})["success"]


@pytest.mark.slow
def test_a_wrong_shape_is_refused_in_seconds_and_the_next_sync_works(server, other, expected):
    tensors = tensors_of(other)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    began = time.monotonic()
    with WeightSender(server.url, backend="gloo", device="cpu", seconds=20) as sender:
        with pytest.raises(SendFailed, match=r"lm_head.weight: shape \[4095, 192\]"):
            sender.send(tensors.items())
        assert time.monotonic() - began < 5
    body = {"token_ids": [5], "sampling_params": GREEDY}
    told = server.http.post("/inference/v1/generate", json=body)
    assert told.status_code == 503 and "update of all weights" in told.json()["error"]["message"]
    send(server, other)
    assert answers(server) == expected[str(other)]


@pytest.mark.slow
def test_sleep_leaves_what_is_said_as_it_was(server):
    before = answers(server)
    assert order(server, "/sleep?level=1") == {"status": "sleeping", "level": 1}
    told = server.http.post("/inference/v1/generate", json={"token_ids": [5]})
    assert told.status_code == 503 and "/wake_up" in told.json()["error"]["message"]
    assert order(server, "/wake_up?tags=weights")["status"] == "sleeping"
    assert order(server, "/wake_up?tags=kv_cache")["status"] == "awake"
    assert answers(server) == before


@pytest.mark.slow
def test_after_sleep_level_2_weights_have_to_come_first(server, other, expected):
    order(server, "/sleep?level=2")
    order(server, "/wake_up?tags=weights")
    send(server, other, buffer_bytes=100_000)
    order(server, "/wake_up?tags=kv_cache")
    assert answers(server) == expected[str(other)]
    order(server, "/sleep?level=2")
    order(server, "/wake_up")
    told = server.http.post("/inference/v1/generate", json={"token_ids": [5]})
    assert told.status_code == 503 and "discarded" in told.json()["error"]["message"]
    send(server, other)
    assert answers(server) == expected[str(other)]


@pytest.fixture
def traffic(server):
    """Six long greedy requests under way, each as a future of its choice."""
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, server, [i, *BEGINNING], max_tokens=LONG) for i in range(6)]
        wait_for(lambda: server.gauge("num_requests_running") == 6)
        yield asked


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_pause_that_keeps_freezes_what_runs_and_queues_what_comes(server, traffic):
    order(server, "/pause?mode=keep&clear_cache=false")
    order(server, "/pause?mode=keep&clear_cache=false")
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    assert not any(future.done() for future in traffic)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        later = pool.submit(ask, server, [9, 9])
        order(server, "/reset_prefix_cache", {"reset_running_requests": True})
        order(server, "/resume")
        assert later.result(20)["finish_reason"] == "length"
    done = [future.result(20) for future in traffic]
    assert [len(choice["token_ids"]) for choice in done] == [LONG] * 6
    assert ask(server, [0, *BEGINNING], max_tokens=LONG)["token_ids"] == done[0]["token_ids"]


@pytest.mark.slow
def test_a_pause_that_aborts_ends_requests_with_what_they_have(server, traffic):
    order(server, "/pause")
    for future in traffic:
        choice = future.result(5)
        assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) < LONG
    told = server.http.post("/inference/v1/generate", json={"token_ids": [5]})
    assert told.status_code == 503 and "/resume" in told.json()["error"]["message"]
    order(server, "/resume")
    assert ask(server, [5])["finish_reason"] == "length"


@pytest.mark.slow
def test_a_pause_that_waits_answers_when_all_have_ended(server, traffic):
    order(server, "/pause?mode=wait")
    assert all(future.result(0.5)["finish_reason"] == "length" for future in traffic)
    order(server, "/resume")


@pytest.mark.slow
def test_requests_are_aborted_by_their_ids(server):
    def start(name):
        body = {"token_ids": [5], "request_id": name}
        body["sampling_params"] = GREEDY | {"max_tokens": LONG}
        return httpx.post(server.url + "/inference/v1/generate", json=body, timeout=30).json()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(start, "one"), pool.submit(start, "two")
        wait_for(lambda: server.gauge("num_requests_running") == 2)
        assert order(server, "/abort_requests", {"request_ids": ["one"]})["aborted"] == 1
        assert one.result(5)["choices"][0]["finish_reason"] == "abort"
        assert two.result(20)["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_requests_go_on_with_new_weights_in_the_middle_of_their_answers(
    server, other, expected, traffic
):
    order(server, "/pause?mode=keep&clear_cache=false")
    order(server, "/reset_prefix_cache", {"reset_running_requests": True})
    sending = threading.Thread(target=send, args=(server, BUNDLED / "flint-nano"))
    sending.start()
    sending.join(20)
    order(server, "/resume")
    for future in traffic:
        spans = future.result(20)["weight_versions"]
        assert [span["version"] for span in spans] == ["model", "flint-nano"]
        assert spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == LONG
    assert answers(server) == expected[str(BUNDLED / "flint-nano")]


@pytest.mark.slow
def test_the_calls_of_skyrl_for_engines_on_other_gpus(server, other, expected, traffic):
    """In its order: pause, forget, update, resume; requests under way go on with new weights."""
    assert order(server, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    reset = order(server, "/reset_prefix_cache", {"reset_running_requests": True})
    assert reset == {"success": True}
    send(server, other)
    assert order(server, "/resume") == {"status": "resumed"}
    assert all(future.result(20)["finish_reason"] == "length" for future in traffic)
    assert answers(server) == expected[str(other)]


@pytest.mark.slow
def test_the_calls_of_skyrl_for_engines_on_the_trainers_gpus(server, other, expected):
    assert order(server, "/sleep?level=2") == {"status": "sleeping", "level": 2}
    told = order(server, "/wake_up?tags=weights")
    assert told == {"status": "sleeping", "tags": ["weights"]}
    send(server, other)
    told = order(server, "/wake_up?tags=kv_cache")
    assert told == {"status": "awake", "tags": ["kv_cache"]}
    assert answers(server) == expected[str(other)]


@pytest.mark.slow
def test_the_calls_of_skyrl_around_an_update_that_needs_memory(server, other, expected, traffic):
    def call(method, **kwargs):
        return order(server, "/collective_rpc", {"method": method, "kwargs": kwargs})

    order(server, "/pause?mode=keep&clear_cache=false")
    assert call("skyrl_sleep_for_weight_sync", offload_kv=True) == {"results": [None]}
    call("skyrl_wake_for_weight_sync", tags=["weights"])
    send(server, other)
    call("skyrl_wake_for_weight_sync", tags=["kv_cache"])
    order(server, "/resume")
    assert all(future.result(20)["finish_reason"] == "length" for future in traffic)
    assert answers(server) == expected[str(other)]


@pytest.mark.slow
def test_all_engines_and_ranks_of_a_server_get_new_weights(tmp_path, other, expected):
    flags = ("--device", "cpu", "--enable-rl", "--weight-transfer-config", TRANSFER)
    divided = ("-dp", "2", "-tp", "2", "--speculative-config", '{"num_speculative_tokens": 0}')
    with serve(tmp_path, "flint-nano", *flags, *divided) as server:
        assert server.http.get("/get_world_size").json() == {"world_size": 4}
        send(server, other)
        assert order(server, "/weight_checker", {"action": "checksum"})["success"]
        for rank in "01":
            headers = {"X-data-parallel-rank": rank}
            body = {"token_ids": PROMPTS[1], "sampling_params": GREEDY}
            told = server.http.post("/inference/v1/generate", json=body, headers=headers)
            assert told.json()["choices"][0]["token_ids"] == expected[str(other)][1]
        order(server, "/sleep?level=1")
        order(server, "/wake_up")
        assert answers(server) == expected[str(other)]
