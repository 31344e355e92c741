"""Imports only go down, level by level, and nothing in the source unpickles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "limelight"
LEVELS = [
    {
        "config",
        "settings",
        "types",
        "lora",
        "metrics",
        "orders",
        "checkpoint",
        "progress",
        "speculative",
        "stats",
        "steps",
        "weight_transfer",
        "__version__",
        "LoRARequest",
        "SamplingParams",
        "StructuredOutputsParams",
    },
    {"ops", "text"},
    {"quant", "parallel"},
    {"models", "cache"},
    {"rl"},
    {"runner"},
    {"engine", "LLM"},
    {"server"},
    {
        "cli",
        "flags",
        "bench",
        "chat",
        "inspection",
        "quantize",
        "conversion",
        "training",
        "demo_tools",
        "deploy",
        "__main__",
    },
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
UNSAFE = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything that is imported anywhere in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_its_level_or_below(path):
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        package, *rest = name.split(".")
        assert package not in UNSAFE
        if package == "limelight":
            assert LEVEL[rest[0]] <= LEVEL[own], f"{own} may not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_reads_no_pickles(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"recv_pyobj", "send_pyobj"}
        if isinstance(node, ast.keyword) and node.arg == "weights_only":
            assert isinstance(node.value, ast.Constant) and node.value.value is True
