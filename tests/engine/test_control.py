"""Orders to an engine between its steps: what becomes of what runs, and what comes after."""

import itertools
import math
import threading
import time

import pytest
import torch
from drafters import write_drafter
from tiny import Answer, prompts, request, write_checkpoint
from trainers import BUNDLED, perturbed, tensors_of

from limelight.config import EngineConfig
from limelight.engine.lockstep import FixedDevices
from limelight.engine.startup import start_engine
from limelight.orders import (
    AbortRequests,
    Asked,
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
from limelight.progress import Progress
from limelight.rl.gloo import GlooGroup, host_store
from limelight.rl.weight_sync import BACKENDS, WeightSync

PROMPTS = prompts(40, 18, 5, seed=3)
SHORT = PROMPTS[1:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flint")
    write_checkpoint(folder / "old", "flint")
    return folder / "old", write_checkpoint(folder / "new", "flint", seed=1)


class Ordered:
    """An engine that takes orders, and what its requests have got so far."""

    def __init__(self, folder, **config):
        settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8} | config
        transfer = {"backend": "gloo", "timeout": 5}
        config = EngineConfig(model=str(folder), weight_transfer_config=transfer, **settings)
        self.ranks = config.tensor_parallel_size
        started = start_engine(config, Progress(quiet=True))
        self.engine, self.control = started.engine, started.control
        self.answers: dict[str, Answer] = {}
        self._ids = itertools.count()

    def add(self, *token_ids, **options):
        added = []
        for ids in token_ids:
            one = request(ids, **({"max_tokens": 20} | options))
            added.append(self.answers.setdefault(one.id, Answer()))
            self._take(self.control.add(one))
        return added

    def _take(self, outputs):
        for output in outputs:
            self.answers[output.request_id].take(output)

    def order(self, order):
        """The reply, or None if it is still to come."""
        self._take(self.control.take(Asked(next(self._ids), order)))
        self.engine.scheduler.check()
        return next(iter(self.control.replies()), None)

    def steps(self, count=None):
        """So many steps, or all that there are; replies that came meanwhile."""
        replies = []
        while self.engine.has_work and count != 0:
            self._take(self.engine.step())
            self.engine.scheduler.check()
            replies += self.control.replies()
            count = None if count is None else count - 1
        return replies

    def ask(self, *token_ids, **options):
        answers = self.add(*token_ids, **options)
        self.steps()
        return [answer.token_ids for answer in answers]


@pytest.fixture
def ordered(checkpoints):
    made = []

    def make(**config):
        made.append(Ordered(checkpoints[0], **config))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


OVERLAP = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlapped"]
)
INTERRUPTIONS = {
    "two pauses": [Pause("keep"), Pause("keep", False), Resume()],
    "reset of what runs": [Pause("keep"), ResetPrefixCache(True), Resume()],
    "sleep 1": [Sleep(1, "keep"), WakeUp()],
    "sleep that keeps the cache": [
        Sleep(1, "keep", keeps_cache=True), WakeUp(["weights"]), WakeUp(["kv_cache"])
    ],
}  # fmt: skip
MORE = {
    "reset": [ResetPrefixCache()],
    "sleep 0": [Sleep(0, "keep"), WakeUp()],
    "sleep of the cache alone": [Sleep(1, "keep", ["kv_cache"]), WakeUp(["kv_cache"])],
}


