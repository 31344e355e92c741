"""The command on tiny random checkpoints: what it writes, and what it says of it."""

import json
import shutil
from fnmatch import fnmatch

import gguf
import numpy as np
import pytest
import torch
from quantized import relative, run, stored, to_gguf, to_modelopt, values
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import write_checkpoint

from limelight import cli, quantize
from limelight.conversion import shards
from limelight.quant.declared import read_declared
from limelight.rl.mxfp8 import coded


def test_the_formats_of_the_command_line_are_those_there_are():
    assert tuple(quantize.FORMATS) == cli.FORMATS


def test_a_gguf_has_all_tensors_by_their_names_there(made, tmp_path):
    _, tensors = to_gguf(made["wide"], tmp_path / "a.gguf")
    common = "attn_norm ffn_norm attn_q_norm attn_k_norm attn_sinks".split()
    dense = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split()
    sparse = dense[:4] + [
        f"ffn_{part}_{of}" for part in ("gate", "up", "down") for of in ("shexp", "exps")
    ]
    types = {"token_embd.weight": "F32", "output_norm.weight": "F32"}
    types |= {"output.weight": "NVFP4", "output.scale": "F32"}
    for i in range(7):
        types |= {f"blk.{i}.{name}.weight": "F32" for name in common}
        for name in sparse if i > 1 else dense:
            types |= {f"blk.{i}.{name}.weight": "NVFP4", f"blk.{i}.{name}.scale": "F32"}
        if i > 1:
            types[f"blk.{i}.ffn_gate_inp.weight"] = "F32"
    assert {name: tensor.tensor_type.name for name, tensor in tensors.items()} == types
    assert list(tensors["blk.3.ffn_down_exps.weight"].shape) == [64, 64, 8]
    assert list(tensors["blk.3.ffn_down_exps.scale"].shape) == [8]
    assert list(tensors["blk.3.attn_q.scale"].shape) == [1]


