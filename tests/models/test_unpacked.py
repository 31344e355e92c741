"""What is kept of NVFP4 projections beside them."""

import torch

from limelight.engine import memory
from limelight.engine.llm import LLM
from limelight.models.unpacked import (
    MOST_RUNS,
    keep_unpacked,
    kept_unpacked,
    packed_projections,
    runs_of,
)
from limelight.ops.fp4 import unpack
from limelight.runner.residence import Residence

PROMPT = "How much is 12 + 30?"


def opened(**flags) -> LLM:
    return LLM(
        "flint-nano-nvfp4", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, **flags
    )


def test_projections_of_attention_are_kept_bit_for_bit():
    runner = opened().engine.runner
    assert not kept_unpacked(runner.model)
    keep_unpacked(runner.model, torch.float32)
    weights = [weight for _, weight in packed_projections(runner.model)]
    assert len(weights) == 2 * runner.model.config.num_layers == len(kept_unpacked(runner.model))
    for weight in weights:
        assert torch.equal(
            weight.values, unpack.reference(weight.codes, weight.scales, dtype=torch.float32)
        )


def test_scales_of_their_rows_are_known_where_a_tensor_has_one():
    runner = opened().engine.runner
    keep_unpacked(runner.model, torch.float32)
    for _, weight in packed_projections(runner.model):
        # Queries, keys and values have their own, or share one.
        assert 1 <= len(weight.runs) <= 3
        ends, scales = zip(*weight.runs, strict=True)
        sizes = torch.tensor([0, *ends]).diff()
        assert torch.equal(torch.tensor(scales).repeat_interleave(sizes), weight.rows.cpu())


def test_rows_of_many_scales_have_no_runs():
    assert runs_of(torch.full((7,), 0.5)) == ((7, 0.5),)
    alternating = torch.arange(2 * MOST_RUNS) % 2 + 1.0
    assert len(runs_of(alternating[:MOST_RUNS])) == MOST_RUNS
    assert runs_of(alternating[: MOST_RUNS + 1]) == ()


def test_they_follow_weights_that_change():
    runner = opened().engine.runner
    keep_unpacked(runner.model, torch.float32)
    for _, weight in packed_projections(runner.model):
        weight.rows.mul_(2.0)
        weight.codes.fill_(0)
    before = [held_NK.data_ptr() for held_NK in kept_unpacked(runner.model)]
    keep_unpacked(runner.model, torch.float32)
    for _, weight in packed_projections(runner.model):
        assert weight.runs[-1][1] == weight.rows[-1].item() and not weight.values.any()
    assert [held_NK.data_ptr() for held_NK in kept_unpacked(runner.model)] == before


def test_they_leave_with_the_weights_and_are_made_anew():
    runner = opened().engine.runner
    keep_unpacked(runner.model, torch.float32)
    before = [held_NK.clone() for held_NK in kept_unpacked(runner.model)]
    residence = Residence(runner, kept_names=())
    residence.release(["weights"], keeps_weights=True, keeps_cache=False)
    assert all(one.untyped_storage().nbytes() == 0 for one in kept_unpacked(runner.model))
    residence.restore(["weights"])
    for held_NK, was_NK in zip(kept_unpacked(runner.model), before, strict=True):
        assert torch.equal(held_NK, was_NK)


def test_a_gpu_keeps_them_if_they_take_little_of_its_memory(monkeypatch):
    model, gpu = opened().engine.runner.model, torch.device("cuda")
    shapes = [weight.shape for _, weight in packed_projections(model)]
    numbers = sum(rows * columns for rows, columns in shapes)
    for total, kept in ((64 * numbers, True), (64 * numbers - 1, False)):
        monkeypatch.setattr(memory, "device_memory", lambda device, total=total: (total, total))
        kinds = memory.unpacked_kinds(model, gpu, torch.bfloat16)
        assert [kind.nbytes for kind in kinds] == [2 * numbers] * kept
    assert memory.unpacked_kinds(model, torch.device("cpu"), torch.bfloat16) == []
