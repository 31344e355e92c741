"""Block tables of layer groups: what a sequence needs, what it can reuse, what it may let go.

Full-attention layers keep the whole sequence, window layers only what a next token can see. Layers
of one kind are cut into groups of equally many, so that all groups draw on one pool of blocks.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from limelight.cache.blocks import BlockPool, ChainHash
from limelight.types import Sequence

# Share of a block's layer rows that may lie idle if that makes for fewer block tables.
IDLE_ROWS = 0.05
# A template's lines after the last message may not come back with the next turn.
TURN_SLACK = 2


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share a block table; `window` counts the token itself, None sees everything."""

    window: int | None
    layers: tuple[int, ...]

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a query at `position` can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size


def plan_groups(
    windows_by_layer: list[int | None], drafter_windows: list[int | None] | None = None
) -> list[GroupSpec]:
    """Cut the layers into groups, those of full attention first.

    A block has as many layer rows as the largest group has layers: the number that makes fewest
    groups while at most `IDLE_ROWS` of the rows are idle, or else leaves none idle. The layers of
    a drafter are numbered behind the others and have groups of their own.
    """
    kinds = _kinds(windows_by_layer)

    def cost(rows: int) -> tuple[bool, int, int]:
        num_groups = sum(-(-len(layers) // rows) for layers in kinds.values())
        idle = num_groups * rows - len(windows_by_layer)
        return idle > IDLE_ROWS * len(windows_by_layer), num_groups, idle

    rows = min(range(1, max(map(len, kinds.values())) + 1), key=cost)
    return [
        GroupSpec(window, tuple(layers[i : i + rows]))
        for of_model in (kinds, _kinds(drafter_windows or [], first=len(windows_by_layer)))
        for window, layers in sorted(of_model.items(), key=lambda kind: kind[0] or 0)
        for i in range(0, len(layers), rows)
    ]


def _kinds(windows_by_layer: list[int | None], first: int = 0) -> dict[int | None, list[int]]:
    """The layers of each window, counted from `first`."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows_by_layer, first):
        kinds.setdefault(window, []).append(layer)
    return kinds


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached beginning: `num_tokens` positions whose blocks are in `tables`, one a group.

    `num_shared` positions were computed before, though a window behind them may be gone.
    """

    num_tokens: int
    num_shared: int
    tables: list[list[int | None]]


class CacheGroups:
    """The block tables of all sequences, over one pool.

    A sequence's tables are equally long in every group. Before the window of position
    `num_computed` their entries are None; all others hold a block. Where drafts are tried, the
    tables reach `ahead` positions further than what is granted, but not beyond `longest`.
    """

    def __init__(
        self,
        specs: list[GroupSpec],
        pool: BlockPool,
        *,
        prefix_caching: bool = True,
        root: bytes = b"",
        hash_seed: str | None = None,
        ahead: int = 0,
        longest: int = 0,
    ):
        self.ahead, self.longest = ahead, longest
        self.specs, self.pool, self.block_size = specs, pool, pool.block_size
        self.prefix_caching = prefix_caching
        self._chain = ChainHash(block_size=pool.block_size, root=root, seed=hash_seed)
        self._full = [g for g, spec in enumerate(specs) if spec.window is None]
        self._sliding = [g for g, spec in enumerate(specs) if spec.window is not None]
        self._windows: dict[int, list[int]] = {}
        for g, spec in enumerate(specs):
            if spec.window is not None:
                self._windows.setdefault(spec.window, []).append(g)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill in one group, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def _held(self, end: int) -> int:
        """The positions that blocks are held for, where those before `end` are granted."""
        held = end + self.ahead
        return held if held <= self.longest else max(end, self.longest)

    def _blocks_for_rows(self, rows: int, chunk: int) -> int:
        """Blocks for `rows` more entries in every table, if windows move on by chunks."""
        count = len(self._full) * rows
        for window, groups in self._windows.items():
            seen = window - 1 + chunk + self.ahead
            # However `seen` positions lie, they touch no more blocks than this.
            count += len(groups) * min(rows, (seen + self.block_size - 2) // self.block_size + 1)
        return count

    def blocks_for_length(self, num_tokens: int, chunk: int) -> int:
        """The least pool in which one sequence reaches `num_tokens`, computed by chunks."""
        return self._blocks_for_rows(self.num_blocks_of(self._held(num_tokens)), chunk)

    def sequences_of_length(self, num_tokens: int, chunk: int) -> int:
        """How many such sequences fit at once: one inside its prompt, the others behind theirs."""
        left = self.pool.num_blocks - self.blocks_for_length(num_tokens, chunk)
        return 0 if left < 0 else 1 + left // self.blocks_for_length(num_tokens, 1)

    def longest_sequence(self, limit: int) -> int:
        """The most tokens, up to `limit`, that one sequence alone can reach in this pool."""
        lengths = range(1, limit + 1)
        return bisect_right(
            lengths, self.pool.num_blocks, key=lambda n: self.blocks_for_length(n, 1)
        )

    def blocks_needed(self, sequence: Sequence, hit: Hit, chunk: int) -> int:
        """Free blocks that let `sequence` take `hit` and compute all its other tokens by chunks."""
        taken = sum(
            block is not None and self.pool.references(block) == 0
            for table in hit.tables
            for block in table
        )
        rows = (
            self.num_blocks_of(self._held(sequence.num_tokens)) - hit.num_tokens // self.block_size
        )
        return taken + self._blocks_for_rows(rows, chunk)

    def reads_prefix(self, sequence: Sequence) -> bool:
        """Whether it may start behind a cached beginning; prompt_logprobs need every position."""
        return self.prefix_caching and sequence.request.params.prompt_logprobs is None

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The chained hash of its full block `index`; each is computed once."""
        hashes = sequence.block_hashes
        prompt, output = sequence.request.prompt_token_ids, sequence.output_token_ids
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._first_parent(sequence)
            first = len(hashes) * self.block_size
            token_ids = prompt[first : first + self.block_size]
            if missing := self.block_size - len(token_ids):
                first = max(0, first - len(prompt))
                token_ids = token_ids + output[first : first + missing]
            hashes.append(self._chain.next(parent, token_ids))
        return hashes[index]

    def _first_parent(self, sequence: Sequence) -> bytes:
        adapter = sequence.request.adapter_id, sequence.adapter_version
        return self._chain.first_parent(sequence.request.cache_salt, adapter)

    def match(self, sequence: Sequence) -> Hit:
        """The longest cached beginning on which all groups agree, the last token excluded."""
        if not self.reads_prefix(sequence):
            return Hit(0, 0, [[] for _ in self.specs])
        find, limit, end = self.pool.find, (sequence.num_tokens - 1) // self.block_size, 0
        tables: list[list[int | None]] = [[] for _ in self.specs]
        while end < limit:
            digest = self.block_hash(sequence, end)
            row = [find((g, digest)) for g in self._full]
            if None in row:
                break
            for g, block in zip(self._full, row, strict=True):
                tables[g].append(block)
            end += 1
        shared = end
        while (gap := self._last_gap(sequence, end)) is not None:
            end = gap
        for g in self._full:
            del tables[g][end:]
        for g in self._sliding:
            first = self.specs[g].first_block(end * self.block_size, self.block_size)
            tables[g] = [None] * first
            tables[g] += [find((g, sequence.block_hashes[i])) for i in range(first, end)]
        if not self._full:
            shared = end
        return Hit(end * self.block_size, shared * self.block_size, tables)

    def _last_gap(self, sequence: Sequence, end: int) -> int | None:
        """The last block that a window before block `end` needs and the cache lacks."""
        firsts = [
            (g, self.specs[g].first_block(end * self.block_size, self.block_size))
            for g in self._sliding
        ]
        for index in range(end - 1, min((first for _, first in firsts), default=end) - 1, -1):
            digest = sequence.block_hashes[index]
            if any(index >= first and self.pool.find((g, digest)) is None for g, first in firsts):
                return index
        return None

    def take(self, sequence: Sequence, hit: Hit):
        """Start `sequence` behind a hit that has just been found."""
        assert not sequence.block_tables
        for table in hit.tables:
            for block in table:
                if block is not None:
                    self.pool.share(block)
        sequence.block_tables = hit.tables
        sequence.num_computed, sequence.num_shared = hit.num_tokens, hit.num_shared
        sequence.num_published = hit.num_tokens // self.block_size

    def has_blocks(self, sequence: Sequence, end: int) -> bool:
        """Whether it holds all that the positions before `end` ask for."""
        held = len(sequence.block_tables[0]) * self.block_size
        return held >= end + self.ahead or held >= self._held(end)

    def room(self, sequence: Sequence) -> int:
        """How many positions behind `num_computed` can be granted with the blocks there are."""
        rows = len(sequence.block_tables[0]) + self.pool.num_free // len(self.specs)
        reach = rows * self.block_size
        return reach - (self.ahead if reach < self.longest else 0) - sequence.num_computed

    def entries(self, sequence: Sequence) -> list[tuple[int, list[int]]]:
        """All live entries: for each group the index of the first, and the blocks from there."""
        firsts = [spec.first_block(sequence.num_computed, self.block_size) for spec in self.specs]
        return [
            (first, [block for block in table[first:] if block is not None])
            for first, table in zip(firsts, sequence.block_tables, strict=True)
        ]

    def grow(self, sequence: Sequence, end: int) -> list[tuple[int, list[int]]]:
        """Hold blocks for the positions before `end`, which `room` allows; the new entries."""
        first = len(sequence.block_tables[0])
        if (rows := self.num_blocks_of(self._held(end)) - first) <= 0:
            return []
        blocks = self.pool.allocate(rows * len(self.specs))
        added = [blocks[g * rows : (g + 1) * rows] for g in range(len(self.specs))]
        for table, entries in zip(sequence.block_tables, added, strict=True):
            table.extend(entries)
        return [(first, entries) for entries in added]

    def advance(self, sequence: Sequence, end: int):
        """The positions before `end` are computed: publish what is full, free what is behind."""
        start, sequence.num_computed = sequence.num_computed, end
        if self.prefix_caching:
            self.publish(sequence)
        for window, groups in self._windows.items():
            # As `GroupSpec.first_block`, which is too slow for each sequence of each step.
            seen, seen_before = end - window + 1, start - window + 1
            behind = seen // self.block_size if seen > 0 else 0
            first = seen_before // self.block_size if seen_before > 0 else 0
            if first < behind:
                for g in groups:
                    self._trim(sequence, g, first, behind)

    def publish(self, sequence: Sequence):
        """Let others find the blocks that are full, computed, and of known tokens."""
        if sequence.num_computed // self.block_size <= sequence.num_published:
            return
        known = min(sequence.num_computed, sequence.num_tokens) // self.block_size
        if known <= sequence.num_published or not (self.prefix_caching and sequence.publishes):
            return
        for index in range(sequence.num_published, known):
            digest = self.block_hash(sequence, index)
            for g, table in enumerate(sequence.block_tables):
                if (block := table[index]) is not None:
                    self.pool.publish(block, (g, digest))
        sequence.num_published = known

    def _trim(self, sequence: Sequence, g: int, first: int, behind: int):
        """Free entries [first, behind) of group g; those that a branch may need are reused last."""
        table, window = sequence.block_tables[g], self.specs[g].window
        assert window is not None
        reach = window + TURN_SLACK * self.block_size
        prompt, shared = sequence.num_prompt, sequence.num_shared
        cold: list[int] = []
        warm: list[int] = []
        for index in range(first, behind):
            block, start = table[index], index * self.block_size
            assert block is not None
            likely = prompt - reach <= start < prompt or shared - reach <= start < shared
            (warm if likely else cold).append(block)
            table[index] = None
        self.pool.release(cold, cold=True)
        self.pool.release(warm)

    def release(self, sequence: Sequence):
        """Give back all its blocks, the tail to be reused before the head."""
        if not sequence.block_tables:
            return
        self.publish(sequence)
        tables = sequence.block_tables
        by_row: list[int | None] = [None] * (len(tables) * len(tables[0]))
        for g, table in enumerate(tables):
            by_row[g :: len(tables)] = table[::-1]
        self.pool.release(block for block in by_row if block is not None)
        sequence.block_tables = []
        sequence.num_computed = 0
        sequence.publishes = True

    def renew(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Let no one find what has been computed so far, nor what `running` ones compute on it."""
        self.pool.forget_all()
        self._chain.version += 1
        for sequence in running:
            sequence.block_hashes, sequence.num_published, sequence.publishes = [], 0, False
        for sequence in waiting:
            sequence.block_hashes = []

    def retract(self, sequence: Sequence):
        """Let no one find what it has computed by itself, now or by its release."""
        for index in range(sequence.num_cached // self.block_size, sequence.num_published):
            for g in range(len(self.specs)):
                self.pool.forget((g, sequence.block_hashes[index]))
        sequence.num_computed = 0

    def check(self, sequences: Iterable[Sequence]):
        """Assert that tables, references and hashes agree, given all sequences that hold blocks."""
        self.pool.check()
        counts: Counter[int] = Counter()
        for sequence in sequences:
            assert len({len(table) for table in sequence.block_tables}) == 1
            for g, (spec, table) in enumerate(zip(self.specs, sequence.block_tables, strict=True)):
                first = spec.first_block(sequence.num_computed, self.block_size)
                assert all((block is None) == (i < first) for i, block in enumerate(table))
                counts.update(block for block in table if block is not None)
                for index, block in enumerate(table):
                    if block is not None and (key := self.pool.key(block)) is not None:
                        assert key == (g, sequence.block_hashes[index])
        assert len(counts) == self.pool.num_blocks - self.pool.num_free
        assert all(self.pool.references(block) == count for block, count in counts.items())
