"""A trainer waits for engines as long as none of them has said no."""

import time

import pytest

from limelight.rl.gloo import GlooGroup, host_store


def meet(seconds, watch=None):
    store = host_store("127.0.0.1", 0, world_size=2, seconds=seconds)
    return GlooGroup(store, rank=0, world_size=2, seconds=seconds, watch=watch)


def test_an_engine_that_refuses_ends_the_wait_at_once():
    def told():
        raise ValueError("no backend")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no backend"):
        meet(60, told)
    assert time.monotonic() - began < 5


def test_engines_that_do_not_come_are_not_waited_for_for_ever():
    with pytest.raises(RuntimeError, match=r"not all of 1 .* came in 0.2 s"):
        meet(0.2)
