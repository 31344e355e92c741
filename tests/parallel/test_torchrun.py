"""What torchrun's environment says, and what is refused with it."""

import pytest

from limelight.cli import main
from limelight.config import EngineConfig, ServerConfig
from limelight.parallel.seat import Seat
from limelight.parallel.torchrun import Torchrun, started_by_torchrun

ENVIRONMENT = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_the_environment_says_who_sits_where():
    found = started_by_torchrun(ENVIRONMENT)
    assert found == Torchrun(rank=3, size=4, local_rank=1, local_size=2, host="10.0.0.1")
    assert (found.seat.rank, found.seat.local_rank, found.seat.local_size) == (3, 1, 2)
    assert not found.seat.is_on_one_machine and Seat(1, 2).is_on_one_machine
    assert started_by_torchrun({}) is None and started_by_torchrun({"RANK": "0"}) is None


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_refused_by_name(name):
    without = {key: value for key, value in ENVIRONMENT.items() if key != name}
    with pytest.raises(ValueError, match=f"but {name} is None"):
        started_by_torchrun(without)
    if name != "MASTER_ADDR":
        with pytest.raises(ValueError, match=f"but {name} is 'x'"):
            started_by_torchrun(ENVIRONMENT | {name: "x"})


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--data-parallel-size", {"data_parallel_size": 2}),
        ("--ray", {"ray": True}),
        ("--restart-engine", {"restart_engine": 1}),
    ],
)
def test_what_cannot_be_had_with_torchrun_is_refused_by_name(flag, given):
    found = Torchrun(rank=0, size=2, local_rank=0, local_size=1, host="a")
    with pytest.raises(ValueError, match=f"{flag} is not supported with torchrun"):
        found.check(EngineConfig(tensor_parallel_size=2), ServerConfig(**given))
    Torchrun(rank=0, size=1, local_rank=0, local_size=1, host="a").check(
        EngineConfig(), ServerConfig(**given)
    )


@pytest.mark.parametrize("size", ["1", "4"])
def test_as_many_processes_as_ranks_must_be_started(monkeypatch, capsys, size):
    for name, value in (ENVIRONMENT | {"RANK": "0", "WORLD_SIZE": size}).items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "flint-nano", "-tp", "2"]) == 2
    told = capsys.readouterr().err
    assert f"started {size} processes (WORLD_SIZE), but -tp is 2" in told
