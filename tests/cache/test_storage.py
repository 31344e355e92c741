"""The cache's memory: its bytes, and each layer's part of it with its scales."""

import pytest
import torch

from limelight.cache.groups import GroupSpec
from limelight.cache.storage import BlockShape, KVStorage

CPU = torch.device("cpu")
GROUPS = [GroupSpec(None, (0, 3)), GroupSpec(9, (1, 2))]


def shape(dtype):
    return BlockShape(rows=2, size=4, kv_heads=2, head_dim=8, dtype=dtype)


def test_fp8_takes_a_byte_a_number():
    assert shape(torch.float8_e4m3fn).nbytes == 2 * 2 * 4 * 2 * 8
    storage = KVStorage(GROUPS, shape(torch.float8_e4m3fn), 5, CPU)
    assert storage.pool.nbytes == 6 * storage.shape.nbytes


def test_each_layer_has_its_own_scales_and_one_of_another_precision_has_none():
    scales_L2 = torch.tensor([[0.5, 2.0], [1.0, 3.0], [0.25, 1.0], [4.0, 0.125]])
    storage = KVStorage(GROUPS, shape(torch.float8_e4m3fn), 5, CPU, scales_L2=scales_L2)
    for cache, scales_2 in zip(storage.caches, scales_L2, strict=True):
        cache.check()
        assert torch.equal(cache.scales_2, scales_2)
        # One kernel serves all layers: how a pointer is aligned is compiled in.
        assert cache.scales_2.data_ptr() % 16 == 0
        cache.write(torch.tensor([7]), torch.full((1, 2, 8), 3.0), torch.full((1, 2, 8), -3.0))
        keys, values = cache.read(torch.tensor([[7, 0]]))
        assert keys[0, 0, :, 0].tolist() == [3.0, 0.0] and values[0, 0, :, 0].tolist() == [
            -3.0,
            0.0,
        ]
    plain = KVStorage(GROUPS, shape(torch.float32), 5, CPU)
    assert all(cache.scales_2 is None for cache in plain.caches)


def test_scales_are_one_unless_given():
    storage = KVStorage(GROUPS, shape(torch.float8_e4m3fn), 5, CPU)
    assert all(cache.scales_2.tolist() == [1.0, 1.0] for cache in storage.caches)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_divides_into_nothing_is_refused(wrong):
    scales_L2 = torch.ones(4, 2)
    scales_L2[2, 1] = wrong
    with pytest.raises(ValueError, match="scales of an FP8 KV cache"):
        KVStorage(GROUPS, shape(torch.float8_e4m3fn), 5, CPU, scales_L2=scales_L2)
