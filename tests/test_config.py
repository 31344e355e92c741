import argparse

import pytest

from limelight.config import EngineConfig, ServerConfig
from limelight.flags import config_from
from limelight.settings import ENVIRONMENT, environment

WRONG = [
    (EngineConfig, "device", "tpu"),
    (EngineConfig, "dtype", "fp4"),
    (EngineConfig, "max_model_len", 0),
    (EngineConfig, "max_num_seqs", 0),
    (EngineConfig, "max_num_seqs", True),
    (EngineConfig, "block_size", -1),
    (EngineConfig, "block_size", 1.5),
    (EngineConfig, "gpu_memory_utilization", 0.0),
    (EngineConfig, "gpu_memory_utilization", 1.01),
    (EngineConfig, "tensor_parallel_size", 0),
    (ServerConfig, "port", 65536),
    (ServerConfig, "port", -1),
    (ServerConfig, "max_num_queued_reqs", -1),
    (ServerConfig, "max_logprobs", -2),
    (ServerConfig, "shutdown_timeout", -0.1),
    (ServerConfig, "stream_interval", 0),
    (ServerConfig, "sse_keep_alive_interval", -1.0),
    (ServerConfig, "sse_keep_alive_interval", float("nan")),
    (ServerConfig, "served_model_name", [""]),
    (ServerConfig, "tool_strict_level", "none"),
]


@pytest.mark.parametrize(("config", "name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(config, name, value):
    with pytest.raises(ValueError, match=name):
        config(**{name: value})


def test_a_config_does_not_change():
    with pytest.raises(AttributeError):
        EngineConfig().model = "other"


def test_the_defaults_run_the_bundled_model_for_this_machine_alone():
    assert EngineConfig().model == "flint-nano"
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig().api_key is None


def test_our_environment_variable_goes_before_another_spelling(monkeypatch):
    for key in ENVIRONMENT["api_key"]:
        monkeypatch.delenv(key, raising=False)
    assert environment("api_key") is None
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert environment("api_key") == "theirs"
    monkeypatch.setenv("LIMELIGHT_API_KEY", "ours")
    assert environment("api_key") == "ours"
    assert environment("port") is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("structured_outputs_config", {"engine": "x"}, "no key 'engine'; it has backend"),
        ("structured_outputs_config", {"backend": "mine"}, 'backend must be one of "auto"'),
        ("structured_outputs_config", {"enable_in_reasoning": True}, "must be one of false"),
        ("structured_outputs_config", {"disable_any_whitespace": 1}, "must be one of true, false"),
        ("reasoning_config", {"start": "<t>"}, "no key 'start'; it has reasoning_start_str"),
        ("reasoning_config", {"reasoning_start_str": ""}, "a text that is not empty"),
        ("reasoning_config", {"reasoning_start_str": "<t>"}, "needs reasoning_end_str"),
        ("reasoning_config", {"reasoning_end_str": "</t>"}, "needs reasoning_start_str"),
    ],
    ids=str,
)
def test_a_wrong_key_of_a_json_flag_is_named(name, value, words):
    with pytest.raises(ValueError, match=words):
        ServerConfig(**{name: value})


def test_json_flags_take_what_they_know():
    ServerConfig(structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True})
    ServerConfig(reasoning_config={"reasoning_start_str": "<t>", "reasoning_end_str": "</t>"})
    ServerConfig(reasoning_parser="glm47", reasoning_config={"reasoning_end_str": "</think>"})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "0", False),
        ("LIMELIGHT_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "false", False),
        ("LIMELIGHT_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "True", True),
        ("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0", False),
        ("VLLM_ENFORCE_STRICT_TOOL_CALLING", "1", True),
    ],
)
def test_switches_can_come_from_the_environment(monkeypatch, key, text, value):
    name = key.partition("_")[2].lower()
    monkeypatch.setenv(key, text)
    config = config_from(argparse.Namespace(), ServerConfig)
    assert getattr(config, name) is value
    monkeypatch.setenv(key, "perhaps")
    with pytest.raises(ValueError, match=key):
        config_from(argparse.Namespace(), ServerConfig)
    assert getattr(config_from(argparse.Namespace(**{name: True}), ServerConfig), name) is True


def test_a_drafter_cannot_be_divided_otherwise_than_its_model():
    drafter = {"model": "flint-nano-dflash2", "draft_tensor_parallel_size": 2}
    EngineConfig(tensor_parallel_size=2, speculative_config=drafter)
    for size in (1, 4):
        with pytest.raises(ValueError, match="draft_tensor_parallel_size 2"):
            EngineConfig(tensor_parallel_size=size, speculative_config=drafter)


def test_batch_invariance_is_refused_where_it_cannot_be_promised():
    assert EngineConfig(batch_invariant=True, tensor_parallel_size=2).batch_invariant
    with pytest.raises(ValueError, match="at most 2 ranks"):
        EngineConfig(batch_invariant=True, tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "mpi"}, "backend must be"), ({"world": 2}, "no key 'world'"),
        ({"backend": "ipc"}, "--enable-pickled-ipc-handles"),
        *(({"timeout": seconds}, "number of seconds") for seconds in (0, -1, "5", True, 1e9)),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_sent_in_a_way_and_a_time_that_there_are(given, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(weight_transfer_config=given)
