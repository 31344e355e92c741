"""Fixtures of the kernels' tests."""

from collections import defaultdict
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from limelight.ops import fp4

HERE = Path(__file__).parent


@pytest.fixture
def poisoned(monkeypatch):
    """Empty tensors hold NaN, or huge integers: what a kernel forgets to write shows."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(
                float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            )

        return made

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def always_decoded(monkeypatch):
    """NVFP4 weights are decoded for as many rows as large ones are: torch's product of unpacked
    ones, with an FP32 result, is a GPU's."""
    monkeypatch.setattr(fp4, "CACHED_ROWS", fp4.FUSED_ROWS)


@pytest.fixture(autouse=True)
def loops_of_loaded_length(monkeypatch):
    """Triton's interpreter makes a loop's bound of an array of one, which NumPy 2.4 refuses."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def products_of_rows_alone(monkeypatch):
    """NumPy multiplies by a library whose sums depend on where in a tile a row stands, on some
    processors; on the matrix units of a GPU they do not. Here they are rounded from FP64."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        total = a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch):
    """Triton's interpreter patches the language at each call of a function, looks for overflows of
    which it then tells no one, makes a table for each type that it looks up and a name for each
    shape, and reduces number by number: that takes most of its time."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patched(fn):
        # What a module calls the language differs.
        if (module := id(fn.__globals__)) in done:
            return interpreter._LangPatchScope()
        done.add(module)
        return patch(fn)

    def launched(*args, **kwargs):
        done.clear()
        return launch(*args, **kwargs)

    if hasattr(interpreter, "_LangPatchScope"):
        monkeypatch.setattr(interpreter, "_patch_lang", patched)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)

    numbers, number_of = {}, interpreter._get_np_dtype

    def known(of):
        if (name := of.scalar.name) not in numbers:
            numbers[name] = number_of(of)
        return numbers[name]

    def nameless(self, types, fields=None):
        self.types, self.fields = types, fields or [""] * len(types)

    monkeypatch.setattr(interpreter, "_get_np_dtype", known)
    monkeypatch.setattr(interpreter.tl.core.tuple_type, "__init__", nameless)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduced_in_pairs)


def reduced_in_pairs(self, input):
    """All neighbours at once, then what they gave, until one is left: a function that reduces is
    associative, since a GPU takes an order of its own."""
    held, axis = self.unravel(input, self.axis)
    parts = [np.moveaxis(one.handle.data, axis, 0) for one in held]
    while len(parts[0]) > 1:
        left, right = (
            [self.to_tensor(part[at::2], one.dtype) for part, one in zip(parts, held, strict=True)]
            for at in (0, 1)
        )
        found = self.combine_fn.fn(*left, *right)
        parts = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
    results = [part[0] for part in parts]
    if self.keep_dims:
        gone = axis if self.axis is not None else tuple(range(input[0].handle.data.ndim))
        results = [np.expand_dims(result, gone) for result in results]
    return [self.to_tensor(result, one.dtype) for result, one in zip(results, held, strict=True)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """On a CPU, of FP16 one case of each test here; of FP32 few that show all values of its
    parameters, each with each: the rest takes minutes."""
    fp16, fp32 = defaultdict(list), defaultdict(list)
    # Those of all other folders come, too.
    for item in (item for item in items if item.path.is_relative_to(HERE)):
        callspec = getattr(item, "callspec", None)
        if callspec is None or {mark.name for mark in item.iter_markers()} & {"gpu", "slow"}:
            continue
        is_fp16 = "fp16" in callspec.id and "cpu" in callspec.id
        (fp16 if is_fp16 else fp32)[item.path, item.originalname].append(item)
    spare = [item for cases in fp16.values() for item in cases[1:]]
    for item in chain(spare, *map(_without_new_pairs, fp32.values())):
        item.add_marker(pytest.mark.slow)


def _without_new_pairs(cases: list) -> list:
    """Those cases of a test whose values, two by two, are all in the others."""
    left = {
        item: set(combinations(sorted((k, repr(v)) for k, v in item.callspec.params.items()), 2))
        for item in cases
    }
    shown = set()
    while left and all(pairs for pairs in left.values()):
        best = max(left, key=lambda item: len(left[item] - shown))
        if left[best] <= shown:
            break
        shown |= left.pop(best)
    return [item for item, pairs in left.items() if pairs]
