"""New weights in an engine that serves: who computes with which, and updates that fail."""

import math
import time

import pytest
import torch
from ordered import OVERLAP, PROMPTS, Ordered, Trainer
from tiny import prompts
from trainers import BUNDLED, perturbed, tensors_of

from limelight.orders import (
    Checksums,
    ClearWeights,
    FinishUpdate,
    InitTransfer,
    NameVersion,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartUpdate,
    UpdateWeights,
    WakeUp,
)
from limelight.rl.weight_sync import BACKENDS, WeightSync


def test_no_one_finds_what_old_weights_have_computed(ordered, checkpoints):
    one, (old, trained) = ordered(), checkpoints
    fresh = Ordered(old.parent / "new")
    expected = fresh.ask(*PROMPTS)
    long, queued = one.add(PROMPTS[0], max_tokens=60)[0], []
    one.steps(8)
    trainer = Trainer(one)
    assert one.order(StartUpdate()).refused is None
    queued = one.add(*PROMPTS)
    one.steps()
    assert trainer.update(dict(trained.named_parameters())).refused is None
    one.order(FinishUpdate("one"))
    one.steps()
    # Nobody asked for it to be computed again: it goes on with the keys it had, alone.
    assert len(long.token_ids) == 60
    assert [answer.token_ids for answer in queued] == expected == one.ask(*PROMPTS)
    assert one.control.state.weight_version == "one"


def test_what_runs_is_computed_again_if_that_is_asked_for(ordered, checkpoints):
    one, (old, trained) = ordered(), checkpoints
    fresh = Ordered(old.parent / "new")
    answers = one.add(*PROMPTS, max_tokens=30)
    one.steps(12)
    one.order(Pause("keep", False))
    one.order(ResetPrefixCache(True))
    Trainer(one).send(dict(trained.named_parameters()))
    one.order(Resume())
    before = [len(answer.token_ids) for answer in answers]
    one.steps()
    for ids, answer, count in zip(PROMPTS, answers, before, strict=True):
        begun = [*ids, *answer.token_ids[:count]]
        assert fresh.ask(begun, max_tokens=30 - count) == [answer.token_ids[count:]]


def test_a_failed_update_leaves_the_engine_marked_incomplete(ordered, checkpoints):
    one, (_, trained) = ordered(), checkpoints
    [frozen] = one.add(PROMPTS[0])
    one.steps(3)
    trainer, tensors = Trainer(one), dict(trained.named_parameters())
    one.order(StartUpdate())
    name = "model.norm.weight"
    told = trainer.update({name: tensors[name]}, shapes=[[47]])
    assert "expected [48]" in told.refused
    assert "failed" in one.control.state.refusal and not one.engine.has_work
    [late] = one.add([5])
    assert late.last.finish_reason == "abort"
    assert "have not come" in trainer.send({name: tensors[name]}).refused
    assert one.control.state.refusal is not None
    assert trainer.send(tensors).refused is None
    assert one.control.state.refusal is None
    one.steps()
    assert len(frozen.token_ids) == 20


def test_an_update_that_no_one_finishes_is_over_when_a_trainer_comes(ordered, checkpoints):
    one, (_, trained) = ordered(), checkpoints
    Trainer(one)
    one.order(StartUpdate())
    trainer = Trainer(one)
    assert "failed" in one.control.state.refusal and not one.control.state.updating
    assert trainer.send(dict(trained.named_parameters())).refused is None


def test_an_update_whose_end_fails_leaves_the_weights_incomplete(ordered, checkpoints, monkeypatch):
    one, (_, trained) = ordered(), checkpoints
    trainer, tensors = Trainer(one), dict(trained.named_parameters())

    def fail(sync):
        raise ValueError("codes without scales")

    with monkeypatch.context() as patch:
        patch.setattr(WeightSync, "finish", fail)
        assert "codes without scales" in trainer.send(tensors).refused
    assert "failed" in one.control.state.refusal and not one.control.state.updating
    assert Trainer(one).send(tensors).refused is None and one.control.state.refusal is None


