"""Drives a DFlash 2 drafter: the context that its target leaves it, and its drafts by slot."""

from dataclasses import dataclass

import torch

from limelight.cache.storage import KVStorage
from limelight.models.batch import Paged, PagedBlocks
from limelight.models.dflash2 import DFlash2
from limelight.ops.noise import draft_uniform
from limelight.ops.paging import PagedLayout
from limelight.ops.passes import Drafted, LaidBlocks, lay_blocks, store
from limelight.ops.rows import Slots
from limelight.ops.synthetic import SyntheticOdds
from limelight.ops.trim import MOST_ODDS, log_odds
from limelight.ops.verify import Proposals
from limelight.runner.inputs import BlockTables, lay_out
from limelight.steps import Grant

# Bytes of taps that are put into the cache at once, and of a step's that may wait for others.
MOST_LATE, MOST_OF_A_STEP = 2**22, 2**20


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the target: its taps, their positions, and their slots in each group of layers."""

    taps_TF: torch.Tensor
    positions_T: torch.Tensor
    slots: dict[int, torch.Tensor]


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
        self.cold_S = torch.zeros(slots, device=device)
        self.numbers_SN = torch.zeros(shape[:2], device=device)
        self.slots = Slots(
            self.lengths_S, last_tokens_S, self.tokens_SN, tables.tensor, storage.shape.size
        )
        self.first = len(storage.caches) - model.config.num_layers
        # Those whose keys and values are not in the cache yet, and the blocks that they go into.
        self.late: list[Rows] = []
        self.late_blocks: set[int] = set()
        self.late_bytes = 0  # of their taps

    def paged(self, layouts: list[PagedLayout]) -> Paged:
        """The drafter's layers alone."""
        first = self.first
        return Paged(layouts, self.storage.group_of_layer[first:], self.storage.caches[first:])

    def take(
        self,
        taps_TF: torch.Tensor,
        positions_T: torch.Tensor,
        layouts: list[PagedLayout],
        *,
        late: bool,
    ) -> None:
        """Put what rows of the target leave into the cache, or `late` with those of other steps if
        they are few: a call takes about as long for one as for many."""
        groups = self.storage.group_of_layer[self.first :]
        rows = Rows(taps_TF, positions_T, {group: layouts[group].slots_T for group in groups})
        if late and taps_TF.nbytes <= MOST_OF_A_STEP:
            # The next step is laid out in the same memory.
            slots = {group: slots_T.clone() for group, slots_T in rows.slots.items()}
            self.late.append(Rows(taps_TF, positions_T.clone(), slots))
            self.late_bytes += taps_TF.nbytes
            size = self.storage.shape.size
            for slots_T in slots.values():
                self.late_blocks.update(slot // size for slot in slots_T.tolist())
        else:
            self._fill(rows)

    def make_way(self, grants: list[Grant]) -> None:
        """Catch up before a block of late rows is anyone's, be it as a new one or for what is in
        it, and before there are too many."""
        if not self.late:
            return
        given = (block for grant in grants for _, blocks in grant.tables for block in blocks)
        if self.late_bytes >= MOST_LATE or not self.late_blocks.isdisjoint(given):
            self.catch_up()

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Put all that is late into the cache; it must be there before it is read."""
        if not self.late:
            return
        late = self.late
        self.forget_late()
        self._fill(
            Rows(
                torch.cat([rows.taps_TF for rows in late]),
                torch.cat([rows.positions_T for rows in late]),
                {g: torch.cat([rows.slots[g] for rows in late]) for g in late[0].slots},
            )
        )

    def forget_late(self) -> None:
        """Let go of what is late."""
        self.late, self.late_blocks, self.late_bytes = [], set(), 0

    def _fill(self, rows: Rows) -> None:
        slots = [rows.slots[group] for group in self.storage.group_of_layer[self.first :]]
        caches = self.storage.caches[self.first :]
        self.model.fill(rows.taps_TF, rows.positions_T, slots, caches)

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
        blocks, laid = self._blocks(rows_B)
        # The best candidate needs no number.
        warmth_B, numbers_BN = self.cold_S[: len(rows_B)], self.numbers_SN[: len(rows_B)]
        if self.draws:
            warmth_B = temperature_B
            numbers_BN = draft_uniform(seeds_B, laid.next_B, drafts=self.num_drafts)
        drafts = self.model.propose(
            laid.anchors_B, blocks, temperature_B=warmth_B, uniform_BN=numbers_BN
        )
        if self.synthetic is None:
            odds_BN = log_odds(drafts.proposals.scores_BNK, temperature_B)
        else:
            odds_BN = self.synthetic(seeds_B, laid.next_B)
        ids_BNK, scores_BNK = drafts.proposals.ids_BNK, drafts.proposals.scores_BNK
        into = Drafted(self.tokens_SN, self.ids_SNK, self.scores_SNK, self.odds_SN)
        store(rows_B, Drafted(drafts.tokens_BN, ids_BNK, scores_BNK, odds_BN), into)
        return odds_BN

    def _blocks(self, rows_B: torch.Tensor) -> tuple[PagedBlocks, LaidBlocks]:
        """A block of masks behind each slot's tokens."""
        rows, longest = self.num_drafts + 1, self.max_model_len
        laid = lay_blocks(rows_B, self.slots, rows=rows, longest=longest)
        layouts = lay_out(
            self.tables, self.storage,
            rows_B=rows_B, seq_lens_B=laid.seq_lens_B, starts_B=laid.starts_B,
            slots_GT=laid.slots_GT, few=len(rows_B), bounds=(rows, longest),
        )  # fmt: skip
        return PagedBlocks(laid.positions_T, rows, self.paged(layouts)), laid
