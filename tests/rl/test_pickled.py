"""Pickles of other engines, read as data: what is in them is told, and nothing of it runs."""

import ctypes
import pickle
import sys
import types

import pytest
import torch

from limelight.rl.ipc import NAMES, read_handles
from limelight.rl.nccl import read_unique_id
from limelight.rl.pickled import Call, Name, read_pickled

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
PROTOCOLS = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


@pytest.fixture
def unique_id(monkeypatch):
    """An object as vLLM's trainers pickle it."""
    module = types.ModuleType(MODULE)

    class ncclUniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = MODULE, "ncclUniqueId"
    module.ncclUniqueId = ncclUniqueId
    monkeypatch.setitem(sys.modules, MODULE, module)
    for parts in range(1, 4):
        parent = ".".join(MODULE.split(".")[:parts])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    return ncclUniqueId.from_buffer_copy(bytes(range(128)))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_unique_id_of_a_trainer_is_read(unique_id, protocol):
    assert read_unique_id(pickle.dumps(unique_id, protocol)) == bytes(range(128))


@pytest.mark.parametrize(
    "value", [b"x" * 128, ("a", b"x" * 128), {"internal": 1}, print, None], ids=repr
)
def test_anything_else_is_no_unique_id(value):
    with pytest.raises(ValueError, match="unique id"):
        read_unique_id(pickle.dumps(value))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@PROTOCOLS
def test_nothing_is_called(tmp_path, protocol):
    data = pickle.dumps([Evil(str(tmp_path / "made"))], protocol)
    [call] = read_pickled(data)
    assert call.callee == Name("io", "open")
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError):
        read_unique_id(data)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_data_comes_back_as_it_was(protocol):
    value = [{"a": (1, 2.5, None), "b": [True, b"xyz", "text" * 100]}, (), [], {}, 2**40, -1]
    assert read_pickled(pickle.dumps([value, value], protocol)) == [value, value]


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"\x80\x04.", b"not a pickle", b"\x80\x04K\x01\x85", b"(lp0\n"]
)
def test_what_is_no_whole_pickle_is_refused(data):
    with pytest.raises(ValueError):
        read_pickled(data)


def test_an_instruction_that_sets_state_is_refused():
    class State:
        def __init__(self):
            self.x = 1

    State.__module__, State.__qualname__ = "builtins", "State"
    import builtins

    builtins.State = State
    try:
        data = pickle.dumps(State())
    finally:
        del builtins.State
    with pytest.raises(ValueError, match="instruction"):
        read_pickled(data)


def test_handles_of_memory_are_read_with_their_types():
    import base64

    shape = torch.Size([2, 3])
    given = (torch.nn.Parameter, shape, (3, 1), torch.UntypedStorage, torch.bfloat16, b"handle")
    text = base64.b64encode(pickle.dumps([{"GPU-1": given}])).decode()
    [handle] = read_handles(text)
    kind, size, strides, storage, dtype, data = handle["GPU-1"]
    assert NAMES[kind] is torch.Tensor and NAMES[storage] is torch.UntypedStorage
    assert size == Call(Name("torch", "Size"), ((2, 3),)) and strides == (3, 1)
    assert NAMES[dtype] is torch.bfloat16 and data == b"handle"
