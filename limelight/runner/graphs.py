"""Steps as CUDA graphs: captured by size at the start, replayed with other contents."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from limelight.progress import Progress

Inputs = TypeVar("Inputs")
Outcome = TypeVar("Outcome")


def graph_sizes(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, multiples of 8, from 128 on of 16, and the largest."""
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, largest, 16), largest}
    return sorted(size for size in sizes if size <= largest)


class Graphs(Generic[Inputs, Outcome]):
    """One graph for each size; a smaller step is padded to the next."""

    def __init__(
        self,
        step: Callable[[Inputs], Outcome],
        padding: Callable[[int], Inputs],
        sizes: list[int],
        progress: Progress,
        *,
        name: str = "graphs",
    ):
        """Capture `step` on the inputs of each size, filled with `padding`."""
        self.sizes = sizes
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outcomes: dict[int, Outcome] = {}
        pool = None
        with progress.phase(f"capturing {name}", len(self.sizes)) as advance:
            # From the largest down, so that the smaller ones find their memory in its pool.
            for size in reversed(self.sizes):
                inputs = padding(size)
                # Whatever is compiled or allocated once is so before the capture.
                step(inputs)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.outcomes[size] = step(inputs)
                pool = graph.pool()
                self.graphs[size] = graph
                advance(1)

    def size_for(self, count: int) -> int | None:
        """The size that holds a step, or None if it is larger than all."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int) -> Outcome:
        """Run the step on what was sent; what it leaves."""
        self.graphs[size].replay()
        return self.outcomes[size]
