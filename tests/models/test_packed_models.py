"""NVFP4 checkpoints of every spelling answer as the model of the weights that they stand for."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import prompts, request, run, start, write_checkpoint

from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.ops.fp4 import FP4, unpack
from limelight.ops.fp4_codes import mixed
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress

MODEL = "model.safetensors"
SIZES = {"moe_intermediate_size": 32, "hidden_size": 64, "intermediate_size": 96}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_weight(shape, *, whole: float, generator):
    """Codes, scales and a global scale, and the weights that they stand for."""
    rows, columns = shape
    codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    return codes, scales, unpack.reference(mixed(codes), scales, dtype=torch.float32) * whole


@pytest.fixture(params=["flint", "beam"])
def twins(request, tmp_path):
    """Two folders of one model: in NVFP4 as ModelOpt writes it, and with its weights spelt out.

    Each tensor has a global scale of its own, up to eight times its neighbours'.
    """
    family, shared = request.param, {"shared_expert_intermediate_size": 32}
    sizes = SIZES | (shared if request.param == "flint" else {})
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    write_checkpoint(plain, family, **sizes)
    shutil.copytree(plain, packed)
    tensors, generator = load_file(plain / MODEL), torch.Generator().manual_seed(1)
    exact, four_bit = dict(tensors), {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        routed = ".experts." in name
        if not stem.endswith(PROJECTIONS) or family == "beam" and not routed:
            four_bit[name] = tensor
            continue
        whole = 0.03 * 2 ** torch.randint(-2, 2, (), generator=generator).item()
        codes, scales, exact[name] = random_weight(tensor.shape, whole=whole, generator=generator)
        four_bit |= {
            name: codes,
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_scale_2": torch.tensor(whole),
            f"{stem}.input_scale": torch.tensor(0.5),
        }
    save_file(exact, plain / MODEL)
    save_file(four_bit, packed / MODEL)
    return plain, packed


def rewrite(folder, change):
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file(tensors, folder / MODEL)


def answers(folder, **config):
    engine = start(folder, **config)
    asked = [request(p, max_tokens=6, prompt_logprobs=0) for p in prompts(1, 30, 65)]
    return run(engine, asked)


def assert_same_answers(found, expected, *, tolerance=1e-4):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert all(abs(a.logprob - b.logprob) < tolerance for a, b in pairs)


def test_four_bit_weights_answer_as_what_they_stand_for(twins):
    plain, packed = twins
    assert_same_answers(answers(packed), answers(plain))


def test_compressed_tensors_divide_by_their_global_scale(twins):
    plain, packed = twins

    def respell(tensors):
        for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
            stem = name.removesuffix(".weight_scale_2")
            tensors[f"{stem}.weight_packed"] = tensors.pop(f"{stem}.weight")
            tensors[f"{stem}.weight_global_scale"] = 1 / tensors.pop(name)[None]
            del tensors[f"{stem}.input_scale"]

    rewrite(packed, respell)
    assert_same_answers(answers(packed), answers(plain))


EXPERT = "model.layers.4.mlp.experts.3.up_proj"


def break_scale(tensors):
    scales = tensors[f"{EXPERT}.weight_scale"].view(torch.uint8).clone()
    scales[1, 1] = 0xFF
    tensors[f"{EXPERT}.weight_scale"] = scales.view(torch.float8_e4m3fn)


FAULTS = {
    "no block scales": (lambda t: t.pop(f"{EXPERT}.weight_scale"), "weight_scale is missing"),
    "no global scale": (lambda t: t.pop(f"{EXPERT}.weight_scale_2"), "weight_scale_2 is missing"),
    "codes of another type": (
        lambda t: t.update({f"{EXPERT}.weight": t[f"{EXPERT}.weight"].long()}),
        "up_proj.weight: type I64",
    ),
    "scales of another shape": (
        lambda t: t.update({f"{EXPERT}.weight_scale": t[f"{EXPERT}.weight_scale"][:-1].clone()}),
        r"weight_scale: F8_E4M3 [31, 4]; expected F8_E4M3 [32, 4]",
    ),
    "a scale that is no number": (break_scale, "weight_scale: a block's scale is not a number"),
    "a negative global scale": (
        lambda t: t.update({f"{EXPERT}.weight_scale_2": torch.tensor(-1.0)}),
        "weight_scale_2: -1.0; that is no scale",
    ),
    "left over": (lambda t: t.update({f"{EXPERT}.extra": torch.ones(1)}), "up_proj.extra is not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_refused_by_file_and_name(twins, fault):
    _, packed = twins
    change, expected = FAULTS[fault]
    rewrite(packed, change)
    with pytest.raises(ValueError) as caught:
        start(packed)
    assert expected in str(caught.value) and MODEL in str(caught.value)


def test_experts_of_a_layer_are_of_one_kind(twins):
    plain, packed = twins
    exact = load_file(plain / MODEL)

    def spell_out(tensors):
        for name in [name for name in tensors if name.startswith(EXPERT)]:
            del tensors[name]
        tensors[f"{EXPERT}.weight"] = exact[f"{EXPERT}.weight"]

    rewrite(packed, spell_out)
    with pytest.raises(ValueError, match="up_proj.weight: type F32, but .* is NVFP4"):
        start(packed)


@pytest.mark.parametrize("divisor", [0.0, 1e-40, float("nan")])
def test_a_divisor_that_no_fp32_can_stand_for_is_refused(twins, divisor):
    _, packed = twins

    def respell(tensors):
        tensors[f"{EXPERT}.weight_packed"] = tensors.pop(f"{EXPERT}.weight")
        tensors[f"{EXPERT}.weight_global_scale"] = torch.tensor(divisor)
        del tensors[f"{EXPERT}.weight_scale_2"]

    rewrite(packed, respell)
    with pytest.raises(ValueError, match="weight_global_scale: .* no scale"):
        start(packed)


def test_the_shards_of_two_ranks_make_up_the_whole(twins):
    _, packed = twins
    cpu = torch.device("cpu")
    whole, *ranks = (
        load_model(
            packed, Placement(mesh, torch.float32, cpu), progress=Progress(quiet=True)
        ).targets
        for mesh in (Mesh.single(), Mesh(0, 2), Mesh(1, 2))
    )
    packed_names = [name for name, target in whole.items() if isinstance(target.into, FP4)]
    assert packed_names
    for name in packed_names:
        filled = torch.full(whole[name].shape, float("nan"))
        for rank in ranks:
            filled[rank[name].take] = decoded(rank[name].into)
        assert torch.equal(filled, decoded(whole[name].into)), name


def decoded(weight):
    held = unpack.reference(weight.codes, weight.scales, dtype=torch.float32)
    return held * weight.rows[..., None]


def test_a_cache_alone_may_be_declared_quantized(twins):
    plain, _ = twins
    stated = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (plain / "hf_quant_config.json").write_text(json.dumps(stated))
    assert len(answers(plain)) == 3


def test_a_pattern_that_can_take_for_ever_is_refused(twins):
    _, packed = twins
    stated = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["re:(.+)+!"]}}
    (packed / "hf_quant_config.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match="can take for ever"):
        start(packed)


def test_projections_of_one_matrix_are_of_one_kind(tmp_path):
    write_checkpoint(tmp_path, "flint", **SIZES)

    def pack(tensors):
        stem = "model.layers.2.self_attn.k_proj"
        rows, columns = tensors[f"{stem}.weight"].shape
        tensors[f"{stem}.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{stem}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        tensors[f"{stem}.weight_scale_2"] = torch.tensor(1.0)

    rewrite(tmp_path, pack)
    with pytest.raises(ValueError, match="q_proj.weight is plain, .*k_proj.weight is NVFP4"):
        start(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_what_is_excluded_by_pattern_is_not_packed_without_weights(twins, file):
    _, packed = twins
    (packed / MODEL).unlink()
    stated = {"quant_algo": "NVFP4", "group_size": 16}
    patterns = ["lm_head", "model.layers.*.self_attn*", "re:.*shared_expert", "model.layers.0.*"]
    if file == "config.json":
        config = json.loads((packed / file).read_text())
        config["quantization_config"] = stated | {"quant_method": "modelopt", "ignore": patterns}
    else:
        config = {"quantization": stated | {"exclude_modules": patterns}}
    (packed / file).write_text(json.dumps(config))
    engine = start(packed, load_format="dummy")
    kinds = {
        name for name, target in engine.runner.model.targets.items() if "FP4" in repr(target.into)
    }
    assert any(".layers.1.mlp" in name for name in kinds)
    assert all(".mlp." in name and ".layers.0." not in name for name in kinds)
    assert not any("shared_expert" in name for name in kinds)
    (answer,) = run(engine, [request(prompts(9)[0])])
    assert len(answer.token_ids) == 8


def test_a_checkpoint_brings_the_scales_of_an_fp8_cache(twins):
    plain, packed = twins
    stem = "model.layers.3.self_attn"
    rewrite(packed, lambda t: t.update({f"{stem}.k_proj.k_scale": torch.tensor(0.25)}))
    rewrite(packed, lambda t: t.update({f"{stem}.v_proj.v_scale": torch.tensor([0.5])}))
    scales_2 = start(packed, kv_cache_dtype="fp8").runner.storage.caches[3].scales_2
    assert scales_2.tolist() == [0.25, 0.5]
    assert_same_answers(answers(packed), answers(plain))
    rewrite(packed, lambda t: t.update({f"{stem}.k_proj.k_scale": torch.tensor(-1.0)}))
    with pytest.raises(ValueError, match="k_proj.k_scale: -1.0; a scale"):
        start(packed, kv_cache_dtype="fp8")
