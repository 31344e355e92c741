"""Packed tensors: where pieces are cut, and what lies in them."""

import pytest
import torch

from limelight.rl.announced import Announced
from limelight.rl.broadcasts import Broadcasts, pieces, unpack


def announce(*sizes, dtype=torch.float32):
    return [Announced(f"t{i}", dtype, (size,)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1, 1, 1], [["t0", "t1", "t2"]]),
        # 16 bytes do not exceed 16.
        ([4, 1, 2, 9, 1], [["t0", "t1"], ["t2", "t3"], ["t4"]]),
        ([50, 50], [["t0"], ["t1"]]),
        ([], []),
    ],
)
def test_a_piece_ends_with_the_tensor_that_crosses_the_line(sizes, expected):
    cut = pieces(announce(*sizes), 16)
    assert [[one.name for one in piece] for piece in cut] == expected


def test_tensors_lie_without_gaps_whatever_their_types():
    values = [
        torch.arange(3, dtype=torch.float16), torch.randn(2, 2), torch.randn(5).bfloat16(),
        torch.tensor(2.5),
    ]  # fmt: skip
    announced = [Announced(f"t{i}", x.dtype, tuple(x.shape)) for i, x in enumerate(values)]
    packed = torch.cat([x.reshape(-1).view(torch.uint8) for x in values])
    for (name, got), one, value in zip(unpack(packed, announced), announced, values, strict=True):
        assert name == one.name and got.dtype == value.dtype and torch.equal(got, value)


class Recording:
    """A group that fills each tensor with the number of its broadcast."""

    def __init__(self):
        self.sizes = []

    def broadcast(self, tensor):
        self.sizes.append(tensor.nbytes)
        tensor.view(-1).view(torch.uint8).fill_(len(self.sizes))

    def wait(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(("packed", "sizes"), [(True, [20, 8]), (False, [16, 4, 8])])
def test_there_are_as_many_broadcasts_as_were_announced(packed, sizes):
    group = Recording()
    receiver = Broadcasts(group, torch.device("cpu"), packed=packed, buffer_bytes=16)
    names = [name for name, _ in receiver.receive(announce(4, 1, 2), {})]
    assert (names, group.sizes) == (["t0", "t1", "t2"], sizes)


def test_a_former_client_says_packed_with_each_update():
    group = Recording()
    receiver = Broadcasts(group, torch.device("cpu"), packed=False, buffer_bytes=2**20)
    list(receiver.receive(announce(4, 1, 2), {"packed": True}))
    assert group.sizes == [28]


def test_what_packed_cannot_be_is_refused_before_anything_is_waited_for():
    receiver = Broadcasts(Recording(), torch.device("cpu"), packed=False, buffer_bytes=2**20)
    receiver.check(announce(4), {})
    with pytest.raises(ValueError, match="packed must be true or false; got 'no'"):
        receiver.check(announce(4), {"packed": "no"})
