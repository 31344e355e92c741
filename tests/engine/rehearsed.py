"""Rehearses a start and compiles some of its kernels: a program, for kernels that other tests run
in Triton's interpreter cannot be compiled in the same process.

    python rehearsed.py FOLDER [NAME ...]

prints JSON: the fault, the launches of all layers and of each kind of layer, how many of them are
of the kernels NAME, and which of these are compiled here after others were to do it.
"""

import json
import sys

from limelight.config import EngineConfig
from limelight.engine import rehearsal
from limelight.engine.rehearsal import Rehearsal, rehearse
from limelight.ops.absent import replaced
from limelight.ops.ahead import compilations, compile_all, compile_launch


def launched(folder: str, *, every_layer: bool = False):
    config = EngineConfig(
        model=folder, device="cuda", dtype="bfloat16", max_num_seqs=3, max_num_batched_tokens=40,
        kv_cache_memory_bytes=2**20,
    )  # fmt: skip
    run_each_kind_once = rehearsal.run_each_kind_once
    run = (lambda model, groups: None) if every_layer else run_each_kind_once
    with replaced(rehearsal, {"run_each_kind_once": run}):
        return rehearse(Rehearsal(config, 64, 90, 2**35))


def main(folder: str, *names: str) -> None:
    all_of, _ = launched(folder, every_layer=True)
    before, fault = launched(folder)
    chosen = [launch for launch in before if launch.kernel.__name__ in names]
    compile_all(chosen, compile_launch, 2)
    again, _ = launched(folder)
    with compilations() as here:
        for launch in again:
            if launch.kernel.__name__ in names:
                compile_launch(launch)
    keys = [[f"{one.kernel.__name__} {one.key}" for one in some] for some in (all_of, before)]
    print(json.dumps({"fault": fault, "every": keys[0], "kinds": keys[1],
                      "chosen": len(chosen), "here": here}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
