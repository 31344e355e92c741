"""What each of several ranks takes of the host's memory while it loads: its share, and not much."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from limelight.config import EngineConfig
from limelight.engine.startup import plan_memory, resolve
from limelight.models.layers import Placement
from limelight.models.loader import build
from limelight.parallel.mesh import Mesh

MIB = 2**20
# Beside its weights a rank holds its modules and one tensor on its way; a whole copy is more.
MOST_BESIDE = 500 * MIB
START = """
import sys, time
from limelight.config import EngineConfig
from limelight.engine.startup import start_engine
from limelight.progress import Progress
config = EngineConfig(
    model=sys.argv[1], device="cpu", dtype="bfloat16", tensor_parallel_size=2, max_num_seqs=1,
    max_model_len=64, kv_cache_memory_bytes=2**20 * 8,
)
engine = start_engine(config, Progress(quiet=True)).engine
print("ready", flush=True)
time.sleep(1)
engine.close()
"""
CONFIG = {
    "architectures": ["FlintForCausalLM"], "model_type": "flint", "dtype": "bfloat16",
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6,
    "sliding_window": 65, "max_position_embeddings": 4096, "num_experts": 128,
    "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def write(folder: Path) -> int:
    """A checkpoint of that shape, a file for each tensor; its bytes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="bfloat16", load_format="dummy", max_model_len=64
    )
    found = resolve(config)
    place = Placement(Mesh.single(), torch.bfloat16, torch.device("cpu"), outline=True)
    targets = build(found.architecture, found.shape, place).targets
    index, total = {}, 0
    for number, (name, target) in enumerate(targets.items()):
        file = f"model-{number:05d}.safetensors"
        dtype = torch.float32 if "gate.weight" in name else torch.bfloat16
        tensor = torch.full(target.shape, 0.01, dtype=dtype)
        save_file({name: tensor}, folder / file)
        index[name], total = file, total + tensor.nbytes
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return total


def own_bytes(pid: int) -> int:
    """What a process holds that no file does; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields.get("RssAnon", "0 kB").split()[0])


@pytest.mark.slow
def test_a_rank_holds_its_share_while_it_loads(tmp_path, capsys):
    total = write(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="bfloat16", tensor_parallel_size=2,
        max_model_len=64, max_num_seqs=1,
    )  # fmt: skip
    share = plan_memory(config, resolve(config)).weights
    # A rank that read the whole model would pass the limit.
    assert total - share > MOST_BESIDE
    lead = subprocess.Popen(
        [sys.executable, "-c", START, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    peaks: dict[str, int] = {}

    def watch() -> None:
        while lead.poll() is None:
            children = Path(f"/proc/{lead.pid}/task/{lead.pid}/children").read_text().split()
            for rank, pid in enumerate([lead.pid, *map(int, children)]):
                name = f"rank {rank}"
                peaks[name] = max(peaks.get(name, 0), own_bytes(pid))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    assert lead.stdout is not None and lead.stdout.readline() == "ready\n"
    assert lead.wait(60) == 0
    shutil.rmtree(tmp_path)
    with capsys.disabled():
        told = ", ".join(f"{name} {peak // MIB} MiB" for name, peak in sorted(peaks.items()))
        print(f"model {total // MIB} MiB, a share {share // MIB} MiB: {told}")
    assert len(peaks) == 2
    for name, peak in peaks.items():
        assert share <= peak < share + MOST_BESIDE, name
