"""Tiny checkpoints to quantize, written once."""

import pytest
from tiny import write_checkpoint

# Rows that NVFP4 can hold: multiples of 16, and of the 64 that GGUF wants.
OF_16 = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
OF_64 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 192,
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folders with the checkpoints by name."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("flint", "beam", "wide", "odd")}
    write_checkpoint(folders["flint"], "flint", **OF_16)
    write_checkpoint(folders["beam"], "beam", moe_intermediate_size=32)
    write_checkpoint(folders["wide"], "flint", **OF_64)
    write_checkpoint(folders["odd"], "flint")
    for folder in folders.values():
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("text")
    return folders
