"""Adapters that PEFT wrote give the logits that PEFT's own model gives, in FP32 on a CPU."""

import pytest
import torch
from adapter_files import ATTENTION, PARAMETERS, write_by_peft
from tiny import prompts

from limelight.models.adapters import AdapterRoom
from limelight.models.batch import Batch
from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.rl.lora import AdapterBank, read_adapter

DENSE = ["gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "linear": {"target_modules": [*ATTENTION, *DENSE]},
    "both parameters of experts": {"target_modules": ["q_proj"], "target_parameters": PARAMETERS},
    "gate and up of experts": {"target_modules": [], "target_parameters": PARAMETERS[:1]},
    "down of experts": {"target_modules": [], "target_parameters": PARAMETERS[1:]},
    "rank-stabilized": {
        "target_modules": ATTENTION, "target_parameters": PARAMETERS, "use_rslora": True,
    },
    "patterns": {
        "target_modules": r".*\.(1|3)\.self_attn\.[qo]_proj",
        "target_parameters": PARAMETERS,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 7, "down_proj": 3},
        "alpha_pattern": {"o_proj": 3, "experts.gate_up_proj": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", ["flint", "beam"])
def test_an_adapter_of_peft_gives_the_logits_of_peft(tmp_path, family, name):
    oracle = write_by_peft(tmp_path, family, {"own": CONFIGS[name]})
    room = AdapterRoom(slots=2, max_rank=8, dtype=torch.float32)
    place = Placement(Mesh.single(), torch.float32, torch.device("cpu"), adapters=room)
    model = load_model(oracle.folder, place, progress=Progress(quiet=True))
    bank = AdapterBank(room)
    bank.held[7] = read_adapter(oracle.adapters["own"], room)
    bank.place(7, 2)
    with_it, without = prompts(30, 20)
    room.step.of_rows_T = torch.tensor([2] * 30 + [0] * 20, dtype=torch.int32)
    with torch.inference_mode():
        hidden_TD = model(torch.tensor(with_it + without), Batch.packed([30, 20]))
        found = torch.log_softmax(model.logits(hidden_TD), dim=-1)
    assert (found[:30] - oracle.logprobs(with_it, "own")).abs().max() < 1e-4
    assert (found[30:] - oracle.logprobs(without, None)).abs().max() < 1e-4
    assert (oracle.logprobs(with_it, "own") - oracle.logprobs(with_it, None)).abs().max() > 0.1


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_merged_experts_are_the_weights_that_peft_computes_with(tmp_path, family):
    configs = {
        name: {"target_modules": [], "target_parameters": PARAMETERS} for name in ("one", "other")
    }
    oracle = write_by_peft(tmp_path, family, configs)
    room = AdapterRoom(1, 8, torch.bfloat16, merges_experts=True)
    place = Placement(Mesh.single(), torch.bfloat16, torch.device("cpu"), adapters=room)
    model = load_model(oracle.folder, place, progress=Progress(quiet=True))
    weights = {name: target.into for name, target in model.targets.items() if ".experts." in name}
    base = {name: weight.clone() for name, weight in weights.items()}
    bank = AdapterBank(room)
    for number, name in enumerate(configs, 1):
        bank.held[number] = read_adapter(oracle.adapters[name], room)
    oracle.model.to(torch.bfloat16)
    for number in (1, 2, 1, 0):
        bank.place(number, 1)
        for path, weight in weights.items():
            module, kind, _ = path.rsplit(".", 2)
            expected = base[path]
            if number:
                oracle.model.set_adapter(list(configs)[number - 1])
                expected = computed(oracle.model, module, kind)
            assert torch.equal(weight, expected), (path, number)


def computed(model, module, kind):
    """What PEFT's model multiplies with, for a tensor of ours."""
    name = "down_proj" if kind == "down_proj" else "gate_up_proj"
    wrapper = model.base_model.model.get_submodule(module)
    while wrapper.parameter_name != name:
        wrapper = wrapper.base_layer
    lhs, rhs, scale = wrapper.get_delta_factors(wrapper.active_adapters[0])
    weight = torch.baddbmm(wrapper.get_param(), lhs, rhs, alpha=scale)
    if kind == "down_proj":
        return weight
    half = weight.shape[1] // 2
    return weight[:, :half] if kind == "gate_proj" else weight[:, half:]
