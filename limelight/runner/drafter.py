"""Drives a DFlash 2 drafter: the context that its target leaves it, and its drafts by slot."""

import torch

from limelight.cache.storage import KVStorage
from limelight.models.batch import Paged, PagedBlocks
from limelight.models.dflash2 import DFlash2
from limelight.ops.noise import draft_uniform
from limelight.ops.paging import PagedLayout
from limelight.ops.rows import Slots
from limelight.ops.synthetic import SyntheticOdds
from limelight.ops.trim import MOST_ODDS, log_odds
from limelight.ops.verify import Proposals
from limelight.runner.inputs import BlockTables, lay_out


class Drafter:
    """What waits in each of S slots, the last of which is no one's: N drafts, and what they were
    drawn from.

    `lengths_S` are the positions of each sequence whose keys and values are in the cache for good;
    its newest token stands behind them.
    """

    def __init__(
        self,
        model: DFlash2,
        storage: KVStorage,
        tables: BlockTables,
        last_tokens_S: torch.Tensor,
        *,
        num_drafts: int,
        max_model_len: int,
        draws: bool,
        synthetic: SyntheticOdds | None = None,
    ):
        """With `draws` drafts are drawn at their request's temperature, else they are the best.
        With `synthetic` odds they stand by these, not by what they are."""
        slots, device = len(last_tokens_S), last_tokens_S.device
        shape = (slots, num_drafts, model.config.candidates)
        self.model, self.storage, self.tables = model, storage, tables
        self.num_drafts, self.max_model_len, self.draws = num_drafts, max_model_len, draws
        self.synthetic, self.last_tokens_S = synthetic, last_tokens_S
        self.lengths_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.tokens_SN = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self.ids_SNK = torch.zeros(shape, dtype=torch.int64, device=device)
        self.scores_SNK = torch.zeros(shape, device=device)
        self.odds_SN = torch.full(shape[:2], -MOST_ODDS, device=device)
        self.slots = Slots(
            self.lengths_S, last_tokens_S, self.tokens_SN, tables.tensor, storage.shape.size
        )
        self.first = len(storage.caches) - model.config.num_layers

    def paged(self, layouts: list[PagedLayout]) -> Paged:
        """The drafter's layers alone."""
        first = self.first
        return Paged(layouts, self.storage.group_of_layer[first:], self.storage.caches[first:])

    @property
    def proposals(self) -> Proposals | None:
        """What the drafts of all slots were drawn from; None if they are the drafter's best."""
        return Proposals(self.ids_SNK, self.scores_SNK) if self.draws else None

    def waiting(self, rows_B: torch.Tensor) -> tuple[Proposals | None, torch.Tensor | None]:
        """What the drafts of these slots were drawn from, and the odds by which they stand; None
        if they are the drafter's best, and if they stand by what they are."""
        drawn = Proposals(self.ids_SNK[rows_B], self.scores_SNK[rows_B]) if self.draws else None
        return drawn, None if self.synthetic is None else self.odds_SN[rows_B]

    def draft(
        self, rows_B: torch.Tensor, seeds_B: torch.Tensor, temperature_B: torch.Tensor
    ) -> torch.Tensor:
        """New drafts behind the newest tokens of these slots; their log odds, [B, N]."""
        rows_B = rows_B.long()
        blocks, first_B = self._blocks(rows_B)
        warmth_B = temperature_B if self.draws else torch.zeros_like(temperature_B)
        numbers_BN = draft_uniform(seeds_B, first_B.long() + 1, drafts=self.num_drafts)
        drafts = self.model.propose(
            self.last_tokens_S[rows_B], blocks,
            temperature_B=warmth_B, uniform_BN=numbers_BN,
        )  # fmt: skip
        if self.synthetic is None:
            odds_BN = log_odds(drafts.proposals.scores_BNK, temperature_B)
        else:
            odds_BN = self.synthetic(seeds_B, first_B + 1)
        for into, value in (
            (self.tokens_SN, drafts.tokens_BN),
            (self.ids_SNK, drafts.proposals.ids_BNK),
            (self.scores_SNK, drafts.proposals.scores_BNK),
            (self.odds_SN, odds_BN),
        ):
            into.index_copy_(0, rows_B, value)
        return odds_BN

    def _blocks(self, rows_B: torch.Tensor) -> tuple[PagedBlocks, torch.Tensor]:
        """A block of masks behind each slot's tokens, and where it begins."""
        rows, longest = self.num_drafts + 1, self.max_model_len
        real_B1 = (rows_B < self.tables.nobody)[:, None]
        first_B = self.lengths_S[rows_B]
        positions_BQ = first_B[:, None] + torch.arange(rows, device=rows_B.device)
        inside_BQ = (positions_BQ < longest) & real_B1
        positions_T = positions_BQ.clamp(max=longest - 1).flatten().long()
        slots_GT = self.slots.places(rows_B.repeat_interleave(rows), positions_T)
        ends_B = (first_B + rows).clamp(max=longest)
        layouts = lay_out(
            self.tables, self.storage,
            rows_B=rows_B.int(),
            seq_lens_B=torch.where(real_B1[:, 0], ends_B, 0).int(),
            starts_B=torch.arange(
                0, len(positions_T) + 1, rows, dtype=torch.int32, device=rows_B.device
            ),
            slots_GT=torch.where(inside_BQ.flatten(), slots_GT, -1),
            few=len(rows_B), bounds=(rows, longest),
        )  # fmt: skip
        return PagedBlocks(positions_T, rows, self.paged(layouts)), first_B
