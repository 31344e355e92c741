"""Which of several engines gets a request: who has its beginning, and who has least to do.

    work(engine) = tokens of its open requests that are yet to be computed + OPEN for each of these
    cost(engine) = tokens of the prompt that it is not known to have + work(engine)

The cheapest gets it. Beginnings are known by the engine that last got them, in pieces of PIECE
tokens; a cache may have dropped one since, which costs time and nothing else.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PIECE = 64
# Tokens of a prompt that take about as long as the answer of an open request holds others up.
OPEN = 64
MOST_PIECES = 2**17


@dataclass(eq=False, slots=True)
class Errand:
    """An open request of one engine, and how many tokens of its prompt are yet to be computed."""

    engine: int
    left: int

    def answered(self) -> None:
        """Its prompt has been computed."""
        self.left = 0


class Router:
    """Knows which requests are open and who was given which beginnings."""

    def __init__(self, count: int):
        self.open: list[set[Errand]] = [set() for _ in range(count)]
        self.owners: OrderedDict[int, int] = OrderedDict()  # of pieces with all before them

    def work(self, engine: int) -> int:
        """In tokens."""
        return sum(OPEN + errand.left for errand in self.open[engine])

    @contextmanager
    def errand(
        self,
        prompt: Sequence[int],
        engines: Collection[int],
        *,
        salt: str = "",
        session: str | None = None,
    ) -> Iterator[Errand]:
        """A request given to one of `engines` for the length of the block.

        Requests of one `session` go to one engine, as long as it is there.
        """
        pieces = list(_pieces(prompt, salt))
        known = self._known(pieces)
        if session is None:
            costs = {i: len(prompt) - PIECE * known[i] + self.work(i) for i in engines}
            chosen = min(costs, key=lambda i: (costs[i], i))
        else:
            chosen = max(engines, key=lambda i: _draw(session, i))
        for piece in pieces:
            self.owners[piece] = chosen
            self.owners.move_to_end(piece)
        while len(self.owners) > MOST_PIECES:
            self.owners.popitem(last=False)
        errand = Errand(chosen, len(prompt) - PIECE * known[chosen])
        self.open[chosen].add(errand)
        try:
            yield errand
        finally:
            self.open[chosen].discard(errand)

    def forget(self, engine: int) -> None:
        """Its cache is empty."""
        for piece in [piece for piece, owner in self.owners.items() if owner == engine]:
            del self.owners[piece]

    def _known(self, pieces: list[int]) -> list[int]:
        """How many of the first pieces each engine was given."""
        known = [0] * len(self.open)
        for place, piece in enumerate(pieces):
            owner = self.owners.get(piece)
            if owner is None:
                break
            if known[owner] == place:
                known[owner] += 1
        return known


def _pieces(prompt: Sequence[int], salt: str) -> Iterator[int]:
    """A number for each whole piece of a prompt and all before it."""
    before = hash(salt)
    for start in range(0, len(prompt) - PIECE + 1, PIECE):
        before = hash((before, *prompt[start : start + PIECE]))
        yield before


def _draw(session: str, engine: int) -> bytes:
    """How engines rank for a session (rendezvous): when one goes, others keep their sessions."""
    return hashlib.sha256(f"{engine}:{session}".encode()).digest()
