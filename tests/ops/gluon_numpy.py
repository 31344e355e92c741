"""Gluon kernels in NumPy: what their source means, without its layouts, which decide only which
thread has what. Triton's interpreter runs none of them.

`in_numpy(module)` is a patch that has the module's kernels run so, on tensors of a CPU in FP32. A
module may have assembly: `assembly` says what it means, by its text.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from limelight.ops import cdiv

FLOAT = np.float32


class Array(np.ndarray):
    """A tensor within a kernel."""

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype) -> "Array":
        return array(self.astype(dtype))

    # Tensors do not change.
    def __iadd__(self, other) -> "Array":
        return array(self + other)

    def __isub__(self, other) -> "Array":
        return array(self - other)


def array(values) -> Array:
    return np.asarray(values).view(Array)


class Pointer:
    """Places of a tensor."""

    def __init__(self, flat: np.ndarray, at=0):
        self.flat, self.at = flat, at
        self.dtype = SimpleNamespace(element_ty=flat.dtype.type)

    def __add__(self, more) -> "Pointer":
        return Pointer(self.flat, self.at + np.asarray(more, np.int64))

    def masked(self, mask) -> tuple[np.ndarray, np.ndarray]:
        at, mask = np.broadcast_arrays(self.at, mask)
        assert ((at[mask] >= 0) & (at[mask] < self.flat.size)).all(), "outside of a tensor"
        return at, mask


class Shared:
    """Shared memory, which begins as garbage."""

    def __init__(self, values: np.ndarray):
        self.values, self.layout = values, None
        self.shape, self.dtype = values.shape, values.dtype.type

    def _reinterpret(self, dtype, shape, layout) -> "Shared":
        return Shared(self.values.reshape(shape))

    def index(self, i) -> "Shared":
        return Shared(self.values[int(i)])

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.values[(slice(None),) * dim + (slice(start, start + length),)])

    def load(self, layout) -> Array:
        return array(self.values.copy())

    def store(self, values: np.ndarray) -> None:
        assert self.values.shape == values.shape
        self.values[...] = values


def load(pointer: Pointer, mask=True, other=0, cache_modifier="") -> Array:
    at, mask = pointer.masked(mask)
    found = np.full(at.shape, other, pointer.flat.dtype)
    found[mask] = pointer.flat[at[mask]]
    return array(found)


def store(pointer: Pointer, values, mask=True) -> None:
    at, mask = pointer.masked(np.broadcast_to(mask, np.shape(values)))
    pointer.flat[at[mask]] = np.asarray(values)[mask]


def garbage(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """NaNs, or the largest integer."""
    integer = np.issubdtype(dtype, np.integer)
    return np.full(shape, np.iinfo(dtype).max if integer else np.nan, dtype)


def _nothing(*args, **kwargs) -> None:
    pass


class AsyncCopy:
    """Copies into shared memory, which come as late as they may: when their group is waited for."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = [[]]

    def async_copy_global_to_shared(self, into: Shared, at: Pointer, mask=True) -> None:
        into.values[...] = garbage(into.shape, into.dtype)
        self.groups[-1].append(lambda: into.store(load(at, np.broadcast_to(mask, into.shape))))

    def commit_group(self) -> None:
        self.groups.append([])

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) - 1 > outstanding:
            for copy in self.groups.pop(0):
                copy()


def language(
    program: int, programs: int, warps: int, assembly: dict[str, Callable]
) -> SimpleNamespace:
    """`gluon.language` for one program."""

    def inline(text, constraints, args, dtype, *, is_pure, pack):
        return tuple(map(array, assembly[getattr(text, "value", text)](*args)))

    layouts = ["BlockedLayout", "DistributedLinearLayout", "DotOperandLayout"]
    layouts += ["NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout"]
    return SimpleNamespace(
        **dict.fromkeys([*layouts, "constexpr", "thread_barrier"], _nothing),
        int16=np.int16, int32=np.int32, int64=np.int64, float32=FLOAT, bfloat16=FLOAT,
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        num_warps=lambda: warps,
        static_range=range,
        arange=lambda start, end, layout=None: array(np.arange(start, end, dtype=np.int32)),
        zeros=lambda shape, dtype, layout=None: array(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout=None: array(np.full(shape, value, dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(garbage(shape, dtype)),
        load=load, store=store, inline_asm_elementwise=inline,
        minimum=np.minimum, maximum=np.maximum, exp=np.exp, cdiv=cdiv,
        where=lambda wanted, a, b: array(np.where(wanted, a, b)),
        sum=lambda x, axis: array(np.sum(x, axis, dtype=x.dtype)),
        associative_scan=lambda x, axis, add: array(np.cumsum(x, axis, dtype=x.dtype)),
        permute=lambda x, order: array(np.transpose(x, order)),
        reshape=lambda x, shape: array(np.reshape(x, shape)),
        join=lambda a, b: array(np.stack((a, b), axis=-1)),
        split=lambda x: (x[..., 0], x[..., 1]),
        convert_layout=lambda x, layout: x,
    )  # fmt: skip


def mma(left: Array, right: Array, total: Array) -> Array:
    return array(total + left.astype(np.float64) @ right.astype(np.float64)).to(FLOAT)


class Kernel:
    """A kernel's launcher."""

    def __init__(self, kernel: JITFunction, assembly: dict[str, Callable]):
        self.kernel, self.assembly = kernel, assembly

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args, num_warps: int = 4, **options) -> None:
            (programs,) = grid
            values = [self._value(arg) for arg in args]
            names = inspect.signature(self.kernel.fn).parameters
            options = {name: value for name, value in options.items() if name in names}
            for program in range(programs):
                gl = language(program, programs, num_warps, self.assembly)
                run = self._bound(self.kernel.fn, gl, {"mma_v2": mma, "async_copy": AsyncCopy()})
                run(*values, **options)

        return launch

    @staticmethod
    def _value(arg):
        if not isinstance(arg, torch.Tensor):
            return arg
        assert arg.dtype != torch.bfloat16, "NumPy has no BF16"
        # A view may begin anywhere and its rows lie apart.
        whole = torch.as_strided(arg, (arg.untyped_storage().nbytes() // arg.itemsize,), (1,), 0)
        return Pointer(whole.numpy(), arg.storage_offset())

    def _bound(
        self, function: FunctionType, gl: SimpleNamespace, others: dict[str, object]
    ) -> FunctionType:
        """The function with NumPy in the place of Triton's names, in those that it calls too."""
        names = dict(function.__globals__)
        for name in function.__code__.co_names:
            held = names.get(name)
            if name in ("gl", "tl"):
                names[name] = gl
            elif name in others:
                names[name] = others[name]
            elif isinstance(held, JITFunction):
                names[name] = self._bound(held.fn, gl, others)
            elif hasattr(held, "value"):
                names[name] = held.value
        return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


@contextmanager
def in_numpy(module: ModuleType, assembly: dict[str, Callable]) -> Iterator[None]:
    """Within, the module's kernels run in NumPy, in FP32."""
    kernels = {
        name: Kernel(held, assembly)
        for name, held in vars(module).items()
        if name.endswith("_kernel") and isinstance(held, JITFunction)
    }
    with mock.patch.multiple(module, **kernels):
        yield
