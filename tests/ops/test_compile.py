"""Every kernel compiles for every GPU generation, and those of a decode step keep to registers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODULES = [
    path.stem
    for path in sorted(HERE.glob("test_*_kernel.py"))
    if "def compile_cases(" in path.read_text()
]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[..., list[dict]]]:
    """What `ahead.py` tells of the kernels of a module; one process for all of them, for it takes
    as long to start as a module to compile."""
    # The interpreter that other tests run kernels in takes the compiler's place.
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command, ends = [sys.executable, HERE / "ahead.py"], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=ends, stdout=ends, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        @cache
        def ask(module: str, extent: str = "few") -> list[dict]:
            print(module, extent, file=process.stdin, flush=True)
            results = []
            for told in map(json.loads, process.stdout):
                if "jobs" in told:
                    assert len(results) == told["jobs"] > 0
                    return results
                results.append(told)
            raise AssertionError("it has ended; see its errors above")

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_every_generation_and_do_not_spill_in_decoding(compiled, module):
    results = compiled(module)
    assert_no_errors(results)
    spilling = [r for r in results if r["decode"] and r["capability"] == 90 and r["stack"]]
    assert not spilling


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_at_all_sizes_of_prompts(compiled, module):
    assert_no_errors(compiled(module, "every"))


def assert_no_errors(results: list[dict]) -> None:
    errors = [f"{r['case']}, {r['capability']}: {r['error']}" for r in results if "error" in r]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(("size", "op"), [(2048, "add_rmsnorm"), (5120, "sandwich")])
def test_squares_add_up_in_one_order_with_and_without_a_sum_over_ranks(compiled, size, op):
    """So that both give the same bits."""
    every = [*compiled("test_norm_kernel"), *compiled("test_boundary_kernel")]
    every = [found for found in every if found["capability"] == 90]
    alone = [found["sums"] for found in every if found["case"] == f"{op} T1 D{size}"]
    summed = [found["sums"] for found in every if found["case"].startswith("N")]
    summed = [sums for sums in summed if sums[0].split()[0] == alone[0][0].split()[0]]
    assert len(alone) == 1 and len(summed) > 5 and all(sums == alone[0] for sums in summed)
