"""Rehearses a start: a program, for kernels that other tests run in Triton's interpreter cannot be
compiled in the same process.

    python rehearsed.py ahead|start FOLDER [NAME ...]

As `ahead` it has the kernels NAME compiled by others, as they are before a start; as `start` it
compiles them itself, of a rehearsal in which each layer runs. Prints JSON: the fault, all launches,
how many of them are of these kernels, and which of these had to be compiled here.
"""

import json
import sys

from limelight.config import EngineConfig
from limelight.engine import rehearsal
from limelight.engine.rehearsal import Rehearsal, rehearse
from limelight.ops.absent import replaced
from limelight.ops.ahead import compilations, compile_all, compile_launch, settle_keys


def main(role: str, folder: str, *names: str) -> None:
    config = EngineConfig(
        model=folder, device="cuda", dtype="bfloat16", max_num_seqs=3, max_num_batched_tokens=40,
        kv_cache_memory_bytes=2**20,
    )  # fmt: skip
    asked = Rehearsal(config, 64, 90, 2**35)
    if role == "ahead":
        launches, fault = rehearse(asked)
    else:
        settle_keys()
        with replaced(rehearsal, {"run_each_kind_once": lambda model, groups: None}):
            launches, fault = rehearse(asked)
    chosen = [launch for launch in launches if launch.kernel.__name__ in names]
    with compilations() as here:
        if role == "ahead":
            compile_all(chosen, compile_launch, 2)
        else:
            for launch in reversed(chosen):
                compile_launch(launch)
    keys = [f"{launch.kernel.__name__} {launch.key}" for launch in launches]
    print(json.dumps({"fault": fault, "launches": keys, "chosen": len(chosen), "here": here}))


if __name__ == "__main__":
    main(*sys.argv[1:])
