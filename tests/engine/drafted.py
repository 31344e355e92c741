"""Engines with drafters, random ones and such as know the right answer: shared by tests."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from drafters import config_json, write_drafter
from tiny import start

from limelight.checkpoint import locate
from limelight.engine.engine import Engine
from limelight.engine.speculation import Decision, Load
from limelight.models.loader import read_config
from limelight.runner.graphs import graph_sizes, prompt_sizes
from limelight.stats import SpeculationStats
from limelight.steps import Trim

Drafts = Callable[[str, int], list[int]]  # of a request, behind so many tokens of its answer


def start_drafted(
    folder: Path, drafter: Path, *, num_drafts: int = 7, adaptive: bool = False, **config: object
) -> Engine:
    """An engine whose every step drafts."""
    method = config.pop("draft_sample_method", "greedy")
    speculative = {
        "model": str(drafter), "num_speculative_tokens": num_drafts,
        "enable_adaptive_verification": adaptive, "draft_sample_method": method,
    }  # fmt: skip
    return start(folder, speculative_config=speculative, **config)


def inject(engine: Engine, drafts: Drafts) -> None:
    """Let `drafts` say what is drafted, whatever the drafter thinks."""
    runner = engine.runner
    drafter = runner.drafted.drafter
    draft = type(drafter).draft.__get__(drafter)

    def injected(rows_B, seeds_B, temperature_B):
        odds_BN = draft(rows_B, seeds_B, temperature_B)
        for slot in rows_B.tolist():
            if slot not in runner.slots:
                continue
            request = runner.slots[slot].request
            made = int(drafter.lengths_S[slot]) + 1 - len(request.prompt_token_ids)
            ids = drafts(request.id, made)[: drafter.num_drafts]
            if ids:
                drafter.tokens_SN[slot, : len(ids)] = torch.tensor(ids)
                if drafter.draws:
                    drafter.ids_SNK[slot, : len(ids), 0] = torch.tensor(ids)
        return odds_BN

    drafter.draft = injected


def knowing(answers: dict[str, list[int]], *, right: float, seed: int = 0) -> Drafts:
    """Drafts of the known answers, of which a share is right and the others one off."""
    rng = random.Random(seed)

    def drafts(request_id: str, made: int) -> list[int]:
        following = answers[request_id][made : made + 15]
        return [token if rng.random() < right else (token + 1) % 97 for token in following]

    return drafts


def write_drafter_for(target: str, folder: Path) -> Path:
    """A small random drafter of a bundled model."""
    shape = read_config(locate(target))[1]
    json_ = config_json(
        drafting={"mask_token_id": 1, "final_logit_softcapping": None},
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        num_attention_heads=2 * shape.num_kv_heads, num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, num_target_layers=shape.num_layers,
    )  # fmt: skip
    write_drafter(folder, json_)
    return folder


class FakeGraphs:
    """Steps padded as graphs are, and run where there is no GPU."""

    def __init__(self, sizes: list[int], replay: Callable[[int], object]):
        self.sizes, self.run, self.replays = sizes, replay, 0

    def size_for(self, count: int) -> int | None:
        return next((size for size in self.sizes if size >= count), None)

    def replay(self, size: int) -> object:
        self.replays += 1
        return self.run(size)


def fake_graphs(engine: Engine) -> list[FakeGraphs]:
    """Let an engine run its steps, its drafter's passes and its plain steps as graphs, those with
    prompts too."""
    runner = engine.runner
    seqs, prompts = graph_sizes(runner.tables.nobody), prompt_sizes(runner.max_num_batched_tokens)

    def read(size):
        return runner.read(runner.inputs.send(runner._size_with_prompts(size)))

    runner.graphs = FakeGraphs(seqs, lambda n: runner.decode(runner.inputs.send((n,) * 3)))
    runner.prompt_graphs = FakeGraphs(prompts, read)
    drafted = runner.drafted
    if drafted is None:
        return [runner.graphs, runner.prompt_graphs]
    count = drafted.drafter.num_drafts
    most = min(drafted.max_num_seqs * (1 + count), drafted.max_num_batched_tokens)

    def steps(extent_of):
        def step(size):
            extent = extent_of(size)
            return drafted._step(drafted.inputs.send((extent.rows, extent.seqs, count)), extent)

        return step

    drafted.graphs = FakeGraphs(graph_sizes(most), steps(drafted.extent_of_graph))
    drafted.prompt_graphs = FakeGraphs(prompts, steps(drafted.extent_with_prompts))
    drafted.pass_graphs = FakeGraphs(seqs, lambda n: drafted._pass(drafted.passes.send((n,))))
    return [
        drafted.graphs, drafted.pass_graphs, drafted.prompt_graphs, runner.graphs,
        runner.prompt_graphs,
    ]  # fmt: skip


class Whim:
    """A policy that rests, drafts and trims as it likes."""

    def __init__(self, seed: int, num_drafts: int = 7):
        self.rng, self.num_drafts, self.rests = random.Random(seed), num_drafts, 0

    def choose(self, load: Load) -> Decision:
        drafts = self.rng.random() < 0.6
        self.rests += not drafts
        return Decision(self.rng.randint(0, sum(load.drafts)), drafts, self.rng.random() < 0.5)

    def trim(self, budget: int) -> Trim:
        return Trim(budget, 0.5, [-0.2] * self.num_drafts)

    def drafted(self, slots, odds_BN) -> None:
        assert odds_BN.shape == (len(slots), self.num_drafts)

    def settled(self, odds_BN, verified, accepted) -> None:
        assert len(odds_BN) == len(verified) == len(accepted)
        assert all(0 <= n <= m <= self.num_drafts for n, m in zip(accepted, verified, strict=True))

    def goes_on_resting(self) -> bool:
        return self.rng.random() < 0.5

    def learn(self) -> None:
        pass

    def timed(self, times) -> None:
        assert times.rows > 0 and times.verify_ms > 0

    def hosted(self, host) -> None:
        assert host.sequences > 0 and host.ms > 0

    def forget(self, slot) -> None:
        pass

    def stats(self) -> SpeculationStats:
        return SpeculationStats()


__all__ = [
    "Whim",
    "config_json",
    "fake_graphs",
    "inject",
    "knowing",
    "start_drafted",
    "write_drafter",
    "write_drafter_for",
]
