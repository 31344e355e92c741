"""A GPU that is not there looks like one to all code up to its launches."""

import torch

from limelight.ops import pdl, stages
from limelight.ops.absent import absent_gpu


def test_its_tensors_say_where_they_are_and_those_of_the_host_stay_there():
    before = torch.cuda.is_available()
    with absent_gpu(90) as gpu:
        assert torch.cuda.is_available()
        one, host = torch.ones(3, 4, device="cuda"), torch.arange(5).pin_memory()
        assert one.is_cuda and one.device.type == "cuda" and not host.is_cuda
        assert one.new_empty(2).is_cuda and host.to("cuda").is_cuda and not one.cpu().is_cuda
        assert host.tolist() == [0, 1, 2, 3, 4] and gpu.reads == 0
    assert one.is_meta and torch.cuda.is_available() == before


def test_what_the_host_reads_of_them_is_zeros_and_is_counted():
    with absent_gpu(90) as gpu:
        there = torch.ones(2, dtype=torch.int64, device="cuda")
        assert there.tolist() == [0, 0] and there.sum().item() == 0 and not bool(there[0])
        assert gpu.reads == 3
        assert torch.ones(2, dtype=torch.int64).copy_(there).tolist() == [0, 0]


def test_launchers_ask_for_what_its_capability_has():
    for capability, able, count in ((80, False, 2), (90, True, 4), (120, True, 2)):
        with absent_gpu(capability):
            tensor = torch.empty(1, device="cuda", dtype=torch.bfloat16)
            assert pdl(tensor)["PDL"] == able and stages(tensor, 4) == count
            assert stages(tensor.float(), 4) == count // 2
