"""Steps as CUDA graphs: captured by size at the start, replayed with other contents."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from limelight.ops import for_graph
from limelight.progress import Progress
from limelight.runner.adapters import RowAdapters

Inputs = TypeVar("Inputs")
Outcome = TypeVar("Outcome")


def graph_sizes(largest: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, 12, multiples of 8, from 128 on of 16, and the largest."""
    sizes = {1, 2, 4, 12, *range(8, 128, 8), *range(128, largest, 16), largest}
    return sorted(size for size in sizes if size <= largest)


# Above so many rows a step with a prompt takes so long that a graph gains little.
MOST_ROWS_WITH_A_PROMPT = 2048


def prompt_sizes(largest: int) -> list[int]:
    """Sizes of steps with a prompt: an eighth to a half apart, and the largest."""
    largest = min(largest, MOST_ROWS_WITH_A_PROMPT)
    sizes = {64, *range(128, 512, 128), *range(512, MOST_ROWS_WITH_A_PROMPT, 256), largest}
    return sorted(size for size in sizes if size <= largest)


class _Address:
    """Where a tensor lies, in the form from which torch makes one that does not own its memory."""

    def __init__(self, x: torch.Tensor):
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": tuple(stride * x.element_size() for stride in x.stride()),
            "typestr": "<f4",
            "version": 2,
        }


def lent(x: torch.Tensor) -> torch.Tensor:
    """An FP32 tensor of a graph without a hold on its memory, which the next capture in the same
    pool may then have too: it holds from the graph's replay until that of another."""
    assert x.dtype == torch.float32
    return torch.as_tensor(_Address(x), device=x.device) if x.is_cuda else x


class Graphs(Generic[Inputs, Outcome]):
    """One graph for each size; a smaller step is padded to the next.

    Where there is room for `adapters`, one with and one without: steps without any take no longer.
    """

    def __init__(
        self,
        step: Callable[[Inputs], Outcome],
        padding: Callable[[int], Inputs],
        sizes: list[int],
        progress: Progress,
        *,
        name: str = "graphs",
        beside: "Graphs[Any, Any] | None" = None,
        adapters: RowAdapters | None = None,
        lend: Callable[[Outcome], Outcome] = lambda outcome: outcome,
    ):
        """Capture `step` on the inputs of each size, filled with `padding`.

        Their memory is that of the graphs `beside` them, which never run at the same time. `lend`
        lets go of what an outcome need not hold on to.
        """
        self.lend = lend
        self.sizes = sizes
        self.pool: Any = None if beside is None else beside.pool
        self.adapters = adapters
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.outcomes: dict[tuple[int, bool], Outcome] = {}
        adapted = adapters is not None and adapters.has_room
        phase = progress.phase(f"capturing {name}", len(self.sizes) * (1 + adapted))
        with phase as advance, for_graph():
            # From the largest down, so that the smaller ones find their memory in its pool.
            for size in reversed(self.sizes):
                inputs = padding(size)
                if adapters is not None and adapted:
                    with adapters.everywhere():
                        self._capture(step, inputs, (size, True))
                    advance(1)
                self._capture(step, inputs, (size, False))
                advance(1)

    def _capture(
        self, step: Callable[[Inputs], Outcome], inputs: Inputs, key: tuple[int, bool]
    ) -> None:
        # Whatever is compiled or allocated once is so before the capture.
        step(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the device meanwhile, as that of NCCL does.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outcome = step(inputs)
        self.outcomes[key] = self.lend(outcome)
        self.pool = graph.pool()
        self.graphs[key] = graph

    def size_for(self, count: int) -> int | None:
        """The size that holds a step, or None if it is larger than all."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int) -> Outcome:
        """Run the step on what was sent; what it leaves."""
        key = size, self.adapters is not None and self.adapters.in_step
        self.graphs[key].replay()
        return self.outcomes[key]
