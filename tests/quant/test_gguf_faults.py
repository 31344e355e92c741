"""GGUF checkpoints with faults: each is refused, early, with the names of file and tensor."""

import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from ggufs import blocks, everything, floats, good, nvfp4, one, read, scale, write

from limelight.quant.gguf import find_tensors


def refusal(file: Path) -> str:
    with pytest.raises(ValueError) as error:
        find_tensors([file])
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.3.attn_q.scale": None}, "blk.3.attn_q.weight: NVFP4, but its scale"),
        ({"blk.3.attn_q.weight": None}, "blk.3.attn_q.scale: there is no tensor"),
        ({"blk.9.attn_q.weight.scale": scale(1)}, "blk.9.attn_q.weight.scale: there is no tensor"),
        ({"output_norm.scale": scale(1)}, "output_norm.scale: output_norm.weight is F32"),
        ({"blk.3.attn_q.weight.scale": scale(1)}, "blk.3.attn_q.weight.scale is there twice"),
        ({"blk.3.attn_q": nvfp4(5, 128)}, "blk.3.attn_q is there twice, also as"),
        ({"blk.3.attn_q.scale": scale(1, 2)}, r"blk.3.attn_q.scale: F32 [2]; expected F32 [1]"),
        (
            {"blk.3.attn_q.scale": (np.ones(1, np.float16), None)},
            "blk.3.attn_q.scale: F16 [1]; expected F32 [1] for blk.3.attn_q.weight [5, 128]",
        ),
        (
            {"blk.3.attn_q.weight": nvfp4(3, 5, 128)},
            "blk.3.attn_q.scale: F32 [1]; expected F32 [3]",
        ),
        ({"blk.3.attn_q.weight": nvfp4(128)}, "blk.3.attn_q.weight: shape [128]; NVFP4 needs rows"),
        (
            {"blk.3.attn_q.weight": (np.zeros((5, 34), np.uint8), Type.Q8_0)},
            "blk.3.attn_q.weight: type Q8_0; expected one of F32, F16, BF16, NVFP4",
        ),
        (
            {"blk.3.attn_q.weight": (np.zeros((5, 17), np.uint8), Type.MXFP4)},
            "blk.3.attn_q.weight: type MXFP4",
        ),
        ({"ids": (np.zeros(3, np.int64), None)}, "ids: type I64"),
        ({"deep": floats(1, 2, 3, 4)}, "deep: shape [1, 2, 3, 4]; expected at most 3"),
        ({"none": floats(3, 0)}, "none: shape [3, 0]"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(tmp_path, changes, message):
    tensors = {name: value for name, value in (good() | changes).items() if value is not None}
    file = write(tmp_path / "x.gguf", tensors)
    assert refusal(file).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ([("bool", "general.tensor_extra.prec_a4", True)], "a tensor"),
        ([("array", "general.tensor_extra.prec_a4", ["blk.3.attn_q.weight"])], "blk.3.attn_q"),
        ([("string", "general.tensor_extra.prec_a4", "blk.3.attn_q.weight")], "blk.3.attn_q"),
        (
            [
                ("array", "general.tensor_extra.name", ["output.weight", "blk.3.attn_q.weight"]),
                ("array", "general.tensor_extra.prec_a4", [False, True]),
            ],
            "blk.3.attn_q",
        ),
    ],
    ids=["bool", "names", "name", "marks"],
)
def test_marks_of_fp4_activations_are_refused(tmp_path, keys, named):
    file = write(tmp_path / "x.gguf", good(), keys=keys)
    message = refusal(file)
    assert message.startswith(f"{file}: {named}") and "FP4 activations" in message


def test_a_mark_of_wider_activations_is_not_refused(tmp_path):
    keys = [
        ("array", "general.tensor_extra.name", ["output.weight", "blk.3.attn_q.weight"]),
        ("array", "general.tensor_extra.prec_a4", [False, False]),
    ]
    assert len(find_tensors([write(tmp_path / "x.gguf", good(), keys=keys)])) == 2


def test_another_architecture_is_refused(tmp_path):
    file = write(tmp_path / "x.gguf", good(), arch="llama")
    assert refusal(file) == f"{file}: general.architecture is 'llama'; expected 'flint'"


