"""Checkpoints of every form load to the same model; a faulty one is refused by file and tensor."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, prompts, request, run, start, write_checkpoint

from limelight.models.layers import Placement
from limelight.models.loader import load_model, read_config
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress

SINGLE = Placement(Mesh.single(), torch.float32, torch.device("cpu"))
MODEL = "model.safetensors"


def load(folder, place=SINGLE, **options):
    return load_model(folder, place, progress=Progress(quiet=True), **options)


def rewrite(folder, change):
    """Apply `change` to the dictionary of tensors of a checkpoint."""
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file(tensors, folder / MODEL)


def refusal(folder) -> str:
    with pytest.raises(ValueError) as caught:
        load(folder)
    return str(caught.value)


@pytest.fixture
def flint(tmp_path):
    write_checkpoint(tmp_path, "flint")
    return tmp_path


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_load_like_single_ones(tmp_path, family):
    write_checkpoint(tmp_path, family)
    before = load(tmp_path)

    def fuse(tensors):
        names = sorted(name for name in tensors if ".mlp.experts." in name)
        heads = {re.match(r".*\.mlp\.experts", name)[0] for name in names}
        for head in heads:
            parts = {
                kind: [tensors.pop(f"{head}.{e}.{kind}_proj.weight") for e in range(8)]
                for kind in ("gate", "up", "down")
            }
            pairs = zip(parts["gate"], parts["up"], strict=True)
            tensors[f"{head}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[f"{head}.down_proj"] = torch.stack(parts["down"])

    rewrite(tmp_path, fuse)
    assert same(before, load(tmp_path))


def test_shards_load_like_a_single_file(flint):
    before = load(flint)
    tensors = load_file(flint / MODEL)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, flint / file)
        weight_map |= dict.fromkeys(part, file)
    (flint / MODEL).unlink()
    (flint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(before, load(flint))
    (flint / "model-1.safetensors").unlink()
    assert "model-1.safetensors: no such file" in refusal(flint)


def test_both_names_of_the_sinks_are_known(flint):
    before = load(flint)
    name = "model.layers.3.self_attn.softmax_offset"
    rewrite(flint, lambda t: t.update({name.replace("softmax_offset", "sinks"): t.pop(name)}))
    assert same(before, load(flint))


def test_older_config_spellings_mean_the_same(flint):
    config = json.loads((flint / "config.json").read_text())
    _, before = read_config(flint)
    types = config.pop("layer_types")
    config["no_rope_layer_indices"] = [i for i, t in enumerate(types) if t == "full_attention"]
    config["use_sliding_window"] = True
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    (flint / "config.json").write_text(json.dumps(config))
    assert read_config(flint)[1] == before


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_and_sinks_stay_fp32_in_a_bf16_model(tmp_path, family):
    write_checkpoint(tmp_path, family)
    rewrite(tmp_path, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))
    model = load(tmp_path, Placement(Mesh.single(), torch.bfloat16, torch.device("cpu")))
    exact = [x for name, x in model.targets.items() if re.search(r"gate\.|softmax_offset", name)]
    routers = [target.into for target in exact if target.into.shape == target.shape]
    assert routers and all(tensor.dtype == torch.float32 for tensor in routers)
    assert model.embed.weight.dtype == torch.bfloat16


def change_shape(tensors):
    tensors["model.norm.weight"] = torch.ones(7)


def change_type(tensors):
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int64)


FAULTS = {
    "missing": (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    "left over": (
        lambda t: t.update({"model.extra": torch.ones(1)}),
        r"model.safetensors: model.extra is not part",
    ),
    "wrong shape": (change_shape, r"model.norm.weight: shape \[7\]; expected \[48\]"),
    "wrong type": (change_type, r"model.norm.weight: type I64; expected one of F32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_refused_by_name(flint, fault):
    change, expected = FAULTS[fault]
    rewrite(flint, change)
    assert re.search(expected, refusal(flint))


def test_a_file_cut_anywhere_is_refused_by_name(flint):
    whole = (flint / MODEL).read_bytes()
    for length in (0, 5, 8, 900, len(whole) // 2, len(whole) - 1):
        (flint / MODEL).write_bytes(whole[:length])
        assert "model.safetensors: not a whole safetensors file" in refusal(flint)


def test_a_header_of_impossible_size_is_refused(flint):
    (flint / MODEL).write_bytes((2**40).to_bytes(8, "little") + b"{}")
    assert "model.safetensors: not a whole safetensors file" in refusal(flint)


def test_a_pickle_is_refused(flint):
    (flint / MODEL).rename(flint / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refusal(flint)


CONFIG_FAULTS = {
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "absurd width": ({"hidden_size": 2**62}, "hidden_size"),
    "endless number": ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    "architecture of no name": ({"architectures": [{}]}, "unknown architecture"),
    "unknown architecture": ({"architectures": ["LlamaForCausalLM"]}, "unknown architecture"),
    "rotation of another kind": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_parameters",
    ),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "heads": ({"num_attention_heads": 5}, "num_attention_heads"),
    "negative": ({"hidden_size": -1}, "hidden_size"),
    "text for a number": ({"num_experts": "8"}, "num_experts"),
    "too many chosen": ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "quantized as 'awq'"),
    "quantized otherwise": (
        {"quantization_config": {"quant_algo": "NVFP4", "group_size": 32}},
        "group_size 32",
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_that_cannot_run_is_refused_by_key(flint, fault):
    change, expected = CONFIG_FAULTS[fault]
    config = json.loads((flint / "config.json").read_text()) | change
    (flint / "config.json").write_text(json.dumps(config))
    text = refusal(flint)
    assert expected in text and "config.json" in text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 100_000, "\xff"])
def test_a_config_that_is_not_json_is_refused(flint, text):
    (flint / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(flint)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_have_the_promised_statistics(tmp_path, family):
    write_checkpoint(tmp_path, family, hidden_size=64)
    (tmp_path / MODEL).unlink()
    model = load(tmp_path, dummy_seed=1)
    by_name = model.targets
    assert abs(by_name["lm_head.weight"].into.std() - 1.0) < 0.05
    assert abs(by_name["model.layers.0.self_attn.q_proj.weight"].into.std() - 0.02) < 0.002
    assert abs(by_name["model.layers.4.mlp.experts.down_proj.weight"].into.std() - 2e-3) < 4e-4
    assert (by_name["model.norm.weight"].into == 1).all()
    assert same(model, load(tmp_path, dummy_seed=1))
    assert not same(model, load(tmp_path, dummy_seed=2))
    answers = run(start(tmp_path, load_format="dummy"), [request(prompts(9)[0])])
    assert len(answers[0].token_ids) == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shards_of_two_ranks_make_up_the_whole(tmp_path, family):
    write_checkpoint(tmp_path, family)
    whole = load(tmp_path).targets
    ranks = [
        load(tmp_path, Placement(Mesh(rank, 2), torch.float32, torch.device("cpu"))).targets
        for rank in range(2)
    ]
    for name, target in whole.items():
        filled = torch.full_like(target.into, float("nan"))
        for rank in ranks:
            filled[rank[name].take] = rank[name].into
        assert torch.equal(filled, target.into), name


def test_a_folder_without_a_checkpoint_says_so(flint, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    assert "config.json: no such file" in refusal(empty)
    shutil.copy(flint / "config.json", empty)
    assert "no .safetensors file" in refusal(empty)
