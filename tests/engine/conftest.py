"""Checkpoints that are written once, for tests of whole engines; those only read them."""

import pytest
from drafters import write_drafter
from tiny import write_checkpoint


@pytest.fixture(scope="session", params=["flint", "beam"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, request.param)
    return path


@pytest.fixture(scope="session")
def flint(tmp_path_factory):
    path = tmp_path_factory.mktemp("flint")
    write_checkpoint(path, "flint")
    return path


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    write_drafter(path)
    return path


@pytest.fixture
def either_loop(folder) -> bool:
    """Whether steps overlap: with one model they do, with the other they do not."""
    return folder.name.startswith("flint")


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlap(request):
    return request.param
