"""GGUF checkpoints: what is read is, bit by bit, what gguf decodes, under the model's names."""

import time

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from ggufs import (
    blocks,
    decoded,
    empty_fp4,
    everything,
    floats,
    good,
    nvfp4,
    one,
    read,
    scale,
    write,
)

from limelight.ops.fp4 import FP4
from limelight.ops.fp4_codes import mixed
from limelight.quant import gguf as reader
from limelight.quant.gguf import files_of, find_tensors

SIGNED = tuple(byte for byte in range(256) if byte != 0xFF)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scales", [tuple(range(0x80)), SIGNED], ids=["unsigned", "signed"])
def test_a_matrix_has_the_values_that_gguf_decodes(tmp_path, scales, device):
    held = blocks(129, 320, scales=scales)
    assert set(held.reshape(-1, 36)[:, :4].flat) == set(scales)
    file = write(
        tmp_path / "x.gguf", {"output.weight": (held, Type.NVFP4), "output.scale": scale(0.37)}
    )
    stored = one(file, "output.weight")
    assert (stored.dtype, stored.shape, stored.file) == ("NVFP4", (129, 320), file)
    expected = torch.from_numpy(gguf.quants.dequantize(held, Type.NVFP4))
    held_here = decoded(read(stored, everything(stored.shape), device))
    assert torch.equal(held_here, expected * torch.tensor(0.37))


@pytest.mark.parametrize("piece", [1, 700, 2**20], ids="P{}".format)
@pytest.mark.parametrize(
    "take",
    [
        (slice(0, 7), slice(0, 11), slice(0, 192)),
        (slice(2, 3), slice(0, 11), slice(0, 192)),
        (slice(1, 6), slice(3, 10), slice(64, 128)),
        (slice(0, 7), slice(4, 5), slice(48, 176)),
        (slice(5, 7), slice(0, 11), slice(80, 96)),
        (slice(5, 5), slice(2, 2), slice(0, 192)),
    ],
    ids=lambda take: "x".join(f"{part.start}-{part.stop}" for part in take),
)
def test_a_part_of_a_stack_is_that_part_of_the_whole(tmp_path, monkeypatch, take, piece):
    monkeypatch.setitem(reader.PIECE, "cpu", piece)
    held, globals_ = blocks(7, 11, 192, scales=SIGNED), np.arange(1, 8) / 3
    name = "blk.2.ffn_up_exps"
    tensors = {f"{name}.weight": (held, Type.NVFP4), f"{name}.scale": scale(*globals_)}
    stored = one(write(tmp_path / "x.gguf", tensors), f"{name}.weight")
    assert stored.shape == (7, 11, 192)
    expected = torch.from_numpy(gguf.quants.dequantize(held, Type.NVFP4))
    expected = expected * torch.from_numpy(globals_).float()[:, None, None]
    assert torch.equal(decoded(read(stored, take)), expected[take])


def test_a_part_lands_between_others_and_leaves_them_alone(tmp_path):
    tensors = {
        "blk.0.ffn_up_exps.weight": nvfp4(3, 5, 128),
        "blk.0.ffn_up_exps.scale": scale(1, 2, 3),
    }
    stored = one(write(tmp_path / "x.gguf", tensors), "blk.0.ffn_up_exps.weight")
    whole = empty_fp4((3, 11, 128))
    before = decoded(whole)
    stored.copy(FP4(*(tensor[:, 4:9] for tensor in whole.tensors)), everything(stored.shape))
    after = decoded(whole)
    assert torch.equal(after[:, 4:9], decoded(read(stored, everything(stored.shape))))
    for rest in (slice(0, 4), slice(9, 11)):
        assert torch.equal(after[:, rest].nan_to_num(), before[:, rest].nan_to_num())


def test_a_block_lies_in_a_row_with_even_columns_in_low_halves(tmp_path):
    block = np.arange(36, dtype=np.uint8)
    block[:4] = 0x38, 0x7F, 0x00, 0xB9
    block[4:12] = 0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7
    file = write(
        tmp_path / "x.gguf", {"output": (block[None], Type.NVFP4), "output.scale": scale(1)}
    )
    held = read(one(file, "output"), everything((1, 64)))
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    assert torch.equal(held.codes[0, :8], mixed(codes))
    assert held.scales.view(torch.uint8).tolist() == [[0x38, 0x00, 0x00, 0x39]]


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(37,), (9, 5), (4, 3, 10)], ids=str)
def test_floats_are_copied_in_part_and_rounded_once(tmp_path, monkeypatch, shape, kind, into):
    monkeypatch.setitem(reader.PIECE, "cpu", 64)
    values = torch.from_numpy(floats(*shape)[0]).to(reader.FLOATS[kind])
    raw = values.view(torch.uint8).numpy() if kind == "BF16" else values.numpy()
    file = write(tmp_path / "x.gguf", {"token_embd.weight": (raw, Type[kind])})
    stored = one(file, "token_embd.weight")
    assert (stored.dtype, stored.shape) == (kind, shape)
    take = tuple(slice(1, size - 1) for size in shape)
    # As a CPU holds FP32 matrices: the last dimension outermost.
    width, *rest = (size - 2 for size in shape[::-1])
    part = torch.empty(width, *rest[::-1], dtype=into).movedim(0, -1)
    stored.copy(part, take)
    assert torch.equal(part, values[take].to(into))


NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "blk.7.attn_norm": "model.layers.7.input_layernorm.weight",
    "blk.7.ffn_norm": "model.layers.7.post_attention_layernorm.weight",
    "blk.7.attn_q": "model.layers.7.self_attn.q_proj.weight",
    "blk.7.attn_k": "model.layers.7.self_attn.k_proj.weight",
    "blk.7.attn_v": "model.layers.7.self_attn.v_proj.weight",
    "blk.7.attn_output": "model.layers.7.self_attn.o_proj.weight",
    "blk.7.attn_q_norm": "model.layers.7.self_attn.q_norm.weight",
    "blk.7.attn_k_norm": "model.layers.7.self_attn.k_norm.weight",
    "blk.7.attn_sinks": "model.layers.7.self_attn.softmax_offset",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
    "blk.47.ffn_gate_inp": "model.layers.47.mlp.gate.weight",
    "blk.47.ffn_gate_shexp": "model.layers.47.mlp.shared_expert.gate_proj.weight",
    "blk.47.ffn_up_shexp": "model.layers.47.mlp.shared_expert.up_proj.weight",
    "blk.47.ffn_down_shexp": "model.layers.47.mlp.shared_expert.down_proj.weight",
    "blk.47.ffn_gate_exps": "model.layers.47.mlp.experts.gate_proj.weight",
    "blk.47.ffn_up_exps": "model.layers.47.mlp.experts.up_proj.weight",
    "blk.47.ffn_down_exps": "model.layers.47.mlp.experts.down_proj.weight",
    "output": "lm_head.weight",
    "blk.0.extra": "blk.0.extra",
    "rope_freqs": "rope_freqs",
}


@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["bare", "weight"])
def test_tensors_have_the_names_of_the_model_and_unknown_ones_their_own(tmp_path, suffix):
    file = write(tmp_path / "x.gguf", {name + suffix: floats(4) for name in NAMES})
    found = {stored.name: stored.target for stored in find_tensors([file])}
    unknown = {"blk.0.extra", "rope_freqs"}
    assert found == {
        name + suffix: target + suffix if name in unknown else target
        for name, target in NAMES.items()
    }


@pytest.mark.parametrize("tensor", ["blk.3.attn_q", "blk.3.attn_q.weight"])
@pytest.mark.parametrize("beside", ["blk.3.attn_q.scale", "blk.3.attn_q.weight.scale"])
def test_a_scale_is_found_in_either_spelling(tmp_path, tensor, beside):
    file = write(tmp_path / "x.gguf", {beside: scale(0.5), tensor: nvfp4(2, 64)})
    (stored,) = find_tensors([file])
    assert read(stored, everything((2, 64))).rows.tolist() == [0.5, 0.5]


def test_a_split_checkpoint_is_all_of_its_parts(tmp_path):
    tensors = good() | {"blk.4.ffn_norm.weight": floats(48), "token_embd.weight": floats(9, 48)}
    write(tmp_path / "x.gguf", tensors, split_max_tensors=2)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    for path in (tmp_path, parts[1]):
        assert files_of(path) == parts
    # The scale is in the second part, its tensor in the first.
    found = {stored.name: stored for stored in find_tensors(parts)}
    assert set(found) == set(tensors) - {"blk.3.attn_q.scale"}
    assert read(found["blk.3.attn_q.weight"], everything((5, 128))).rows[0] == 0.75
    with pytest.raises(ValueError, match=r"x-00001-of-00003.gguf: one of 3 parts .* found 1"):
        find_tensors(parts[:1])
    parts[1].unlink()
    for path in (tmp_path, parts[0]):
        with pytest.raises(ValueError, match=r"x-00002-of-00003.gguf: no such file; .* 3 parts"):
            files_of(path)


def test_a_split_checkpoint_with_a_part_of_another_is_refused(tmp_path):
    write(tmp_path / "x.gguf", good(), split_max_tensors=1)
    norms = {f"blk.{i}.ffn_norm": floats(3) for i in range(4)}
    write(tmp_path / "y.gguf", norms, split_max_tensors=2)
    write(tmp_path / "z.gguf", norms, split_max_tensors=3)
    last = tmp_path / "x-00003-of-00003.gguf"
    (tmp_path / "y-00002-of-00002.gguf").rename(last)
    with pytest.raises(ValueError, match=r"x-00003-of-00003.gguf: one of 2 parts .* found 3"):
        find_tensors(files_of(last))
    (tmp_path / "z-00002-of-00002.gguf").rename(tmp_path / "y-00002-of-00002.gguf")
    with pytest.raises(ValueError, match=r"split.tensors.count is 4; found 3 tensors"):
        find_tensors(files_of(tmp_path / "y-00001-of-00002.gguf"))


def test_a_folder_holds_one_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="no .gguf file"):
        files_of(tmp_path)
    first = write(tmp_path / "a.gguf", good())
    assert files_of(tmp_path) == files_of(first) == [first]
    write(tmp_path / "b.gguf", good())
    with pytest.raises(ValueError, match=r"several checkpoints, a.gguf, b.gguf"):
        files_of(tmp_path)
    with pytest.raises(ValueError, match=r"c.gguf: no such file"):
        files_of(tmp_path / "c.gguf")
    with pytest.raises(ValueError, match=r"no part 4 of 3"):
        files_of(tmp_path / "c-00004-of-00003.gguf")


def test_a_long_vocabulary_is_passed_over(tmp_path):
    keys = [
        ("array", "tokenizer.ggml.tokens", [f"token {i}" for i in range(200_000)]),
        ("array", "tokenizer.ggml.scores", [0.5] * 200_000),
        ("uint32", "flint.block_count", 48),
    ]
    file = write(tmp_path / "x.gguf", good(), keys=keys)
    begin = time.monotonic()
    assert len(find_tensors([file])) == 2
    assert time.monotonic() - begin < 2
