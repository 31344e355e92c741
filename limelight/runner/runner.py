"""StepPlan -> Batch -> forward -> sample -> StepResult."""

from dataclasses import dataclass

import numpy as np
import torch

from limelight.cache.storage import KVStorage
from limelight.models.batch import Batch, Paged
from limelight.models.loader import Model
from limelight.ops.attention import PagedLayout
from limelight.runner.sampler import Choice, Sampler, token_logprobs
from limelight.types import Admission, Grant, Request, Sampled, StepPlan, StepResult, TokenLogprobs

# Prompt log-probabilities need logits of every prompt token; this many rows exist at once.
LOGIT_ROWS_AT_ONCE = 256


@dataclass(slots=True)
class Slot:
    """What the runner knows of the sequence in a slot."""

    request: Request
    token_ids: list[int]  # known on the host: the prompt, and the output before a preemption


class ModelRunner:
    """Executes plans on one model and its cache; keeps block tables and last tokens by slot."""

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: list[int],
    ):
        self.model, self.storage = model, storage
        self.device = storage.pool.device
        self.block_size = storage.shape.size
        max_blocks = -(-max_model_len // self.block_size)
        # Entries behind a window keep stale ids; attention never looks there.
        self.tables = [np.zeros((max_num_seqs, max_blocks), dtype=np.int64) for _ in storage.groups]
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self.slots: dict[int, Slot] = {}
        self.sampler = Sampler(
            vocab_size=model.config.vocab_size, eos_token_ids=eos_token_ids, device=self.device
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: one `Sampled` for each grant, in the plan's order."""
        for admission in plan.admissions:
            self._admit(admission)
        for grant in plan.grants:
            for table, (first, blocks) in zip(self.tables, grant.tables, strict=True):
                table[grant.slot, first : first + len(blocks)] = blocks
        hidden_TD = self.model(self._tokens(plan.grants), self._batch(plan.grants))
        ends = np.cumsum([grant.num_tokens for grant in plan.grants]).tolist()
        choices = self._sample(plan.grants, ends, hidden_TD)
        sampled = []
        for grant, end in zip(plan.grants, ends, strict=True):
            choice = choices.get(grant.slot)
            made = choice is not None and choice.error is None
            sampled.append(
                Sampled(
                    slot=grant.slot,
                    token_ids=[choice.token_id] if choice and made else [],
                    logprobs=[choice.logprobs] if choice and choice.logprobs else None,
                    prompt_logprobs=self._prompt_logprobs(
                        grant, hidden_TD[end - grant.num_tokens : end]
                    ),
                    error=choice.error if choice else None,
                )
            )
        return StepResult(sampled)

    def forget(self) -> None:
        """Drop what is known of every slot."""
        self.slots.clear()
        self.sampler.rules.clear()

    def _admit(self, admission: Admission) -> None:
        request = admission.request
        token_ids = request.prompt_token_ids + admission.output_token_ids
        self.slots[admission.slot] = Slot(request, token_ids)
        self.sampler.admit(admission.slot, request, admission.output_token_ids)

    def _tokens(self, grants: list[Grant]) -> torch.Tensor:
        """The token ids of this step; those not known on the host are the slots' last ones."""
        known: list[int] = []
        last: list[tuple[int, int]] = []
        for grant in grants:
            ids = self.slots[grant.slot].token_ids[grant.start : grant.start + grant.num_tokens]
            if len(ids) < grant.num_tokens:
                assert grant.num_tokens == 1, "only the last token can be unknown on the host"
                last.append((len(known), grant.slot))
                ids = [0]
            known += ids
        tokens_T = torch.tensor(known, dtype=torch.int64, device=self.device)
        if last:
            rows, slots = torch.tensor(last, dtype=torch.int64, device=self.device).T
            tokens_T[rows] = self.last_tokens[slots]
        return tokens_T

    def _batch(self, grants: list[Grant]) -> Batch:
        """Positions, and for each group of layers where keys and values are and go."""
        slots = np.array([grant.slot for grant in grants])
        starts = np.array([grant.start for grant in grants])
        counts = np.array([grant.num_tokens for grant in grants])
        ends = starts + counts
        positions_T = np.arange(counts.sum()) + np.repeat(
            starts - (counts.cumsum() - counts), counts
        )
        rows_T = np.repeat(slots, counts)
        blocks = -(-int(ends.max()) // self.block_size)
        layouts = []
        for table, group in zip(self.tables, self.storage.groups, strict=True):
            blocks_T = table[rows_T, positions_T // self.block_size]
            slots_T = blocks_T * self.block_size + positions_T % self.block_size
            layouts.append(
                PagedLayout(
                    table_BN=table[slots, :blocks],
                    seq_lens=ends.tolist(),
                    query_lens=counts.tolist(),
                    slots_T=torch.from_numpy(slots_T).to(self.device),
                    block_size=self.block_size,
                    window=group.window,
                )
            )
        paged = Paged(layouts, self.storage.group_of_layer, self.storage.caches)
        return Batch(positions_T=torch.from_numpy(positions_T).to(self.device), paged=paged)

    def _sample(
        self, grants: list[Grant], ends: list[int], hidden_TD: torch.Tensor
    ) -> dict[int, Choice]:
        """The choice of each slot whose grant samples."""
        rows = [(end - 1, grant) for grant, end in zip(grants, ends, strict=True) if grant.samples]
        if not rows:
            return {}
        slots = [grant.slot for _, grant in rows]
        logits_RV = self.model.logits(hidden_TD[[row for row, _ in rows]])
        positions = [grant.start + grant.num_tokens for _, grant in rows]
        choices = self.sampler.choose(logits_RV, slots, positions)
        self.last_tokens[slots] = torch.tensor(
            [choice.token_id for choice in choices], device=self.device
        )
        return dict(zip(slots, choices, strict=True))

    def _prompt_logprobs(self, grant: Grant, hidden_TD: torch.Tensor) -> list[TokenLogprobs] | None:
        """Of the prompt tokens at start + 1 .. start + num_tokens, where they were asked for."""
        request = self.slots[grant.slot].request
        if request.params.prompt_logprobs is None:
            return None
        first = grant.start + 1
        following = request.prompt_token_ids[first : first + grant.num_tokens]
        reports: list[TokenLogprobs] = []
        for at in range(0, len(following), LOGIT_ROWS_AT_ONCE):
            ids = following[at : at + LOGIT_ROWS_AT_ONCE]
            logits_RV = self.model.logits(hidden_TD[at : at + len(ids)])
            reports += token_logprobs(logits_RV, ids, [request.params.prompt_logprobs] * len(ids))
        return reports
