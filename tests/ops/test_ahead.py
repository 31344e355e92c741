"""Kernels that were compiled by others are found, whatever was launched before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a process of its own: here Triton's interpreter is in the compiler's place.
PROGRAM = """
import importlib, json, pkgutil, sys
import limelight.ops
from limelight.ops.ahead import settle_keys
from triton.runtime.jit import JITCallable

names = [f"limelight.ops.{one.name}" for one in pkgutil.iter_modules(limelight.ops.__path__)]
modules = [importlib.import_module(name) for name in names]

def keys(backwards, settles):
    order = modules[::-1] if backwards else modules
    for name in names:
        del sys.modules[name]
    sys.modules.update((module.__name__, module) for module in order)
    kernels = {}
    for module in order:
        for name, value in vars(module).items():
            if isinstance(value, JITCallable):
                kernels[f"{value.__module__}.{name}"] = value
                value.hash, value.used_global_vals = None, {}
    if settles:
        settle_keys()
    return {name: kernel.cache_key for name, kernel in kernels.items()}

print(json.dumps([keys(way, settles) for settles in (True, False) for way in (False, True)]))
"""


@pytest.fixture(scope="module")
def keys():
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_keys_that_are_settled_do_not_depend_on_the_order(keys):
    forwards, backwards, *_ = keys
    assert forwards == backwards and len(forwards) > 50


def test_else_they_would(keys):
    """With a Triton of which this fails, nothing has to be settled."""
    *_, forwards, backwards = keys
    assert forwards != backwards
