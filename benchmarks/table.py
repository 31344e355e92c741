"""Print files of `benchmarks/results/` as Markdown tables: python benchmarks/table.py FILE ..."""

import json
import sys
from pathlib import Path

from limelight.bench.record import cell

LABELS = ("model", "weights", "kv", "batch", "context", "engine")


def table(rows: list[dict[str, object]]) -> str:
    """The rows with their labels in front, then their figures."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("slice", "kernels"))
    columns = [key for key in LABELS if key in keys] + [key for key in keys if key not in LABELS]
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    for name in sys.argv[1:]:
        kept = json.loads(Path(name).read_text(encoding="utf-8"))
        machine = kept["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores"
        if machine["gpu"]:
            where = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver']}"
        print(
            f"`{kept['command']}`\non {where}, commit {kept['commit']}:\n\n{table(kept['rows'])}\n"
        )


if __name__ == "__main__":
    main()
