"""Adapters that PEFT wrote give the logits that PEFT's own model gives, in FP32 on a CPU."""

import pytest
import torch
from adapters import ATTENTION, PARAMETERS, write_by_peft
from tiny import prompts

from limelight.models.adapters import AdapterRoom
from limelight.models.batch import Batch
from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.rl.lora import AdapterBank

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
    bank.read(7, str(oracle.adapters["own"]))
    bank.place(7, 2)
    with_it, without = prompts(30, 20)
    room.step.of_rows_T = torch.tensor([2] * 30 + [0] * 20, dtype=torch.int32)
    with torch.inference_mode():
        hidden_TD = model(torch.tensor(with_it + without), Batch.packed([30, 20]))
        found = torch.log_softmax(model.logits(hidden_TD), dim=-1)
    assert (found[:30] - oracle.logprobs(with_it, "own")).abs().max() < 1e-4
    assert (found[30:] - oracle.logprobs(without, None)).abs().max() < 1e-4
    assert (oracle.logprobs(with_it, "own") - oracle.logprobs(with_it, None)).abs().max() > 0.1
