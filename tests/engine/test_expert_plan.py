"""Who holds which experts, what that takes, and the record of how busy each was."""

import json
from dataclasses import replace

import pytest
import torch

from limelight.config import EngineConfig
from limelight.engine import expert_load
from limelight.engine.expert_load import ExpertLoad, load_file
from limelight.engine.experts import expert_mesh
from limelight.engine.startup import plan_memory, resolve
from limelight.metrics import Metrics
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.stats import EngineStats

FOUR = Seat(rank=1, size=2, data_rank=1, data_size=2)


def nano(**given) -> EngineConfig:
    settings = {"model": "beam-nano-nvfp4", "device": "cpu", "enable_expert_parallel": True}
    return EngineConfig(**settings | given)


def test_a_rank_of_four_plans_for_a_quarter_of_the_experts_and_not_of_their_width():
    config = nano(tensor_parallel_size=2)
    found = resolve(config)
    divided = {kind.name: kind.nbytes for kind in plan_memory(config, found).kinds}
    alone = plan_memory(config, found, Mesh.single())
    (every,) = (kind.nbytes for kind in alone.kinds if kind.name == "routed experts")
    experts = expert_mesh(config, found, FOUR)
    assert experts.rank == 3 and experts.size == 4
    plan = plan_memory(config, found, experts=experts)
    held = {kind.name: kind.nbytes for kind in plan.kinds}
    assert 4 * held["routed experts"] == every
    assert held["attention"] == divided["attention"]
    assert plan.workspace > plan_memory(config, found).workspace


def test_one_rank_alone_holds_all_experts_as_ever():
    assert expert_mesh(nano(), resolve(nano()), Seat()) is None
    without = replace(nano(), enable_expert_parallel=False)
    assert expert_mesh(without, None, FOUR) is None
    for given in ({"num_redundant_experts": 1}, {"expert_dispatch_dtype": "fp8"}):
        flag = next(iter(given)).replace("_", "-")
        with pytest.raises(ValueError, match=f"--{flag} has a meaning with --enable-expert"):
            expert_mesh(replace(without, **given), None, FOUR)
        with pytest.raises(ValueError, match=f"--{flag} has a meaning with .* several ranks only"):
            expert_mesh(nano(**given), None, Seat())


def test_what_a_graph_cannot_hold_is_refused_with_what_would_do():
    on_gpu = replace(resolve(nano()), device=torch.device("cuda"))
    with pytest.raises(ValueError, match="all2all_pipelined counts rows .* --enforce-eager"):
        expert_mesh(nano(moe_backend="all2all_pipelined"), on_gpu, FOUR)
    with pytest.raises(ValueError, match="--weight-transfer-config .* not supported yet"):
        expert_mesh(nano(weight_transfer_config={"backend": "nccl"}), on_gpu, FOUR)
    with pytest.raises(ValueError, match="--enable-lora .* not supported yet"):
        expert_mesh(nano(enable_lora=True), on_gpu, FOUR)
    with pytest.raises(ValueError, match="drafts .* --enforce-eager"):
        expert_mesh(nano(), on_gpu, FOUR)
    assert expert_mesh(nano(enforce_eager=True), on_gpu, FOUR).size == 4


def test_a_load_is_written_whole_and_read_again_by_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(expert_load, "SECONDS_BETWEEN_LOOKS", 0.0)
    given = str(tmp_path / "load.json")
    file = load_file(nano(expert_load_file=given), Seat(data_rank=1, data_size=2))
    assert file == tmp_path / "load.1.json"
    counts = {1: [5, 0, 1] + [0] * 9, 4: [9, 9] + [0] * 10}
    load = ExpertLoad(file, lambda: counts)
    assert load.look(0, idle=False) == [] and not file.exists()
    assert load.look(3, idle=False) == [14, 9, 1] + [0] * 9
    assert json.loads(file.read_text())["layers"]["4"][:2] == [9, 9]
    assert [one.name for one in tmp_path.iterdir()] == ["load.1.json"]
    placed = nano(expert_placement=[str(file)], num_redundant_experts=2)
    experts = expert_mesh(placed, resolve(placed), Seat(data_size=2))
    held = [experts.placement.held(4, rank) for rank in range(2)]
    assert all({0, 1} <= set(one) and len(one) == 7 for one in held)
    with pytest.raises(ValueError, match="--expert-load-file: there is no folder"):
        load_file(nano(expert_load_file=str(tmp_path / "no" / "load.json")), Seat())


def test_a_load_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(expert_load, "SECONDS_BETWEEN_LOOKS", 0.0)
    load = ExpertLoad(tmp_path / "gone" / "load.json", lambda: {1: [5, 1]})
    assert load.look(3, idle=False) == [5, 1]
    assert "--expert-load-file" in caplog.text


def test_tokens_of_each_expert_are_told_for_each_engine():
    stats = [EngineStats(expert_tokens=[4, 0]), EngineStats(expert_tokens=[1, 7])]
    text = Metrics("m", stats=lambda: stats, info=lambda: None).render().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:expert_tokens_total{")]
    assert [line.rpartition(" ")[2] for line in lines] == ["4.0", "0.0", "1.0", "7.0"]
    assert 'engine="1"' in lines[3] and 'expert="1"' in lines[3]
    quiet = Metrics("m", stats=lambda: [EngineStats()], info=lambda: None).render().decode()
    assert "expert_tokens" not in quiet
