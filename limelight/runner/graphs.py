"""Decode steps as CUDA graphs: captured by size at the start, replayed with other contents."""

from bisect import bisect_left
from collections.abc import Callable

import torch

from limelight.progress import Progress
from limelight.runner.inputs import StepTensors


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, multiples of 8, from 128 on of 16, and the largest."""
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, largest, 16), largest}
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """One graph for each size; a smaller batch is padded to the next."""

    def __init__(
        self,
        step: Callable[[StepTensors], tuple[torch.Tensor, torch.Tensor]],
        padding: Callable[[int], StepTensors],
        sizes: list[int],
        progress: Progress,
    ):
        """Capture `step` on the tensors of each size, filled with `padding`."""
        self.sizes = sizes
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        pool = None
        with progress.phase("capturing graphs", len(self.sizes)) as advance:
            # From the largest down, so that the smaller ones find their memory in its pool.
            for size in reversed(self.sizes):
                tensors = padding(size)
                # Whatever is compiled or allocated once is so before the capture.
                step(tensors)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.outputs[size] = step(tensors)
                pool = graph.pool()
                self.graphs[size] = graph
                advance(1)

    def size_for(self, batch: int) -> int | None:
        """The size that holds a batch, or None if it is larger than all."""
        at = bisect_left(self.sizes, batch)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step on what was sent; its tokens and best logits [size]."""
        self.graphs[size].replay()
        return self.outputs[size]