@pytest.mark.parametrize("take", [slice(0, 64), slice(64, 128)], ids=["elsewhere", "there"])
def test_a_scale_of_ff_is_refused_when_its_rows_are_copied(tmp_path, take):
    held = blocks(5, 128)
    held[3, 38] = 0xFF
    tensors = good() | {"blk.3.attn_q.weight": (held, Type.NVFP4)}
    stored = one(file := write(tmp_path / "x.gguf", tensors), "blk.3.attn_q.weight")
    read(stored, (slice(0, 3), slice(0, 128)))
    if take.start == 0:
        read(stored, (slice(0, 5), take))
        return
    with pytest.raises(ValueError) as error:
        read(stored, (slice(0, 5), take))
    assert str(error.value).startswith(f"{file}: blk.3.attn_q.weight: a block has the scale 0xFF")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_of_a_tensor_that_is_no_number_is_refused(tmp_path, value):
    file = write(tmp_path / "x.gguf", good() | {"blk.3.attn_q.scale": scale(value)})
    with pytest.raises(ValueError, match=r"x.gguf: blk.3.attn_q.scale: not all .* finite"):
        read(one(file, "blk.3.attn_q.weight"), everything((5, 128)))


def test_rows_of_nvfp4_are_whole_blocks(tmp_path):
    file = write(tmp_path / "x.gguf", good())
    data = file.read_bytes().replace(
        struct.pack("<QQI", 128, 5, 40), struct.pack("<QQI", 96, 5, 40)
    )
    file.write_bytes(data)
    assert refusal(file).startswith(
        f"{file}: blk.3.attn_q.weight: shape [5, 96]; the rows of NVFP4"
    )


def test_a_file_cut_anywhere_is_refused_at_once(tmp_path):
    file = write(tmp_path / "x.gguf", good())
    data = file.read_bytes()
    # The last tensor is four bytes; the writer fills them up to 32, which others may not.
    whole = {len(data), len(data) - 28}
    for size in range(len(data) + 1):
        file.write_bytes(data[:size])
        if size in whole:
            assert len(find_tensors([file])) == 2
        else:
            assert refusal(file).startswith(f"{file}: not a whole GGUF file: ")


def test_a_file_cut_while_it_is_read_is_refused(tmp_path):
    file = write(tmp_path / "x.gguf", {"token_embd.weight": floats(7, 96)})
    (stored,) = find_tensors([file])
    os.truncate(file, file.stat().st_size - 32)
    with pytest.raises(ValueError, match="x.gguf: token_embd.weight: the file ended"):
        stored.copy(torch.empty(7, 96), everything((7, 96)))


def test_what_is_no_gguf_file_is_refused(tmp_path):
    file = tmp_path / "x.gguf"
    (tmp_path / "folder.gguf").mkdir()
    assert "no such file" in refusal(file)
    assert "folder" in refusal(tmp_path / "folder.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "device" in refusal(tmp_path / "pipe.gguf")
    for content, message in [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it begins with b'vers'"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 0x1"),
        (
            b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
            "version 0x3000000; expected 2 or 3, little-endian",
        ),
    ]:
        file.write_bytes(content)
        assert refusal(file).startswith(f"{file}: not a whole GGUF file: ")
        assert message in refusal(file)


def header(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


KEY = struct.pack("<Q1s", 1, b"k")
HOSTILE = {
    "tensors": header(2**60, 0),
    "keys": header(0, 2**60),
    "key": header(0, 1, struct.pack("<Q", 2**63)),
    "twice": header(0, 2, (KEY + struct.pack("<IB", 0, 1)) * 2),
    "text": header(0, 1, KEY + struct.pack("<IQ", 8, 2**64 - 1)),
    "latin": header(0, 1, struct.pack("<Q1s", 1, b"\xe9") + struct.pack("<IB", 0, 1)),
    "kind": header(0, 1, KEY + struct.pack("<I", 77)),
    "nested": header(0, 1, KEY + struct.pack("<IIQ", 9, 9, 2**40)),
    "numbers": header(0, 1, KEY + struct.pack("<IIQ", 9, 6, 2**62)),
    "texts": header(0, 1, KEY + struct.pack("<IIQ", 9, 8, 2**62)),
    "long": header(0, 1, KEY + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 1)),
    "dimensions": header(1, 0, KEY + struct.pack("<I", 2**31)),
    "size": header(1, 0, KEY + struct.pack("<IQQQQIQ", 4, *(2**63,) * 3, 1, 0, 0)),
    "offset": header(1, 0, KEY + struct.pack("<IQIQ", 1, 4, 0, 2**64 - 1)),
    "alignment": header(0, 1, struct.pack("<Q17sII", 17, b"general.alignment", 4, 24)),
    "marks": header(
        0, 1, struct.pack("<Q28sIIQ", 28, b"general.tensor_extra.prec_a4", 9, 7, 2**61)
    ),
}


@pytest.mark.parametrize("zeros", [0, 2**33], ids=["alone", "zeros"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused_in_little_time(tmp_path, content, zeros):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    os.truncate(file, len(content) + zeros)
    begin = time.monotonic()
    assert refusal(file).startswith(f"{file}: ")
    assert time.monotonic() - begin < 5
