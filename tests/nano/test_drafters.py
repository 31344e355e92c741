"""The bundled drafters as they are shipped: small, and right about what their targets say next."""

import json
from dataclasses import replace

import pytest

from limelight.checkpoint import BUNDLED_DRAFTERS, locate
from limelight.config import EngineConfig
from limelight.engine.startup import resolve
from limelight.models.dflash2_loader import load_drafter
from limelight.progress import Progress
from limelight.training.acceptance import measure, total
from limelight.training.answers import collect, questions
from limelight.training.course import load_target, placement, read_lines
from nano.chat import FAMILIES
from nano.draft_lines import lines
from nano.spoilers import SPOILERS

QUIET = Progress(quiet=True)
TASKS = ("json", "talk", "think")
EACH, TOKENS, DRAFTS = 8, 64, 7
LEAST = {"flint-nano": 6.0, "beam-nano": 5.8}
# What may be left with each fault. A drafter of a block this small hardly needs its later rows.
SPOILED = {"taps one layer off": 0.8, "causal mask": 0.995, "no hidden_norm": 0.8}
MOST_BYTES = 4 * 10**6


def held_out(name):
    """Some lines of tasks with predictable answers, that no one has learned from."""
    found = {task: [] for task in TASKS}
    for line in lines(FAMILIES[name], share=0.0):
        value = json.loads(line)
        if value["held_out"] and value["task"] in found:
            found[value["task"]].append(line)
    return [line for task in TASKS for line in found[task][:EACH]]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_is_accepted_unless_it_is_spoiled(name, tmp_path):
    config = EngineConfig(model=name, device="cpu", kv_cache_memory_bytes=2**28)
    found, path = resolve(config), tmp_path / "lines.jsonl"
    path.write_text("".join(f"{line}\n" for line in held_out(name)))
    asked = questions(read_lines(config, found, path), [0.0])
    alone = replace(config, speculative_config={"num_speculative_tokens": 0})
    documents = collect(asked, None, alone, max_tokens=TOKENS, seed=0, progress=QUIET)
    assert len(documents) == EACH * len(TASKS)
    target, folder = load_target(found, QUIET), locate(BUNDLED_DRAFTERS[name])
    drafter = load_drafter(folder, placement(found), target, progress=QUIET)
    assert (folder / "model.safetensors").stat().st_size <= MOST_BYTES
    plain = total(measure(drafter, target, documents, drafts=DRAFTS))
    shares = (plain.accepted_N / plain.tried_N).tolist()
    assert plain.length >= LEAST[name] and shares[0] > shares[-1]
    for fault, spoiled in SPOILERS.items():
        with spoiled(drafter, target):
            length = total(measure(drafter, target, documents, drafts=DRAFTS)).length
        assert length < SPOILED[fault] * plain.length, fault
    assert total(measure(drafter, target, documents, drafts=DRAFTS)).length == plain.length


@pytest.mark.parametrize("name", [name for name in BUNDLED_DRAFTERS if name.endswith("nvfp4")])
def test_a_model_in_four_bits_has_the_drafter_of_what_it_was_made_of(name):
    found = resolve(EngineConfig(model=name, device="cpu"))
    target, folder = load_target(found, QUIET), locate(BUNDLED_DRAFTERS[name])
    drafter = load_drafter(folder, placement(found), target, progress=QUIET)
    assert drafter.config.num_kv_heads == target.config.num_kv_heads
    assert drafter.config.head_dim == target.config.head_dim
