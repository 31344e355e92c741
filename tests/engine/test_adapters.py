"""Which adapters are there, in host memory and in slots, whatever is asked for and in any order."""

import random

import pytest

from limelight.engine.adapters import Adapters
from limelight.steps import AdapterMove
from limelight.types import LoRARequest, RequestError


class Folders:
    """Reads adapters that are but names; those of `broken` cannot be read."""

    def __init__(self):
        self.read, self.broken = [], set()

    def carry_out(self, order):
        if order.folder in self.broken:
            raise ValueError(f"{order.folder} is broken")
        self.read.append(order.folder)


def adapter(number, *, folder=None, in_place=False):
    return LoRARequest(f"adapter {number}", number, folder or str(number), in_place)


def world(*, loaded=0, **limits):
    folders = Folders()
    adapters = Adapters(folders, **({"max_loras": 2, "max_cpu_loras": 3} | limits))
    for number in range(1, loaded + 1):
        adapters.load(adapter(number))
    return adapters, folders


def test_no_more_adapters_run_than_there_are_slots():
    adapters, _ = world(loaded=3)
    assert {adapters.acquire(1), adapters.acquire(2)} == {1, 2}
    assert adapters.has_room(1) and not adapters.has_room(3)
    adapters.release(1)
    assert adapters.acquire(3) == 1
    assert adapters.take_moves() == [
        AdapterMove("place", 1, slot=1), AdapterMove("place", 2, slot=2),
        AdapterMove("place", 3, slot=1),
    ]  # fmt: skip


def test_an_adapter_stays_in_its_slot_until_another_one_needs_it():
    adapters, _ = world(loaded=2)
    adapters.acquire(1)
    adapters.release(1)
    adapters.take_moves()
    assert adapters.acquire(1) == 1 and not adapters.take_moves()


def test_host_memory_keeps_those_that_were_asked_for_last():
    adapters, folders = world(loaded=4)
    assert adapters.take_moves() == [AdapterMove("drop", 1)]
    adapters.enter("request", 2)
    adapters.leave("request")
    adapters.enter("request", 1)
    assert folders.read == ["1", "2", "3", "4", "1"]
    assert adapters.take_moves() == [AdapterMove("drop", 3)]


def test_what_an_open_request_needs_stays_in_host_memory():
    adapters, folders = world(loaded=1, max_loras=1, max_cpu_loras=1)
    adapters.enter("request", 1)
    adapters.load(adapter(2))
    adapters.load(adapter(3))
    assert AdapterMove("drop", 1) not in adapters.take_moves()
    adapters.leave("request")
    adapters.check()


def test_an_id_is_taken_twice_only_in_place():
    adapters, _ = world(loaded=1)
    with pytest.raises(RequestError, match="load_inplace"):
        adapters.load(adapter(1))
    adapters.acquire(1)
    adapters.take_moves()
    first = adapters.version(1)
    assert adapters.load(adapter(1, folder="new", in_place=True)) > first
    assert adapters.take_moves() == [AdapterMove("place", 1, slot=1)]


def test_an_adapter_that_cannot_be_read_changes_nothing():
    adapters, folders = world(loaded=1)
    folders.broken.add("new")
    version = adapters.version(1)
    with pytest.raises(ValueError, match="broken"):
        adapters.load(adapter(1, folder="new", in_place=True))
    assert adapters.version(1) == version and not adapters.take_moves()


def test_an_unloaded_adapter_takes_no_requests_and_ends_those_it_has():
    adapters, _ = world(loaded=1)
    adapters.enter("request", 1)
    adapters.acquire(1)
    adapters.unload(1)
    with pytest.raises(RequestError, match="not loaded"):
        adapters.enter("another", 1)
    adapters.check()
    assert adapters.version(1)
    adapters.release(1)
    adapters.leave("request")
    assert adapters.take_moves()[-1] == AdapterMove("drop", 1)
    with pytest.raises(RequestError, match="no adapter"):
        adapters.unload(1)
    # Loaded again, it is not dropped by what was still to happen.
    adapters.unload(adapters.load(adapter(1)) and 1)
    adapters.load(adapter(1))
    assert AdapterMove("drop", 1) not in adapters.take_moves()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_leaves_slots_and_memory_in_order(seed):
    rng = random.Random(seed)
    adapters, _ = world(loaded=3)
    open_, running, placed = {}, [], {}
    for step in range(200):
        number = rng.randint(1, 5)
        event = rng.choice(["load", "unload", "enter", "run", "end"])
        try:
            if event == "load":
                adapters.load(adapter(number, in_place=rng.random() < 0.5))
            elif event == "unload":
                adapters.unload(number)
            elif event == "enter":
                adapters.enter(f"{step}", number)
                open_[f"{step}"] = number
        except RequestError:
            pass
        waiting = [id for id in open_ if id not in running and adapters.has_room(open_[id])]
        if event == "run" and waiting:
            slot = adapters.acquire(open_[waiting[0]])
            running.append(waiting[0])
            moves = [move for move in adapters.take_moves() if move.kind == "place"]
            placed |= {move.slot: move.adapter_id for move in moves}
            assert placed[slot] == open_[waiting[0]]
        if event == "end" and open_:
            id = rng.choice(list(open_))
            if id in running:
                running.remove(id)
                adapters.release(open_[id])
            adapters.leave(id)
            del open_[id]
        adapters.check()
