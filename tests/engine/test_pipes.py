"""Messages between ranks arrive whole and in order, whatever their size."""

import os
import threading
from io import FileIO

import pytest

from limelight.engine.pipes import Sender, Word, receive, receive_bytes


@pytest.fixture
def pipe():
    ends = os.pipe()
    reader, writer = FileIO(ends[0], "r"), FileIO(ends[1], "w")
    yield reader, writer
    reader.close()
    writer.close()


def test_messages_larger_than_the_pipe_arrive_whole_and_in_order(pipe):
    reader, writer = pipe
    sent = [Word(fault="x" * size) for size in (0, 5, 300_000, 1)]
    sender = Sender(writer)
    thread = threading.Thread(target=lambda: [sender.send(word) for word in sent])
    thread.start()
    assert [receive(reader, Word) for _ in sent] == sent
    thread.join()


def test_an_end_inside_a_message_is_the_end(pipe):
    reader, writer = pipe
    writer.write((100).to_bytes(8, "little") + b"half")
    writer.close()
    assert receive(reader, Word) is None


def test_a_sender_hears_that_no_one_reads(pipe):
    reader, writer = pipe
    reader.close()
    with pytest.raises(OSError):
        Sender(writer).send(Word())


def test_a_message_that_is_longer_than_agreed_is_not_read(pipe):
    reader, writer = pipe
    Sender(writer).send_bytes(b"12345")
    with pytest.raises(ValueError, match="5 bytes is longer than 4"):
        receive_bytes(reader, 4)
