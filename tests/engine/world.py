"""A world for the scheduler: a machine that checks every key it reads, and the engine's part."""

import random
from dataclasses import dataclass, field, replace

from limelight.cache.blocks import BlockPool
from limelight.cache.groups import CacheGroups, GroupSpec
from limelight.engine.scheduler import Scheduler
from limelight.steps import StepPlan
from limelight.types import Request, SamplingParams, Sequence

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


def ahead(num_drafts: int) -> int:
    """Positions held behind what is granted: of drafts unsettled, verified and drafted."""
    return 3 * num_drafts + 1 if num_drafts else 0


@dataclass
class Machine:
    """Executes plans: grants one by one in any order, each writing its keys and then reading.

    Some of a grant's drafts stand, as only the machine knows; what they leave behind, and what a
    block of `num_drafts` new ones writes, is not to be read. Nor is what was written with weights
    older than those that a sequence began with.
    """

    specs: list[GroupSpec]
    block_size: int
    rng: random.Random
    num_drafts: int = 0
    longest: int = 0
    weights: int = 0
    memory: dict[tuple[int, int], tuple[int, int | None, int]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[dict[int, int]]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0

    def execute(self, plan: StepPlan) -> dict[int, list[int]]:
        """The sampled tokens of each slot that samples: of the drafts that stood, and one more."""
        for admission in plan.admissions:
            token_ids = admission.request.prompt_token_ids + admission.output_token_ids
            self.tokens[admission.slot] = token_ids
            self.tables[admission.slot] = [{} for _ in self.specs]
            self.begun[admission.slot] = self.weights
        sampled = {}
        for grant in self.rng.sample(plan.grants, len(plan.grants)):
            token_ids, base = self.tokens[grant.slot], grant.num_tokens - grant.num_drafts
            # Where a step with drafts was under way, the grant tells the earliest start.
            unsure = grant.num_drafts or (grant.samples and base == 1 and self.num_drafts)
            start = len(token_ids) - 1 if unsure else grant.start
            assert base > 0 and grant.start <= start and start + base <= len(token_ids)
            assert grant.samples == (start + base == len(token_ids))
            self._take(grant)
            self._attend(grant, histories(token_ids), start, start + base)
            self.computed += base
            if grant.samples:
                stood = self.rng.randint(0, grant.num_drafts)
                sampled[grant.slot] = []
                for _ in range(stood + 1):
                    sampled[grant.slot].append(next_token(token_ids))
                    token_ids.append(sampled[grant.slot][-1])
                self._attend(grant, histories(token_ids), start + 1, start + 1 + stood)
                self._try(grant, start + 1 + stood, start + 1 + grant.num_drafts)
                if plan.drafts and self.num_drafts:
                    self._try(
                        grant, start + base + stood, start + base + stood + self.num_drafts + 1
                    )
        return sampled

    def _take(self, grant):
        changes = grant.tables or [(0, [])] * len(self.tables[grant.slot])
        for table, (first, blocks) in zip(self.tables[grant.slot], changes, strict=True):
            assert 0 not in blocks
            assert all(table.get(first + i) != block for i, block in enumerate(blocks))
            table.update(enumerate(blocks, first))

    def _try(self, grant, start, end):
        """Leave keys that mean nothing."""
        for g, table in enumerate(self.tables[grant.slot]):
            for position in range(start, min(end, self.longest)):
                place = table[position // self.block_size], position % self.block_size
                self.memory[place] = g, None, self.weights

    def _attend(self, grant, seen, start, end):
        size = self.block_size
        for g, (spec, table) in enumerate(zip(self.specs, self.tables[grant.slot], strict=True)):
            for position in range(start, end):
                place = table[position // size], position % size
                self.memory[place] = g, seen[position], self.weights
            oldest = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(oldest, end):
                place = table[position // size], position % size
                *key, weights = self.memory[place]
                assert key == [g, seen[position]] and weights >= self.begun[grant.slot]


class World:
    """Scheduler, machine and the engine's part; `late` settles each step after the next plan."""

    def __init__(
        self, specs, num_blocks, *, block_size=4, seed=0, late=False, groups=None, **limits
    ):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 100, **limits}
        drafts, longest = limits.get("num_drafts", 0), limits["max_model_len"]
        self.groups = CacheGroups(
            specs, BlockPool(num_blocks, block_size=block_size),
            ahead=ahead(drafts), longest=longest, **(groups or {}),
        )  # fmt: skip
        self.scheduler = Scheduler(self.groups, **limits)
        self.rng = random.Random(seed + 1)
        self.machine = Machine(specs, block_size, random.Random(seed), drafts, longest)
        self.late = late
        self.unsettled: list[tuple[StepPlan, dict[int, Sequence], dict[int, list[int]]]] = []
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

    def renew(self, *, preempt):
        """New weights, and perhaps all that runs is computed again."""
        self.settle(keep=0)
        if preempt:
            self.scheduler.preempt_all()
        self.scheduler.renew_prefixes()
        self.scheduler.check()
        self.machine.weights += 1

    def step(self):
        # Now and then the drafter rests.
        plan = replace(self.scheduler.schedule(), drafts=self.rng.random() < 0.9)
        self.scheduler.check()
        self.plans.append(plan)
        limit = self.scheduler.max_num_batched_tokens
        assert plan.num_tokens <= limit and len({g.slot for g in plan.grants}) == len(plan.grants)
        assert plan.grants or self.unsettled, "nobody gets on"
        running = dict(self.scheduler.running)
        if self.late:
            self.scheduler.advance(plan)
            self.scheduler.check()
        self.unsettled.append((plan, running, self.machine.execute(plan)))
        if not self.late:
            self.scheduler.advance(plan)
        self.settle(keep=int(self.late and bool(plan.grants)))
        return plan

    def settle(self, keep):
        while len(self.unsettled) > keep:
            plan, running, sampled = self.unsettled.pop(0)
            grants = {grant.slot: grant for grant in plan.grants}
            for slot, tokens in sampled.items():
                if self.live.get(running[slot].request.id) is running[slot]:
                    self.append(running[slot], grants[slot], tokens)
        self.scheduler.check()

    def append(self, sequence, grant, tokens):
        id, output = sequence.request.id, sequence.output_token_ids
        for token in tokens:
            output.append(token)
            if len(output) == sequence.request.max_tokens or ends(sequence.request, token):
                self.scheduler.settle(sequence, grant, len(tokens) - 1)
                self.scheduler.finish(sequence)
                self.done[id] = self.live.pop(id)
                return
        self.scheduler.settle(sequence, grant, len(tokens) - 1)

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
