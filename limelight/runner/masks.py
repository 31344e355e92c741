"""What guides say of rows of logits: which tokens may come next, or the only one that may.

Where a model is divided guides are on rank 0 alone. It tells all ranks the tokens that are forced,
and each the bits of its share of the masks, one a token.
"""

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from limelight.parallel.collectives import from_first, scattered
from limelight.parallel.sampling import Share
from limelight.runner.grammar import SECONDS_OF_TOKEN, TOO_SLOW, Guide
from limelight.runner.transfers import sent

# It takes a second to import, which the first constraint pays for and no start.
if TYPE_CHECKING:
    import xgrammar

# From this size on, the masks of several rows are worth a few threads.
LARGE_VOCABULARY = 32_768
MOST_THREADS = 8
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Led:
    """A row of logits that a guide leads, which is here or on rank 0, and what that says now: the
    only token that may come, and whether some may not. `constrained`: not by a budget alone."""

    row: int
    guide: Guide | None
    constrained: bool
    forced: int = NO_TOKEN
    is_masked: bool = False

    @classmethod
    def by(cls, guide: Guide | None, row: int, *, constrained: bool) -> "Led":
        if guide is None:
            return cls(row, None, constrained)
        forced = guide.forced
        is_masked = guide.needs_mask or bool(guide.banned)
        return cls(row, guide, constrained, NO_TOKEN if forced is None else forced, is_masked)

    @property
    def speaks(self) -> bool:
        """Whether anything is said, as may be at any time by a guide that is not here."""
        return self.guide is None or self.is_masked or self.forced != NO_TOKEN


