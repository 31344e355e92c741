"""How much memory a plan may take, of a GPU and of a host, and what a start looks up for it."""

from dataclasses import replace

import pytest
import torch
from tiny import write_checkpoint

from limelight import LLM
from limelight.config import EngineConfig
from limelight.engine import llm, memory, startup
from limelight.engine.memory import device_memory
from limelight.engine.startup import plan_memory, resolve

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flint")
    write_checkpoint(path, "flint")
    return str(path)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with 900 MiB to take, in a group that may hold 500 MiB and holds 450, 150 of files."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {900 * 1024} kB\n")
    (tmp_path / "memory.max").write_text(f"{500 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{450 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {150 * MIB}\nactive_file 9\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


def test_files_that_a_group_has_in_memory_count_as_free(host):
    assert device_memory(CPU) == (200 * MIB, 200 * MIB)
    (host / "memory.current").write_text(str(900 * MIB))
    assert device_memory(CPU)[0] == 0


@pytest.mark.parametrize("text", ["max", str(2**60)], ids=["no limit", "a high one"])
def test_a_group_without_a_limit_leaves_what_the_host_has(host, text):
    (host / "memory.max").write_text(text)
    assert device_memory(CPU)[0] == 900 * MIB
    (host / "memory.max").unlink()
    assert device_memory(CPU)[0] == 900 * MIB


def test_a_host_without_meminfo_has_what_it_says_or_says_that_it_does_not(host, monkeypatch):
    (host / "meminfo").unlink()
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)
    assert device_memory(CPU)[0] == 4096_000
    monkeypatch.delattr(memory.os, "sysconf")
    with pytest.raises(ValueError, match="does not tell how much memory"):
        device_memory(CPU)


def planned(folder, monkeypatch, *, free, total, device=CUDA, **settings):
    """The plan of a device with so many MiB."""
    answer = (free * MIB, total * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: answer)
    config = EngineConfig(model=folder, device="cpu", max_num_seqs=512, **settings)
    return plan_memory(config, replace(resolve(config), device=device))


def test_the_share_of_a_gpu_is_one_of_its_whole_memory(folder, monkeypatch):
    for free in (400, 305):
        plan = planned(folder, monkeypatch, free=free, total=600, gpu_memory_utilization=0.5)
        plan.check()
        taken = plan.weights + plan.workspace + plan.cache
        assert 300 * MIB - plan.block.nbytes < taken <= 300 * MIB


def test_a_share_of_a_gpu_that_others_do_not_leave_is_refused_with_one_that_they_do(
    folder, monkeypatch
):
    plan = planned(folder, monkeypatch, free=290, total=600, gpu_memory_utilization=0.5)
    with pytest.raises(ValueError, match="--gpu-memory-utilization 0.48\n"):
        plan.check()
    planned(folder, monkeypatch, free=290, total=600, gpu_memory_utilization=0.48).check()
    # A cache whose size is given asks for no share.
    planned(folder, monkeypatch, free=290, total=600, kv_cache_memory_bytes=9 * MIB).check()


def test_the_share_of_a_host_is_one_of_what_is_free(folder, monkeypatch, host):
    (host / "memory.max").write_text(f"{900 * MIB}\n")
    config = EngineConfig(model=folder, device="cpu", max_num_seqs=512, gpu_memory_utilization=0.5)
    plan = plan_memory(config, resolve(config))
    plan.check()
    assert 300 * MIB - plan.block.nbytes < plan.weights + plan.workspace + plan.cache <= 300 * MIB
    (host / "memory.current").write_text(str(1045 * MIB))
    with pytest.raises(ValueError, match="do not fit into the 2.5 MiB that may be used"):
        plan_memory(config, resolve(config)).check()


def test_a_start_finds_the_model_and_reads_its_shape_once(folder, monkeypatch):
    calls = []

    def counted(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: calls.append(name) or original(*a, **k))

    counted(startup, "locate")
    counted(llm, "locate")
    counted(startup, "read_config")
    with LLM(folder, device="cpu"):
        assert sorted(calls) == ["locate", "read_config"]


def test_weights_whose_kernels_go_by_the_rows_are_refused_where_batches_must_not_matter():
    config = EngineConfig(model="flint-nano-nvfp4", batch_invariant=True)
    plan = plan_memory(config, resolve(config))
    plan.check()
    with pytest.raises(ValueError, match="no NVFP4 weights on a GPU.*routed experts"):
        replace(plan, invariant_on_gpu=True).check()


def test_room_for_expert_ids_is_part_of_a_block(folder):
    sizes = [
        plan_memory(config, resolve(config)).block.nbytes
        for config in (
            EngineConfig(model=str(folder)),
            EngineConfig(model=str(folder), enable_return_routed_experts=True),
        )
    ]
    # 16 tokens, 7 layers, 2 experts of a byte each.
    assert sizes[1] - sizes[0] == 16 * 7 * 2
