"""What an adapter file may hold, in which layouts, and what is refused with its name."""

import pytest
import torch
from adapter_files import EXPERTS, INNER, SIZE, attention, write_adapter, write_files
from safetensors.torch import load_file
from tiny import FAMILIES

from limelight.models.adapters import AdapterRoom
from limelight.models.flint import FlintConfig
from limelight.models.layers import Placement
from limelight.models.loader import build
from limelight.parallel.mesh import Mesh
from limelight.rl.lora import AdapterBank, read_adapter

RANK = 4
LAYER = "base_model.model.model.layers.2.mlp.experts"
GATE_UP, DOWN = "2.mlp.experts.base_layer", "2.mlp.experts"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def flat(inputs, outputs, rank=RANK):
    return (rank * EXPERTS, inputs), (outputs, rank * EXPERTS)


def bank(mesh=None, *, max_rank=8, **changes):
    """Of a Flint of three layers, of which only shapes matter."""
    base, config_class, _ = FAMILIES["flint"]
    json = config_class(**(base | {"num_hidden_layers": 3} | changes)).to_dict()
    room = AdapterRoom(slots=1, max_rank=max_rank, dtype=torch.float32)
    place = Placement(mesh or Mesh.single(), torch.float32, torch.device("cpu"), adapters=room)
    build("FlintForCausalLM", FlintConfig.from_dict(json), place)
    return AdapterBank(room)


def placed(adapters, folder, kind):
    """B A of each expert, [E, out, in], of gate_up_proj or down_proj, as the slot has it."""
    adapters.held[1] = read_adapter(folder, adapters.room)
    adapters.place(1, 1)
    name = "gate_proj" if kind == "gate_up_proj" else kind
    matrix = adapters.room.sites[f"model.layers.2.mlp.experts.{name}"].matrix
    return matrix.b[0] @ matrix.a[0]


def by_peft(folder, nested, *, swapped=False):
    """The same from the file, by PEFT's formula."""
    tensors = load_file(folder / "adapter_model.safetensors")
    path = f"{LAYER}.base_layer" if nested else LAYER
    a, b = (tensors[f"{path}.lora_{side}.weight"] for side in "AB")
    a, b = a.reshape(EXPERTS, RANK, -1), b.reshape(-1, RANK, EXPERTS)
    return 2.0 * torch.einsum("ore,eri->eio" if swapped else "ore,eri->eoi", b, a)


def test_two_parameters_nest_and_the_inner_one_is_gate_and_up(tmp_path):
    shapes = {GATE_UP: flat(SIZE, 2 * INNER), DOWN: flat(INNER, SIZE)}
    write_adapter(tmp_path, shapes, target_parameters=BOTH)
    found = placed(bank(), tmp_path, "gate_up_proj")
    assert torch.allclose(found, by_peft(tmp_path, True), atol=1e-4)
    assert torch.allclose(
        placed(bank(), tmp_path, "down_proj"), by_peft(tmp_path, False), atol=1e-4
    )


@pytest.mark.parametrize("kind, inputs, outputs", [
    ("gate_up_proj", SIZE, 2 * INNER), ("down_proj", INNER, SIZE),
])  # fmt: skip
def test_which_parameter_stands_alone_is_told_by_the_config(tmp_path, kind, inputs, outputs):
    config = {"target_parameters": [f"experts.{kind}"], "peft_version": "0.21.2"}
    write_adapter(tmp_path, {DOWN: flat(inputs, outputs)}, **config)
    assert torch.allclose(placed(bank(), tmp_path, kind), by_peft(tmp_path, False), atol=1e-4)


def test_a_file_of_an_older_peft_is_turned_round(tmp_path):
    shapes = {GATE_UP: flat(2 * INNER, SIZE), DOWN: flat(SIZE, INNER)}
    write_adapter(tmp_path, shapes, target_parameters=BOTH)
    # 2 I is D in this model, so only down_proj tells.
    found = placed(bank(), tmp_path, "gate_up_proj")
    assert torch.allclose(found, by_peft(tmp_path, True, swapped=True), atol=1e-4)
    found = placed(bank(), tmp_path, "down_proj")
    assert torch.allclose(found, by_peft(tmp_path, False, swapped=True), atol=1e-4)


@pytest.mark.parametrize("version, swapped", [("0.18.1", True), ("0.21.2", False)])
def test_where_shapes_do_not_tell_the_version_does(tmp_path, version, swapped):
    config = {"target_parameters": BOTH[:1], "peft_version": version}
    write_adapter(tmp_path, {DOWN: flat(SIZE, SIZE)}, **config)
    found = placed(bank(), tmp_path, "gate_up_proj")
    assert torch.allclose(found, by_peft(tmp_path, False, swapped=swapped), atol=1e-4)


@pytest.mark.parametrize("version", [{}, {"peft_version": "0.19.0"}])
def test_without_either_it_is_refused(tmp_path, version):
    write_adapter(tmp_path, {DOWN: flat(SIZE, SIZE)}, target_parameters=BOTH[:1], **version)
    with pytest.raises(ValueError, match="peft_version"):
        read_adapter(tmp_path, bank().room)


