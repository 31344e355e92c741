"""/metrics: the names that dashboards read, and what makes them move."""

import re

import pytest
from server_fakes import FakeEngine, FakeForm, ids

from limelight.orders import EngineState

NAMES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc", "vllm:engine_sleep_state", "vllm:cache_config_info",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_by_source_total", "vllm:request_success_total",
    "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:admission_rejections_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum", "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket", "vllm:iteration_tokens_total_bucket", "http_requests_total",
    "http_request_duration_seconds_bucket",
)  # fmt: skip


def samples(api) -> dict[str, float]:
    answer = api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = re.findall(r"^([^#\s]+?(?:\{[^}]*\})?) (\S+)$", answer.text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def value(api, name: str, **labels: str) -> float:
    wanted = {f'{key}="{text}"' for key, text in labels.items()}
    matching = [
        number
        for sample, number in samples(api).items()
        if sample.partition("{")[0] == name and all(label in sample for label in wanted)
    ]
    assert len(matching) == 1, (name, labels)
    return matching[0]


def test_every_name_is_there_with_the_model_s_name(make_api):
    engine = FakeEngine()
    api = make_api(engine, served_model_name=["shown", "other"])
    api.chat()
    engine.phase = "loading"
    api.chat()
    engine.phase = "ready"
    found = samples(api)
    names = {sample.partition("{")[0] for sample in found}
    assert [name for name in NAMES if name not in names] == []
    labelled = [sample for sample in found if sample.startswith("vllm:")]
    assert all('model_name="shown"' in sample and 'engine="0"' in sample for sample in labelled)


@pytest.mark.parametrize(
    "state, present",
    [
        ({}, "awake"),
        ({"asleep": ["weights", "kv_cache"]}, "weights_offloaded"),
        ({"asleep": ["weights"], "incomplete": "discarded"}, "discard_all"),
        ({"incomplete": "an update failed"}, "awake"),
    ],
    ids=str,
)
def test_an_engine_that_sleeps_does_not_say_that_it_is_awake(make_api, state, present):
    api = make_api(FakeEngine(state=EngineState(**state)))
    for name in ("awake", "weights_offloaded", "discard_all"):
        assert value(api, "vllm:engine_sleep_state", sleep_state=name) == (name == present)


def test_tokens_and_endings_are_counted(make_api):
    api = make_api()
    api.complete("abcdefgh", max_tokens=3, n=2)
    api.complete("abcdefgh", max_tokens=30)
    assert value(api, "vllm:prompt_tokens_total") == 24
    assert value(api, "vllm:prompt_tokens_cached_total") == 15
    assert value(api, "vllm:prompt_tokens_by_source_total", source="local_compute") == 9
    assert value(api, "vllm:generation_tokens_total") == 3 + 3 + 14
    assert value(api, "vllm:request_success_total", finished_reason="length") == 2
    assert value(api, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(api, "vllm:time_to_first_token_seconds_count") == 3
    assert value(api, "vllm:inter_token_latency_seconds_count") == 2 + 2 + 13
    assert value(api, "vllm:request_params_n_count") == 2
    assert value(api, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.003)


def test_the_engine_s_own_figures_are_read_at_each_scrape(api):
    assert value(api, "vllm:num_requests_running") == 3
    assert value(api, "vllm:num_requests_waiting") == 2
    assert value(api, "vllm:kv_cache_usage_perc") == 0.25
    assert value(api, "vllm:iteration_tokens_total_sum") == 9
    assert value(api, "vllm:cache_config_info", num_gpu_blocks="64") == 1


def test_http_requests_count_by_route_and_unknown_paths_together(api):
    api.chat()
    api.chat(n=0)
    for path in ("/a", "/b", "/health", "/metrics"):
        api.get(path)
    chat = {"handler": "/v1/chat/completions", "method": "POST"}
    assert value(api, "http_requests_total", **chat, status="2xx") == 1
    assert value(api, "http_requests_total", **chat, status="4xx") == 1
    assert value(api, "http_requests_total", handler="none") == 2
    handlers = {sample for sample in samples(api) if sample.startswith("http_requests_total")}
    assert len(handlers) == 3, "probes are not counted"


def test_a_stop_text_counts_as_a_stop(make_api):
    api = make_api(FakeEngine(lambda request: ids("one two three")))
    api.complete(stop=["two"])
    assert value(api, "vllm:request_success_total", finished_reason="stop") == 1


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        ("/v1/chat/completions", "chat_completions", {"n": 2, "temperature": 1}),
        ("/v1/responses", "responses", {}),
        ("/v1/messages", "other", {}),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_each_choice_that_is_read_for_calls_counts_once(make_api, path, kind, fields, stream):
    api = make_api(
        FakeEngine(lambda request: ids("A(why)B[now]C")), form=FakeForm(), reasoning_parser="glm47",
        tool_call_parser="glm47", enable_auto_tool_choice=True,
    )  # fmt: skip
    ask = {"messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 60}
    tool = {"type": "function", "name": "now"}
    if kind != "responses":
        tool = {"type": "function", "function": {"name": "now"}}
    if kind == "other":
        tool = {"name": "now", "input_schema": {"type": "object"}}
    mode = "streaming" if stream else "non_streaming"
    labels = {"mode": mode, "request_type": kind}
    for limit in (60, 3):
        limits = {"max_tokens": limit, "max_output_tokens": limit}
        api.post(path, json=ask | limits | fields | {"tools": [tool], "stream": stream})
    api.post(path, json=ask | {"stream": stream})
    count = fields.get("n", 1)
    name = "vllm:tool_call_parser_invocations_total"
    assert value(api, name, **labels, outcome="tool_call") == count
    assert value(api, name, **labels, outcome="no_tool_call") == count
