"""Which experts the tokens of a sequence went to: gathered when it ends, and kept when preempted.

The rows are those of the steps that computed the tokens that were told: what a preempted sequence
computes anew does not replace them. Knows no torch.
"""

from dataclasses import dataclass, field
from typing import Protocol

from limelight.types import RoutedExperts, Sequence


class Pending(Protocol):
    """Rows on their way: that of `runner/routing.py`, or a scripted one."""

    def result(self) -> bytes: ...


class Reader(Protocol):
    """What reads rows of a sequence by its blocks."""

    layers: int
    chosen: int
    dtype: str

    def read(self, blocks: list[int], first: int, last: int) -> Pending: ...


@dataclass(slots=True)
class Kept:
    """The rows [first, last) of a sequence."""

    rows: Pending
    first: int
    last: int
    read_last: int  # how many positions were read, of which some may be drafts' that fell


@dataclass(slots=True)
class Told:
    """The rows of a sequence that has ended, in pieces that follow on each other."""

    pieces: list[Kept]
    layers: int
    chosen: int
    dtype: str

    def result(self) -> RoutedExperts:
        """All of them, once they are there."""
        data = bytearray()
        for piece in self.pieces:
            rows = piece.rows.result()
            row = len(rows) // max(1, piece.read_last - piece.first)
            data += rows[: row * (piece.last - piece.first)]
        count = sum(piece.last - piece.first for piece in self.pieces)
        return RoutedExperts(
            data=bytes(data), shape=(count, self.layers, self.chosen), dtype=self.dtype
        )


@dataclass(slots=True)
class Routing:
    """Gathers rows by `reader`; `kept` has those of sequences that were preempted, by request."""

    reader: Reader
    kept: dict[str, list[Kept]] = field(default_factory=dict)

    def keep(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """It gives its blocks back, with so many positions computed at most."""
        pieces = self.kept.setdefault(sequence.request.id, [])
        first = _end(sequence, pieces)
        if first < computed:
            rows = self.reader.read(blocks, first, computed)
            pieces.append(Kept(rows, first, computed, computed))

    def go_on(self, sequence: Sequence) -> None:
        """It is admitted again: what of its last rows were no drafts that fell is known now."""
        pieces = self.kept.get(sequence.request.id)
        if pieces:
            _cut(pieces, sequence.num_tokens - 1)

    def take(self, sequence: Sequence) -> Told | None:
        """All rows of one that ends, before its blocks are given back; None if some are missing."""
        pieces = self.kept.pop(sequence.request.id, [])
        last = sequence.num_tokens - 1
        _cut(pieces, last)
        first = _end(sequence, pieces)
        if first < last:
            if not sequence.block_tables:
                return None
            blocks = [block for block in sequence.block_tables[0] if block is not None]
            pieces.append(Kept(self.reader.read(blocks, first, last), first, last, last))
        return Told(pieces, self.reader.layers, self.reader.chosen, self.reader.dtype)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.kept.pop(request_id, None)

    def renew(self) -> None:
        """All that was computed is computed anew, with other weights: so are the rows."""
        self.kept.clear()


def _end(sequence: Sequence, pieces: list[Kept]) -> int:
    """The first position that is not kept."""
    return pieces[-1].last if pieces else sequence.request.params.routed_experts_prompt_start or 0


def _cut(pieces: list[Kept], last: int) -> None:
    """Leave out the positions from `last` on."""
    for piece in pieces:
        piece.last = max(piece.first, min(piece.last, last))