def test_a_gguf_says_what_it_is(made, tmp_path):
    to_gguf(made["wide"], tmp_path / "a.gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["general.architecture"].contents() == "flint"
    assert fields["flint.block_count"].contents() == 7
    assert fields["flint.attention.head_count_kv"].contents() == 2
    assert fields["flint.attention.sliding_window"].contents() == 17


def test_the_weights_of_a_gguf_are_near_to_those_they_were(made, tmp_path):
    rows, tensors = to_gguf(made["wide"], tmp_path / "a.gguf")
    weights = stored(made["wide"])

    def held(name):
        tensor = tensors[f"{name}.weight"]
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        scale = tensors[f"{name}.scale"].data.reshape(-1, *[1] * (decoded.ndim - 1))
        return torch.from_numpy(decoded * np.squeeze(scale))

    pairs = {"output": "lm_head", "blk.4.attn_v": "model.layers.4.self_attn.v_proj"}
    pairs |= {"blk.1.ffn_down": "model.layers.1.mlp.down_proj"}
    pairs |= {"blk.5.ffn_up_shexp": "model.layers.5.mlp.shared_expert.up_proj"}
    for name, source in pairs.items():
        assert relative(held(name), weights[f"{source}.weight"]) < 0.09
    decoded = gguf.quants.dequantize(
        tensors["blk.3.ffn_gate_exps.weight"].data, gguf.GGMLQuantizationType.NVFP4
    )
    for e in range(8):
        weight = weights[f"model.layers.3.mlp.experts.{e}.gate_proj.weight"]
        expert = torch.from_numpy(decoded[e] * tensors["blk.3.ffn_gate_exps.scale"].data[e])
        assert relative(expert, weight) < 0.09
    [head] = [row for row in rows if row["kind"] == "LM head"]
    said = relative(held("output"), weights["lm_head.weight"])
    assert head["relative_rms_error"] == pytest.approx(said, rel=1e-4)


def test_what_is_kept_in_a_gguf_has_its_values(made, tmp_path):
    _, tensors = to_gguf(made["wide"], tmp_path / "a.gguf")
    weights = stored(made["wide"])
    names = {
        "token_embd": "model.embed_tokens.weight",
        "blk.6.attn_sinks": "model.layers.6.self_attn.softmax_offset",
        "blk.6.ffn_gate_inp": "model.layers.6.mlp.gate.weight",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm.weight",
    }
    for name, source in names.items():
        np.testing.assert_array_equal(tensors[f"{name}.weight"].data, weights[source].numpy())


def test_rows_that_gguf_cannot_cut_into_blocks_keep_their_type_and_the_report_says_so(
    made, tmp_path
):
    rows, tensors = to_gguf(made["odd"], tmp_path / "a.gguf")
    assert tensors["blk.0.attn_output.weight"].tensor_type.name == "NVFP4"
    for name in ("blk.0.attn_q", "blk.3.ffn_down_exps", "output"):
        assert tensors[f"{name}.weight"].tensor_type.name == "F32"
        assert f"{name}.scale" not in tensors
    attention = {row["format"]: row["tensors"] for row in rows if row["kind"] == "attention"}
    assert attention == {"NVFP4": 7, "F32": 21}


def test_a_bundled_model_in_bf16_keeps_its_embedding_in_bf16(tmp_path):
    rows, tensors = to_gguf("flint-nano", tmp_path / "a.gguf")
    assert tensors["token_embd.weight"].tensor_type.name == "BF16"
    assert {row["kind"] for row in rows if row["format"] == "NVFP4"} == {
        "attention", "dense feed-forward", "shared experts", "routed experts", "LM head"
    }  # fmt: skip
    errors = [row["relative_rms_error"] for row in rows if row["format"] == "NVFP4"]
    assert all(0.07 < error < 0.09 for error in errors)


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_a_modelopt_folder_has_three_tensors_for_one(made, tmp_path, family):
    rows, tensors = to_modelopt(made[family], tmp_path / "a")
    weights = stored(made[family])
    every = "self_attn experts shared_expert .mlp.gate_proj .mlp.up_proj .mlp.down_proj".split()
    chosen = every if family == "flint" else [".experts."]
    matrices = {
        name
        for name in weights
        if name.endswith("_proj.weight") and any(word in name for word in chosen)
    }
    expected = set(weights) | {
        f"{name}{end}" for name in matrices for end in ("_scale", "_scale_2")
    }
    assert set(tensors) == expected
    for name, weight in weights.items():
        if name in matrices:
            assert tensors[name].dtype == torch.uint8
            assert tensors[f"{name}_scale"].dtype == torch.float8_e4m3fn
            assert tensors[f"{name}_scale_2"].shape == ()
            assert relative(values(tensors, name), weight) < 0.09
        else:
            assert torch.equal(tensors[name], weight) and tensors[name].dtype == weight.dtype
    quantized = sum(row["tensors"] for row in rows if row["format"] == "NVFP4")
    assert quantized == len(matrices)
    assert sum(row["bytes_before"] for row in rows) == sum(w.nbytes for w in weights.values())
    assert sum(row["bytes_after"] for row in rows) == sum(t.nbytes for t in tensors.values())


def test_matrices_that_engines_join_have_one_global_scale(made, tmp_path):
    _, tensors = to_modelopt(made["flint"], tmp_path / "a")

    def scales(prefix, *parts):
        return {float(tensors[f"{prefix}.{part}_proj.weight_scale_2"]) for part in parts}

    assert len(scales("model.layers.2.self_attn", "q", "k", "v")) == 1
    for mlp in ("layers.0.mlp", "layers.2.mlp.shared_expert", "layers.2.mlp.experts.5"):
        assert len(scales(f"model.{mlp}", "gate", "up")) == 1
        assert len(scales(f"model.{mlp}", "gate", "down")) == 2
    assert len({float(scale) for name, scale in tensors.items() if name.endswith("_scale_2")}) > 50


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_the_config_tells_what_is_quantized(made, tmp_path, family):
    _, tensors = to_modelopt(made[family], tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    older = json.loads((tmp_path / "a" / "hf_quant_config.json").read_text())["quantization"]
    quantization = config.pop("quantization_config")
    assert config == json.loads((made[family] / "config.json").read_text())
    assert quantization["quant_method"] == "modelopt"
    assert quantization["quant_algo"] == older["quant_algo"] == "W4A16_NVFP4"
    assert quantization["group_size"] == older["group_size"] == 16
    assert quantization["ignore"] == older["exclude_modules"]
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and tensor.ndim == 2:
            kept = any(fnmatch(module, pattern) for pattern in quantization["ignore"])
            assert kept == (tensor.dtype != torch.uint8), module


def test_tokenizer_and_template_go_along_and_old_weights_do_not(made, tmp_path):
    to_modelopt(made["flint"], tmp_path / "a")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "config.json", "hf_quant_config.json", "generation_config.json", "tokenizer.json",
        "chat_template.jinja", "model.safetensors",
    }  # fmt: skip


def test_many_bytes_are_split_into_files_with_an_index(made, tmp_path, monkeypatch):
    _, whole = to_modelopt(made["flint"], tmp_path / "whole")
    monkeypatch.setattr(shards, "SHARD_BYTES", 50_000)
    _, tensors = to_modelopt(made["flint"], tmp_path / "split")
    files = sorted(path.name for path in (tmp_path / "split").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "split" / name).stat().st_size < 80_000 for name in files)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "split" / file, "pt") as opened:
            assert opened.get_slice(name).get_shape() == list(whole[name].shape)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensors[name].float(), tensor.float())


