"""Fixtures of the kernels' tests."""

from dataclasses import replace

import pytest
import torch


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
def quick_interpreter(monkeypatch):
    """Triton's interpreter patches the language at each call of a function, and looks for overflows
    of which it then tells no one: that takes most of its time."""
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of FP16 one case of each test, of FP32 all: the rest takes minutes."""
    seen = set()
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "fp16" in callspec.id and "cpu" in callspec.id:
            if (case := (item.path, item.originalname)) in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(case)
