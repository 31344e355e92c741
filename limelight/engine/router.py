"""Which of several engines gets a request: who has its beginning, and who has least to do.

    work(engine) = tokens of its open requests that are yet to be computed + OPEN for each of these
    cost(engine) = tokens of the prompt that it is not known to have + work(engine)

The cheapest gets it. Engines are called by any keys.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from limelight.types import Request

PIECE = 64
# Tokens of a prompt that take about as long as the answer of an open request holds others up.
OPEN = 64
MOST_PIECES = 2**17

Engine = TypeVar("Engine", bound=Hashable)


class Beginnings(Generic[Engine]):
    """Which engines got which beginnings, in pieces of PIECE tokens.

    A cache may have dropped one since, which costs time and nothing else.
    """

    def __init__(self) -> None:
        self.owners: OrderedDict[int, set[Engine]] = OrderedDict()  # of pieces with all before

    def known(self, pieces: list[int]) -> Counter[Engine]:
        """How many tokens of a prompt each engine was given before."""
        tokens: Counter[Engine] = Counter()
        for place, piece in enumerate(pieces):
            found = [one for one in self.owners.get(piece, ()) if tokens[one] == PIECE * place]
            if not found:
                break
            tokens.update(dict.fromkeys(found, PIECE))
        return tokens

    def learn(self, pieces: list[int], engine: Engine) -> None:
        for piece in pieces:
            self.owners.setdefault(piece, set()).add(engine)
            self.owners.move_to_end(piece)
        while len(self.owners) > MOST_PIECES:
            self.owners.popitem(last=False)

    def forget(self, engine: Engine) -> None:
        """Its cache is empty."""
        for owners in self.owners.values():
            owners.discard(engine)


@dataclass(eq=False, slots=True)
class Errand(Generic[Engine]):
    """An open request of one engine, and how many tokens of its prompt are yet to be computed."""

    engine: Engine
    left: int


class Router(Generic[Engine]):
    """Knows what each engine has to do, and who was given which beginnings."""

    def __init__(self) -> None:
        self.work: Counter[Engine] = Counter()  # in tokens
        self.beginnings: Beginnings[Engine] = Beginnings()

    @contextmanager
    def errand(self, request: Request, engines: Collection[Engine]) -> Iterator[Errand[Engine]]:
        """A request given to one of `engines` for the length of the block.

        Requests of one session go to one engine, as long as it is there.
        """
        pieces, session = pieces_of(request), request.session
        known = self.beginnings.known(pieces)
        if session is None:
            chosen = min(engines, key=lambda one: self.work[one] - known[one])
        else:
            chosen = max(engines, key=lambda one: draw(session, one))
        self.beginnings.learn(pieces, chosen)
        errand = Errand(chosen, len(request.prompt_token_ids) - known[chosen])
        self.work[chosen] += OPEN + errand.left
        try:
            yield errand
        finally:
            self.answered(errand)
            self.work[chosen] -= OPEN

    def answered(self, errand: Errand[Engine]) -> None:
        """Its prompt has been computed."""
        self.work[errand.engine] -= errand.left
        errand.left = 0


def pieces_of(request: Request) -> list[int]:
    """A number for each whole piece of a prompt and all before it.

    As in the prefix cache, prompts with different salts or adapters have none in common.
    """
    prompt, pieces = request.prompt_token_ids, [hash((request.adapter_id, request.cache_salt))]
    for start in range(0, len(prompt) - PIECE + 1, PIECE):
        pieces.append(hash((pieces[-1], *prompt[start : start + PIECE])))
    return pieces[1:]


def draw(session: str, engine: Hashable) -> bytes:
    """How engines rank for a session (rendezvous): when one goes, others keep their sessions."""
    return hashlib.sha256(f"{engine}:{session}".encode()).digest()
