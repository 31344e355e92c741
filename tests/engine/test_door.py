"""Ranks that torchrun has started come to rank 0 by the store; who has no token stays out."""

import queue
import socket
import threading

import msgspec
import pytest
import torch

from limelight.config import EngineConfig
from limelight.engine import ranks
from limelight.engine.door import KEY, Address, Door, knock
from limelight.engine.links import Connection
from limelight.engine.pipes import Hello, Word, receive, receive_bytes
from limelight.engine.ranks import Ranks
from limelight.engine.worker import compare_flags
from limelight.parallel.group import open_store, store_at
from limelight.parallel.seat import Seat

HOST = "127.0.0.1"


@pytest.fixture
def store():
    return open_store()


@pytest.fixture
def guests():
    """Who was let in: rank, address and connection."""
    return queue.Queue()


@pytest.fixture
def door(store, guests):
    door = Door(store, HOST, 3, lambda *guest: guests.put(guest))
    yield door
    door.close()


def address_of(store) -> Address:
    return msgspec.json.decode(store.get(KEY), type=Address)


def refused(address: Address, *sent: bytes) -> bool:
    """Whether a stranger who sends this is sent away."""
    with socket.create_connection((address.host, address.port), timeout=5) as stranger:
        for data in sent:
            stranger.sendall(data)
        try:
            return stranger.recv(1) == b""
        except ConnectionResetError:
            return True


def test_ranks_come_in_any_order_and_messages_go_both_ways(store, door, guests):
    found = {}
    for rank in (2, 1):
        reads, says, meeting = knock(store_at(store.port), rank)
        came, where, connection = guests.get(timeout=5)
        link = Connection(connection)
        assert (came, where) == (rank, HOST)
        door.store.set(f"to {rank}", "x")
        assert meeting.get(f"to {rank}") == b"x"
        says.send(Word(is_ready=True))
        assert receive(link.words, Word) == Word(is_ready=True)
        link.commands.send_bytes(b"x" * 300_000)
        assert receive_bytes(reads) == b"x" * 300_000
        found[rank] = link, reads
    assert not door.awaited
    for link, reads in found.values():
        link.kill()
        assert receive_bytes(reads) is None


def test_a_rank_waits_for_a_door_that_is_not_there_yet_or_not_any_more(store, guests):
    knocking = threading.Thread(target=knock, args=(store_at(store.port), 1))
    knocking.start()
    door = Door(store, HOST, 2, lambda *guest: guests.put(guest))
    knocking.join(5)
    assert guests.get(timeout=5)[0] == 1
    door.close()
    again = threading.Thread(target=knock, args=(store_at(store.port), 1))
    again.start()
    with pytest.raises(queue.Empty):
        guests.get(timeout=0.5)
    door = Door(store, HOST, 2, lambda *guest: guests.put(guest))
    again.join(5)
    assert guests.get(timeout=5)[0] == 1
    door.close()


def test_strangers_are_refused_and_keep_no_rank_out(store, door, guests):
    address = address_of(store)
    silent = socket.create_connection((address.host, address.port))
    hello = msgspec.msgpack.encode(Hello(b"y" * 32, 1))
    for data in (hello, b"\x80", b"GET / HTTP/1.1\r\n\r\n"):
        assert refused(address, len(data).to_bytes(8, "little"), data)
    assert refused(address, b"GET / HTTP/1.1\r\n\r\n")
    assert refused(address, (2**62).to_bytes(8, "little"))
    for rank in (0, 3):
        right = msgspec.msgpack.encode(Hello(address.token, rank))
        assert refused(address, len(right).to_bytes(8, "little"), right)
    assert guests.empty() and door.awaited == {1, 2}
    knock(store, 1)
    assert guests.get(timeout=5)[0] == 1
    again = msgspec.msgpack.encode(Hello(address.token, 1))
    assert refused(address, len(again).to_bytes(8, "little"), again)
    door.close()
    assert silent.recv(1) == b""
    silent.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))


def test_a_door_at_an_address_of_another_machine_is_refused_by_name(store):
    with pytest.raises(ValueError, match=r"cannot listen on MASTER_ADDR 198\.51\.100\.1"):
        Door(store, "198.51.100.1", 2, lambda *guest: None)


def test_machines_with_other_flags_are_told_which():
    own = EngineConfig(prefix_hash_seed="secret", max_num_seqs=4)
    compare_flags(own, EngineConfig(max_num_seqs=4))
    with pytest.raises(ValueError, match="another max_num_seqs than rank 0"):
        compare_flags(own, EngineConfig(max_num_seqs=8))


def test_ranks_that_do_not_come_are_named(store, monkeypatch):
    monkeypatch.setattr(ranks, "SECONDS_TO_COME", 0.1)
    device = torch.device("cpu")
    started = Ranks.started(EngineConfig(), device, None, Seat(size=3), store, HOST)
    with pytest.raises(ValueError, match=r"ranks \[1, 2\] have not come in 0\.1 s"), started:
        pass
