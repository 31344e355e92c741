"""What every benchmark leaves: a table to read, and one JSON object to keep."""

import json
import os
import platform
import shlex
import statistics
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from limelight import __version__

if TYPE_CHECKING:
    from rich.table import Table

OUTPUTS = ("--json", "--plot")  # each with a file
PACKAGES = ("torch", "triton", "transformers")
# What the table has of a benchmark whose rows have more figures than a screen is wide.
SHOWN = {
    "spec": (
        "batch", "drafts", "tokens_per_s", "speedup", "tpot_ms", "acceptance_length",
        "verified_per_step", "forward_ms", "draft_ms", "drafting_share",
    ),
    "startup": (
        "startup_s", "imports_s", "weights_s", "compiling_s", "warm_up_s", "graphs_s", "timing_s",
        "first_request_s", "other_s", "kernels_met",
    ),
}  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and number of `values`, to four significant digits."""
    if not values:
        raise ValueError("nothing was measured")
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    figures = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}
    return {name: float(f"{value:.4g}") for name, value in figures.items()} | {"n": len(values)}


def record(bench: str, argv: list[str], rows: list[dict[str, object]]) -> dict[str, object]:
    """The JSON object of one run of `limelight bench BENCH`, given as `argv`."""
    return {
        "bench": bench,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(["limelight", *_measured(argv)]),
        "rows": rows,
    }


def _measured(argv: list[str]) -> list[str]:
    """The arguments without where the figures go, which is a matter of one machine."""
    kept, left = [], iter(argv)
    for argument in left:
        if argument in OUTPUTS:
            next(left, None)
        elif not argument.startswith(tuple(f"{flag}=" for flag in OUTPUTS)):
            kept.append(argument)
    return kept


def machine() -> dict[str, object]:
    """The GPU and its driver, if there is one, and the CPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    names = [line.split(", ") for line in _output_of(query).splitlines()]
    return {
        "gpu": names[0][0] if names else None,
        "gpus": len(names),
        "driver": names[0][1] if names else None,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """The versions of Python, of ours, and of the packages that a figure depends on."""
    found = {"python": platform.python_version(), "limelight": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that runs, with "-dirty" if it was changed; None outside one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    # An installed copy may lie inside a checkout of something else.
    if not _output_of([*git, "ls-files", "--", Path(__file__).name]):
        return None
    head = _output_of([*git, "rev-parse", "--short=12", "HEAD"])
    changed = _output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    return head + ("-dirty" if changed else "") if head else None


def _output_of(command: list[str]) -> str:
    """What a command prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def show(bench: str, rows: list[dict[str, object]]):
    """Print what all rows share, then a table of the rest, with the medians of their figures."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if not any(isinstance(row.get(key), list) for row in rows)]
    cells = {column: [cell(row.get(column)) for row in rows] for column in columns}
    shared = [column for column in columns if len(rows) > 1 and len(set(cells[column])) == 1]
    facts = ", ".join(f"{column} {cells[column][0]}" for column in shared)
    console, table = Console(highlight=False), Table()
    shown = [one for one in SHOWN.get(bench, columns) if one in columns and one not in shared]
    for column in shown:
        table.add_column(column, justify="right", overflow="fold")
    for row in zip(*(cells[column] for column in shown), strict=True):
        table.add_row(*row)
    console.print(f"{bench}: {facts}" if facts else bench, markup=False)
    console.print(table)
    for measured in rows:
        if isinstance(kernels := measured.get("kernels"), list):
            console.print(_kernel_table(kernels))


def _kernel_table(kernels: list[dict[str, object]]) -> "Table":
    """What `--breakdown` found: the kernels of a step, by time."""
    from rich.table import Table

    table = Table("kernel", "launches", "us", "adds us")
    for kernel in kernels:
        table.add_row(*map(str, kernel.values()))
    return table


def cell(value: object) -> str:
    """A figure by its median, with its outer tenths where there are some; else the value."""
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    tenths = f" ({value['p10']:.3g}-{value['p90']:.3g})" if value["n"] > 1 else ""
    return f"{value['median']:.4g}{tenths}"


def save(path: str, result: dict[str, object]):
    """Write the object to `path`."""
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
