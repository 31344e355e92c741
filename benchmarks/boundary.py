"""What the sum over ranks costs with the add and norm behind it: `ops/boundary.py` beside NCCL.

    python benchmarks/boundary.py --ranks 2 --json FILE

A GPU for each rank. The ways of the kernel, and NCCL's all-reduce with the norm as a kernel behind
it, each as a graph of many boundaries that is replayed; the results of all ways are compared first.
Rows and columns as Flint (2048, add and norm) and Beam (5120, sandwich) have them, BF16.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.multiprocessing
from torch import Tensor

from limelight.bench.record import record, save, show, spread
from limelight.ops import boundary
from limelight.ops.boundary import Partial
from limelight.ops.norm import add_rmsnorm, sandwich
from limelight.parallel.collectives import all_reduce
from limelight.parallel.group import join, leave, open_store, store_at, take_device
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat
from limelight.parallel.symmetric import with_peers

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Bytes of all rows up to which a way is tried.
WAYS = {"once": (2**21, 2**21), "twice": (0, 2**23)}
IN_A_GRAPH, REPLAYS, WARM = 20, 50, 5
EPS, DTYPE = 1e-6, torch.bfloat16


@dataclass(frozen=True)
class Boundary:
    """Inputs of one boundary, and the ways over it."""

    h: Tensor
    x: Tensor
    weights: tuple[Tensor, Tensor]
    mesh: Mesh

    @property
    def is_sandwich(self) -> bool:
        return self.h.shape[1] == 5120

    def by_nccl(self) -> tuple[Tensor, Tensor]:
        x = all_reduce(self.x.clone(), self.mesh)
        if self.is_sandwich:
            return sandwich.kernel(self.h, x, *self.weights, n=5, eps=EPS)
        return add_rmsnorm.kernel(self.h, x, self.weights[1], eps=EPS)

    def fused(self) -> tuple[Tensor, Tensor]:
        assert self.mesh.peers is not None
        x = Partial(self.x, self.mesh.peers, lambda x: all_reduce(x.clone(), self.mesh))
        if self.is_sandwich:
            return boundary.sum_sandwich.kernel(self.h, x, *self.weights, n=5, eps=EPS)
        return boundary.sum_add_rmsnorm.kernel(self.h, x, self.weights[1], eps=EPS)


def inputs(rows: int, size: int, mesh: Mesh) -> Boundary:
    """The same stream and weights on each rank, a summand of its own on each."""
    same = torch.Generator("cuda").manual_seed(rows)
    own = torch.Generator("cuda").manual_seed(1000 * (1 + mesh.rank) + rows)

    def drawn(*shape: int, generator: torch.Generator = same) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(DTYPE)

    return Boundary(
        drawn(rows, size), drawn(rows, size, generator=own), (drawn(size), drawn(size)), mesh
    )


def microseconds(work: Callable[[], object]) -> dict[str, float]:
    """Of one call, within a graph of many."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_A_GRAPH):
            work()
    times = []
    for _ in range(WARM + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / IN_A_GRAPH)
    return spread(times[WARM:])


def measure(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    """Of one rank; rank 0 writes."""
    device = torch.device("cuda")
    take_device(device, rank, ranks)
    boundary.MOST_BYTES = {}
    plain = join(store_at(port), device, Seat(rank, ranks), width=0, dtype=DTYPE)
    found = []
    for size in args.sizes:
        for way, most in WAYS.items():
            boundary.MOST_BYTES = {8: most}
            mesh = with_peers(plain, size, DTYPE, device)
            assert mesh.peers is not None, "these GPUs cannot reach each other's memory"
            for rows in args.rows:
                if rows > mesh.peers.rows:
                    continue
                one = inputs(rows, size, mesh)
                same = all(map(torch.equal, one.fused(), one.by_nccl()))
                us = microseconds(one.fused)
                nbytes = rows * size * DTYPE.itemsize
                row = {"op": "boundary", "way": way, "ranks": ranks, "columns": size, "rows": rows}
                found.append(row | {"bytes": nbytes, "us": us, "as_nccl": same})
        for rows in args.rows:
            row = {"op": "boundary", "way": "nccl", "ranks": ranks, "columns": size, "rows": rows}
            us = microseconds(inputs(rows, size, plain).by_nccl)
            found.append(row | {"bytes": rows * size * DTYPE.itemsize, "us": us, "as_nccl": True})
    if rank == 0:
        show("boundary", found)
        if args.json:
            command = shlex.join(["python", *sys.argv])
            save(args.json, record("boundary", [], found) | {"command": command})
    torch.cuda.synchronize()
    leave()


def main() -> None:
    """Start a process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--sizes", type=int, nargs="+", default=(2048, 5120))
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    store = open_store()
    with torch.inference_mode():
        torch.multiprocessing.spawn(measure, (args.ranks, store.port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
