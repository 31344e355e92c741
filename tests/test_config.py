import pytest

from limelight.config import ENVIRONMENT, EngineConfig, ServerConfig, environment

WRONG = [
    (EngineConfig, "device", "tpu"),
    (EngineConfig, "dtype", "fp4"),
    (EngineConfig, "max_model_len", 0),
    (EngineConfig, "max_num_seqs", 0),
    (EngineConfig, "block_size", -1),
    (EngineConfig, "block_size", 1.5),
    (EngineConfig, "gpu_memory_utilization", 0.0),
    (EngineConfig, "gpu_memory_utilization", 1.01),
    (EngineConfig, "tensor_parallel_size", 2),
    (ServerConfig, "port", 65536),
    (ServerConfig, "port", -1),
    (ServerConfig, "max_num_queued_reqs", -1),
    (ServerConfig, "max_logprobs", -2),
    (ServerConfig, "shutdown_timeout", -0.1),
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
