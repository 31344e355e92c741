"""`limelight inspect`: what a model holds, what it takes, and whether it fits on this device.

Made from config.json, and from the headers of weights that are here; none is downloaded or read.
"""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from limelight.checkpoint import BUNDLED_NAMES, locate
from limelight.config import EngineConfig
from limelight.engine.experts import expert_mesh
from limelight.engine.memory import MemoryPlan
from limelight.engine.startup import plan_memory, resolve
from limelight.models.loader import has_weights
from limelight.parallel.seat import Seat

PACKED = {"nvfp4": "W4A16", "mxfp8": "W8A8"}
LENGTHS = (1024, 8192, 65_536, 262_144)


def inspect(config: EngineConfig) -> dict[str, object]:
    """The report as plain data; sizes in bytes."""
    local = locate(config.model, weights=False) if _is_here(config.model) else None
    if local is None or not has_weights(local):
        config = replace(config, load_format="dummy")
    found = resolve(config)
    experts = expert_mesh(config, found, Seat(size=config.tensor_parallel_size))
    plan, model = plan_memory(config, found, experts=experts), found.shape
    try:
        plan.check()
        fault = None
    except ValueError as error:
        fault = str(error).splitlines()[0]
    return {
        "model": config.model,
        "architecture": found.architecture,
        "device": str(found.device),
        "layers": {
            "all": model.num_layers,
            "sparse": sum(model.sparse),
            "experts": model.num_experts,
            "experts per token": model.experts_per_token,
        },
        "attention": _attention(plan, model.num_layers),
        "parameters": sum(kind.parameters for kind in plan.kinds),
        "weights": [
            asdict(kind) | {"path": _path(kind.format, found.device.type)} for kind in plan.kinds
        ],
        "memory": {
            "available": plan.available,
            "weights": plan.weights,
            "work space": plan.workspace,
            "KV cache": plan.cache,
            "left": plan.left,
        },
        "sequences": _sequences(plan) if fault is None else {},
        "fits": fault is None,
        "fault": fault,
    }


def _is_here(model: str) -> bool:
    return model in BUNDLED_NAMES or Path(model).expanduser().exists()


def _path(format: str, device: str) -> str:
    """What a product with such weights runs through."""
    packed = next((kind for kind in PACKED if kind in format), None)
    if packed is None:
        return "kernels" if device == "cuda" else "torch"
    return f"{PACKED[packed]} kernels" if device == "cuda" else "decoded for each product"


def _attention(plan: MemoryPlan, num_layers: int) -> list[dict[str, object]]:
    """The kinds of layer by what they see, and the KV bytes that a token takes in all of a kind.

    Layers from `num_layers` on are those of a drafter.
    """
    layers: Counter[str] = Counter()
    for group in plan.groups:
        kind = "full attention" if group.window is None else f"window of {group.window}"
        drafter = "drafter, " if group.layers[0] >= num_layers else ""
        layers[drafter + kind] += len(group.layers)
    one = plan.block.nbytes // (plan.block.rows * plan.block.size)
    return [
        {
            "kind": kind,
            "layers": count,
            "kv_bytes_per_token": count * one,
        }
        for kind, count in layers.items()
    ]


def _sequences(plan: MemoryPlan) -> dict[str, int]:
    """How many sequences fit into the KV cache at once, by their length."""
    lengths = sorted({min(length, plan.max_model_len) for length in (*LENGTHS, plan.max_model_len)})
    return {str(length): plan.sequences_of(length) for length in lengths}


def show(report: dict[str, object]) -> None:
    """Print the report as tables."""
    console = Console(highlight=False)
    console.print(
        f"{report['model']}: {report['architecture']} on {report['device']}", markup=False
    )
    tables = {
        "layers": [_mapping(report["layers"])],
        "attention": _rows(report["attention"]),
        f"weights: {report['parameters']:,} parameters": _rows(report["weights"]),
        "memory in bytes": [_mapping(report["memory"])],
    }
    if report["fits"]:
        tables["sequences that fit at once, by their length"] = [_mapping(report["sequences"])]
    for title, rows in tables.items():
        console.print(f"\n{title}", markup=False)
        console.print(_table(rows))
    verdict = "It fits." if report["fits"] else f"It does not fit: {report['fault']}"
    console.print(f"\n{verdict}", markup=False)


def _mapping(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _rows(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return value


def _table(rows: list[dict[str, object]]) -> Table:
    table = Table()
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            *(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row.values())
        )
    return table
