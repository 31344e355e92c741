"""What a profiler sees of a prefill: its kernels, and the rate at which attention multiplies."""

from collections.abc import Sequence

import torch

from limelight.bench import floor
from limelight.bench.prefill import time_prefill
from limelight.engine.startup import Started

ATTENTION = "_prefill_kernel"
KINDS = ("full", "window")


def prefill(started: Started, prompts: list[list[int]], *, slice_of: int) -> dict[str, object]:
    """Figures of one more round, of a model whose heads `slice_of` devices share."""
    runner = floor.runner_of(started)
    config = runner.model.config
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        time_prefill(started.engine, prompts)
        torch.cuda.synchronize()
    launches = sorted(
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events()
        if event.name == ATTENTION
    )
    kernels = floor.kernels_in(profile, 1)
    busy_us = sum(kernel["us"] for kernel in kernels if isinstance(kernel["us"], float))
    figures = attention(
        [microseconds for _, microseconds in launches],
        config.windows,
        channels=config.num_heads // slice_of * config.head_dim,
        lengths=[len(prompt) for prompt in prompts],
    )
    rate = round(floor.matrix_rate(runner.device) / 1e12, 1)
    return (
        {"busy_ms": round(busy_us / 1e3, 3), "matrix_tflops": rate} | figures | {"kernels": kernels}
    )


def attention(
    launches_us: Sequence[float],
    windows: Sequence[int | None],
    *,
    channels: int,
    lengths: Sequence[int],
) -> dict[str, object]:
    """Milliseconds and TFLOP/s of full and of window layers, from the times of their launches.

    These are in the order of the layers, as often as prompts were cut into pieces. `channels` are
    those of all query heads.
    """
    layers = len(windows)
    if not launches_us or len(launches_us) % layers:
        raise ValueError(
            f"{len(launches_us)} launches of attention are no steps of {layers} layers"
        )
    us, pairs = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    for i, microseconds in enumerate(launches_us):
        us[kind_of(windows[i % layers])] += microseconds
    for window in windows:
        pairs[kind_of(window)] += sum(visible(length, window) for length in lengths)
    figures: dict[str, object] = {}
    for kind in KINDS:
        if us[kind]:
            figures[f"{kind}_ms"] = round(us[kind] / 1e3, 3)
            # A product with a key and one with a value, each of a multiplication and an addition.
            figures[f"{kind}_tflops"] = round(4 * channels * pairs[kind] / us[kind] / 1e6, 1)
    return figures


def kind_of(window: int | None) -> str:
    return KINDS[window is not None]


def visible(length: int, window: int | None) -> int:
    """How many pairs of a query and a key that it sees a sequence has."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
