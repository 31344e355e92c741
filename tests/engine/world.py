"""A world for the scheduler: a machine that checks every key it reads, and the engine's part."""

import random
from dataclasses import dataclass, field

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, GroupSpec
from limelight.engine.scheduler import Scheduler
from limelight.types import Request, SamplingParams, Sequence, StepPlan

FULL, SLIDING = GroupSpec(None, (0,)), GroupSpec(9, (1,))


def next_token(token_ids: list[int]) -> int:
    """The model: the whole history decides."""
    return hash(tuple(token_ids)) % 5


def ends(request: Request, token: int) -> bool:
    return token == 4 and not request.params.ignore_eos


def histories(token_ids: list[int]) -> list[int]:
    """One number a position, for all tokens up to there."""
    seen, all_seen = 0, []
    for token in token_ids:
        seen = hash((seen, token))
        all_seen.append(seen)
    return all_seen


@dataclass
class Machine:
    """Executes plans: grants one by one in any order, each writing its keys and then reading."""

    specs: list[GroupSpec]
    block_size: int
    rng: random.Random
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    tables: dict[int, list[dict[int, int]]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0

    def execute(self, plan: StepPlan) -> dict[int, int]:
        """The sampled token of each slot that samples."""
        for admission in plan.admissions:
            token_ids = admission.request.prompt_token_ids + admission.output_token_ids
            self.tokens[admission.slot] = token_ids
            self.tables[admission.slot] = [{} for _ in self.specs]
        sampled = {}
        for grant in self.rng.sample(plan.grants, len(plan.grants)):
            token_ids, end = self.tokens[grant.slot], grant.start + grant.num_tokens
            assert grant.num_tokens > 0 and end <= len(token_ids)
            assert grant.samples == (end == len(token_ids))
            self._attend(grant, histories(token_ids), end)
            self.computed += grant.num_tokens
            if grant.samples:
                sampled[grant.slot] = next_token(token_ids)
                token_ids.append(sampled[grant.slot])
        return sampled

    def _attend(self, grant, seen, end):
        size = self.block_size
        for g, (spec, table) in enumerate(zip(self.specs, self.tables[grant.slot], strict=True)):
            first, blocks = grant.tables[g]
            assert 0 not in blocks
            assert all(table.get(first + i) != block for i, block in enumerate(blocks))
            table.update(enumerate(blocks, first))
            for position in range(grant.start, end):
                place = table[position // size], position % size
                self.memory[place] = g, seen[position]
            oldest = 0 if spec.window is None else max(0, grant.start - spec.window + 1)
            for position in range(oldest, end):
                place = table[position // size], position % size
                assert self.memory[place] == (g, seen[position])


class World:
    """Scheduler, machine and the engine's part; `late` settles each step after the next plan."""

    def __init__(
        self, specs, num_blocks, *, block_size=4, seed=0, late=False, groups=None, **limits
    ):
        self.groups = CacheGroups(
            specs, BlockPool(num_blocks, block_size=block_size), **(groups or {})
        )
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 100, **limits}
        self.scheduler = Scheduler(self.groups, **limits)
        self.machine = Machine(specs, block_size, random.Random(seed))
        self.late = late
        self.unsettled: list[tuple[dict[int, Sequence], dict[int, int]]] = []
        self.live: dict[str, Sequence] = {}
        self.done: dict[str, Sequence] = {}
        self.plans: list[StepPlan] = []

    def add(self, prompt, *, id="0", max_tokens=8, priority=0, arrival=0.0, salt="", **params):
        request = Request(
            id=id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**{"ignore_eos": True, **params}),
            max_tokens=max_tokens,
            seed=0,
            priority=priority,
            cache_salt=salt,
            arrival=arrival,
        )
        sequence = self.live[request.id] = Sequence(request)
        self.scheduler.add(sequence)
        self.scheduler.check()
        return sequence

    def abort(self, id):
        assert self.scheduler.abort(id) is self.live.pop(id)
        self.scheduler.check()

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.plans.append(plan)
        limit = self.scheduler.max_num_batched_tokens
        assert plan.num_tokens <= limit and len({g.slot for g in plan.grants}) == len(plan.grants)
        assert plan.grants or self.unsettled, "nobody gets on"
        running = dict(self.scheduler.running)
        if self.late:
            self.scheduler.advance(plan)
            self.scheduler.check()
        self.unsettled.append((running, self.machine.execute(plan)))
        if not self.late:
            self.scheduler.advance(plan)
        self.settle(keep=int(self.late and bool(plan.grants)))
        return plan

    def settle(self, keep):
        while len(self.unsettled) > keep:
            running, sampled = self.unsettled.pop(0)
            for slot, token in sampled.items():
                sequence = running[slot]
                id, output = sequence.request.id, sequence.output_token_ids
                if self.live.get(id) is not sequence:
                    continue
                output.append(token)
                if len(output) == sequence.request.max_tokens or ends(sequence.request, token):
                    self.scheduler.finish(sequence)
                    self.done[id] = self.live.pop(id)
        self.scheduler.check()

    def run(self):
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return self.close()
            self.step()
        raise AssertionError("no end in sight")

    def close(self):
        """All is as before the first request, and every answer is the naive one."""
        pool = self.groups.pool
        assert not self.live and pool.num_free == pool.num_blocks
        for sequence in self.done.values():
            token_ids = list(sequence.request.prompt_token_ids)
            for token in sequence.output_token_ids:
                assert token == next_token(token_ids)
                token_ids.append(token)
            request, made = sequence.request, len(sequence.output_token_ids)
            assert ends(request, sequence.output_token_ids[-1]) or made == request.max_tokens


def numbers(count, *, seed):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]
