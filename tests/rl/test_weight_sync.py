"""A rank's session with a trainer: what it takes, where it goes, and what it refuses at once."""

import msgspec
import pytest
import torch
from sessions import announce, assert_fresh, by_expert, met
from tiny import write_checkpoint

from limelight.parallel.mesh import Mesh
from limelight.rl.checksum import checksums

CPU = torch.device("cpu")
FAMILIES = pytest.mark.parametrize("family", ["flint", "beam"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By family, a folder with an old and a new checkpoint, and the new model."""
    written = {}
    for family in ("flint", "beam"):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(folder / "old", family)
        written[family] = folder, write_checkpoint(folder / "new", family, seed=1)
    return written


@pytest.fixture
def world(checkpoints, monkeypatch):
    return lambda family="flint", **options: met(checkpoints[family], monkeypatch, **options)


@pytest.fixture(scope="module")
def untouched(checkpoints):
    """A world for what changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        yield met(checkpoints["flint"], patch)


@FAMILIES
@pytest.mark.parametrize(("experts", "parts"), [("fused", 1), ("one by one", 3)])
def test_after_an_update_the_weights_are_those_of_a_fresh_start(world, family, experts, parts):
    world = world(family)
    tensors = dict(world.trained.state_dict())
    if experts == "one by one":
        tensors = by_expert(tensors)
    assert world.send(tensors, parts=parts) == {"missing": 0, "stale": 0}
    assert_fresh(world)
    assert world.transport.finished == 1


def test_sinks_may_have_their_name_in_checkpoints(world):
    world = world()
    tensors = {
        name.replace("self_attn.sinks", "self_attn.softmax_offset"): x
        for name, x in world.trained.state_dict().items()
    }
    world.send(tensors)
    assert_fresh(world)


@FAMILIES
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_part(world, family, rank):
    world = world(family, mesh=Mesh(rank, 2))
    world.send(dict(world.trained.state_dict()))
    assert_fresh(world)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_half_the_size_are_kept_as_the_model_keeps_them(world, dtype):
    world = world()
    tensors = {name: x.to(dtype) for name, x in world.trained.state_dict().items()}
    world.send(tensors)
    for name, target in world.model.targets.items():
        assert target.into.dtype == torch.float32
        expected = world.fresh.targets[name].into.to(dtype).float()
        assert torch.equal(target.into, expected), name


def test_what_is_no_parameter_keeps_its_value(world, caplog):
    world = world("beam")
    before = {name: target.into.clone() for name, target in world.model.targets.items()}
    assert world.send(dict(world.trained.named_parameters())) == {"missing": 4, "stale": 0}
    assert "left 4 of" in caplog.text
    for name, target in world.model.targets.items():
        whole = before if name.endswith("e_score_correction_bias") else None
        expected = whole[name] if whole else world.fresh.targets[name].into
        assert torch.equal(target.into, expected)


def test_the_same_tensors_need_not_be_announced_again(world):
    world = world()
    world.send(dict(world.trained.state_dict()))
    world.transport.tensors = {n: x + 1 for n, x in world.trained.state_dict().items()}
    world.sync.start()
    world.sync.update({"names": [], "dtype_names": [], "shapes": []})
    assert world.sync.finish()["missing"] == 0
    name = "model.norm.weight"
    assert torch.equal(world.model.targets[name].into, world.trained.state_dict()[name] + 1)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["model.norms.weight"]}, "not part of the model"),
        ({"names": ["model.layers.3.mlp.experts.8.up_proj.weight"]}, "not part of the model"),
        ({"shapes": [[47]]}, r"model.norm.weight: shape \[47\]; expected \[48\]"),
        ({"shapes": [[48, 1]]}, "shape"),
        ({"shapes": [[-1]]}, "no shape"),
        ({"shapes": [48]}, "no shape"),
        ({"shapes": []}, "equally long"),
        ({"dtype_names": ["float8_e5m2"]}, "dtype"),
        ({"dtype_names": [7]}, "dtype"),
        ({"names": "all"}, "names must be a list"),
        ({"names": [5]}, "no name"),
        ({"names": [NORM] * 2, "dtype_names": ["float32"] * 2, "shapes": [[48]] * 2}, "twice"),
        (
            {"names": ["model.layers.0.self_attn.k_proj.k_scale"], "shapes": [[]]},
            "cannot be replaced",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_taken_is_refused_before_anything_is_received(untouched, change, message):
    world = untouched
    before = {name: target.into.clone() for name, target in world.model.targets.items()}
    world.transport.receive = None
    world.sync.start()
    info = announce({NORM: torch.zeros(48)}) | change
    with pytest.raises(ValueError, match=message):
        world.sync.update(msgspec.json.decode(msgspec.json.encode(info)))
    assert all(torch.equal(t.into, before[name]) for name, t in world.model.targets.items())
    # The update is over, and the trainer may begin the next one.
    assert not world.sync.is_active and world.sync.stale and not world.transport.closed


def test_the_states_follow_each_other(world):
    world = world()
    for call in (lambda: world.sync.update({}), world.sync.finish):
        with pytest.raises(ValueError, match="start_weight_update comes first"):
            call()
    world.sync.start()
    with pytest.raises(ValueError, match="open already"):
        world.sync.start()
    world.sync.finish()
    world.sync.end()
    with pytest.raises(ValueError, match="init_weight_transfer_engine comes first"):
        world.sync.start()


def test_a_fault_on_the_way_ends_the_session_and_a_full_update_mends_it(world):
    world = world()
    world.transport.fault = TimeoutError("nothing has come")
    world.sync.start()
    tensors = dict(world.trained.state_dict())
    with pytest.raises(TimeoutError):
        world.sync.update(announce(tensors))
    assert world.transport.closed and len(world.sync.stale) == len(world.model.targets)
    world.transport.fault = None
    world.meet()
    few = dict(list(tensors.items())[:5])
    assert world.send(few)["stale"] > 0
    assert world.send(tensors) == {"missing": 0, "stale": 0}
    assert_fresh(world)


def test_a_new_trainer_takes_the_place_of_one_that_is_gone(world):
    world = world()
    world.sync.start()
    world.meet()
    assert world.transport.closed and world.sync.stale
    world.send(dict(world.trained.state_dict()))
    assert not world.sync.stale


def test_without_a_backend_no_trainer_is_met(world):
    world = world()
    with pytest.raises(ValueError, match="--weight-transfer-config"):
        world.session(backend=None).init({}, replica=0)


def test_checksums_do_not_depend_on_how_tensors_lie(world):
    world = world()
    whole = checksums(world.fresh.targets, Mesh.single())
    name = "model.layers.3.mlp.experts.gate_proj.weight"
    target = world.fresh.targets[name]
    target.into[2, 3, 4] += 1
    changed = checksums(world.fresh.targets, Mesh.single())
    assert [n for n in whole if whole[n] != changed[n]] == [name]
    other = target.into[2, 3].clone()
    target.into[2, 3], target.into[2, 4] = target.into[2, 4].clone(), other
    assert checksums(world.fresh.targets, Mesh.single())[name] != changed[name]
