"""A trainer sends what an engine holds as MXFP8: to be quantized there, or as codes and scales."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sessions import announce, assert_fresh, by_expert, met
from tiny import write_checkpoint

from limelight.models.loader import load_model
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.quant.declared import Declared
from limelight.rl.announced import SKYRL_EXPERTS
from limelight.rl.checksum import checksums
from limelight.rl.mxfp8 import coded

SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
MORE = {"flint": {"shared_expert_intermediate_size": 128}, "beam": {}}
IGNORED = ("re:.*self_attn.gate_proj", "model.layers.1.mlp")
QUERY = "model.layers.0.self_attn.q_proj.weight"
ONE_FAMILY = pytest.mark.parametrize("checkpoint", ["flint"], indirect=True)


@pytest.fixture(scope="module", params=["flint", "beam"])
def checkpoint(request, tmp_path_factory):
    """A folder with an old and a new checkpoint, and the new model in BF16, as trainers have it."""
    folder, sizes = tmp_path_factory.mktemp(request.param), SIZES | MORE[request.param]
    write_checkpoint(folder / "old", request.param, **sizes)
    trained = write_checkpoint(folder / "new", request.param, seed=1, **sizes)
    trained = trained.to(torch.bfloat16)
    trained.save_pretrained(folder / "new")
    return folder, trained


@pytest.fixture
def world(checkpoint, monkeypatch):
    return lambda **options: met(
        checkpoint, monkeypatch, declared=Declared("MXFP8", IGNORED), **options
    )


def tensors_of(world):
    return {name: x.clone() for name, x in world.trained.state_dict().items()}


def as_skyrl(tensors):
    """Codes and scales of all experts of a layer and kind in one."""
    found = {}
    for name, x in tensors.items():
        front, _, kind = name.rpartition(".")
        parts = {name: x}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), x.chunk(2, dim=1), strict=True))
        elif kind == "down_proj":
            parts = {kind: x}
        if x.ndim == 3:
            parts = {f"{SKYRL_EXPERTS}{front}.{one}.weight": part for one, part in parts.items()}
        found |= coded(parts.items(), ignore=IGNORED)
    return found


FORMS = {
    "plain, fused": lambda tensors: tensors,
    "plain, one by one": by_expert,
    "codes, fused": lambda tensors: dict(coded(tensors.items(), ignore=IGNORED)),
    "codes, one by one": lambda tensors: dict(coded(by_expert(tensors).items(), ignore=IGNORED)),
    "codes, as SkyRL stacks them": as_skyrl,
}


@pytest.mark.parametrize("form", FORMS)
def test_after_an_update_the_weights_are_those_of_a_fresh_start(world, form):
    world = world()
    where = {name: target.into for name, target in world.model.targets.items()}
    tensors = FORMS[form](tensors_of(world))
    assert any(x.dtype == torch.float8_e4m3fn for x in tensors.values()) == ("codes" in form)
    assert world.send(tensors, parts=3) == {"missing": 0, "stale": 0}
    assert_fresh(world)
    # In place, so that graphs stay.
    assert all(target.into is where[name] for name, target in world.model.targets.items())


@pytest.mark.parametrize("form", ["plain, fused", "codes, one by one"])
def test_a_rank_takes_its_part(world, form):
    world = world(mesh=Mesh(1, 2))
    world.send(FORMS[form](tensors_of(world)))
    assert_fresh(world)


def test_they_are_those_of_a_checkpoint_of_the_codes_too(world, checkpoint, tmp_path):
    world, (folder, _) = world(), checkpoint
    world.send(tensors_of(world))
    shutil.copytree(folder / "new", tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    save_file(dict(coded(load_file(file).items(), ignore=IGNORED)), file)
    packed = load_model(tmp_path / "packed", world.place, progress=Progress(quiet=True))
    alone = Mesh.single()
    assert checksums(packed.targets, alone) == checksums(world.model.targets, alone)


@ONE_FAMILY
def test_checksums_tell_codes_from_scales(world):
    world = world()
    before = checksums(world.model.targets, Mesh.single())
    world.model.targets[QUERY].into.scales[3, 1] += 1
    after = checksums(world.model.targets, Mesh.single())
    assert [name for name in before if before[name] != after[name]] == [f"{QUERY}_scale"]


@ONE_FAMILY
@pytest.mark.parametrize("name", [QUERY, f"{QUERY}_scale"])
def test_codes_and_scales_come_together(world, name):
    world = world()
    tensors = FORMS["codes, fused"](tensors_of(world))
    whole = dict(tensors)
    del tensors[name]
    other = QUERY if name.endswith("_scale") else f"{QUERY}_scale"
    with pytest.raises(ValueError, match=f"brought {other} without {name}$"):
        world.send(tensors)
    assert world.sync.stale == world.sync.replaced
    assert world.send(whole) == {"missing": 0, "stale": 0}
    assert_fresh(world)


@ONE_FAMILY
def test_an_expert_without_its_scales_is_named(world):
    world = world()
    tensors = FORMS["codes, one by one"](tensors_of(world))
    del tensors["model.layers.3.mlp.experts.5.up_proj.weight_scale"]
    with pytest.raises(ValueError, match="up_proj.weight of expert 5 without .*up_proj.weight_sca"):
        world.send(tensors)


WRONG = {
    "scales of another shape": ({f"{QUERY}_scale": torch.zeros(64, 3, dtype=torch.uint8)}, "shape"),
    "scales that are no bytes": (
        {f"{QUERY}_scale": torch.zeros(64, 2)}, "type F32; expected one of U8",
    ),
    "codes that are bytes": ({QUERY: torch.zeros(64, 64, dtype=torch.uint8)}, "type U8"),
    "codes of what is plain": (
        {"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}, "not held as MXFP8",
    ),
    "codes of what is ignored": (
        {"model.layers.1.mlp.up_proj.weight": torch.zeros(128, 64).to(torch.float8_e4m3fn)},
        "up_proj.weight is not held as MXFP8",
    ),
    "scales beside plain numbers": (
        {QUERY: torch.zeros(64, 64), f"{QUERY}_scale": torch.zeros(64, 2, dtype=torch.uint8)},
        f"{QUERY}_scale stands for {QUERY}_scale, and so does",
    ),
}  # fmt: skip


@ONE_FAMILY
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_taken_is_refused_before_anything_is_received(world, wrong):
    world, (tensors, words) = world(), WRONG[wrong]
    before = checksums(world.model.targets, Mesh.single())
    world.transport.receive = None
    world.sync.start()
    with pytest.raises(ValueError, match=words):
        world.sync.update(announce(tensors))
    assert checksums(world.model.targets, Mesh.single()) == before


@ONE_FAMILY
@pytest.mark.parametrize(
    ("form", "name", "bits", "words"),
    [
        ("codes, fused", f"{QUERY}_scale", 0xFF, f"{QUERY}_scale holds what is no number"),
        ("codes, fused", QUERY, 0xFF, f"{QUERY} holds what is no number"),
        ("plain, fused", QUERY, 0xFF, f"{QUERY} holds numbers that are not finite"),
    ],
    ids=["a scale", "a code", "a number"],
)
def test_what_is_no_number_fails_the_update_when_it_comes(world, form, name, bits, words):
    world = world()
    tensors = FORMS[form](tensors_of(world))
    tensors[name].view(torch.uint8)[2, :2] = bits
    with pytest.raises(ValueError, match=words):
        world.send(tensors)
    assert world.transport.closed and world.sync.stale


def test_trainers_are_told_of_numbers_that_are_not_finite():
    with pytest.raises(ValueError, match=f"{QUERY} holds numbers that are not finite"):
        dict(coded([(QUERY, torch.full((64, 64), torch.inf))]))
    with pytest.raises(ValueError, match="rows of 48 are not whole blocks"):
        dict(coded([(QUERY, torch.zeros(64, 48))]))
