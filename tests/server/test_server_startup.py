"""What a start reads before the model: sampling defaults, addresses, the example."""

import json
import socket
from pathlib import Path

import pytest

from limelight.config import EngineConfig, ServerConfig
from limelight.server.startup import address, example, listen, load_texts, sampling_defaults


def write_defaults(folder: Path, **values: object) -> EngineConfig:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return EngineConfig(model=str(folder))


def test_the_model_s_sampling_defaults_are_read(tmp_path):
    engine = write_defaults(tmp_path, temperature=0.7, top_k=20, eos_token_id=3, top_p=None)
    assert sampling_defaults(engine, "auto") == {"temperature": 0.7, "top_k": 20}
    assert sampling_defaults(engine, "vllm") == {}
    assert sampling_defaults(EngineConfig(), str(tmp_path)) == {"temperature": 0.7, "top_k": 20}


def test_a_model_without_defaults_is_neutral(tmp_path):
    assert sampling_defaults(EngineConfig(model=str(tmp_path)), "auto") == {}


@pytest.mark.parametrize(("name", "value"), [("temperature", 9), ("top_p", "high"), ("top_k", 1.5)])
def test_impossible_defaults_name_the_file(tmp_path, name, value):
    engine = write_defaults(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=rf"generation_config.json: {name}"):
        sampling_defaults(engine, "auto")


def test_a_model_without_a_tokenizer_is_served_by_ids(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    texts = load_texts(EngineConfig(model=str(tmp_path)), ServerConfig())
    assert texts.tokenizer is None and texts.template is None
    assert '"prompt": [0]' in example("http://x", "m", texts, ServerConfig())


def test_an_open_host_without_a_key_is_warned_of(tmp_path, caplog):
    load_texts(EngineConfig(model=str(tmp_path)), ServerConfig(host="0.0.0.0"))
    assert "no --api-key" in caplog.text
    caplog.clear()
    load_texts(EngineConfig(model=str(tmp_path)), ServerConfig(host="0.0.0.0", api_key=["k"]))
    assert "no --api-key" not in caplog.text


def test_the_address_is_one_that_can_be_visited():
    with listen("0.0.0.0", 0) as sock:
        port = sock.getsockname()[1]
        assert address(sock) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass
