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
must not read values. Cases are called on GPUs that are not there. Every launch is compiled for
capability 90, the first of each kernel for all of `CAPABILITIES`; without `-m slow`, of launches
that do not decode only the first of each kernel. Launches that specialize alike are compiled once.
`decode` says that none of the kernels may spill.

By hand, from the root of the project, with registers, stack bytes and shared memory of each:

    PYTHONPATH=. python tests/ops/ahead.py test_linear_kernel [word in the case's name]
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from limelight.ops.absent import Launch, absent_gpu, recorded_launches
from limelight.ops.ahead import compile_all, compile_launch

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
class Job:
    """A launch to compile, and the first case that made it, or the first that decodes."""

    case: Case
    launch: Launch


def record(cases: list[Case], capability: int) -> list[Job]:
    """The launches of all cases, each kind once."""
    found: dict[tuple[object, str], Job] = {}
    for case in cases:
        with absent_gpu(capability), recorded_launches() as launches:
            case.call()
        for launch in launches:
            assert not callable(launch.grid) and 0 not in launch.grid, case.name
            key = launch.kernel, launch.key
            if key not in found or case.decode and not found[key].case.decode:
                found[key] = Job(case, launch)
    return list(found.values())


def build(job: Job) -> dict:
    """Compile one launch: its name and what it needs, or its error."""
    launch = job.launch
    result = {
        "case": job.case.name,
        "kernel": launch.kernel.__name__,
        "capability": launch.capability,
        "decode": job.case.decode,
    }
    try:
        made = compile_launch(launch)
    except Exception as error:  # whatever the compiler objects to is the result
        cause = error.__cause__ or error
        return result | {"error": f"{type(cause).__name__}: {cause}"[:2000]}
    usage = resource_usage(made.asm["cubin"])
    if made.metadata.shared > CAPABILITIES[launch.capability]:
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


def jobs_of(cases: list[Case], known: set[object], *, every: bool) -> list[Job]:
    """For `MAIN` every launch, or those that decode and the first of each kernel; for the other
    capabilities the first of each kernel that is not `known` yet, which it is from then on."""
    jobs = record(cases, MAIN)
    if not every:
        first = {job.launch.kernel: job for job in reversed(jobs)}
        jobs = [job for job in jobs if job.case.decode or job is first[job.launch.kernel]]
    new = {job.launch.kernel for job in jobs} - known
    for capability in CAPABILITIES:
        if capability != MAIN and new:
            first = {job.launch.kernel: job for job in reversed(record(cases, capability))}
            jobs += [job for kernel, job in first.items() if kernel in new]
    known |= new
    return jobs


def main(
    module: str, word: str = "", known: set[object] | None = None, *, every: bool = True
) -> None:
    """Print what each kernel of the module's cases needs, a JSON object a line."""
    cases = importlib.import_module(module).compile_cases()
    known = set() if known is None else known
    found = jobs_of([case for case in cases if word in case.name], known, every=every)
    jobs = {id(job.launch): job for job in found}

    def work(launch: Launch) -> None:
        # One write, so that the workers' lines stay whole.
        sys.stdout.write(json.dumps(build(jobs[id(launch)])) + "\n")
        sys.stdout.flush()

    compile_all([job.launch for job in jobs.values()], work, min(os.cpu_count() or 1, 8))
    print(json.dumps({"jobs": len(jobs)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    # Or the modules that are asked for, line by line: every launch of them, or few.
    known: set[object] = set()
    for line in () if sys.argv[1:] else sys.stdin:
        asked, extent = line.split()
        main(asked, known=known, every=extent == "every")
