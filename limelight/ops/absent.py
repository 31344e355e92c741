"""A GPU that is not there: tensors on it have no memory, and launches are recorded.

Within `absent_gpu` all code runs as it would on a GPU of that capability, up to the launches of
kernels; what it reads of a tensor is zeros. So all that a start will launch is known without one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
PLENTY = 2**60
Arguments = tuple[Any, ...]
Named = dict[str, Any]


def _move(func: Callable[..., Any], args: Arguments, named: Named) -> Any:
    places = [str(place) for place in (*args[1:], *named.values())]
    if args[0].is_meta and "cpu" in places:
        return torch.zeros(args[0].shape, dtype=args[0].dtype)
    return func(*map(_placed, args), **{key: _placed(value) for key, value in named.items()})


def _copy(func: Callable[..., Any], args: Arguments, named: Named) -> Any:
    return args[0].zero_() if args[1].is_meta else func(*args, **named)


def _placed(value: Any) -> Any:
    """The meta device where a GPU is meant."""
    on_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return META if on_gpu else value


Tensor: Any = torch.Tensor
SPECIAL: dict[Any, Callable[[Callable[..., Any], Arguments, Named], Any]] = {
    torch.device: lambda func, args, named: func(*args, **named),
    Tensor.is_cuda.__get__: lambda func, args, named: args[0].is_meta,
    Tensor.device.__get__: lambda func, args, named: (
        torch.device("cuda", 0) if args[0].is_meta else args[0].device
    ),
    Tensor.pin_memory: lambda func, args, named: args[0],
    Tensor.cpu: lambda func, args, named: _move(Tensor.to, (*args, "cpu"), named),
    Tensor.to: _move,
    Tensor.copy_: _copy,
}
READING = {
    Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__,
}  # fmt: skip


class AbsentTensors(TorchFunctionMode):
    """Tensors of the meta device say that they are on a GPU, and are made where one is asked for.

    Those of the host stay what they are. `reads` counts how often the host has read zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(
        self, func: Any, types: object, args: Arguments = (), kwargs: Named | None = None
    ) -> Any:
        named = kwargs or {}
        if (special := SPECIAL.get(func)) is not None:
            return special(func, args, named)
        if func in READING and args[0].is_meta:
            self.reads += 1
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:], **named)
        if named:
            # No memory is pinned where there is no device.
            named = {key: _placed(value) for key, value in named.items() if key != "pin_memory"}
        return func(*args, **named)


class AbsentDriver:
    """A driver of Triton's; a device's number is its capability, so that each has its kernels."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class Nothing:
    """An event, a stream, a graph: what is asked of it has been done at once."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        return 1.0

    def record(self) -> None:
        pass

    synchronize = replay = record


@contextmanager
def absent_gpu(capability: int, *, memory: int = PLENTY) -> Iterator[AbsentTensors]:
    """Within, `cuda` is a GPU of this capability (90: 9.0) and memory (bytes, all of them free), on
    which nothing happens.

    For a process of its own, or a test: what stands in for `torch.cuda` does so in all threads.
    """
    from triton.runtime.driver import driver

    cuda: Named = dict.fromkeys(("Event", "Stream", "stream"), Nothing)
    cuda |= {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
        "mem_get_info": lambda device=None: (memory, memory),
        "synchronize": lambda device=None: None,
    }
    with (
        replaced(torch.cuda, cuda),
        replaced(torch.backends.cudnn, {"is_available": lambda: True}),
        replaced(driver, {"_active": AbsentDriver(capability)}),
        AbsentTensors() as tensors,
    ):
        yield tensors


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher handed to a kernel, for a device of this capability.

    Launches of a kernel with equal keys are one to the compiler.
    """

    kernel: Any
    capability: int
    key: str
    grid: Any
    args: Arguments
    options: Named


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """The launches within, of which none runs: the first of those with equal keys."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    # By their ids, for the hash of a kernel is made of its key; see `settle_keys` in `ahead.py`.
    known: set[tuple[int, int, str]] = set()

    def note(kernel: Any, *args: object, grid: Any, warmup: bool, **options: object) -> None:
        device = driver.active.get_current_device()
        with torch._C.DisableTorchFunction():
            *_, binder = kernel.device_caches[device]
            _, specialization, rest = binder(*args, **options)
        launch = Launch(kernel, device, f"{specialization} {rest}", grid, args, options)
        if (id(kernel), device, launch.key) not in known:
            known.add((id(kernel), device, launch.key))
            launches.append(launch)

    with replaced(JITFunction, {"run": note}):
        yield launches


@contextmanager
def replaced(owner: object, attributes: Named) -> Iterator[None]:
    """Within, `owner` has these attributes."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
