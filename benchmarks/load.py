"""How fast a checkpoint in the page cache loads, and how much memory of the host that takes:

    python benchmarks/load.py benchmarks/configs/flint-nvfp4 flint.gguf --json load.json

`load_s` is the weights alone, `ready_s` a whole engine with its kernels and graphs, both in a fresh
process; `anon_gb` is the most memory of its own (RssAnon) that this process had until then.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READ_BYTES = 16 * 2**20
SECONDS_BETWEEN_SAMPLES = 0.005
PROMPT = 32


def child(args: argparse.Namespace) -> None:
    """Start an engine and let it answer; leave what that took in a file."""
    import torch

    from limelight.engine import startup
    from limelight.engine.llm import LLM
    from limelight.types import SamplingParams

    load_model, seconds = startup.load_model, []

    def timed(*values, **options):
        start = time.monotonic()
        model = load_model(*values, **options)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
        return model

    startup.load_model = timed
    start = time.monotonic()
    llm = LLM(
        model=str(args.file), hf_config_path=str(args.config), max_model_len=args.max_model_len
    )
    ready_s = time.monotonic() - start
    prompt = [i * 97 % llm.info.vocab_size for i in range(1, PROMPT + 1)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    output = llm.generate([prompt], params)[0].outputs[0]
    assert len(output.token_ids) == 8 and math.isfinite(output.cumulative_logprob), output
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    told = {"device": device, "load_s": seconds[0], "ready_s": ready_s}
    Path(args.child).write_text(json.dumps(told))
    llm.close()


def own_memory(pid: int) -> int:
    """Bytes of RssAnon of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(argv: list[str]) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        process = subprocess.Popen([sys.executable, __file__, *argv, "--child", report.name])
        most = 0
        while process.poll() is None:
            most = max(most, own_memory(process.pid))
            time.sleep(SECONDS_BETWEEN_SAMPLES)
        if process.returncode:
            raise SystemExit(f"the engine's process ended with {process.returncode}")
        return json.loads(Path(report.name).read_text()) | {"anon_gb": most / 1e9}


def read_through(file: Path) -> None:
    """Bring the file into the page cache."""
    buffer = bytearray(READ_BYTES)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="folder with config.json")
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    from limelight.bench import record

    os.sync()
    read_through(args.file)
    found = measure(sys.argv[1:])
    size = args.file.stat().st_size / 1e9
    row = {"model": args.config.name, "weights": "nvfp4", "file_gb": size, **found}
    row |= {"load_gb_per_s": size / found["load_s"], "ready_gb_per_s": size / found["ready_s"]}
    row = {
        key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()
    }
    command = shlex.join(["python", *sys.argv])
    record.save(args.json, record.record("load", [], [row]) | {"command": command})
    print(json.dumps(row))


if __name__ == "__main__":
    main()
