"""Who computes how many tokens in the next step, and in which blocks. Integers only, no torch."""

import time
from bisect import insort_left, insort_right
from heapq import heappop, heappush
from typing import Literal, TypedDict

from limelight.cache.groups import CacheGroups, Hit
from limelight.engine.adapters import Adapters
from limelight.steps import Admission, Grant, StepPlan
from limelight.types import Sequence

# Of a step's tokens drafts have one of so many where a prompt is waiting for them.
DRAFT_SHARE = 4
# Steps for which who waits for a slot of its adapter is overtaken by those whose adapters have one.
MOST_OVERTAKEN = 256


class SchedulerStats(TypedDict):
    """What `EngineStats` tells of the scheduler; the last three count from the start."""

    running: int
    waiting: int
    waiting_tokens: int
    cache_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class Scheduler:
    """Admits, cuts prompts into chunks, preempts: continuous batching in one order throughout.

    The order is by arrival, or by priority and then arrival. Running sequences come first, each
    with at least one token a step; when the blocks run out, the last one in order gives all of its
    own back and will be computed anew. `schedule` makes a plan and `advance` says that it has run
    or is sure to run before any later plan, so a plan can be made before the tokens of the one
    before are known. Only sequences that wait for a prefix in the making, or for a slot of their
    adapter, are overtaken.

    Behind a step that drafts, each sequence that decodes brings `num_drafts` tokens more to be
    verified, as far as its length and the step's budget go; `settle` says how many of them stood.
    """

    def __init__(
        self,
        groups: CacheGroups,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        num_drafts: int = 0,
        adapters: Adapters | None = None,
        longest_chunk: int = 0,
    ):
        least, num_blocks = groups.blocks_for_length(max_model_len, 1), groups.pool.num_blocks
        if num_blocks < least:
            raise ValueError(
                f"the KV cache has {num_blocks} blocks, and one sequence of max_model_len "
                f"{max_model_len} tokens needs {least}: lower max_model_len to "
                f"{groups.longest_sequence(max_model_len)}, or give the cache more memory"
            )
        self.groups = groups
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.policy, self.num_drafts = max_model_len, policy, num_drafts
        self.adapters = adapters
        # Of one prompt, so that several get on beside each other.
        self.longest_chunk = longest_chunk or max_num_batched_tokens
        self.running: dict[int, Sequence] = {}  # by slot
        self._sequences: dict[str, Sequence] = {}  # by request, running or waiting
        self._ordered: list[Sequence] = []  # the running ones
        self._waiting: list[Sequence] = []
        self._waiting_tokens = 0
        self._slots = list(range(max_num_seqs))  # a heap
        # Blocks that this plan fills, by index: whoever begins with the same waits for them.
        self._filling: dict[int, set[bytes]] = {}
        # The sequence that found too few blocks last time, and how many there were.
        self._refused: tuple[Sequence, int] | None = None
        # Those of the last plan that gave their blocks back: these, and the positions in them.
        self.preempted: list[tuple[Sequence, list[int], int]] = []
        self._preemptions = self._prefix_queries = self._prefix_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._sequences)

    @property
    def request_ids(self) -> list[str]:
        """Of all sequences, running or waiting."""
        return list(self._sequences)

    def stats(self) -> SchedulerStats:
        """The state after a step; prefix figures count the first admission of each sequence."""
        pool = self.groups.pool
        return SchedulerStats(
            running=len(self._ordered),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting_tokens,
            cache_usage=1 - pool.num_free / pool.num_blocks,
            preemptions=self._preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def add(self, sequence: Sequence):
        """Queue a sequence; ValueError if it cannot fit the model or its id is in use."""
        request, length = sequence.request, sequence.num_prompt
        if length < 1 or length + request.max_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.id!r} has {length} prompt tokens and asks for "
                f"{request.max_tokens}; from 1 to max_model_len {self.max_model_len} in all fit"
            )
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already being served")
        self._sequences[request.id] = sequence
        insort_right(self._waiting, sequence, key=self._order)
        self._waiting_tokens += length

    def abort(self, request_id: str) -> Sequence | None:
        """Forget a request wherever it stands; None if it is not here."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self.finish(sequence)
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request, running or waiting."""
        return self._sequences.get(request_id)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence runs or waits here."""
        return self._sequences.get(sequence.request.id) is sequence

    def finish(self, sequence: Sequence):
        """Take a sequence out and give its slot and blocks back."""
        del self._sequences[sequence.request.id]
        if sequence.slot is None:
            self._waiting.remove(sequence)
            self._waiting_tokens -= sequence.num_prompt
        else:
            self._ordered.remove(sequence)
            self._vacate(sequence)

    def fail(self, sequence: Sequence):
        """Take a sequence out whose keys and values may be wrong: no one will start behind them."""
        self.groups.retract(sequence)
        self.finish(sequence)

    def preempt_all(self) -> None:
        """Let all sequences give their blocks back, to be computed again from their tokens."""
        while self._ordered:
            self._preempt(self._ordered.pop())

    def renew_prefixes(self) -> None:
        """Let no one find what has been computed so far; what sequences hold stays theirs alone."""
        self._refused = None
        self.groups.renew(self._ordered, self._waiting)

    def schedule(self) -> StepPlan:
        """The next step; without grants if there is nothing to do."""
        plan = StepPlan()
        self._filling.clear()
        self.preempted.clear()
        preemptions = self._preemptions
        spare = self._continue_running(plan)
        if self._waiting and preemptions == self._preemptions:
            self._admit_waiting(plan, spare)
        if plan.grants and self.adapters is not None:
            plan.moves.extend(self.adapters.take_moves())
        return plan

    def renew(self, adapter_id: int, version: int):
        """An adapter has changed: who waits for it starts with nothing that the former one made."""
        for sequence in self._waiting:
            if sequence.request.adapter_id == adapter_id:
                sequence.adapter_version = version
                sequence.block_hashes.clear()

    def advance(self, plan: StepPlan):
        """The granted positions are computed; sequences finished since `schedule` are passed by."""
        for grant in plan.grants:
            if (sequence := self.running.get(grant.slot)) is not None:
                self.groups.advance(sequence, grant.start + grant.num_tokens - grant.num_drafts)
                sequence.num_unsure += grant.num_drafts
                sequence.num_drafts = self.num_drafts if plan.drafts and grant.samples else 0

    def settle(self, sequence: Sequence, grant: Grant, num_accepted: int):
        """So many of a grant's drafts stand, and the tokens are known; no matter if it has left."""
        if self.running.get(grant.slot) is sequence and grant.num_drafts:
            sequence.num_unsure -= grant.num_drafts
            self.groups.advance(sequence, sequence.num_computed + num_accepted)

    def check(self):
        """Assert that queues, slots and blocks agree."""
        assert sorted(self._slots + list(self.running)) == list(range(self.max_num_seqs))
        assert len(self._ordered) == len(self.running) <= self.max_num_batched_tokens
        assert all(self.running[s.slot] is s for s in self._ordered if s.slot is not None)
        assert all(s.slot is None and not s.block_tables for s in self._waiting)
        assert all(s.num_computed == 0 for s in self._waiting)
        assert self._waiting_tokens == sum(s.num_prompt for s in self._waiting)
        assert len(self._sequences) == len(self._ordered) + len(self._waiting)
        for queue in (self._ordered, self._waiting):
            assert queue == sorted(queue, key=self._order)
        self.groups.check(self._ordered)

    def _order(self, sequence: Sequence) -> tuple[int, float]:
        request = sequence.request
        return (request.priority if self.policy == "priority" else 0), request.arrival

    def _continue_running(self, plan: StepPlan) -> int:
        """Grant to the running sequences; the tokens that are left of the step's budget."""
        # One token is set aside for each, so a long prompt stops no one's decoding.
        groups, spare = self.groups, self.max_num_batched_tokens - len(self._ordered)
        room_for_drafts = self._room_for_drafts()
        # The first drafts of all sequences are likelier than all drafts of the first ones.
        most_drafts = max(1, room_for_drafts // max(1, len(self._ordered)))
        index = 0
        while index < len(self._ordered):
            sequence = self._ordered[index]
            count = min(self._wanted(sequence), 1 + spare)
            has = groups.has_blocks(sequence, sequence.num_computed + count)
            if count > 0 and (has or (count := self._make_room(sequence, count)) > 0):
                spare -= count - 1
                drafts = 0
                if sequence.num_drafts:
                    drafts = min(self._useful_drafts(sequence), most_drafts, spare, room_for_drafts)
                    spare -= drafts
                    room_for_drafts -= drafts
                tables = [] if has else groups.grow(sequence, sequence.num_computed + count)
                self._grant(plan, sequence, count, tables, drafts)
            index += 1
        return spare

    def _wanted(self, sequence: Sequence) -> int:
        """Tokens that it can compute now."""
        left = sequence.num_tokens - sequence.num_computed
        if left > 0:
            return min(left, self.longest_chunk)
        # Its last token is still being sampled: on to the next one, if there will be one.
        made = sequence.num_computed + 1 - sequence.num_prompt
        return int(made < sequence.request.max_tokens)

    def _room_for_drafts(self) -> int:
        """Drafts in a step; beside a prompt so few that it gets on."""
        if not any([s.num_drafts for s in self._ordered]):
            return 0
        prompts = self._waiting or any(s.num_tokens - s.num_computed > 1 for s in self._ordered)
        return self.max_num_batched_tokens // (DRAFT_SHARE if prompts else 1)

    def _useful_drafts(self, sequence: Sequence) -> int:
        """As many as wait, while it is not certain that the sequence ends before them."""
        last = sequence.num_prompt + sequence.request.max_tokens - 1
        left = last - 1 - (sequence.num_computed + sequence.num_unsure)
        return max(0, min(sequence.num_drafts, left))

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Preempt from the end until `sequence` can compute something; how much of `count`."""
        while (room := self.groups.room(sequence)) <= 0:
            last = self._ordered.pop()
            self._preempt(last)
            if last is sequence:
                return 0
        return min(count, room)

    def _preempt(self, sequence: Sequence):
        """Back to its place in the queue, with its tokens and without its blocks."""
        blocks = [block for block in sequence.block_tables[0] if block is not None]
        self.preempted.append((sequence, blocks, sequence.num_computed + sequence.num_unsure))
        self._vacate(sequence)
        sequence.num_preemptions += 1
        self._preemptions += 1
        insort_left(self._waiting, sequence, key=self._order)
        self._waiting_tokens += sequence.num_prompt

    def _vacate(self, sequence: Sequence):
        assert sequence.slot is not None
        del self.running[sequence.slot]
        heappush(self._slots, sequence.slot)
        sequence.slot = None
        sequence.num_unsure = sequence.num_drafts = 0
        adapter_id = sequence.request.adapter_id
        if self.adapters is not None and self.adapters.takes_slot(adapter_id):
            self.adapters.release(adapter_id)
        self.groups.release(sequence)

    def _admit_waiting(self, plan: StepPlan, spare: int):
        """Let sequences in while there are slots, tokens, and blocks for all that they know."""
        groups, passed, no_slots = self.groups, 0, False
        while spare > 0 and self._slots and passed < min(len(self._waiting), self.max_num_seqs):
            sequence = self._waiting[passed]
            if not self._has_slot(sequence, none_left=no_slots):
                passed += 1
                sequence.num_overtaken += 1
                no_slots |= sequence.num_overtaken > MOST_OVERTAKEN
                continue
            if self._prefix_in_the_making(sequence):
                passed += 1
                continue
            if (hit := self._affordable_hit(sequence)) is None:
                break
            del self._waiting[passed]
            self._admit(plan, sequence, hit)
            most = min(spare, groups.room(sequence))
            count = min(self._wanted(sequence), most)
            spare -= count
            groups.grow(sequence, sequence.num_computed + count)
            self._grant(plan, sequence, count, groups.entries(sequence))
            if count == most and sequence.num_computed + count < sequence.num_tokens:
                break

    def _has_slot(self, sequence: Sequence, *, none_left: bool) -> bool:
        """Whether its adapter, if it has one, can be in the step."""
        adapters, adapter_id = self.adapters, sequence.request.adapter_id
        if adapters is None or not adapters.takes_slot(adapter_id):
            return True
        return not none_left and adapters.has_room(adapter_id)

    def _affordable_hit(self, sequence: Sequence) -> Hit | None:
        """Its cached beginning, or None if there are too few free blocks for the rest."""
        free, alone = self.groups.pool.num_free, not self._ordered
        if self._refused is not None and not alone:
            refused, free_then = self._refused
            if refused is sequence and free <= free_then:
                return None
        hit = self.groups.match(sequence)
        needed = self.groups.blocks_needed(sequence, hit, self.max_num_batched_tokens)
        # Alone it runs on what there is, by smaller chunks.
        if needed > free and not alone:
            self._refused = sequence, free
            return None
        return hit

    def _prefix_in_the_making(self, sequence: Sequence) -> bool:
        """Whether this plan fills a block that the next one can give it: no need to do it twice."""
        return self.groups.reads_prefix(sequence) and any(
            (index + 1) * self.groups.block_size < sequence.num_tokens
            and self.groups.block_hash(sequence, index) in digests
            for index, digests in self._filling.items()
        )

    def _admit(self, plan: StepPlan, sequence: Sequence, hit: Hit):
        request = sequence.request
        self._waiting_tokens -= sequence.num_prompt
        self._refused = None
        self.groups.take(sequence, hit)
        sequence.slot = heappop(self._slots)
        self.running[sequence.slot] = sequence
        insort_right(self._ordered, sequence, key=self._order)
        adapter_slot = 0
        if self.adapters is not None and self.adapters.takes_slot(request.adapter_id):
            slot = self.adapters.acquire(request.adapter_id)
            # The base model has nothing beside its weights, whatever slot it takes.
            adapter_slot = slot if request.adapter_id else 0
        output = list(sequence.output_token_ids)
        plan.admissions.append(Admission(sequence.slot, request, output, adapter_slot))
        if sequence.first_scheduled is None:
            sequence.first_scheduled = time.monotonic()
            sequence.num_cached = hit.num_tokens
            if self.groups.reads_prefix(sequence):
                self._prefix_queries += sequence.num_tokens
                self._prefix_hits += hit.num_tokens

    def _grant(
        self,
        plan: StepPlan,
        sequence: Sequence,
        count: int,
        tables: list[tuple[int, list[int]]],
        drafts: int = 0,
    ):
        """Let it compute `count` positions and its drafts; `tables` has the new entries."""
        assert sequence.slot is not None
        start, end = sequence.num_computed, sequence.num_computed + count
        samples = end >= sequence.num_tokens
        plan.grants.append(
            Grant(
                sequence.slot, start, count + drafts, tables, samples, drafts, sequence.num_unsure
            )
        )  # fmt: skip
        if count == 1:
            return
        first = start // self.groups.block_size
        fills = end // self.groups.block_size > first
        if fills and self.groups.prefix_caching and sequence.publishes:
            digest = self.groups.block_hash(sequence, first)
            self._filling.setdefault(first, set()).add(digest)
