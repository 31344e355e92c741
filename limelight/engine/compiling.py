"""Every kernel that a start will launch, compiled by all cores while the weights are loaded.

A process of its own rehearses the start (`engine/rehearsal.py`) and forks workers, which compile
what was launched into Triton's cache, where the start then finds it. What that misses is compiled
when it is met, so nothing here can fail a start.
"""

import fcntl
import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import torch

from limelight.config import EngineConfig
from limelight.engine.memory import CGROUP, MemoryPlan, device_memory
from limelight.parallel.expert_mesh import ExpertMesh
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.progress import Progress

if TYPE_CHECKING:
    from limelight.engine.rehearsal import Rehearsal
    from limelight.engine.startup import Resolved
    from limelight.ops.absent import Launch

logger = logging.getLogger(__name__)
PROGRAM = (sys.executable, "-P", "-m", "limelight.engine.compiling")
PACKAGE = Path(__file__).parent.parent
# Of the host's memory, for each process: the largest kernels take half of it.
BYTES_OF_A_COMPILER = 2**30


@dataclass(frozen=True, slots=True)
class Word:
    """A line that the process writes."""

    total: int | None = None  # how many kernels there are; the first word
    done: int = 0  # so many more are compiled
    fault: str | None = None


@contextmanager
def compiling(
    config: EngineConfig,
    found: "Resolved",
    plan: MemoryPlan,
    mesh: Mesh,
    experts: ExpertMesh | None = None,
    *,
    compiles: bool = True,
) -> Iterator[Callable[[Progress], None]]:
    """Within, kernels are compiled beside whatever else is done; yields what waits for them.

    One rank `compiles` for all of its machine. There are none on a CPU.
    """
    if found.device.type != "cuda" or not compiles:
        yield lambda progress: None
        return
    asked = _rehearsal(config, plan, mesh, found.device, experts)
    # Random weights are of the kinds that the config declares, which the identity does not have.
    identity = found.identity + repr(plan.kinds).encode()
    if (mark := mark_of(asked, identity)).exists():
        yield lambda progress: logger.debug("kernels were compiled by a start before this one")
        return
    process = subprocess.Popen(
        PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        # Neither the process nor its workers have a device, and one thread each.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        # If it has ended already, `follow` will tell.
        with suppress(OSError), process.stdin as into:
            into.write(msgspec.json.encode(asked))
        words = process.stdout
        yield lambda progress: follow(words, progress, mark)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _rehearsal(
    config: EngineConfig,
    plan: MemoryPlan,
    mesh: Mesh,
    device: torch.device,
    experts: ExpertMesh | None,
) -> "Rehearsal":
    from limelight.engine.rehearsal import Rehearsal

    major, minor = torch.cuda.get_device_capability(device)
    seat = Seat(size=mesh.size)
    if experts is not None:
        seat = Seat(0, mesh.size, experts.rank // mesh.size, experts.size // mesh.size)
    return Rehearsal(
        config, plan.num_blocks, 10 * major + minor, plan.total, seat,
        is_joined=mesh.group is not None, has_peers=mesh.peers is not None,
    )  # fmt: skip


def mark_of(asked: "Rehearsal", identity: bytes) -> Path:
    """An empty file beside the kernels of such a start, once all are there; `identity` is that of
    what was found, wherever it lies."""
    import triton

    about = msgspec.to_builtins(asked)
    for name in ("model", "revision", "hf_config_path", "seed"):
        del about["config"][name]
    (about["config"]["speculative_config"] or {}).pop("model", None)
    hashed = hashlib.sha256(identity + msgspec.json.encode(about))
    hashed.update(f"{triton.__version__} {torch.__version__} {sys.version}".encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        hashed.update(file.read_bytes())
    return Path(triton.knobs.cache.dir) / f"limelight-{hashed.hexdigest()[:32]}"


def follow(words: IO[bytes], progress: Progress, mark: Path) -> None:
    """Show what is compiled until all is, and leave the mark; or tell why not all is."""
    with progress.phase("finding kernels", 1):
        first = words.readline()
    if not first:
        logger.warning("kernels are compiled when they are met: the process for them has ended")
        return
    word = msgspec.json.decode(first, type=Word)
    total, done, fault = word.total or 0, 0, word.fault
    with progress.phase("compiling kernels", total, unit="kernels") as advance:
        for line in words:
            word = msgspec.json.decode(line, type=Word)
            fault = fault or word.fault
            done += word.done
            advance(word.done)
    if fault is not None or done < total:
        fault = fault or f"{total - done} of {total} were left"
        logger.warning("some kernels are compiled when they are met, which takes longer: %s", fault)
        return
    with suppress(OSError):  # without it the next start looks again
        mark.touch()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Engines beside each other have the same kernels: who comes later finds them made."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "limelight.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def processes() -> int:
    """How many can compile at once: one a core that this process may use, as far as memory goes."""
    free, _ = device_memory(torch.device("cpu"))
    cores = len(os.sched_getaffinity(0))
    limit = CGROUP / "cpu.max"
    quota, period = limit.read_text().split() if limit.exists() else ("max", "1")
    if quota != "max":
        cores = min(cores, -(-int(quota) // int(period)))
    return max(1, min(cores, free // BYTES_OF_A_COMPILER))


def main() -> int:
    """Entry of the process."""
    from limelight.engine.rehearsal import Rehearsal, rehearse
    from limelight.ops.ahead import compile_all, compile_launch, make_stub

    out = os.dup(1)
    # Whatever a library prints must not come among the words.
    os.dup2(2, 1)
    # What there is to say of the config the start says itself.
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)s: %(message)s")

    def tell(word: Word) -> None:
        # One write, so that the workers' lines stay whole.
        os.write(out, msgspec.json.encode(word) + b"\n")

    def compile_one(launch: "Launch") -> None:
        try:
            make_stub(compile_launch(launch))
        except Exception as error:  # the start will meet it too
            fault = f"{launch.kernel.__name__}: {type(error).__name__}: {error}"
            tell(Word(fault=fault[:1000]))
        else:
            tell(Word(done=1))

    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Rehearsal)
    launches, fault = rehearse(asked)
    tell(Word(total=len(launches), fault=fault))
    with one_at_a_time():
        compile_all(launches, compile_one, processes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
