"""Every kernel compiles for every GPU generation, and those of a decode step keep to registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODULES = [
    path.stem
    for path in sorted(HERE.glob("test_*_kernel.py"))
    if "def compile_cases(" in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_every_generation_and_do_not_spill_in_decoding(module):
    # The interpreter that other tests run kernels in takes the compiler's place.
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, HERE / "ahead.py", module], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    *results, count = map(json.loads, run.stdout.splitlines())
    assert len(results) == count["jobs"] > 0
    errors = [f"{r['case']}, {r['capability']}: {r['error']}" for r in results if "error" in r]
    assert not errors, "\n".join(errors)
    spilling = [r for r in results if r["decode"] and r["capability"] == 90 and r["stack"]]
    assert not spilling
