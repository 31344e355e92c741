"""What an engine gives back while it sleeps, and what it wakes up with."""

import pytest
from drafters import write_drafter
from ordered import PROMPTS, Ordered, Trainer

from limelight.engine.lockstep import FixedDevices
from limelight.orders import (
    ClearWeights,
    FinishUpdate,
    Sleep,
    StartUpdate,
    WakeUp,
)

SHORT = PROMPTS[1:]


@pytest.mark.parametrize("level", [1, 2])
def test_while_it_sleeps_an_engine_has_given_its_memory_back(ordered, level):
    one = ordered()
    model, pool = one.control.devices.runner.model, one.control.devices.runner.storage.pool
    one.order(Sleep(level))
    assert one.control.state.asleep == ["weights", "kv_cache"]
    held = [target.into.untyped_storage().nbytes() for target in model.targets.values()]
    assert pool.untyped_storage().nbytes() == sum(held) == 0
    one.order(WakeUp(["weights"]))
    assert one.control.state.asleep == ["kv_cache"]
    assert all(target.into.untyped_storage().nbytes() for target in model.targets.values())
    one.order(WakeUp(["weights"]))
    one.order(WakeUp(["kv_cache"]))
    assert one.control.state.asleep == [] and bool((pool == 0).all())
    assert (one.control.state.refusal is None) == (level == 1)


def test_a_drafter_sleeps_and_wakes_beside_its_target(tmp_path, checkpoints):
    write_drafter(tmp_path)
    drafting = {"model": str(tmp_path), "num_speculative_tokens": 3}
    one = Ordered(checkpoints[0], speculative_config=drafting)
    plain = Ordered(checkpoints[0])
    expected = plain.ask(*PROMPTS)
    assert one.ask(*PROMPTS) == expected
    answers = one.add(*PROMPTS)
    one.steps(3)
    one.order(Sleep(1, "keep"))
    one.order(WakeUp())
    one.steps()
    assert [answer.token_ids for answer in answers] == expected


def test_a_sleep_that_devices_refuse_ends_no_request(ordered):
    one = ordered()
    one.control.devices = FixedDevices()
    answers = one.add(*PROMPTS)
    one.steps(3)
    for mode in ("abort", "wait", "keep"):
        assert "--enable-expert-parallel" in one.order(Sleep(1, mode)).refused
    one.steps()
    assert all(len(answer.token_ids) == 20 for answer in answers)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_sleep_that_fails_half_way_tells_all_and_can_be_woken(ordered, monkeypatch, mode):
    one = ordered()
    expected = one.ask(*SHORT)
    residence = one.control.devices.residence
    release = residence.release

    def fail(tags, **options):
        release(tags[:1], **options)
        raise RuntimeError("no memory on the host")

    monkeypatch.setattr(residence, "release", fail)
    answers = one.add(*SHORT)
    one.steps(3)
    reply = one.order(Sleep(1, mode)) or one.steps()[0]
    assert "no memory" in reply.failed
    finish = "abort" if mode == "abort" else "length"
    assert [answer.last.finish_reason for answer in answers] == [finish] * 2
    assert one.control.state.asleep == ["weights", "kv_cache"]
    assert one.order(WakeUp()).failed is None
    assert one.ask(*SHORT) == expected


def test_what_no_update_could_bring_back_is_not_let_go(ordered):
    one = ordered()
    one.control.devices.sync.backend = None
    before = one.ask(*SHORT)
    for order in (Sleep(2), ClearWeights()):
        assert "--weight-transfer-config" in one.order(order).refused
    assert one.order(Sleep(2, tags=["kv_cache"])).refused is None
    one.order(WakeUp())
    assert one.ask(*SHORT) == before


def test_a_sleep_tells_the_level_at_which_the_weights_are(ordered):
    one = ordered()
    assert one.order(Sleep(1)).result == {"level": 1}
    assert one.order(Sleep(2)).result == {"level": 1}
    assert one.order(Sleep(0)).result == {"level": 0}
    one.order(WakeUp())
    assert one.control.state.refusal is None and one.order(Sleep(2)).result == {"level": 2}


def test_weights_that_are_being_updated_do_not_sleep(ordered, checkpoints):
    one, (_, trained) = ordered(), checkpoints
    trainer = Trainer(one)
    one.order(StartUpdate())
    assert "update is open" in one.order(Sleep(1)).refused
    assert "update is open" in one.order(Sleep(2, "wait", ["weights"])).refused
    assert one.order(Sleep(1, tags=["kv_cache"])).refused is None
    assert trainer.update(dict(trained.named_parameters())).refused is None
    assert one.order(FinishUpdate()).refused is None and one.order(WakeUp()).refused is None
    assert one.control.state.refusal is None
