"""What leads a sequence beside its parameters: a constraint, a budget of thoughts.

A constraint is a grammar that xgrammar has compiled for the vocabulary; its matcher follows the
tokens and tells which may come next. After the last token of the grammar only one that ends the
answer may come; where none may, the answer is whole without one.
"""

import copy
import time
from typing import TYPE_CHECKING

import numpy as np

from limelight.runner.thoughts import Thoughts
from limelight.types import Request

# It takes a second to import, which the first constraint pays for and no start.
if TYPE_CHECKING:
    import xgrammar

# A grammar that takes longer for one token (CPU seconds) would hold up everyone's step.
SECONDS_OF_TOKEN = 0.05
TOO_SLOW = "what the constraint allows next takes too long to find; a simpler one would do"
# A character has four bytes at most, and a token at least one.
LONGEST_REST = 3


class Guide:
    """Follows one sequence; `refused` tells what is wrong with the request and ends it at once.

    While the constraint waits for the end of reasoning, it lets everything come but what would end
    reasoning with something that it cannot begin with: the answer's end, or a kept end.
    """

    def __init__(
        self,
        request: Request,
        grammar: "xgrammar.CompiledGrammar | None",
        *,
        eos_token_ids: list[int],
        output: list[int],
    ):
        params, constraint, reasoning = request.params, request.constraint, request.reasoning
        self.refused: str | None = None
        self.has_ended = self.is_behind = False  # at the end, and behind it
        self._num_late = 0  # tokens of reasoning since its end should have come
        self._eos = eos_token_ids
        self._ignores_eos = params.ignore_eos
        self._stops = list(params.stop_token_ids or [])
        self._ends = frozenset(self._stops + ([] if params.ignore_eos else eos_token_ids))
        self.thoughts = None if reasoning is None else Thoughts(reasoning, request.prompt_token_ids)
        self.matcher = None if grammar is None else _matcher(grammar)
        assert constraint is None or self.matcher is not None, "its grammar is not there"
        waits = constraint is not None and constraint.after_reasoning
        assert self.thoughts is not None or not waits, "when does it begin?"
        self._waits = waits and self.thoughts is not None and self.thoughts.is_open
        self._barred: list[list[int]] = []
        if self._waits and self.matcher is not None and reasoning is not None:
            self._barred = [end for end in reasoning.ends_kept if not self._lets(end)]
            if not self.matcher.is_completed() and not params.ignore_eos:
                self._barred += [[token_id] for token_id in eos_token_ids]
        for token_id in output:
            self.accept(token_id)

    @property
    def forced(self) -> int | None:
        """The only token that may come next, whatever else is said.

        Where the constraint holds reasoning too, its end waits for that of a character.
        """
        token_id = None if self.thoughts is None or self.has_ended else self.thoughts.forced
        if token_id is None or not self._is_held or self._num_late >= LONGEST_REST:
            return token_id
        return token_id if self._lets([token_id]) else None

    @property
    def _is_held(self) -> bool:
        """Whether the constraint has begun, and has not been given up."""
        return self.matcher is not None and not self._waits and self.refused is None

    @property
    def banned(self) -> list[int]:
        """The tokens that may not come next, beside those that the mask leaves out."""
        if not self._waits or self.thoughts is None:
            return []
        return [end[-1] for end in self._barred if self.thoughts.completes(end)]

    @property
    def needs_mask(self) -> bool:
        """Whether the grammar has a say in the next token."""
        return self._is_held and not self.has_ended and self.forced is None

    @property
    def is_whole(self) -> bool:
        """Whether the answer may end here."""
        return self.needs_mask and self.matcher is not None and self.matcher.is_completed()

    def finish_mask(self, mask_V: np.ndarray) -> None:
        """Take out of a mask of one bit a token what is banned, and where the grammar made it let
        the request's own ends take the place of the model's."""
        for token_id in self.banned:
            mask_V[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        if not self.needs_mask or not (self._ignores_eos or self._stops):
            return
        if self._ignores_eos:
            for token_id in self._eos:
                mask_V[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        if self._stops and self.is_whole:
            for token_id in self._stops:
                mask_V[token_id // 8] |= np.uint8(1 << token_id % 8)

    def fork(self) -> "Guide":
        """One that goes on by itself from here, for drafts that may have to be taken back."""
        other = copy.copy(self)
        other.matcher = None if self.matcher is None else self.matcher.fork()
        other.thoughts = copy.copy(self.thoughts)
        return other

    def accept(self, token_id: int) -> None:
        """Go on by a token; what comes behind the end is no part of the answer."""
        if self.has_ended:
            self.is_behind = True
            return
        following = [token_id]
        if self.thoughts is not None:
            is_late = self.thoughts.forced not in (None, token_id)
            self._num_late = self._num_late + 1 if is_late else 0
            after = self.thoughts.feed(token_id)
            if self._waits:
                following, self._waits = after, self.thoughts.is_open
        if token_id in self._ends:
            self.has_ended = True
        elif self._is_held:
            self._follow(following)

    def _follow(self, token_ids: list[int]) -> None:
        assert self.matcher is not None
        started = time.thread_time()
        for token_id in token_ids:
            if not self.matcher.accept_token(token_id):
                self.refused = f"the constraint does not allow the token {token_id} that came"
                return
        if time.thread_time() - started > SECONDS_OF_TOKEN:
            self.refused = TOO_SLOW

    def _lets(self, token_ids: list[int]) -> bool:
        """Whether the grammar lets these follow."""
        assert self.matcher is not None
        count = 0
        while count < len(token_ids) and self.matcher.accept_token(token_ids[count]):
            count += 1
        self.matcher.rollback(count)
        return count == len(token_ids)


def _matcher(grammar: "xgrammar.CompiledGrammar") -> "xgrammar.GrammarMatcher":
    import xgrammar

    return xgrammar.GrammarMatcher(grammar)