def test_an_update_that_no_one_goes_on_with_is_over_after_a_while(ordered, checkpoints):
    one, (_, trained) = ordered(), checkpoints
    [frozen] = one.add(PROMPTS[0])
    one.steps(3)
    trainer, tensors = Trainer(one), dict(trained.named_parameters())
    assert one.control.seconds_left == math.inf
    one.order(StartUpdate())
    assert 0 < one.control.seconds_left <= 5
    one.control.expire()
    assert one.control.state.updating
    one.control.seconds = 0.01
    assert trainer.update({"model.norm.weight": tensors["model.norm.weight"]}).refused is None
    time.sleep(0.02)
    one.control.expire()
    assert not one.control.state.updating and "failed" in one.control.state.refusal
    assert "no trainer" in one.order(StartUpdate()).refused
    one.control.seconds = 5
    assert Trainer(one).send(tensors).refused is None
    one.steps()
    assert len(frozen.token_ids) == 20


def test_who_goes_on_after_an_update_has_none_of_the_old_weights(ordered, checkpoints):
    _, trained = checkpoints
    sinks = {name: tensor + 3 for name, tensor in trained.named_parameters() if "sinks" in name}
    told = []
    for keeps in (True, False):
        one = ordered()
        runner = one.control.devices.runner
        runner.kept = runner.kept if keeps else None
        [answer] = one.add(PROMPTS[2], max_tokens=16)
        one.steps(6)
        assert not keeps or any(kept.layers for kept in runner.kept)
        Trainer(one).send(sinks)
        one.steps()
        told.append([one.logprob for one in answer.logprobs])
    assert told[0] == pytest.approx(told[1], abs=1e-4)


def test_after_sleep_level_2_an_update_has_to_bring_all(ordered, checkpoints):
    one, (old, trained) = ordered(), checkpoints
    tensors = dict(trained.named_parameters())
    trainer = Trainer(one)
    one.order(Sleep(2))
    assert "sleep" in one.order(StartUpdate()).refused
    assert "sleep" in one.order(Checksums()).refused
    one.order(WakeUp(["weights"]))
    one.order(StartUpdate())
    assert trainer.update({"model.norm.weight": tensors["model.norm.weight"]}).refused is None
    assert "have not come" in one.order(FinishUpdate()).refused
    assert trainer.send(tensors).refused is None
    assert "kv_cache" in one.control.state.refusal
    one.order(WakeUp())
    assert one.ask(*PROMPTS) == Ordered(old.parent / "new").ask(*PROMPTS)


def test_weights_that_were_cleared_have_to_come_again(ordered, checkpoints):
    one, (old, trained) = ordered(), checkpoints
    before = one.order(Checksums()).result
    assert one.order(ClearWeights()).refused is None
    assert one.order(Checksums()).result != before and one.control.state.refusal is not None
    Trainer(one).send(dict(trained.named_parameters()))
    assert one.order(Checksums()).result == Ordered(old.parent / "new").order(Checksums()).result


def test_each_token_has_the_version_of_its_weights(ordered):
    one = ordered()
    one.order(NameVersion("a"))
    [answer] = one.add([5])
    told = []
    while one.engine.has_work:
        for output in one.engine.step():
            told += [(len(answer.token_ids), output.weight_version)]
            answer.take(output)
        if len(answer.token_ids) == 7:
            one.order(NameVersion("b"))
    assert [pair for pair in told if pair[1] is not None] == [(0, "a"), (7, "b")]


