"""Handles of another process's memory: which are taken, and when memory is mapped and let go."""

import base64
import gc
import pickle
import weakref

import pytest
import torch

from limelight.rl import ipc
from limelight.rl.announced import Announced
from limelight.rl.ipc import IPC

CPU = torch.device("cpu")


def handle(shape, dtype=torch.float32, *, memory=b"m" * 64):
    """As `reduce_tensor` makes them for tensors on a GPU, here the trainer's seventh."""
    return (
        torch.nn.Parameter, torch.Size(shape), (1,) * len(shape), 0, torch.storage.TypedStorage,
        dtype, 7, memory, 4096, 0, False, b"counter", 0, b"event", True,
    )  # fmt: skip


def pickled(handles):
    return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}


def announce(**shapes):
    return [Announced(name, torch.float32, shape) for name, shape in shapes.items()]


@pytest.fixture
def memory(monkeypatch):
    """What handles stand for, by their bytes, and the arguments by which each was mapped."""
    tensors, mapped = {}, []

    def rebuild(*arguments):
        mapped.append(arguments)
        return tensors[arguments[7]].clone()

    monkeypatch.setattr(ipc, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    return tensors, mapped


def test_each_tensor_is_mapped_on_the_device_of_this_process(memory):
    tensors, mapped = memory
    tensors |= {b"a": torch.ones(2), b"b": torch.zeros(3)}
    handles = [{"GPU-1": handle((2,), memory=b"a")}, {"GPU-1": handle((3,), memory=b"b")}]
    transport = IPC(index=3, uuid="GPU-1", packed=False)
    announced, info = announce(x=(2,), y=(3,)), pickled(handles)
    transport.check(announced, info)
    received = dict(transport.receive(announced, info))
    assert torch.equal(received["x"], torch.ones(2)) and torch.equal(received["y"], torch.zeros(3))
    assert [arguments[6] for arguments in mapped] == [3, 3]
    assert mapped[0][:6] == (
        torch.Tensor, torch.Size((2,)), (1,), 0, torch.storage.TypedStorage, torch.float32,
    )  # fmt: skip


def test_a_packed_buffer_is_mapped_once_and_let_go_at_the_end(memory):
    tensors, mapped = memory
    tensors[b"buffer"] = torch.arange(5.0).view(torch.uint8)
    info = pickled({"GPU-1": handle((20,), torch.uint8, memory=b"buffer")})
    info["tensor_sizes"] = [8, 12]
    transport, announced = IPC(index=0, uuid="GPU-1", packed=True), announce(x=(2,), y=(3,))
    for _ in range(2):
        transport.check(announced, info)
        received = {name: x.tolist() for name, x in transport.receive(announced, info)}
        assert received == {"x": [0.0, 1.0], "y": [2.0, 3.0, 4.0]}
    assert len(mapped) == 1
    buffer = weakref.ref(transport._mapped[1])
    transport.finish()
    gc.collect()
    assert buffer() is None


def evil(part, value):
    parts = list(handle((2,)))
    parts[part] = value
    return [{"GPU-1": tuple(parts)}]


@pytest.mark.parametrize(
    ("handles", "message"),
    [
        ([{"GPU-2": handle((2,))}], "no handle for GPU GPU-1"),
        ([], "for each tensor"),
        ({"GPU-1": handle((2,))}, "for each tensor"),
        ([handle((2,))], "no handle"),
        ([{"GPU-1": handle((2,))[:-1]}], "15 parts"),
        (evil(0, print), "no part of a handle"),
        (evil(4, open), "no part of a handle"),
        (evil(1, [2]), "no part of a handle"),
        (evil(2, ("a",)), "no part of a handle"),
        (evil(5, torch.float64), "no part of a handle"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_handle_is_refused_and_nothing_is_mapped(memory, handles, message):
    transport = IPC(index=0, uuid="GPU-1", packed=False)
    with pytest.raises(ValueError, match=message):
        transport.check(announce(x=(2,)), pickled(handles))
    assert memory[1] == []


@pytest.mark.parametrize("nested_in", [lambda deep: evil(4, deep), lambda deep: [deep]])
def test_a_small_pickle_cannot_ask_for_an_endless_message(nested_in):
    deep = ()
    for _ in range(18):
        deep = (deep, deep)
    with pytest.raises(ValueError, match="tuple") as told:
        IPC(index=0, uuid="GPU-1", packed=False).check(announce(x=(2,)), pickled(nested_in(deep)))
    assert len(str(told.value)) < 200


@pytest.mark.parametrize(
    "info", [{}, {"ipc_handles_pickled": "?"}, {"ipc_handles_pickled": 5}, {"ipc_handles": [1]}]
)
def test_without_pickled_handles_there_is_nothing_to_map(info):
    with pytest.raises(ValueError):
        IPC(index=0, uuid="GPU-1", packed=False).check(announce(x=(2,)), info)


def test_sizes_in_a_buffer_must_be_those_of_the_shapes():
    info = pickled({"GPU-1": handle((20,), torch.uint8)}) | {"tensor_sizes": [8, 8]}
    with pytest.raises(ValueError, match="tensor_sizes"):
        IPC(index=0, uuid="GPU-1", packed=True).check(announce(x=(2,), y=(3,)), info)


def test_another_shape_than_was_announced_is_refused(memory):
    memory[0][b"a"] = torch.ones(3)
    info = pickled([{"GPU-1": handle((3,), memory=b"a")}])
    transport = IPC(index=0, uuid="GPU-1", packed=False)
    with pytest.raises(ValueError, match="the handle is of"):
        list(transport.receive(announce(x=(2,)), info))


def test_an_engine_on_a_cpu_maps_nothing():
    with pytest.raises(ValueError, match="GPU"):
        IPC.on(CPU, packed=False)
