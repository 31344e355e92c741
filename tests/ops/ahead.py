"""Compiles kernels for GPUs that are not there, as their launchers launch them.

To have your kernels compiled, define in `tests/ops/test_<op>_kernel.py`

    from ahead import Case, meta

    def compile_cases() -> list[Case]:
        return [
            Case("one row", lambda: project.kernel(meta(1, 2048), meta(5120, 2048)), decode=True),
            Case("many rows", lambda: rmsnorm.kernel(meta(4096, 2048), meta(2048), eps=1e-6)),
        ]

`test_compile.py` finds the function by its name. `meta` makes a tensor without memory (BF16 unless
told otherwise), so shapes can be those of the real models; the launcher gets nothing else, so it
must not read values or ask the device. Every launch is compiled for capability 90, the first of
each kernel for all of `CAPABILITIES`, with `PDL` and stages as they would be there. Launches that
specialize alike are compiled once. `decode` says that none of the kernels may spill.

By hand, from the root of the project, with registers, stack bytes and shared memory of each:

    PYTHONPATH=. python tests/ops/ahead.py test_linear_kernel [word in the case's name]
"""

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from limelight.ops import ROOMY, fewer_stages

# Bytes of shared memory that a program may have there.
CAPABILITIES = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
MAIN = 90


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a launcher."""

    name: str
    call: Callable[[], object]
    decode: bool = False


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A contiguous tensor that has everything but memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher handed to a kernel."""

    case: str
    decode: bool
    kernel: object
    args: tuple
    options: dict

    @property
    def key(self) -> str:
        named = {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **self.options}
        fixed = {p.name for p in self.kernel.params if p.is_constexpr} | set(self.options)
        return f"{self.kernel.__name__} {[_kind(v, k in fixed) for k, v in named.items()]}"


def _kind(value: object, fixed: bool) -> str:
    """What of an argument decides the code that is made."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.storage_offset() * value.element_size() % 16 == 0}"
    if isinstance(value, int) and not isinstance(value, bool) and not fixed:
        return f"{value == 1} {value % 16 == 0} {value > 2**31 - 1}"
    return repr(value)


class AbsentGpu:
    """A driver of Triton's for GPUs that are not there; its device numbers are capabilities."""

    def __init__(self):
        self.capability = MAIN

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def record(cases: list[Case]) -> list[Launch]:
    """The launches of all cases, each kind once."""
    from triton.runtime.jit import JITFunction

    launches: dict[str, Launch] = {}
    run = JITFunction.run
    for case in cases:

        def note(kernel, *args, grid, warmup, case=case, **options):
            assert not callable(grid) and 0 not in grid, f"{case.name}: grid {grid}"
            launch = Launch(case.name, case.decode, kernel, args, options)
            old = launches.get(launch.key)
            if old is None or case.decode and not old.decode:
                launches[launch.key] = launch

        JITFunction.run = note
        try:
            case.call()
        finally:
            JITFunction.run = run
    return list(launches.values())


def build(launch: Launch, capability: int) -> dict:
    """Compile one launch: its name and what it needs, or its error."""
    from triton.runtime.driver import driver

    driver.active.capability = capability
    options = dict(launch.options)
    options.pop("launch_pdl", None)
    if "PDL" in options:
        options["PDL"] = capability >= 90
        options |= {"launch_pdl": True} if capability >= 90 else {}
    if capability // 10 not in ROOMY and "num_stages" in options:
        options["num_stages"] = fewer_stages(options["num_stages"])
    result = {
        "case": launch.case,
        "kernel": launch.kernel.__name__,
        "capability": capability,
        "decode": launch.decode,
    }
    try:
        made = launch.kernel.run(*launch.args, grid=(1, 1, 1), warmup=True, **options)
    except Exception as error:  # whatever the compiler objects to is the result
        cause = error.__cause__ or error
        return result | {"error": f"{type(cause).__name__}: {cause}"[:2000]}
    usage = resource_usage(made.asm["cubin"])
    if made.metadata.shared > CAPABILITIES[capability]:
        result["error"] = f"{made.metadata.shared} bytes of shared memory"
    result |= usage | {"shared": made.metadata.shared, "warps": made.metadata.num_warps}
    return result | {"sums": sums(made.asm.get("ttgir", ""))}


def sums(ttgir: str) -> list[str]:
    """How the numbers of each FP32 row that is summed lie in threads, which decides the order."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.blocked<.*>)$", ttgir, re.M))
    rows = re.findall(r"\}\) : \(tensor<(\d+)xf32, (#\w+)>\) -> f32", ttgir)
    return sorted({f"{count} {layouts.get(layout, layout)}" for count, layout in rows})


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where spilled registers go."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: max(map(int, re.findall(rf"\b{key}:(\d+)", text))) for key in ("REG", "STACK")}
    return {"registers": found["REG"], "stack": found["STACK"]}


def jobs_of(cases: list[Case], known: set[object]) -> list[tuple[Launch, int]]:
    """Every launch for `MAIN`; for the other capabilities the first of each kernel that is not
    `known` yet, which it is from then on."""
    launches = record(cases)
    first = {launch.kernel: launch for launch in reversed(launches)}
    new = [launch for kernel, launch in first.items() if kernel not in known]
    known.update(first)
    return [(launch, MAIN) for launch in launches] + [
        (launch, c) for launch in new for c in CAPABILITIES if c != MAIN
    ]


def main(module: str, word: str = "", known: set[object] | None = None) -> None:
    """Print what each kernel of the module's cases needs, a JSON object a line."""
    from triton.runtime.driver import driver

    driver.set_active(AbsentGpu())
    cases = importlib.import_module(module).compile_cases()
    known = set() if known is None else known
    jobs = jobs_of([case for case in cases if word in case.name], known)

    def work(start: int, step: int) -> None:
        for job in jobs[start::step]:
            # One write, so that the workers' lines stay whole.
            sys.stdout.write(json.dumps(build(*job)) + "\n")
            sys.stdout.flush()

    # Kernels cannot be sent to a process; a fork has them already.
    fork, count = multiprocessing.get_context("fork"), min(os.cpu_count() or 1, 8)
    workers = [fork.Process(target=work, args=(i, count)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("a worker died")
    print(json.dumps({"jobs": len(jobs)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    # Or the modules that are asked for, line by line.
    known: set[object] = set()
    for line in () if sys.argv[1:] else sys.stdin:
        main(line.strip(), known=known)
