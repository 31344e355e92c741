"""The little arithmetic of launches is Triton's, without what that costs."""

from pathlib import Path

import pytest
import triton

import limelight.ops
from limelight.ops import cdiv, next_power_of_2


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 128, 129, 2**20, 2**31 + 1])
def test_sizes_are_those_that_triton_finds(count):
    assert next_power_of_2(count) == triton.next_power_of_2(count)
    assert [cdiv(count, size) for size in (1, 3, 128)] == [
        triton.cdiv(count, size) for size in (1, 3, 128)
    ]


def test_no_launcher_asks_triton():
    for path in Path(limelight.ops.__path__[0]).glob("*.py"):
        assert "triton.cdiv(" not in (text := path.read_text()), path
        assert "triton.next_power_of_2(" not in text, path
