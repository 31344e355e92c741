"""What steps take on this machine: some of each kind, run in the empty cache at the start."""

import math
from dataclasses import replace

from limelight.engine import pretended
from limelight.engine.cost import StepCost, StepCosts
from limelight.engine.memory import MemoryPlan
from limelight.progress import Progress
from limelight.runner.runner import ModelRunner
from limelight.steps import Grant, StepKind, StepPlan, StepTimes
from limelight.types import SamplingParams

# Tries of a step. What plain ones take is not corrected as long as drafts seem to pay.
ROUNDS = {StepKind.PLAIN: 4, StepKind.DRAFTED: 2, StepKind.PROMPT: 2}
# Tokens before each sequence of the largest step that is timed; smaller steps read as many in all.
LENGTHS = {"cpu": (64, 1024), "cuda": (128, 2048, 16_384)}
# Rows of steps with a prompt, and of others. Those that have a graph are timed too (of others if
# they are few): a step is padded to the next.
PROMPT_ROWS = {"cpu": (16, 64), "cuda": (64, 512, 2048, 8192)}
ROWS = {
    "cpu": (1, 4, 16, 64),
    "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048),
}
MOST_EACH = 128


class Timing:
    """Steps of one model and drafter, timed."""

    def __init__(self, runner: ModelRunner, num_drafts: int, plan: MemoryPlan):
        self.runner, self.num_drafts, self.plan = runner, num_drafts, plan
        self.machine = runner.device.type
        self.longest = max(1, plan.max_model_len - 1 - plan.ahead)
        most = min(plan.max_num_seqs * (1 + num_drafts), plan.chunk)
        each = [size for size in runner.drafted_sizes(prompts=False) if size <= MOST_EACH]
        with_prompts = runner.drafted_sizes(prompts=True)
        points, last = ROWS[self.machine], ROWS[self.machine][-1]
        longest = min(plan.chunk, self.longest)
        self.rows = {
            StepKind.PLAIN: _points(min(plan.max_num_seqs, plan.chunk, last), points, each),
            StepKind.DRAFTED: _points(min(most, last), points, each),
            StepKind.PROMPT: _points(longest, PROMPT_ROWS[self.machine], with_prompts),
        }
        # Behind the last point that is timed none is padded to another.
        sizes = dict.fromkeys(self.rows, each) | {StepKind.PROMPT: with_prompts}
        self.graphs = {
            kind: min(max(sizes[kind], default=0), points[-1]) for kind, points in self.rows.items()
        }
        sequences = self._sequences(StepKind.DRAFTED, self.rows[StepKind.DRAFTED][-1])
        self.contexts = [length * sequences for length in LENGTHS[self.machine]]

    def costs(self, progress: Progress) -> StepCosts:
        """Of each kind by rows and context, and of drafting by sequences."""
        ms: dict[StepKind, list[list[float]]] = {kind: [] for kind in self.rows}
        drafting: dict[int, float] = {}
        contexts = dict.fromkeys(self.rows, self.contexts) | {StepKind.PROMPT: [0]}
        total = sum(len(contexts[kind]) * len(points) for kind, points in self.rows.items())
        with progress.phase("timing steps", total) as advance:
            for kind, points in self.rows.items():
                for context in contexts[kind]:
                    ms[kind].append([])
                    for rows in points:
                        best = self.best(kind, rows, context)
                        ms[kind][-1].append(best.verify_ms)
                        if best.draft_ms is not None:
                            least = drafting.get(best.sequences, math.inf)
                            drafting[best.sequences] = min(least, best.draft_ms)
                        advance(1)
        self.runner.forget()
        counts = sorted(drafting)
        return StepCosts(
            {
                kind: StepCost(points, contexts[kind], ms[kind], graphs=self.graphs[kind])
                for kind, points in self.rows.items()
            },
            StepCost(counts, [0], [[drafting[n] for n in counts]], graphs=0),
        )

    def best(self, kind: StepKind, rows: int, context: int) -> StepTimes:
        """The shortest times of some equal steps."""
        times = [self.step(kind, rows, context) for _ in range(ROUNDS[kind])]
        draft_ms = [one.draft_ms for one in times if one.draft_ms is not None]
        return replace(
            min(times, key=lambda one: one.verify_ms),
            draft_ms=min(draft_ms) if draft_ms else None,
        )

    def step(self, kind: StepKind, rows: int, context: int) -> StepTimes:
        """One step of so many rows, whose sequences have `context` tokens in all before it."""
        sequences = self._sequences(kind, rows)
        length = min(context // sequences, self.longest)
        if kind is not StepKind.PROMPT:
            length = max(length, 1)
        counts = [rows // sequences + (i < rows % sequences) for i in range(sequences)]
        tables = pretended.tables(self.plan, length + counts[0])
        self.runner.pretend(length)
        plan = StepPlan(
            pretended.admit(sequences, length or rows, SamplingParams(temperature=0.0)),
            [
                Grant(i, length, n, tables, True, n - 1 if kind is StepKind.DRAFTED else 0)
                for i, n in enumerate(counts)
            ],
            drafts=kind is not StepKind.PLAIN,
            timed=True,
        )
        times = self.runner.execute(plan).times
        assert times is not None
        return times

    def _sequences(self, kind: StepKind, rows: int) -> int:
        """As few as can have so many rows."""
        if kind is StepKind.PROMPT:
            return 1
        return rows if kind is StepKind.PLAIN else -(-rows // (1 + self.num_drafts))


def _points(most: int, points: tuple[int, ...], sizes: list[int]) -> list[int]:
    """Numbers of rows up to `most`: it, some points, and all sizes of graphs."""
    return sorted({most, *(size for size in (*points, *sizes) if size < most)})
