"""StepPlan -> Batch -> forward -> sample -> StepResult."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from limelight.cache.storage import KVStorage
from limelight.models.batch import Batch, Paged
from limelight.models.loader import Model
from limelight.ops.noise import plain_uniform
from limelight.ops.paging import FEW_QUERIES, PagedLayout
from limelight.ops.sample import sample
from limelight.progress import Progress
from limelight.runner.graphs import DecodeGraphs, graph_sizes
from limelight.runner.inputs import BlockTables, Size, StepInputs, StepTensors
from limelight.runner.sampler import NO_GRAMMARS, Choice, Sampler, token_logprobs
from limelight.types import (
    Admission,
    DeviceLost,
    Grant,
    Request,
    Sampled,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import xgrammar

# Prompt log-probabilities need logits of every prompt token; this many rows exist at once.
LOGIT_ROWS_AT_ONCE = 256
NOT_NUMBERS = "the model's logits are not numbers"


@contextmanager
def device_faults(device: torch.device) -> Iterator[None]:
    """Tell an error of one step from a device that does nothing any more: `DeviceLost`."""
    try:
        yield
    except RuntimeError as error:
        if device.type == "cuda":
            try:
                torch.zeros((), device=device).item()
            except RuntimeError:
                raise DeviceLost(str(error)) from error
        raise


@dataclass(slots=True)
class Slot:
    """What the runner knows of the sequence in a slot."""

    request: Request
    token_ids: list[int]  # known on the host: the prompt, and the output before a preemption


@dataclass(slots=True)
class Launched:
    """A step that may still run on the device; `result` waits for it."""

    grants: list[Grant]
    slots: list[int]  # of the rows that sample, in their order
    device: torch.device
    choices: list[Choice] | None = None  # of these rows, where the host chose
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by slot
    tokens_R: torch.Tensor | None = None  # where the device did, on the host once `done`
    best_R: torch.Tensor | None = None
    done: torch.cuda.Event | None = None

    def fetch(self, tokens_R: torch.Tensor, best_R: torch.Tensor) -> "Launched":
        """Send what the device chose on its way to the host; rows beyond `slots` are padding."""
        self.tokens_R, self.best_R = tokens_R[: len(self.slots)], best_R[: len(self.slots)]
        if self.device.type == "cuda":
            self.tokens_R, self.best_R = (
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                for x in (self.tokens_R, self.best_R)
            )
            self.done = torch.cuda.Event()
            self.done.record()
        return self

    def result(self) -> StepResult:
        """One `Sampled` for each grant, in the plan's order."""
        with device_faults(self.device):
            if self.done is not None:
                self.done.synchronize()
        choices = dict(zip(self.slots, self._choices(), strict=True))
        return StepResult([self._sampled(grant, choices.get(grant.slot)) for grant in self.grants])

    def _choices(self) -> list[Choice]:
        if self.choices is not None:
            return self.choices
        if self.tokens_R is None or self.best_R is None:
            return []
        return [
            Choice(token, error=None if best == best else NOT_NUMBERS)
            for token, best in zip(self.tokens_R.tolist(), self.best_R.tolist(), strict=True)
        ]

    def _sampled(self, grant: Grant, choice: Choice | None) -> Sampled:
        prompt_logprobs = self.prompt_logprobs.get(grant.slot)
        if choice is None:
            return Sampled(grant.slot, [], prompt_logprobs=prompt_logprobs)
        return Sampled(
            slot=grant.slot,
            token_ids=[choice.token_id] if choice.has_token else [],
            logprobs=[choice.logprobs] if choice.logprobs else None,
            prompt_logprobs=prompt_logprobs,
            error=choice.error,
            refused=choice.refused,
            is_whole=choice.is_whole,
        )


