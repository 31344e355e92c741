"""The operations of both models: each a plain-torch reference beside a kernel for CUDA.

Shapes are in the names: T tokens, D model, H query heads, K KV heads, J heads of any kind, C head
size, E experts, N chosen, F inner, G gate and up (2F), V vocabulary, R rows that sample, B
sequences, S slots.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
_references_only: ContextVar[bool] = ContextVar("references_only", default=False)
_batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)
_for_graph: ContextVar[bool] = ContextVar("for_graph", default=False)
_calls: ContextVar["list[Call] | None"] = ContextVar("calls", default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation on CUDA, as it was made."""

    name: str
    kernel: Callable[..., object]
    reference: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


class op(Generic[P, R]):
    """An operation in its two forms: the kernel where the first argument is on CUDA.

    The reference is the specification. It runs wherever gradients are on, since kernels have none,
    and everywhere within `use_reference`.
    """

    def __init__(self, *, reference: Callable[P, R], kernel: Callable[P, R]):
        ours, theirs = inspect.signature(reference), inspect.signature(kernel)
        assert ours == theirs, f"{reference.__name__}{ours} and its kernel's {theirs} differ"
        self.reference, self.kernel = reference, kernel
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if first.is_cuda and not torch.is_grad_enabled() and not _references_only.get():
            if (calls := _calls.get()) is not None:
                name = self.reference.__name__.removesuffix("_reference")
                calls.append(Call(name, self.kernel, self.reference, args, kwargs))
            return self.kernel(*args, **kwargs)
        return self.reference(*args, **kwargs)


@contextmanager
def use_reference() -> Iterator[None]:
    """Within, every operation is its reference, on CUDA too: to find a kernel that is wrong."""
    token = _references_only.set(True)
    try:
        yield
    finally:
        _references_only.reset(token)


@contextmanager
def batch_invariance(wanted: bool) -> Iterator[None]:
    """Within, where wanted, a row's result depends neither on other rows nor on their number."""
    token = _batch_invariant.set(wanted)
    try:
        yield
    finally:
        _batch_invariant.reset(token)


def is_batch_invariant() -> bool:
    """Whether operations are now to keep to one order of adding, whatever it costs."""
    return _batch_invariant.get()


@contextmanager
def for_graph() -> Iterator[None]:
    """Within, a step is one for a graph to hold, which keeps whatever the host knows of weights."""
    token = _for_graph.set(True)
    try:
        yield
    finally:
        _for_graph.reset(token)


def is_for_graph() -> bool:
    """Whether operations are captured, or run for that."""
    return _for_graph.get()


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """The calls of operations on CUDA within, in their order: to repeat and time them."""
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


# Triton's own two take microseconds each, and a step has hundreds of launches.
def cdiv(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def by_size(table: Mapping[int, V], size: int) -> V:
    """What a table has for the least of its bounds, in rising order, that `size` keeps to."""
    return next(value for most, value in table.items() if size <= most)


# Generations whose programs may have 227 KB of shared memory, for which tile tables are made.
ROOMY = (9, 10)


def stages(tensor: torch.Tensor, count: int) -> int:
    """How many tiles a loop copies ahead: `count`, half as many of FP32, and half as many on a
    device with less room."""
    if tensor.itemsize == 4:
        count = fewer_stages(count)
    return count if is_roomy(tensor) else fewer_stages(count)


def is_roomy(tensor: torch.Tensor) -> bool:
    """Whether programs on its device may have 227 KB of shared memory."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] in ROOMY


def fewer_stages(count: int) -> int:
    return max(1, count // 2)


@cache
def processors(device: torch.device) -> int:
    """Its multiprocessors; of what is no GPU, some."""
    properties = torch.cuda.get_device_properties
    return properties(device).multi_processor_count if device.type == "cuda" else 3


def pdl(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch keywords of programmatic dependent launch, which Hopper brought.

    A kernel then starts while its predecessor ends; it must wait (`gdc_wait`) in every program
    before it reads anything but weights or writes anything. Where one reads something else that is
    complete all the same, it says why.
    """
    able = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