class Masks:
    """Lets what guides say hold for the rows of a step."""

    def __init__(self, *, vocab_size: int, device: torch.device, share: Share | None = None):
        self.vocab_size, self.device, self.share = vocab_size, device, share
        self._batch: xgrammar.BatchGrammarMatcher | None = None
        self._bits_RV = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32)
        # What each byte of a mask adds to the logits of its eight tokens.
        bits_B8 = torch.arange(256)[:, None] >> torch.arange(8) & 1
        self._added_B8 = torch.zeros(256, 8).masked_fill(bits_B8 == 0, float("-inf")).to(device)

    def mask(self, logits_RS: torch.Tensor, led: list[Led]) -> None:
        """Set the logits of what may not come next to -inf, in place, of all ranks together."""
        if self.share is None:
            led = [one for one in led if one.is_masked]
        else:
            led = [one for one in led if one.constrained]
        if not led:
            return
        first, size = (0 if self.share is None else self.share.first), logits_RS.shape[1]
        bytes_RV = self._bytes(led, size)
        # Several times faster than filling by a mask of booleans, on a CPU.
        added_RV = self._added_B8.index_select(0, bytes_RV.flatten().int()).view(len(led), -1)
        added_RV = added_RV[:, first % 8 :][:, :size]
        rows = [one.row for one in led]
        if len(rows) == len(logits_RS):
            logits_RS.add_(added_RV)
        else:
            logits_RS.index_add_(0, self._integers(rows), added_RV)

    def force(self, logits_RS: torch.Tensor, led: list[Led]) -> None:
        """Leave rows the only token that may come, if there is one, whatever else is said."""
        if self.share is None:
            led = [one for one in led if one.forced != NO_TOKEN]
        if not led:
            return
        forced_R = self._integers([one.forced for one in led])
        rows_R, first = self._integers([one.row for one in led]), 0
        if self.share is not None:
            forced_R, first = from_first(forced_R, self.share.mesh), self.share.first
        ids_S = torch.arange(first, first + logits_RS.shape[1], device=self.device)
        only_RS = torch.where(ids_S == forced_R[:, None], 0.0, float("-inf"))
        logits_RS[rows_R] = torch.where(forced_R[:, None] == NO_TOKEN, logits_RS[rows_R], only_RS)

    def meet(self) -> None:
        """Exchange once what ranks exchange of guided rows, since NCCL connects them when they
        first do, for which there might be no memory left."""
        if self.share is not None:
            mesh = self.share.mesh
            none_N1 = torch.zeros(mesh.size, 1, dtype=torch.uint8, device=self.device)
            scattered(none_N1 if mesh.rank == 0 else None, none_N1[0].clone(), mesh)
            from_first(self._integers([NO_TOKEN]), mesh)

    def _bytes(self, led: list[Led], size: int) -> torch.Tensor:
        """The masks of this rank's tokens, from the byte of the first on, uint8 [R, bytes]."""
        if self.share is None:
            return self._fill(led)
        mesh, width = self.share.mesh, (size + 7 + 7) // 8
        parts_NRW = None
        own_RW = torch.empty(len(led), width, dtype=torch.uint8, device=self.device)
        if mesh.rank == 0:
            bytes_RV = self._fill(led)
            begins = [min(rank * size, self.vocab_size) // 8 for rank in range(mesh.size)]
            padded_RV = torch.nn.functional.pad(bytes_RV, (0, begins[-1] + width))
            parts_NRW = torch.stack([padded_RV[:, at : at + width] for at in begins])
        return scattered(parts_NRW, own_RW, mesh)

    def _fill(self, led: list[Led]) -> torch.Tensor:
        """All masks, on the device: the host's work alone, which may still compute the logits."""
        guides = [one.guide for one in led if one.guide is not None]
        assert len(guides) == len(led)
        if len(guides) > len(self._bits_RV):
            width = self._bits_RV.shape[1]
            pinned = self.device.type == "cuda"
            self._bits_RV = torch.zeros(len(guides), width, dtype=torch.int32, pin_memory=pinned)
        bits_RV = self._bits_RV[: len(guides)]
        # Without a mask of its own a row may go on in any way that is not banned.
        bits_RV.fill_(-1)
        asked = {r: guide for r, guide in enumerate(guides) if guide.needs_mask}
        if asked:
            self._ask(asked, bits_RV)
        bytes_RV = bits_RV.view(torch.uint8)
        for guide, mask_V in zip(guides, bytes_RV.numpy(), strict=True):
            guide.finish_mask(mask_V)
        return bytes_RV.to(self.device, non_blocking=True)

    def _ask(self, asked: dict[int, Guide], bits_RV: torch.Tensor) -> None:
        """Let grammars fill the rows of their guides."""
        matchers = [guide.matcher for guide in asked.values() if guide.matcher is not None]
        assert len(matchers) == len(asked)
        started = time.perf_counter()
        try:
            self._matchers().batch_fill_next_token_bitmask(matchers, bits_RV, list(asked))
        except RuntimeError:
            self._ask_each(asked, bits_RV)
        if time.perf_counter() - started > SECONDS_OF_TOKEN:
            self._ask_each(asked, bits_RV)

    def _matchers(self) -> "xgrammar.BatchGrammarMatcher":
        import xgrammar

        if self._batch is None:
            threads = min(MOST_THREADS, (os.cpu_count() or 1) // 2)
            self._batch = xgrammar.BatchGrammarMatcher(
                max_threads=max(1, threads if self.vocab_size >= LARGE_VOCABULARY else 1)
            )
        return self._batch

    def _ask_each(self, asked: dict[int, Guide], bits_RV: torch.Tensor) -> None:
        """Fill row by row, and refuse those that fail or that alone take too long."""
        for r, guide in asked.items():
            assert guide.matcher is not None
            started = time.thread_time()
            try:
                guide.matcher.fill_next_token_bitmask(bits_RV, r)
            except RuntimeError as error:
                guide.refused = f"what the constraint allows next cannot be told: {error}"[:500]
            if time.thread_time() - started > SECONDS_OF_TOKEN:
                guide.refused = TOO_SLOW

    def _integers(self, values: list[int]) -> torch.Tensor:
        return sent(values, torch.int64, self.device)
