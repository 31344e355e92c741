"""One model on two machines, which are two torchruns here: answers, and the end of all."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from server_fakes import wait_until
from test_divided_server import FLAGS, PROMPT, answers, descendants

from limelight import LLM, SamplingParams

BODY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def machine(
    node: int, each: int, port: int, *flags: str, log: Path, restarts: int = 0
) -> subprocess.Popen:
    """One of two, with `each` processes, and a GPU if any."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
        "--nproc-per-node", str(each), "--node-rank", str(node), "--max-restarts", str(restarts),
        "--master-addr", "127.0.0.1", "--master-port", str(port),
        "-m", "limelight", "serve", "flint-nano", *FLAGS, *flags,
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": str(node)}
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=env)


@contextmanager
def machines(
    folder: Path, each: int, *flags: str, others: tuple[str, ...] | None = None, restarts: int = 0
) -> Iterator[tuple[list[subprocess.Popen], str]]:
    """Both, and the address of the server; `others` are the second one's flags, if not the same."""
    port, at = free_port(), free_port()
    flags = (*flags, "--port", str(at))
    both = [
        machine(node, each, port, *given, log=folder / f"{node}.log", restarts=restarts)
        for node, given in enumerate((flags, flags if others is None else others))
    ]
    below: dict[int, str] = {}
    try:
        yield both, f"http://127.0.0.1:{at}"
    finally:
        for one in both:
            below |= descendants(one.pid) if one.poll() is None else {}
            one.kill()
            one.wait()
        for pid in below:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def rank_of(node: subprocess.Popen, local_rank: int) -> int:
    """The process that torchrun has started there."""
    wanted = f"LOCAL_RANK={local_rank}"
    for pid, command in descendants(node.pid).items():
        environment = Path(f"/proc/{pid}/environ").read_text()
        if "limelight\0serve" in command and wanted in environment.split("\0"):
            return pid
    raise AssertionError("no such rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "node", "local_rank", "how"),
    [(1, 1, 0, signal.SIGKILL), (2, 0, 1, signal.SIGKILL), (2, 1, 1, signal.SIGSTOP)],
    ids=["on the other machine", "on the machine of rank 0", "hung"],
)
def test_two_machines_answer_as_one_process_and_end_with_a_rank(
    tmp_path, each, node, local_rank, how
):
    with machines(tmp_path, each, "-tp", str(2 * each)) as (both, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_until(lambda: answers(client, "/ready") == 200, seconds=120)
            text = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
            with LLM("flint-nano", device="cpu", max_model_len=1024, max_num_seqs=4) as llm:
                params = SamplingParams(temperature=0, max_tokens=24)
                assert text == llm.generate(PROMPT, params)[0].outputs[0].text
            below = descendants(both[0].pid) | descendants(both[1].pid)
            os.kill(rank_of(both[node], local_rank), how)
        start = time.monotonic()
        name = f"rank {node * each + local_rank} at 127.0.0.1: has "
        wait_until(lambda: name in (tmp_path / "0.log").read_text(), seconds=10)
        assert time.monotonic() - start < 10
        if how == signal.SIGKILL:
            assert both[0].wait(10) == both[1].wait(10) == 1
            assert time.monotonic() - start < 10
        else:
            # Its own torchrun waits for half a minute before it kills what it cannot end.
            assert both[0].wait(20) == 1 and both[1].wait(60) == 1
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), seconds=5)
        if (each, node) == (1, 1):
            assert "exitcode  : 1 " in (tmp_path / "0.log").read_text()
        elif node == 0:
            assert "rank 2: rank 0 has ended" in (tmp_path / "1.log").read_text()


@pytest.mark.slow
def test_torchrun_may_start_all_anew(tmp_path):
    with machines(tmp_path, 1, "-tp", "2", restarts=1) as (both, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_until(lambda: answers(client, "/ready") == 200, seconds=120)
            text = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
            os.kill(rank_of(both[1], 0), signal.SIGKILL)
            wait_until(lambda: answers(client, "/ready") != 200, seconds=10)
            wait_until(lambda: answers(client, "/ready") == 200, seconds=120)
            again = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert again == text
        both[0].send_signal(signal.SIGTERM)
        for one in both:
            one.wait(60)


@pytest.mark.slow
def test_a_signal_lets_requests_end_and_then_all_machines(tmp_path):
    with machines(tmp_path, 1, "-tp", "2") as (both, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_until(lambda: answers(client, "/ready") == 200, seconds=120)
            long = BODY | {"max_tokens": 200, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=long) as answer:
                lines = answer.iter_lines()
                next(lines)
                for one in both:
                    one.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        for one in both:
            one.wait(15)


@pytest.mark.slow
def test_machines_that_are_started_otherwise_are_refused(tmp_path):
    others = ("-tp", "2", "--block-size", "32")
    with machines(tmp_path, 1, "-tp", "2", others=others) as (both, _):
        assert both[0].wait(60) == both[1].wait(60) == 1
    told = (tmp_path / "0.log").read_text()
    assert "rank 1 at 127.0.0.1: it has another block_size than rank 0" in told


@pytest.mark.slow
def test_a_number_of_processes_that_is_not_that_of_ranks_is_told_on_each_machine(tmp_path):
    with machines(tmp_path, 1, "-tp", "4") as (both, _):
        assert both[0].wait(60) == both[1].wait(60) == 1
    for node in (0, 1):
        told = (tmp_path / f"{node}.log").read_text()
        assert "torchrun has started 2 processes (WORLD_SIZE), but -tp is 4" in told


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_machines_with_a_gpu_each_answer_as_one_with_two(tmp_path):
    flags = ("-tp", "2", "--device", "cuda", "--kv-cache-memory-bytes", str(2**28))
    with machines(tmp_path, 1, *flags) as (both, url):
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_until(lambda: answers(client, "/ready") == 200, seconds=300)
            text = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
            os.kill(rank_of(both[1], 0), signal.SIGKILL)
        assert both[0].wait(10) == both[1].wait(10) == 1
    assert "rank 1 at 127.0.0.1: has ended" in (tmp_path / "0.log").read_text()
    with LLM(
        "flint-nano", device="cuda", tensor_parallel_size=2, max_model_len=1024, max_num_seqs=4,
        kv_cache_memory_bytes=2**28,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=24)
        assert text == llm.generate(PROMPT, params)[0].outputs[0].text