def test_fused_experts_and_names_of_transformers_are_read_as_well(made, tmp_path):
    source = shutil.copytree(made["wide"], tmp_path / "source")
    weights = stored(source)
    for i in range(2, 7):
        prefix = f"model.layers.{i}.mlp.experts"
        experts = {
            part: torch.stack([weights.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        }
        weights[f"{prefix}.gate_up_proj"] = torch.cat((experts["gate"], experts["up"]), dim=1)
        weights[f"{prefix}.down_proj"] = experts["down"]
    for i in range(7):
        name = f"model.layers.{i}.self_attn."
        weights[f"{name}sinks"] = weights.pop(f"{name}softmax_offset")
    save_file(weights, source / "model.safetensors")
    to_gguf(source, tmp_path / "fused.gguf")
    to_gguf(made["wide"], tmp_path / "single.gguf")
    assert (tmp_path / "fused.gguf").read_bytes() == (tmp_path / "single.gguf").read_bytes()


def test_the_command_prints_a_table_and_says_what_it_lacks(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    argv = ["quantize", str(made["flint"]), str(tmp_path / "a"), "--device", "cpu"]
    assert cli.main(argv) == 2
    assert "gguf-nvfp4, modelopt-nvfp4" in capsys.readouterr().err
    assert cli.main([*argv, "--format", "modelopt-nvfp4"]) == 0
    printed = capsys.readouterr().out
    assert "routed experts" in printed and "NVFP4" in printed and "%" in printed
    assert cli.main([*argv, "--format", "modelopt-nvfp4"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_a_folder_in_mxfp8_is_what_an_engine_makes_of_the_plain_one(tmp_path, family):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    shared = {"shared_expert_intermediate_size": 64} if family == "flint" else {}
    write_checkpoint(tmp_path / "plain", family, **sizes, **shared, num_hidden_layers=4)
    rows = run(tmp_path / "plain", tmp_path / "a", format="mxfp8")
    expected = dict(coded(stored(tmp_path / "plain").items()))
    found = stored(tmp_path / "a")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    errors = [row["relative_rms_error"] for row in rows if row["format"] == "MXFP8"]
    assert len(errors) > 2 and all(0.01 < error < 0.04 for error in errors)
    declared = read_declared(tmp_path / "a")
    for name in expected:
        if f"{name}_scale" in expected:
            assert declared.packing(name) == "MXFP8"
    assert declared.packing("model.layers.3.mlp.gate.weight") is None