class ModelRunner:
    """Executes plans on one model and its cache; keeps block tables and last tokens by slot."""

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: list[int],
        grammars: Mapping[str, "xgrammar.CompiledGrammar"] = NO_GRAMMARS,
    ):
        self.model, self.storage = model, storage
        self.device = storage.pool.device
        self.block_size, self.max_model_len = storage.shape.size, max_model_len
        self.tables = BlockTables(
            groups=len(storage.groups),
            slots=max_num_seqs,
            max_blocks=-(-max_model_len // self.block_size),
            device=self.device,
        )
        self.inputs = StepInputs(
            max_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_seqs=max_num_seqs,
            groups=len(storage.groups),
            device=self.device,
        )
        # One more for padding rows, which belong to no sequence.
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self.slots: dict[int, Slot] = {}
        self.sampler = Sampler(
            vocab_size=model.head.outputs,
            eos_token_ids=eos_token_ids,
            device=self.device,
            grammars=grammars,
        )
        self.graphs: DecodeGraphs | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for it."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; the device may still run the one before."""
        with device_faults(self.device), torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> Launched:
        for admission in plan.admissions:
            self._admit(admission)
        self.tables.update((grant.slot, grant.tables) for grant in plan.grants)
        # Attention takes the sequences with few queries first.
        grants = sorted(plan.grants, key=lambda grant: grant.num_tokens > FEW_QUERIES)
        sampling = [grant for grant in grants if grant.samples]
        rules = [self.sampler.rules[grant.slot] for grant in sampling]
        launched = Launched(plan.grants, [grant.slot for grant in sampling], self.device)
        on_device = all(rule.on_device for rule in rules)
        if on_device and (padded := self._graph_size(grants)) is not None:
            assert self.graphs is not None
            self._send((padded,) * 3, grants, sampling)
            return launched.fetch(*self.graphs.replay(padded))
        tokens = sum(grant.num_tokens for grant in grants)
        tensors = self._send((tokens, len(grants), len(sampling)), grants, sampling)
        hidden_TD = self._forward(tensors, grants)
        launched.prompt_logprobs = self._prompt_logprobs(grants, hidden_TD)
        if not sampling:
            return launched
        logits_RV = self.model.logits(hidden_TD[tensors.samples_R])
        if on_device:
            return launched.fetch(*self._draw(logits_RV, tensors))
        positions = [grant.start + grant.num_tokens for grant in sampling]
        launched.choices = self.sampler.choose(logits_RV, launched.slots, positions)
        chosen = [choice.token_id for choice in launched.choices]
        self.last_tokens[tensors.sample_slots_R] = torch.tensor(chosen, device=self.device)
        return launched

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Make decode steps graphs; the model must have run before."""
        sizes = graph_sizes(self.tables.nobody)
        self.graphs = DecodeGraphs(self.decode, self._padding, sizes, progress)

    def forget(self) -> None:
        """Drop what is known of every slot."""
        self.slots.clear()
        self.sampler.rules.clear()

    def decode(self, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of one token for each sequence, all on the device: tokens and best logits [R]."""
        batch = self._batch(tensors, few=len(tensors.rows_B), bounds=(1, self.max_model_len))
        return self._draw(self.model.logits(self.model(tensors.tokens_T, batch)), tensors)

    def _padding(self, size: int) -> StepTensors:
        return self._send((size,) * 3, [], [])

    def _send(self, size: Size, grants: list[Grant], sampling: list[Grant]) -> StepTensors:
        """A step's inputs on the device, rows beyond the grants' as padding."""
        self._stage(self.inputs.stage(size), grants, sampling)
        return self.inputs.send(size)

    def _admit(self, admission: Admission) -> None:
        request = admission.request
        token_ids = request.prompt_token_ids + admission.output_token_ids
        self.slots[admission.slot] = Slot(request, token_ids)
        self.sampler.admit(admission.slot, request, admission.output_token_ids)

    def _graph_size(self, grants: list[Grant]) -> int | None:
        """The size of the graph that holds this step; None if it must run without."""
        if self.graphs is None or not all(g.num_tokens == 1 and g.samples for g in grants):
            return None
        return self.graphs.size_for(len(grants))

    def _stage(self, tensors: StepTensors, grants: list[Grant], sampling: list[Grant]) -> None:
        """Fill the host's side of a step; rows beyond the grants' become padding."""
        to = tensors.arrays
        slots = np.array([grant.slot for grant in grants], dtype=np.int64)
        starts = np.array([grant.start for grant in grants], dtype=np.int64)
        counts = np.array([grant.num_tokens for grant in grants], dtype=np.int64)
        tokens, seqs = int(counts.sum()), len(grants)
        firsts = counts.cumsum() - counts
        positions = np.arange(tokens) + np.repeat(starts - firsts, counts)
        codes: list[int] = []
        for grant in grants:
            codes += self._codes(grant)
        nobody = self.tables.nobody
        rows = np.repeat(slots, counts)
        blocks = self.tables.host[:, rows, positions // self.block_size]
        _fill(to["tokens_T"], codes, 0)
        _fill(to["positions_T"], positions, 0)
        to["slots_GT"][:, :tokens] = blocks.astype(np.int64) * self.block_size + (
            positions % self.block_size
        )
        to["slots_GT"][:, tokens:] = -1
        _fill(to["rows_B"], slots, nobody)
        _fill(to["seq_lens_B"], starts + counts, 0)
        to["starts_B"][: seqs + 1] = np.append(firsts, tokens)
        to["starts_B"][seqs + 1 :] = np.arange(tokens + 1, tokens + len(to["starts_B"]) - seqs)
        last_rows = dict(zip(slots.tolist(), (firsts + counts - 1).tolist(), strict=True))
        _fill(to["samples_R"], [last_rows[grant.slot] for grant in sampling], 0)
        _fill(to["sample_slots_R"], [grant.slot for grant in sampling], nobody)
        rules = [self.sampler.rules[grant.slot] for grant in sampling]
        _fill(to["temperature_R"], [rule.request.params.temperature for rule in rules], 0.0)
        numbers = [
            0.0 if rule.greedy else plain_uniform(rule.request.seed, grant.start + grant.num_tokens)
            for rule, grant in zip(rules, sampling, strict=True)
        ]
        _fill(to["uniform_R"], numbers, 0.0)

    def _codes(self, grant: Grant) -> list[int]:
        """The ids of a grant's tokens, or the code of the last token of its slot."""
        known = self.slots[grant.slot].token_ids
        if grant.num_tokens == 1 and grant.start >= len(known):
            return [-1 - grant.slot]
        ids = known[grant.start : grant.start + grant.num_tokens]
        assert len(ids) == grant.num_tokens, "only the last token can be unknown on the host"
        return ids

    def _forward(self, tensors: StepTensors, grants: list[Grant]) -> torch.Tensor:
        few = sum(grant.num_tokens <= FEW_QUERIES for grant in grants)
        bounds = (max(g.num_tokens for g in grants), max(g.start + g.num_tokens for g in grants))
        return self.model(tensors.tokens_T, self._batch(tensors, few=few, bounds=bounds))

    def _draw(
        self, logits_RV: torch.Tensor, tensors: StepTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's token, kept as the last of its slot, and its best logit."""
        into = (self.last_tokens, tensors.sample_slots_R)
        return sample(logits_RV, tensors.temperature_R, tensors.uniform_R, into=into)

    def _batch(self, tensors: StepTensors, *, few: int, bounds: tuple[int, int]) -> Batch:
        """Positions, and for each group of layers where keys and values are and go.

        The first `few` sequences have few queries; `bounds` are the most queries and tokens.
        """
        layouts = [
            PagedLayout(
                tables_SN=self.tables.tensor[g],
                rows_B=tensors.rows_B,
                seq_lens_B=tensors.seq_lens_B,
                starts_B=tensors.starts_B,
                slots_T=tensors.slots_GT[g],
                block_size=self.block_size,
                window=group.window,
                few=few,
                max_query=bounds[0],
                max_len=bounds[1],
            )
            for g, group in enumerate(self.storage.groups)
        ]
        paged = Paged(layouts, self.storage.group_of_layer, self.storage.caches)
        return Batch(tensors.positions_T, paged, self.last_tokens)

    def _prompt_logprobs(
        self, grants: list[Grant], hidden_TD: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """By slot, of the prompt tokens at start + 1 .. start + num_tokens, where asked for."""
        reports: dict[int, list[TokenLogprobs]] = {}
        end = 0
        for grant in grants:
            begin, end = end, end + grant.num_tokens
            request = self.slots[grant.slot].request
            wanted = request.params.prompt_logprobs
            if wanted is None:
                continue
            following = request.prompt_token_ids[grant.start + 1 :][: grant.num_tokens]
            rows = reports.setdefault(grant.slot, [])
            for at in range(0, len(following), LOGIT_ROWS_AT_ONCE):
                ids = following[at : at + LOGIT_ROWS_AT_ONCE]
                logits_RV = self.model.logits(hidden_TD[begin + at : begin + at + len(ids)])
                rows += token_logprobs(logits_RV, ids, [wanted] * len(ids))
        return reports


def _fill(to: np.ndarray, values: "np.ndarray | list[int] | list[float]", rest: float) -> None:
    """`values`, then `rest` in what is left."""
    to[: len(values)] = values
    to[len(values) :] = rest