@OVERLAP
@pytest.mark.parametrize(
    "orders",
    [
        *INTERRUPTIONS.values(),
        *(pytest.param(one, marks=pytest.mark.slow) for one in MORE.values()),
    ],
    ids=[*INTERRUPTIONS, *MORE],
)
def test_what_is_kept_goes_on_as_if_nothing_had_been(ordered, orders, overlap):
    one = ordered(max_num_batched_tokens=16)
    one.engine.overlap = overlap
    expected = one.ask(*PROMPTS)
    for after in (1, 11):
        answers = one.add(*PROMPTS)
        one.steps(after)
        for i, order in enumerate(orders):
            assert one.order(order).refused is None
            if i < len(orders) - 1:
                assert not one.engine.has_work and not one.control.state.updating
        one.steps()
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize("name", [
    "reset of what runs", "sleep that keeps the cache",
    pytest.param("two pauses", marks=pytest.mark.slow),
    pytest.param("sleep 1", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_is_kept_has_the_experts_of_all_its_tokens(ordered, name):
    one = ordered(max_num_batched_tokens=16, enable_return_routed_experts=True)

    def rows(answers):
        one.steps()
        return [answer.last.routed_experts for answer in answers]

    expected = rows(one.add(*PROMPTS))
    assert [made.shape[0] for made in expected] == [len(ids) + 20 - 1 for ids in PROMPTS]
    answers = one.add(*PROMPTS)
    one.steps(11)
    for order in INTERRUPTIONS[name]:
        one.order(order)
    assert rows(answers) == expected


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


def test_a_pause_that_aborts_tells_all_that_there_was(ordered):
    one = ordered()
    expected = one.ask(*PROMPTS)
    answers = one.add(*PROMPTS)
    one.steps(6)
    assert one.order(Pause()).refused is None
    for answer, want in zip(answers, expected, strict=True):
        assert answer.last.finish_reason == "abort" and 0 < len(answer.token_ids) < 20
        assert answer.token_ids == want[: len(answer.token_ids)]
    [late] = one.add([5])
    assert late.last.finish_reason == "abort" and late.token_ids == []
    one.order(Resume())
    assert one.ask(*PROMPTS) == expected


def test_a_pause_that_waits_is_answered_when_nothing_runs(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(3)
    assert one.order(Pause("wait")) is None
    assert one.control.state.refusal is not None
    [late] = one.add([5])
    assert late.last.finish_reason == "abort"
    [reply] = one.steps()
    assert reply.refused is None and all(len(answer.token_ids) == 20 for answer in answers)
    # Also if nothing runs, or it waits already.
    assert one.order(Pause("wait")) is not None
    one.order(Resume())
    assert one.ask([5])[0]


def test_a_resume_ends_the_waiting_for_a_pause(ordered):
    one = ordered()
    [answer] = one.add([5])
    one.steps(2)
    assert one.order(Pause("wait")) is None
    one._take(one.control.take(Asked(99, Resume())))
    replies = {reply.id: reply for reply in one.control.replies()}
    assert "resumed" in replies[1 - 1].refused and replies[99].refused is None
    one.steps()
    assert len(answer.token_ids) == 20


def test_a_pause_may_become_another_one(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(3)
    one.order(Pause("keep"))
    assert one.order(Pause("wait")) is None
    assert len(one.steps()) == 1
    assert all(len(answer.token_ids) == 20 for answer in answers)
    one.order(Resume())
    answers = one.add(*PROMPTS)
    one.steps(3)
    one.order(Pause("keep"))
    one.order(Pause("abort"))
    assert all(answer.last.finish_reason == "abort" for answer in answers)


def test_only_the_requests_of_these_ids_are_aborted(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(2)
    name = next(iter(one.answers))
    assert one.order(AbortRequests([name, "unknown"])).result == {"aborted": 1}
    assert one.order(AbortRequests(["unknown"])).result == {"aborted": 0}
    one.steps()
    assert [answer.last.finish_reason for answer in answers] == ["abort", "length", "length"]
    one.add(*PROMPTS)
    assert one.order(AbortRequests()).result == {"aborted": 3}


@pytest.mark.parametrize(
    "order",
    [
        Sleep(3), Sleep(1, tags=["all"]), WakeUp(["all"]), StartUpdate(), UpdateWeights({}),
        FinishUpdate(), InitTransfer({}), InitTransfer({"master_address": "x", "master_port": 1}),
        InitTransfer({"nccl_unique_id_b64": "eA==", "rank_offset": 1, "world_size": 2}),
    ],
    ids=repr,
)  # fmt: skip
def test_an_order_that_cannot_be_is_refused_and_changes_nothing(ordered, order):
    one = ordered()
    before = one.control.state
    assert one.order(order).refused
    assert one.control.state == before and one.ask([5])[0]


def test_a_pause_that_waits_answers_only_when_its_requests_have_ended(ordered):
    one = ordered()
    answers = one.add(*PROMPTS)
    one.steps(3)
    assert one.order(Pause("wait")) is None
    for order in (StartUpdate(), ClearWeights()):
        assert "end first" in one.order(order).refused
    assert one.control.state.draining
    assert len(one.steps()) == 1 and all(len(answer.token_ids) == 20 for answer in answers)


@pytest.mark.parametrize("order", [Pause("keep"), Sleep(0, "keep"), Sleep(1, "keep")], ids=repr)
def test_what_freezes_requests_ends_the_waiting_for_them(ordered, order):
    one = ordered()
    [answer] = one.add([5])
    one.steps(2)
    assert one.order(Sleep(1, "wait")) is None
    one._take(one.control.take(Asked(99, order)))
    replies = {reply.id: reply for reply in one.control.replies()}
    assert "mode=keep" in replies[0].refused and replies[99].refused is None
    assert not one.engine.has_work and not one.control.state.draining
    one.order(WakeUp())
    one.order(Resume())
    one.steps()
    assert len(answer.token_ids) == 20


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


class Trainer:
    """Sends the tensors of a model to one engine in process."""

    def __init__(self, one):
        self.one = one
        self.world_size = 1 + one.ranks
        self.store = host_store("127.0.0.1", 0, world_size=self.world_size, seconds=10)
        meeting = threading.Thread(target=self._meet)
        meeting.start()
        info = {"master_address": "127.0.0.1", "master_port": self.store.port, "rank_offset": 1}
        assert one.order(InitTransfer(info | {"world_size": self.world_size})).failed is None
        meeting.join()

    def _meet(self):
        self.group = GlooGroup(self.store, rank=0, world_size=self.world_size, seconds=10)

    def update(self, tensors, *, shapes=None):
        info = {
            "names": list(tensors),
            "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
            "shapes": shapes or [list(x.shape) for x in tensors.values()],
        }
        if shapes is not None:
            return self.one.order(UpdateWeights(info))
        sending = threading.Thread(
            target=lambda: [self.group.broadcast(x.detach().contiguous()) for x in tensors.values()]
        )
        sending.start()
        reply = self.one.order(UpdateWeights(info))
        sending.join()
        return reply

    def send(self, tensors, version=None):
        assert self.one.order(StartUpdate()).refused is None
        assert self.update(tensors).refused is None
        return self.one.order(FinishUpdate(version))


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
    assert [answer.token_ids for answer in answers] == expected
