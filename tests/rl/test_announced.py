"""What is found wrong with an announcement alone."""

import time

import pytest
import torch

from limelight.rl.announced import Announced, Landing


def test_a_tensor_that_is_announced_twice_is_named_at_once_however_many_there_are():
    every = [Announced(f"t{i}", torch.float32, (1,)) for i in range(30_000)]
    began = time.process_time()
    with pytest.raises(ValueError, match="t29999 is announced twice"):
        Landing.plan([*every, every[-1]], {}, {})
    assert time.process_time() - began < 1
