import json

import pytest

from limelight import cli
from limelight.config import EngineConfig
from limelight.inspection import inspect

SHAPE = {
    "architectures": ["FlintForCausalLM"],
    "dtype": "float32",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "sliding_window": 17,
    "max_position_embeddings": 640,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2 + ["full_attention"],
    "mlp_only_layers": [0, 1],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def test_parameters_are_counted_by_kind(folder):
    report = inspect(EngineConfig(model=folder, device="cpu"))
    kinds = {kind["name"]: kind["parameters"] for kind in report["weights"]}
    assert kinds["embedding"] == kinds["LM head"] == 99 * 32
    assert kinds["routed experts"] == 3 * 6 * 3 * 16 * 32
    assert kinds["shared experts"] == 3 * 3 * 24 * 32
    assert kinds["dense feed-forward"] == 2 * 3 * 48 * 32
    assert kinds["router"] == 3 * 6 * 32
    assert report["parameters"] == sum(kinds.values())
    assert report["memory"]["weights"] == 4 * report["parameters"]
    assert report["layers"] == {"all": 5, "sparse": 3, "experts": 6, "experts per token": 2}


def test_cache_bytes_are_told_by_kind_of_layer(folder):
    report = inspect(EngineConfig(model=folder, device="cpu"))
    a_layer = 2 * 2 * 8 * 4  # keys and values, two heads of eight FP32 numbers
    assert report["attention"] == [
        {"kind": "full attention", "layers": 3, "kv_bytes_per_token": 3 * a_layer},
        {"kind": "window of 17", "layers": 2, "kv_bytes_per_token": 2 * a_layer},
    ]


def test_it_says_whether_the_model_fits_and_why_not(folder):
    report = inspect(EngineConfig(model=folder, device="cpu"))
    assert report["fits"] and report["fault"] is None
    assert report["sequences"]["640"] >= 1
    small = inspect(EngineConfig(model=folder, device="cpu", kv_cache_memory_bytes=20_000))
    assert not small["fits"]
    assert "640" in small["fault"]


def test_the_command_prints_tables_or_json(folder, capsys):
    assert cli.main(["inspect", folder, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "FlintForCausalLM" in out and "window of 17" in out and "It fits." in out
    assert cli.main(["inspect", folder, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "FlintForCausalLM"