@pytest.mark.slow
@OVERLAP
def test_all_ranks_carry_out_what_is_ordered(checkpoints, overlap):
    old, trained = checkpoints
    tensors = dict(trained.named_parameters())
    whole, fresh = Ordered(old), Ordered(old.parent / "new")
    one = Ordered(old, tensor_parallel_size=2)
    one.engine.overlap = overlap
    try:
        assert one.order(Checksums()).result == whole.order(Checksums()).result
        answers = one.add(*PROMPTS)
        one.steps(4)
        for order in (Pause("keep"), ResetPrefixCache(True), Sleep(1, "keep"), WakeUp(), Resume()):
            assert one.order(order).refused is None
        one.steps()
        assert [answer.token_ids for answer in answers] == whole.ask(*PROMPTS)
        trainer = Trainer(one)
        assert trainer.send(tensors).result == {"missing": 0, "stale": 0}
        assert one.order(Checksums()).result == fresh.order(Checksums()).result
        assert one.ask(*PROMPTS) == fresh.ask(*PROMPTS)
        name = "model.norm.weight"
        one.order(StartUpdate())
        assert "expected [48]" in trainer.update({name: tensors[name]}, shapes=[[47]]).refused
        assert trainer.send(tensors).refused is None
        one.order(Sleep(2))
        one.order(WakeUp())
        assert trainer.send(tensors).refused is None and one.control.state.refusal is None
        assert one.ask(*PROMPTS) == fresh.ask(*PROMPTS)
        # A trainer that falls silent: all ranks give up alike, and the next one is met.
        one.order(StartUpdate())
        info = {"names": [name], "dtype_names": ["float32"], "shapes": [[48]]}
        assert one.order(UpdateWeights(info)).failed
        assert Trainer(one).send(tensors).refused is None
        assert one.ask(*PROMPTS) == fresh.ask(*PROMPTS)
    finally:
        one.engine.close()


class Handed:
    """A trainer on this very device: its tensors are simply there."""

    def __init__(self, tensors):
        self.tensors = tensors

    def check(self, announced, info):
        pass

    def receive(self, announced, info):
        return ((one.name, self.tensors[one.name]) for one in announced)

    def finish(self):
        pass

    def close(self):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "mxfp8"])
@pytest.mark.parametrize("model", ["flint-nano", "beam-nano"])
def test_graphs_outlive_an_update_and_come_back_after_sleep(
    model, quantization, tmp_path, monkeypatch
):
    other = perturbed(tmp_path / "model", model)
    tensors = {name: tensor.cuda() for name, tensor in tensors_of(other).items()}
    monkeypatch.setitem(BACKENDS, "gloo", lambda *where: Handed(tensors))
    gpu = {
        "device": "cuda",
        "dtype": "float32",
        "speculative_config": {"num_speculative_tokens": 0},
        "quantization": quantization,
        # Beside it others may use the GPU.
        "kv_cache_memory_bytes": 2**28,
    }
    one, fresh = Ordered(BUNDLED / model, **gpu), Ordered(other, **gpu)
    long = prompts(300, 18, 5, seed=3)
    before, expected = one.ask(*long, max_tokens=60), fresh.ask(*long, max_tokens=60)
    graphs = one.control.devices.runner.graphs
    one.order(InitTransfer({}))
    one.order(StartUpdate())
    info = {
        "names": list(tensors),
        "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
        "shapes": [list(x.shape) for x in tensors.values()],
    }
    assert one.order(UpdateWeights(info)).refused is None
    assert one.order(FinishUpdate()).result["missing"] == 0
    assert one.control.devices.runner.graphs is graphs
    assert one.ask(*long, max_tokens=60) == expected != before
    assert one.order(Checksums()).result == fresh.order(Checksums()).result
    awake = torch.cuda.memory_allocated()
    answers = one.add(*long, max_tokens=60)
    one.steps(20)
    one.order(Sleep(1, "keep"))
    assert one.control.devices.runner.graphs is None
    assert awake - torch.cuda.memory_allocated() > one.control.devices.runner.storage.shape.nbytes
    one.order(WakeUp(["weights"]))
    one.order(WakeUp(["kv_cache"]))
    assert one.control.devices.runner.graphs is not None
    one.steps()
    if quantization is None:
        assert [answer.token_ids for answer in answers] == expected
    else:
        # What was written before is read as a prompt, where a number may fall to another code.
        assert [len(answer.token_ids) for answer in answers] == [60] * len(long)
    assert one.ask(*long, max_tokens=60) == expected
