"""Engines that serve the same load in turn, one without drafts and one that can draft in two ways.

Both stand beside each other where they fit into memory; else one is measured after the other.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from limelight.bench.closed_loop import Window, watch
from limelight.config import EngineConfig
from limelight.engine.drafting import AllDrafts, Drafting
from limelight.engine.startup import Started, plan_memory, resolve, start_engine
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.types import Request


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine to be started, and the ways in which it takes part."""

    config: EngineConfig
    ways: list[str]


def turns(entries: list[Entry], mesh: Mesh) -> list[list[Entry]]:
    """Those who are measured together: all, each with a cache of its own, if that fits and none is
    divided among ranks."""
    apart = [[entry] for entry in entries]
    if len(entries) == 1 or entries[0].config.tensor_parallel_size > 1:
        return apart
    plans = [plan_memory(entry.config, resolve(entry.config), mesh) for entry in entries]
    needed = sum(plan.weights + plan.workspace + plan.cache for plan in plans)
    if needed > min(plans[0].usable, plans[0].available):
        return apart
    return [
        [
            replace(entry, config=replace(entry.config, kv_cache_memory_bytes=plan.cache))
            for entry, plan in zip(entries, plans, strict=True)
        ]
    ]


class Contestant:
    """An engine, and what decides about drafts in each way that it takes."""

    def __init__(self, started: Started, ways: dict[str, Drafting | None]):
        self.started, self.ways = started, ways

    @classmethod
    def start(cls, entry: Entry, mesh: Mesh) -> "Contestant":
        started = start_engine(entry.config, Progress(quiet=False), mesh)
        own, ways = started.engine.drafting, {}
        for way in entry.ways:
            ways[way] = own
            if way == "fixed" and own is not None:
                count = len(own.policy.stats().verified_at)
                ways[way] = Drafting(AllDrafts(count), synthetic=own.synthetic)
        return cls(started, ways)

    def check(self, *, prompt: int, answer: int, clients: int) -> None:
        """`ValueError` if the model or its cache cannot take so many of so many tokens."""
        plan, length = self.started.plan, prompt + answer
        if length > plan.max_model_len:
            raise ValueError(
                f"prompts of up to {prompt} tokens and {answer} tokens out do not fit the model's "
                f"length of {plan.max_model_len}: lower --prompt-len or --output-len"
            )
        if (fit := plan.sequences_of(length)) < clients:
            raise ValueError(
                f"the KV cache holds {fit} sequences of {length} tokens, not {clients}: lower "
                f"--concurrency or --output-len"
            )

    def watch(self, way: str, requests: Iterator[Request], clients: int, count: int) -> Window:
        """One round of a load, while drafts are decided about in this way."""
        engine = self.started.engine
        engine.drafting = self.ways[way]
        return watch(engine, requests, clients=clients, count=count)


def free() -> None:
    """Give back the memory of engines that are gone, for the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
