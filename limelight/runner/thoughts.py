"""Where a sequence's reasoning stands, token by token, and when its budget is used up."""

from limelight.types import Reasoning


class Thoughts:
    """Follows the marks of reasoning, and counts its tokens: those after the start, marks or not.

    A mark of several tokens is complete with its last one; the ones before count as reasoning.
    """

    def __init__(self, reasoning: Reasoning, prompt: list[int]):
        self.is_open, self.num_tokens = reasoning.is_open, reasoning.num_tokens
        self.budget, self.forced_end = reasoning.budget, reasoning.forced_end
        self._starts, self._ends_kept = reasoning.starts, reasoning.ends_kept
        # What is written over the budget ends reasoning, whatever the marks are.
        self._ends = [*reasoning.ends, *filter(None, [reasoning.forced_end])]
        marks = [*self._starts, *self._ends, *self._ends_kept]
        self._reach = max(map(len, marks), default=1)
        # The prompt may have begun a mark, of the end only in the reasoning that it left open.
        since = min(self.num_tokens, self._reach) if self.is_open else self._reach
        self._tail = prompt[len(prompt) - min(since, len(prompt)) :]

    @property
    def forced(self) -> int | None:
        """The only token that may come next, if the budget is used up."""
        if not self.is_open or self.budget is None or self.num_tokens < self.budget:
            return None
        begun = (
            k for k in range(len(self.forced_end) - 1, 0, -1) if self._has(self.forced_end[:k])
        )
        return self.forced_end[next(begun, 0)]

    def feed(self, token_id: int) -> list[int]:
        """Go on by a token; the ones that are now known to follow the reasoning."""
        self._tail = [*self._tail, token_id][-self._reach :]
        if not self.is_open:
            if any(map(self._has, self._starts)):
                self.is_open, self.num_tokens, self._tail = True, 0, []
            return [token_id]
        self.num_tokens += 1
        kept = next(filter(self._has, self._ends_kept), [])
        if kept or any(map(self._has, self._ends)):
            self.is_open, self._tail = False, []
        return kept

    def completes(self, mark: list[int]) -> bool:
        """Whether the last token of `mark` would complete it here."""
        return self._has(mark[:-1])

    def _has(self, mark: list[int]) -> bool:
        """Whether `mark` stands at the end."""
        return not mark or self._tail[-len(mark) :] == mark