def test_experts_one_by_one_and_stacked_are_the_same_adapter(tmp_path):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((8, 4, SIZE), (8, INNER, 4)))
    single, stacked = {}, {}
    for kind in ("gate_proj", "up_proj"):
        stacked |= {f"{LAYER}.{kind}.lora_A.weight": a, f"{LAYER}.{kind}.lora_B.weight": b}
        for e in range(EXPERTS):
            single |= {
                f"{LAYER}.{e}.{kind}.lora_A.weight": a[e].clone(),
                f"{LAYER}.{e}.{kind}.lora_B.weight": b[e].clone(),
            }
    write_files(tmp_path / "single", single)
    write_files(tmp_path / "stacked", {name: t.clone() for name, t in stacked.items()})
    expected = 2.0 * torch.cat([b @ a, b @ a], dim=1)
    for name in ("single", "stacked"):
        found = placed(bank(), tmp_path / name, "gate_up_proj")
        assert torch.allclose(found, expected, atol=1e-4)


def test_experts_without_an_adapter_of_their_own_are_left_as_they_are(tmp_path):
    write_adapter(tmp_path, {"2.mlp.experts.5.down_proj": ((4, INNER), (SIZE, 4))})
    found = placed(bank(), tmp_path, "down_proj")
    assert found[5].any() and not found[[0, 1, 2, 3, 4, 6, 7]].any()


def test_a_slot_holds_nothing_of_the_adapter_before(tmp_path):
    adapters = bank()
    write_adapter(tmp_path / "experts", {DOWN: flat(INNER, SIZE)}, target_parameters=BOTH[1:])
    assert placed(adapters, tmp_path / "experts", "down_proj").any()
    assert not placed(
        adapters, write_adapter(tmp_path / "attention", attention()), "down_proj"
    ).any()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_holds_its_part(tmp_path, rank):
    shapes = {GATE_UP: flat(SIZE, 2 * INNER), DOWN: flat(INNER, SIZE), **attention()}
    write_adapter(tmp_path, shapes, target_parameters=BOTH, peft_version="0.21.2")
    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    mine = bank(Mesh(rank, 2))
    whole = placed(bank(), tmp_path, "gate_up_proj").unflatten(1, (2, INNER))[:, :, half]
    assert torch.allclose(placed(mine, tmp_path, "gate_up_proj"), whole.flatten(1, 2), atol=1e-5)
    whole = placed(bank(), tmp_path, "down_proj")[..., half]
    assert torch.allclose(placed(mine, tmp_path, "down_proj"), whole, atol=1e-5)


CONFIG_FAULTS = {
    "peft_type": "IA3",
    "bias": "all",
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1, 2],
    "init_lora_weights": "pissa_niter_16",
    "r": 0,
    "rank_pattern": {"q_proj": -1},
    "trainable_token_indices": [3],
    "something_new": {"changes": "everything"},
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_config_that_cannot_be_served_is_refused_by_name(tmp_path, name):
    write_adapter(tmp_path, attention(), **{name: CONFIG_FAULTS[name]})
    with pytest.raises(ValueError, match=rf"adapter_config\.json.*{name}"):
        read_adapter(tmp_path, bank().room)


TENSOR_FAULTS = {
    "of no module": ("2.mlp.shared_expert.side_proj", ((4, SIZE), (SIZE, 4)), "no projection"),
    "of the router": ("2.mlp.gate", ((4, SIZE), (EXPERTS, 4)), "router"),
    "of another shape": ("0.self_attn.q_proj", ((4, SIZE + 1), (64, 4)), r"expected F32 \[4, 48\]"),
    "of another rank": ("0.self_attn.q_proj", ((3, SIZE), (64, 3)), r"expected F32 \[4, 48\]"),
    "of no dimensions": (DOWN, ((), ()), "two or three dimensions"),
    "of experts of another shape": (DOWN, flat(INNER, SIZE + 1), "are no adapter of rank 4"),
    "of an expert that is not there": (
        "2.mlp.experts.8.down_proj", ((4, INNER), (SIZE, 4)), "8 experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tmp_path, name):
    path, shapes, text = TENSOR_FAULTS[name]
    write_adapter(tmp_path, {path: shapes}, target_parameters=BOTH[1:])
    with pytest.raises(ValueError, match=text) as error:
        read_adapter(tmp_path, bank().room)
    assert path in str(error.value)


@pytest.mark.parametrize("name", [
    "base_model.model.model.layers.0.self_attn.q_proj.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "base_model.model.lm_head.weight",
])  # fmt: skip
def test_no_tensor_is_passed_over(tmp_path, name):
    write_adapter(tmp_path, attention())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    write_files(tmp_path, tensors | {name: torch.zeros(4)})
    with pytest.raises(ValueError, match=name):
        read_adapter(tmp_path, bank().room)


def test_half_a_pair_is_refused(tmp_path):
    write_files(
        tmp_path,
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)},
    )
    with pytest.raises(ValueError, match="other half"):
        read_adapter(tmp_path, bank().room)


def test_the_same_weights_twice_are_refused(tmp_path):
    shapes = {
        DOWN: flat(INNER, SIZE), "2.mlp.experts.0.down_proj": ((RANK, INNER), (SIZE, RANK)),
    }  # fmt: skip
    write_adapter(tmp_path, shapes, target_parameters=BOTH[1:])
    with pytest.raises(ValueError, match="same weights"):
        read_adapter(tmp_path, bank().room)


def test_a_rank_above_the_room_is_refused_with_the_flag(tmp_path):
    write_adapter(tmp_path, attention(9), r=9)
    with pytest.raises(ValueError, match=r"rank 9 is above the 8 .*--max-lora-rank"):
        read_adapter(tmp_path, bank().room)


def test_values_that_are_no_numbers_are_refused(tmp_path):
    write_adapter(tmp_path, attention())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    write_files(tmp_path, tensors)
    with pytest.raises(ValueError, match="not finite"):
        read_adapter(tmp_path, bank().room)
