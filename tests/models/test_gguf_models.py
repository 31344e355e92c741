"""A GGUF file serves as the model of the weights that it stands for, or is refused by name."""

import shutil

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import save_file
from tiny import prompts, request, run, start, write_checkpoint

from limelight.ops.fp4 import FP4, unpack
from limelight.progress import Progress
from limelight.quant.gguf import find_tensors
from limelight.quantize import quantize

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a random Flint, and that model as a GGUF file beside it."""
    folder = tmp_path_factory.mktemp("flint")
    write_checkpoint(folder, "flint", **SIZES)
    file = folder.parent / f"{folder.name}.gguf"
    quantize(str(folder), str(file), format="gguf-nvfp4", progress=Progress(quiet=True))
    return folder, file


def everything(shape):
    return tuple(slice(0, size) for size in shape)


def values_of(stored):
    """All values of a tensor, FP32."""
    if stored.dtype != "NVFP4":
        into = torch.empty(stored.shape)
        stored.copy(into, everything(stored.shape))
        return into
    *rows, columns = stored.shape
    into = FP4(
        torch.empty(*rows, columns // 2, dtype=torch.uint8),
        torch.empty(*rows, columns // 16, dtype=torch.float8_e4m3fn),
        torch.empty(rows),
    )
    stored.copy(into, everything(stored.shape))
    return unpack.reference(into.codes, into.scales, dtype=torch.float32) * into.rows[..., None]


@pytest.fixture
def spelt_out(source, tmp_path):
    """The weights that the GGUF stands for, as safetensors."""
    folder, file = source
    shutil.copy(folder / "config.json", tmp_path)
    tensors = {}
    for stored in find_tensors([file]):
        value, (front, between, rest) = values_of(stored), stored.target.partition(".experts.")
        if between:
            tensors |= {f"{front}.experts.{e}.{rest}": one.clone() for e, one in enumerate(value)}
        else:
            tensors[stored.target] = value
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def answers(file, **config):
    asked = [request(p, max_tokens=6, prompt_logprobs=0) for p in prompts(1, 30, 65)]
    return run(start(file, **config), asked)


def test_a_file_answers_as_the_weights_that_it_stands_for(source, spelt_out):
    folder, file = source
    found = answers(file, hf_config_path=str(folder))
    for ours, theirs in zip(found, answers(spelt_out), strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


def test_a_folder_with_a_config_and_one_file_is_a_model(source, tmp_path):
    folder, file = source
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(file, tmp_path / "model.gguf")
    expected = answers(file, hf_config_path=str(folder))
    assert [a.token_ids for a in answers(tmp_path)] == [a.token_ids for a in expected]


def test_a_folder_of_both_forms_says_so(source, tmp_path):
    folder, file = source
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.copy(file, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="both .gguf and .safetensors"):
        start(tmp_path)


def rewritten(file, path, change):
    """The file with another set of tensors: `change` gets them by name, with their types."""
    tensors = {t.name: (np.array(t.data), t.tensor_type) for t in GGUFReader(file).tensors}
    change(tensors)
    writer = GGUFWriter(path, "flint")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_both_names_of_a_scale_mean_the_same(source, tmp_path):
    folder, file = source

    def respell(tensors):
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name.replace(".scale", ".weight.scale")] = tensors.pop(name)

    other = rewritten(file, tmp_path / "other.gguf", respell)
    config = {"hf_config_path": str(folder)}
    expected = [a.logprobs[0].logprob for a in answers(file, **config)]
    assert [a.logprobs[0].logprob for a in answers(other, **config)] == expected


FAULTS = {
    "no scale": (lambda t: t.pop("blk.2.attn_k.scale"), "blk.2.attn_k"),
    "no norm": (lambda t: t.pop("blk.3.attn_q_norm.weight"), "layers.3.self_attn.q_norm.weight is"),
    "no expert": (lambda t: t.pop("blk.4.ffn_up_exps.weight"), "blk.4.ffn_up_exps"),
    "left over": (
        lambda t: t.update({"blk.0.extra.weight": t["output_norm.weight"]}),
        "blk.0.extra.weight is not part",
    ),
    "wrong shape": (
        lambda t: t.update({"output_norm.weight": t["blk.3.attn_q_norm.weight"]}),
        "output_norm.weight: shape [16]; expected [64]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_by_tensor(source, tmp_path, fault):
    folder, file = source
    change, expected = FAULTS[fault]
    other = rewritten(file, tmp_path / "faulty.gguf", change)
    with pytest.raises(ValueError) as caught:
        start(other, hf_config_path=str(folder))
    assert expected in str(caught.value) and "faulty.gguf" in str(caught.value)


def test_a_file_without_a_config_says_what_it_needs(source):
    with pytest.raises(ValueError, match="name its folder with --hf-config-path"):
        start(source[1])
